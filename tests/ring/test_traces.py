"""The traces of whole runs as the file exporter writes them: one a step, whole, whoever was killed meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from span_trees import Traces, check_trees, seconds

SUPPORT = Path(__file__).parents[1] / "support"
NUM_STEPS, GROUPS_PER_STEP = 4, 48
RUN_DEADLINE_S = 60.0


def trace(how: str, run_dir: Path) -> Traces:
    command = [sys.executable, SUPPORT / "traced_ring.py", run_dir, how]
    subprocess.run(command, check=True, timeout=RUN_DEADLINE_S, cwd=SUPPORT)
    return Traces(run_dir)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return trace("calm", tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return trace("rough", tmp_path_factory.mktemp("rough"))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return trace("cut", tmp_path_factory.mktemp("cut"))


@pytest.fixture(params=["calm", "rough", "cut"])
def each(request: pytest.FixtureRequest) -> Traces:
    return request.getfixturevalue(request.param)


def test_one_root_a_step_and_no_orphan(each: Traces):
    check_trees(each, NUM_STEPS)
    assert {span.name for span in each.spans if not span.parent_id} == {"start", "step", "finish"}


def test_every_phase_is_there_and_they_add_up_to_the_step(calm: Traces):
    for step, root in calm.steps().items():
        phases = calm.phases(root)
        evaluated = ["evaluate"] if step in (1, 3) else []
        assert [span.name for span in phases] == [*evaluated, "generate", "train", "sync", "report"]
        assert seconds(*phases) == pytest.approx(seconds(root), rel=0.05), step
    (finish,) = calm.named("finish")
    assert {"evaluate", "checkpoint"} <= {span.name for span in calm.children(finish)}


def test_a_group_is_followed_through_the_services(calm: Traces):
    admitted = calm.named("admit")
    assert len(admitted) == len({span.attributes["beamline.group_id"] for span in admitted})
    assert len(admitted) == NUM_STEPS * GROUPS_PER_STEP
    for admit in admitted:
        span, way = admit, ["admit"]
        while below := calm.children(span):
            (span,) = below
            way.append(span.name)
            assert span.attributes["beamline.group_id"] == admit.attributes["beamline.group_id"]
        assert way == ["admit", "generate group", "score group", "collect group"]


def test_what_is_done_for_a_step_hangs_on_it(calm: Traces):
    for trained in calm.named("train step"):
        assert calm.by_id[trained.parent_id].name == "train"
        assert calm.root_of(trained).attributes["beamline.step"] == trained.attributes["beamline.step"]
    for loaded in calm.named("collect PolicyLoaded"):
        version = int(loaded.attributes["beamline.policy_version"])
        root = calm.root_of(loaded)
        assert (root.name, root.attributes.get("beamline.step", 0)) == ("step" if version else "start", version)


def test_a_repeated_delivery_is_linked_to_its_sender_and_is_no_second_root(rough: Traces):
    again = [span for span in rough.spans if any("messaging.redelivered" in link.attributes for link in span.links)]
    assert again
    for span in again:
        (link,) = span.links
        assert (link.trace_id, link.span_id) == (span.trace_id, span.parent_id)
        assert int(link.attributes["messaging.num_delivered"]) > 1


def test_a_coordinator_that_is_started_again_goes_on_with_the_trace(cut: Traces):
    assert len(cut.named("start")) == 3, "of the trainer, and of both coordinators"
    root = cut.steps()[2]
    generate = [span for span in cut.children(root) if span.name == "generate"]
    first, second = sorted(generate, key=lambda span: span.start_ns)
    assert first.end_ns < root.start_ns <= second.start_ns, "the first is of the coordinator that was killed"
    before = [span for span in cut.named("admit") if span.end_ns < root.start_ns and span.trace_id == root.trace_id]
    assert before and all(span.parent_id == root.span_id for span in before)
    issued = {span.attributes["beamline.group_id"] for span in before}
    started = max(span.start_ns for span in cut.named("start"))
    after = [span for span in cut.named("collect group") if span.start_ns > started]
    answered = [span for span in after if span.attributes["beamline.group_id"] in issued]
    assert answered and all(span.trace_id == root.trace_id for span in answered)
