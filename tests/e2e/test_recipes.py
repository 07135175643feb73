"""The other recipes with the real engines: the second model, and real prompts through every part."""

from pathlib import Path

import pytest

from real_runs import beamline, run_to_end

SAMPLES = Path(__file__).parents[1] / "data"
PUBLISHED = Path(__file__).parents[3] / "shared" / "data"


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


@pytest.mark.parametrize(
    ("files", "num_rows", "num_problems"),
    [
        pytest.param((SAMPLES / "gsm8k-sample.jsonl", SAMPLES / "aime-2025-sample.jsonl"), 64, 8, id="samples"),
        pytest.param(
            (PUBLISHED / "gsm8k-train.jsonl", PUBLISHED / "aime-2025.jsonl"),
            7473,
            30,
            id="published",
            marks=pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published data sets are not at {PUBLISHED}"),
        ),
    ],
)
def test_real_prompts_go_through_two_steps_and_an_evaluation(
    files: tuple[Path, Path], num_rows: int, num_problems: int, tmp_path: Path
):
    """GSM8K to train on and AIME 2025 to evaluate, prepared, checked and found by `data.dir`."""
    for name, file in zip(("gsm8k", "aime-2025"), files, strict=True):
        prepared = beamline("data", "prepare", name, "--from", str(file), "--to", str(tmp_path))
        assert prepared.code == 0, prepared.output
        checked = beamline("data", "check", prepared.shown.strip(), "--model", "asset:tiny-beam")
        assert checked.code == 0, checked.output
    run = run_to_end(
        "tiny-beam-gsm8k",
        tmp_path,
        f"data.dir={tmp_path}",
        "data.evals.0.num_samples=2",
        "trainer.num_steps=2",
        "trainer.eval_interval=3",
    )
    assert run.code == 0, run.output
    assert sorted(run.steps) == [1, 2]
    for step, values in run.steps.items():
        assert values["policy/mismatch_abs_mean"] <= 1e-3
        assert values["reward/std"] > 0, "the overlong penalty tells answers apart that are all wrong"
        assert values["data/position"] == 8 * step
        assert values["data/epoch"] == 8 * step / num_rows
        assert values["data/dropped_prompts"] == 0
    assert f"prompts: {16 / num_rows:.3f} epochs drawn, 0 prompts left out" in run.output
    evaluation = run.evaluation("aime-2025", 2)
    assert 0 <= evaluation["accuracy"] <= 1
    assert (evaluation["num_problems"], evaluation["dropped"]) == (num_problems, 0)
