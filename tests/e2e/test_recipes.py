"""The other recipes with the real engines: the second model, and real prompts through every part."""

from pathlib import Path

from real_runs import beamline, run_to_end

SAMPLES = Path(__file__).parents[1] / "data"


def test_tiny_qwen3_moe_runs_three_steps(tmp_path: Path):
    """With two engines on one queue, and blobs that travel over the bus as they would between hosts."""
    run = run_to_end(
        "tiny-qwen3-moe",
        tmp_path,
        "trainer.num_steps=3",
        "trainer.eval_interval=0",
        "rollout.replicas=2",
        "bus.blob_store=jetstream",
    )
    assert run.code == 0, run.output
    assert sorted(run.steps) == [1, 2, 3]
    for values in run.steps.values():
        assert values["policy/mismatch_abs_mean"] <= 1e-3
        assert max(values["sync/canary_gap/rollout-0"], values["sync/canary_gap/rollout-1"]) <= 1e-4
        assert values["policy/grad_norm"] > 0


def test_tiny_beam_gsm8k_runs_two_steps_and_an_evaluation(tmp_path: Path):
    for name, sample in (("gsm8k", "gsm8k-sample.jsonl"), ("aime-2025", "aime-2025-sample.jsonl")):
        prepared = beamline("data", "prepare", name, "--from", str(SAMPLES / sample), "--to", str(tmp_path))
        assert prepared.code == 0, prepared.output
    train = next(tmp_path.glob("gsm8k*.parquet"))
    evaluation = f"{{path: {tmp_path / 'aime-2025.parquet'}, name: aime-2025, num_samples: 2}}"
    run = run_to_end(
        "tiny-beam-gsm8k",
        tmp_path,
        "trainer.num_steps=2",
        "trainer.eval_interval=2",
        f"data.train={train}",
        f"data.evals=[{evaluation}]",
    )
    assert run.code == 0, run.output
    assert sorted(run.steps) == [1, 2]
    for values in run.steps.values():
        assert values["policy/mismatch_abs_mean"] <= 1e-3
        assert values["reward/std"] > 0, "the overlong penalty tells answers apart that are all wrong"
    assert 0 <= run.evaluation("aime-2025", 2)["accuracy"] <= 1
    assert run.evaluation("aime-2025", 2)["num_problems"] == 8
