"""A run in turns with the real engines: a calculator of the user's own, which breaks now and then."""

import json
import re
from pathlib import Path

import pytest

from real_runs import ROOT, run_to_end

SUM = re.compile(r"^(\d+)([+-]\d+)=(-?\d+)$", re.MULTILINE)


def test_a_run_with_a_tool_goes_on_without_the_trajectories_whose_tool_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    evaluation = "{path: task:chained-sums, name: sums, num_samples: 4, max_problems: 32}"
    run = run_to_end(
        "tiny-beam-calculator",
        tmp_path,
        "rollout.environment.name=planted_environments:FragileCalculator",
        "rollout.sampling.groups_per_step=16",
        f"data.evals=[{evaluation}]",
        "trainer.num_steps=2",
        "trainer.eval_interval=2",
    )
    assert run.code == 0, run.output
    assert sorted(run.steps) == [1, 2]
    for values in run.steps.values():
        assert 0 < values["environment/broken"] < 16 * 8 / 2
        assert values["reward/abstained"] >= values["environment/broken"]
        assert values["policy/mismatch_abs_mean"] <= 1e-5
        assert values["routing/fallback_share"] == 0
        assert 0 < values["tokens/loss"] < values["tokens/trained"]
        assert values["policy/grad_norm"] > 0
    log = (run.path / "logs" / "rollout-0.log").read_text()
    where = r"environment planted_environments:\w+ of group g-\d+, sample \d, turn 1"
    assert re.search(rf"{where}: raised LookupError: planted", log)
    assert re.search(rf"{where}: took its process down, which was ended by SIGABRT", log)
    dump = run.path / "evals" / "global_step_0" / "sums.jsonl"
    completions = [json.loads(line) for line in dump.read_text().splitlines()]
    sums = [found for completion in completions for found in SUM.findall(completion["completion"])]
    assert len(sums) > 32 * 4, "the tool is called"
    assert [(a, b, c) for a, b, c in sums if int(a) + int(b) != int(c)] == [], "the tool's totals are right"
    assert {"stop", "environment"} <= {completion["finish_reason"] for completion in completions}
