"""The demo's traces as a user looks at them: a step, a group, and the whole run in Perfetto's format."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfetto_reader import read_timeline
from real_runs import Run, beamline

PHASES = ("generate", "train", "sync", "report")
WORK = ("generate group", "score group", "collect group", "train step", "assemble", "mini_batch", "optimizer", "export")


def traced(*arguments: str) -> dict[str, Any]:
    ended = beamline("trace", *arguments, "--json")
    assert ended.code == 0, ended.output
    return json.loads(ended.shown)


def test_the_last_step_as_a_tree_with_what_it_waited_for(demo: Run):
    last = max(demo.steps)
    found = traced(str(demo.path))
    assert found["step"] == last
    names = {span["name"] for span in found["spans"]}
    assert set(PHASES) | set(WORK) <= names
    assert sum(piece["duration_s"] for piece in found["critical_path"]) == pytest.approx(found["duration_s"], abs=1e-3)
    waited_for = {piece["name"] for piece in found["critical_path"]}
    assert {"generate group", "mini_batch", "old_logprobs"} <= waited_for
    unexplained_s = sum(piece["duration_s"] for piece in found["critical_path"] if piece["gap"])
    assert unexplained_s < 0.25 * found["duration_s"]
    text = beamline("trace", str(demo.path)).shown
    assert text.startswith(f"step {last} of run run: ") and "●    train " in text


def test_a_group_from_its_prompt_to_the_gradient(demo: Run):
    runs = str(demo.path.parent)
    (assemble,) = (span for span in traced("run", "--runs", runs, "--step", "1")["spans"] if span["name"] == "assemble")
    trained = assemble["links"][0]["attributes"]
    found = traced(trained["beamline.group_id"], "--runs", runs, "--run", "run")
    assert (found["run"], found["outcome"], found["step"]) == ("run", "trained", 1)
    spans = {span["name"]: span for span in found["spans"]}
    assert [name for name in ("admit", "bind", *WORK) if name not in spans] == []
    generated, scored = spans["generate group"], spans["score group"]
    assert (generated["worker"], generated["attributes"]["beamline.policy_version"]) == ("rollout-0", 0)
    assert len(scored["attributes"]["beamline.rewards"].split()) == 8
    assert str(spans["mini_batch"]["attributes"]["beamline.mini_batch"]) in trained["beamline.mini_batch"].split()
    assert spans["train step"]["attributes"]["beamline.policy_version"] == 1


def test_what_is_not_there_is_said_with_the_nearest(demo: Run):
    runs = str(demo.path.parent)
    for arguments, why in (
        (("g-999999", "--runs", runs), "the nearest is 'g-000"),
        (("rum", "--runs", runs), "the nearest is 'run'"),
        (("run", "--runs", runs, "--step", "99"), f"the nearest is {max(demo.steps)}"),
    ):
        ended = beamline("trace", *arguments)
        assert ended.code == 2 and why in ended.output, ended.output


def test_the_whole_run_in_perfettos_format(demo: Run, tmp_path: Path):
    ended = beamline("trace", str(demo.path), "--perfetto", str(tmp_path / "run.pftrace"))
    assert ended.code == 0, ended.output
    timeline = read_timeline(tmp_path / "run.pftrace")
    assert sorted(timeline.processes) == ["coordinator", "reward", "rollout", "trainer"]
    workers = {each.track.split(".")[1] for each in timeline.slices}
    assert workers == {"coordinator", "reward", "rollout-0", "trainer"}
    steps = timeline.named("step")
    assert sorted(step.notes["beamline.step"] for step in steps) == sorted(demo.steps)
    for phase in PHASES:
        found = timeline.named(phase)
        assert len(found) == len(steps), phase
        within = [any(s.start_ns <= f.start_ns and f.end_ns <= s.end_ns for s in steps) for f in found]
        assert all(within), phase
    assert (
        len([s for s in timeline.slices if s.name.startswith("generate group g-")]) == demo.summary["ledger"]["issued"]
    )
    counters = timeline.counters
    assert max(value for _, value in counters["rollout.rollout-0.in flight: generate group"]) > 1
    assert counters["rollout.rollout-0.bytes so far: generate group"][-1][1] > 0
    assert any("queue/pending" in name for name in counters), "as the coordinator heard them"
    flows = [flow for s in timeline.named("assemble") for flow in s.flows]
    assert len(flows) == demo.summary["ledger"]["trained"], "an arrow from every group that was trained"
