"""A checkpoint evaluated by itself, and two runs compared, with the real engines."""

import json
from pathlib import Path

import pytest

from real_runs import DEMO_STEPS, Run, beamline, processes_of, shared_memory_of

SETS = ("chained-sums", "chained-sums-greedy")
MAX_CHANGED = 2
"""Of 2,048 completions: a tie of two tokens may fall otherwise where requests meet in other batches."""


@pytest.fixture(scope="module")
def evaluated(demo: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`beamline eval` of the demo's last checkpoint."""
    folder = tmp_path_factory.mktemp("evaluated")
    ended = beamline("eval", "tiny-beam", f"run.dir={folder}", "--checkpoint", str(demo.path), deadline_s=240)
    return Run(folder / "tiny-beam-eval", ended.code, ended.output)


def test_a_checkpoint_scores_as_its_run_did(demo: Run, evaluated: Run):
    """The same seeds, problems and weights give the same completions, to the letter."""
    assert evaluated.code == 0, evaluated.output
    for name in SETS:
        then, now = demo.evaluation(name, DEMO_STEPS), evaluated.evaluation(name, 0)
        old = completions(demo, DEMO_STEPS, name)
        new = completions(evaluated, 0, name)
        assert len(new) == len(old) == now["num_problems"] * now["num_samples"]
        changed = sum(a != b for a, b in zip(old, new, strict=True))
        assert changed <= MAX_CHANGED
        assert abs(then["accuracy"] - now["accuracy"]) <= changed / len(new)
    assert demo.evaluation(SETS[0], 0) != evaluated.evaluation(SETS[0], 0), (
        "the policy before training scores otherwise"
    )


def completions(run: Run, step: int, name: str) -> list[bytes]:
    return (run.path / "evals" / f"global_step_{step}" / f"{name}.jsonl").read_bytes().splitlines()


def test_an_evaluation_trains_nothing_and_leaves_nothing_running(evaluated: Run):
    summary = evaluated.summary
    assert summary["status"] == "finished" and evaluated.steps == {}
    assert summary["ledger"]["issued"] == 0
    assert not (evaluated.path / "checkpoints").exists()
    assert processes_of(evaluated.path) == [] and shared_memory_of(evaluated.path) == []


def test_the_results_are_a_table_with_intervals(evaluated: Run):
    values = evaluated.evaluation("chained-sums", 0)
    rows = [" ".join(line.split()) for line in evaluated.output.splitlines()]
    (row,) = [row for row in rows if row.startswith("chained-sums 256 8 ")]
    interval = f"{100 * values['accuracy_low']:.1f} % to {100 * values['accuracy_high']:.1f} %"
    assert f" {100 * values['accuracy']:.1f} % {interval} {100 * values['pass_at_2']:.1f} %" in row
    assert str(evaluated.path / "report.html") in evaluated.output


def test_the_same_policy_is_no_different_from_itself(demo: Run, evaluated: Run):
    ended = beamline("compare", str(demo.path), str(evaluated.path), "--json")
    assert ended.code == 0, ended.output
    content = json.loads(ended.shown)
    for found in content["sets"]:
        difference = found["difference"]
        assert difference["num_problems"] == 256 and difference["p_value"] > 0.4
        assert abs(difference["mean"]) <= MAX_CHANGED / 256
    assert content["sentences"][0].startswith("No difference can be told on chained-sums (tiny-beam-eval less run: ")
    settings = {setting["key"]: setting["second"] for setting in content["settings"]}
    checkpoint = demo.path.resolve() / "checkpoints" / f"global_step_{DEMO_STEPS}" / "policy"
    assert Path(settings["model.path"]) == checkpoint and settings["trainer.num_steps"] == 0


def test_training_is_a_significant_gain(demo: Run, tmp_path: Path):
    """The demo against itself before training, as a run of its own would have left it."""
    before = tmp_path / "before"
    (before / "evals").mkdir(parents=True)
    (before / "launcher.lock").touch()
    summary = demo.summary
    summary["run"], summary["steps"] = "before", []
    summary["evaluations"] = [e for e in summary["evaluations"] if e["step"] == 0]
    (before / "summary.json").write_text(json.dumps(summary))
    (before / "evals" / "global_step_0").symlink_to(demo.path / "evals" / "global_step_0")
    ended = beamline("compare", str(before), str(demo.path))
    assert ended.code == 0, ended.output
    first = ended.shown.splitlines()[0]
    assert first.startswith("run is better on chained-sums than before by ")
    assert first.endswith("p < 0.0001, paired over 256 problems).")
