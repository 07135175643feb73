"""The traces of the demo with the real engines: every part of every step, in every service, in one tree."""

import pytest

from real_runs import DEMO_STEPS, Run
from span_trees import Traces, check_trees, seconds

GROUPS_PER_STEP = 32


@pytest.fixture(scope="module")
def traces(demo: Run) -> Traces:
    return Traces(demo.path)


def test_one_root_a_step_and_no_orphan(traces: Traces):
    check_trees(traces, DEMO_STEPS)


def test_the_phases_add_up_to_the_step(traces: Traces, demo: Run):
    for step, root in traces.steps().items():
        phases = traces.phases(root)
        assert [span.name for span in phases][-4:] == ["generate", "train", "sync", "report"]
        assert seconds(*phases) == pytest.approx(seconds(root), rel=0.05), step
        by_name = {span.name: seconds(span) for span in phases}
        assert by_name["train"] == pytest.approx(demo.steps[step]["timing/train"], rel=0.05)


def test_a_steps_work_is_done_where_it_should_be(traces: Traces):
    for root in traces.steps().values():
        own = [span for span in traces.spans if span.trace_id == root.trace_id]
        places = {(span.name, span.service): span for span in own}
        for name in ("train step", "assemble", "old_logprobs", "mini_batch", "optimizer", "export"):
            assert (name, "trainer") in places, name
        for name in ("generate group", "transfer", "activate", "canary"):
            assert places[name, "rollout"].worker == "rollout-0", name
        parents = {span.name: traces.by_id[span.parent_id].name for span in own if span.parent_id}
        below_step = ("assemble", "old_logprobs", "mini_batch", "export")
        assert {name: parents[name] for name in below_step} == dict.fromkeys(below_step, "train step")
        assert (parents["train step"], parents["optimizer"]) == ("train", "mini_batch")
        assert (parents["activate"], parents["canary"]) == ("sync", "activate")


def test_every_group_is_followed_from_its_prompt_to_its_gradient(traces: Traces):
    trained = {
        str(link.attributes["beamline.group_id"]): traces.by_id[link.span_id]
        for assemble in traces.named("assemble")
        for link in assemble.links
    }
    assert len(trained) > DEMO_STEPS * GROUPS_PER_STEP / 2
    for group_id, admit in trained.items():
        assert (admit.name, admit.attributes["beamline.group_id"]) == ("admit", group_id)
        (generated,) = traces.children(admit)
        (scored,) = traces.children(generated)
        assert [(span.name, span.service) for span in (generated, scored)] == [
            ("generate group", "rollout"),
            ("score group", "reward"),
        ]
        assert admit.start_ns < generated.start_ns < scored.start_ns


def test_the_end_of_the_run_is_a_trace_too(traces: Traces):
    (finish,) = traces.named("finish")
    *_, save = sorted(traces.named("save"), key=lambda span: span.start_ns)
    assert save.service == "trainer" and traces.root_of(save) == finish
    evaluated = [span for span in traces.named("generate group") if span.attributes["beamline.purpose"] == "eval"]
    assert len(evaluated) > 256 and {traces.by_id[span.parent_id].name for span in evaluated} == {"evaluate"}
