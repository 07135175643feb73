"""A run whose advantage, loss and grader are a user's own: those of `examples`, named in the recipe."""

from pathlib import Path

import pytest

from real_runs import run_to_end


def test_a_run_with_an_own_advantage_loss_and_grader(tmp_path: Path) -> None:
    run = run_to_end(
        "tiny-beam",
        tmp_path,
        "algorithm.advantage=examples.own_advantage:median",
        "algorithm.loss=examples.own_loss:penalised",
        "reward.grader=examples.own_grader:grade",
        "algorithm.dynamic_sampling={mode: filter, max_sample_batches: 3}",
        "algorithm.reduction=sequence_mean",
        "algorithm.num_mini_batches=1",
        "rollout.sampling.groups_per_step=8",
        "data.evals=[]",
        "trainer.num_steps=2",
        "trainer.eval_interval=0",
    )
    assert run.code == 0, run.output
    assert sorted(run.steps) == [1, 2]
    for values in run.steps.values():
        assert 0 < values["reward/accuracy"] < values["reward/mean"], "a wrong answer in the right form earns 0.1"
        assert abs(values["policy/loss"]) > 0.01, "it is minus the mean advantage, which is 0 for a group's mean"
        assert values["policy/grad_norm"] > 0 and values["policy/clip_ratio"] == 0
        useful = values["sampling/batches_drawn"] * 8 - values["sampling/filtered_groups"]
        assert useful == 8 or values["sampling/batches_drawn"] == pytest.approx(3)
    assert run.summary["ledger"]["filtered"] == sum(v["sampling/filtered_groups"] for v in run.steps.values())
