"""The second model, and what a recipe chooses of the algorithm family, in a whole run with the real engines.

Two engines serve one queue, and blobs travel over the bus as they would between hosts.
"""

from pathlib import Path

import pytest

from real_runs import run_to_end


def test_a_run_with_everything_that_is_off_by_default(tmp_path: Path):
    run = run_to_end(
        "tiny-qwen3-moe",
        tmp_path,
        "rollout.replicas=2",
        "bus.blob_store=jetstream",
        "trainer.num_steps=2",
        "trainer.eval_interval=0",
        "rollout.sampling.groups_per_step=4",
        "algorithm.loss=gspo",
        "algorithm.advantage=rloo",
        "algorithm.reduction=prompt_mean",
        "algorithm.entropy_coefficient=0.01",
        "algorithm.kl.coefficient=0.1",
        "algorithm.kl.place=reward",
    )
    assert run.code == 0, run.output
    first, second = (run.steps[step] for step in (1, 2))
    # Before the first update policy and reference differ by nothing but the engine's routes, which agree in float32.
    assert first["policy/kl"] == pytest.approx(0, abs=1e-5)
    assert second["policy/kl"] > first["policy/kl"]
    for values in (first, second):
        assert values["policy/grad_norm"] > 0
        assert values["loss/entropy"] < 0 and "loss/kl" not in values
        assert values["policy/mismatch_abs_mean"] <= 1e-3
        assert max(values["sync/canary_gap/rollout-0"], values["sync/canary_gap/rollout-1"]) <= 1e-4
        assert (values["packing/waste"], values["packing/heaviest_rank"]) == (0, 1)
