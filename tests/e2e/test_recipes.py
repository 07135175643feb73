"""Real prompts through every part, with the real engines: the published sets where they are, else samples of them."""

from pathlib import Path

from real_runs import beamline, run_to_end

_OWN, _SHARED = Path(__file__).parents[1] / "data", Path(__file__).parents[3] / "shared" / "data"
SAMPLES = ((_OWN / "gsm8k-sample.jsonl", _OWN / "aime-2025-sample.jsonl"), 64, 8)
"""Files, and how many rows and problems they have."""
PUBLISHED = ((_SHARED / "gsm8k-train.jsonl", _SHARED / "aime-2025.jsonl"), 7473, 30)
"""The whole sets, which a user's clone does not have."""


def test_real_prompts_go_through_two_steps_and_an_evaluation(tmp_path: Path):
    """GSM8K to train on and AIME 2025 to evaluate, prepared, checked and found by `data.dir`."""
    files, num_rows, num_problems = PUBLISHED if PUBLISHED[0][0].is_file() else SAMPLES
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
