"""The logs of a run with the real engines: one form, and bound to the steps' traces."""

import json
import re
from typing import Any

from beamline.coordinator.observe.spans import read_spans
from real_runs import Run, beamline

STEP = 2


def records(run: Run, *options: str) -> list[dict[str, Any]]:
    """What `beamline logs --json` prints."""
    ended = beamline("logs", str(run.path), *options, "--json")
    assert ended.code == 0, ended.output
    return [json.loads(line) for line in ended.shown.splitlines()]


def test_a_steps_lines_are_bound_to_its_trace(demo: Run):
    (root,) = [
        span
        for span in read_spans(demo.path)
        if span.name == "step" and not span.parent_id and span.attributes["beamline.step"] == STEP
    ]
    found = records(demo, "--step", str(STEP))
    assert {record["step"] for record in found} == {STEP}
    assert {record["trace_id"] for record in found if record["worker"] == "trainer"} == {root.trace_id}
    assert any(record["message"].startswith(f"step {STEP} trains g-") for record in found)
    assert "train of policy 1" in {r["message"] for r in found if r["worker"] == "coordinator"}


def test_the_engines_lines_are_ours_and_come_once(demo: Run):
    found = records(demo, "rollout", "--level", "WARNING")
    engine = [record for record in found if record["logger"].startswith("vllm.")]
    assert engine and {record["worker"] for record in engine} == {"rollout-0"}
    raw = [record["message"] for record in records(demo, "rollout") if not record["logger"]]
    assert [text for text in raw if re.match(r"(\(\w+ pid=\d+\) )?(INFO|WARNING|ERROR) \d\d-\d\d ", text)] == []


def test_all_workers_come_by_time(demo: Run):
    found = records(demo)
    assert {"coordinator", "nats", "reward", "rollout-0", "trainer"} <= {record["worker"] for record in found}
    times = [record["time"] for record in found]
    assert times == sorted(times)


def test_top_of_a_run_that_has_ended_says_what_it_came_to(demo: Run):
    ended = beamline("top", str(demo.path))
    assert ended.code == 0, ended.output
    assert re.search(r"^run \S+: finished after \d+ steps in \d+ s$", ended.shown, re.MULTILINE)
