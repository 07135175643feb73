"""What `beamline eval` evaluates: which policy is meant, what is refused, how a recipe becomes a run of no step."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator import cli
from beamline.coordinator.eval_command import check_graded, eval_config, policy_of
from beamline.coordinator.eval_table import show_evaluations
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.summary import Evaluation
from beamline.protocol.config import DataSection, EvalSet, RunConfig, RunSection, TrainerSection
from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.protocol.messages import EvalResult
from beamline.runtime.run_files import write_config
from made_checkpoints import make_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(
        run=RunSection(name="demo", dir=str(tmp_path)),
        data=DataSection(train="train.parquet", evals=[EvalSet(path="aime.parquet", name="aime-2025")]),
        trainer=TrainerSection(num_steps=50, eval_interval=0),
    )


@pytest.fixture
def run_folder(config: RunConfig, tmp_path: Path) -> Path:
    """A run with two checkpoints of one file."""
    folder = tmp_path / "demo"
    write_config(folder, config)
    (folder / "launcher.lock").touch()
    for step in (1, 2):
        make_checkpoint(folder / "checkpoints", step)
    return folder


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("{run}", 2),
        ("{run}/checkpoints", 2),
        ("{run}/checkpoints/latest", 2),
        ("{run}/checkpoints/global_step_1", 1),
        ("latest", 2),
    ],
)
def test_a_checkpoint_is_named_in_many_ways(config: RunConfig, run_folder: Path, given: str, step: int) -> None:
    expected = run_folder / "checkpoints" / f"global_step_{step}" / "policy"
    assert policy_of(given.format(run=run_folder), config) == expected


def test_a_hugging_face_directory_is_taken_as_it_is(config: RunConfig, run_folder: Path) -> None:
    policy = run_folder / "checkpoints" / "global_step_1" / "policy"
    assert policy_of(str(policy), config) == policy


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_offered(config: RunConfig, run_folder: Path) -> None:
    (run_folder / "checkpoints" / "global_step_2" / "policy" / "config.json").write_text("other")
    with pytest.raises(ConfigError) as error:
        policy_of(str(run_folder), config)
    assert "global_step_2 cannot be used: truncated: policy/config.json has 5 bytes, its manifest.json says" in str(
        error.value
    )
    assert f"use {run_folder / 'checkpoints' / 'global_step_1'}, the newest that is whole" in str(error.value)


def test_what_is_no_checkpoint_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder: give a checkpoint's, such as"):
        policy_of("nowhere", config)
    with pytest.raises(ConfigError, match=f"{tmp_path / 'demo'} is not a folder"):
        policy_of("latest", config)
    with pytest.raises(ConfigError, match=r"neither a checkpoint, which has a manifest\.json, nor a Hugging Face"):
        policy_of(str(tmp_path), config)


def test_a_run_without_a_checkpoint_is_refused(config: RunConfig, tmp_path: Path) -> None:
    write_config(tmp_path / "demo", config)
    (tmp_path / "demo" / "launcher.lock").touch()
    with pytest.raises(ConfigError, match=r"that run has no checkpoint in .*/demo/checkpoints: one comes every"):
        policy_of("latest", config)


def test_the_recipe_becomes_a_run_of_no_step(config: RunConfig) -> None:
    changed = eval_config(config, "/models/policy", own_name=False)
    assert (changed.run.name, changed.model.path) == ("demo-eval", "/models/policy")
    assert (changed.trainer.num_steps, changed.trainer.eval_interval) == (0, 1)
    assert changed.data.train == "aime.parquet", "no training prompt is needed"
    assert changed.data.evals == config.data.evals and changed.rollout == config.rollout
    assert eval_config(config, "/models/policy", own_name=True).run.name == "demo"


def test_an_evaluation_neither_goes_on_nor_saves(config: RunConfig) -> None:
    training = TrainerSection(resume_mode="latest", checkpoint_path="/ckpts", export_path="/exports", export_interval=5)
    trainer = eval_config(replace(config, trainer=training), "/models/policy", own_name=False).trainer
    assert (trainer.resume_mode, trainer.resume_path, trainer.saves) == ("none", "", False)
    assert (trainer.checkpoint_path, trainer.export_path, trainer.export_interval) == ("", "", 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny-beam", "data.evals=[]"], "recipe tiny-beam evaluates nothing: name what to evaluate on, as in data.ev"),
        (["tiny-beam", "--checkpoint", "nowhere"], "--checkpoint nowhere is not a folder"),
        (["tiny-beem", "--checkpoint", "nowhere"], "did you mean tiny-beam?"),
        (["tiny-beam", "--checkpoint", "."], "--checkpoint . is neither a checkpoint"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", *arguments])
    lines = capsys.readouterr().err.splitlines()
    assert (end.value.code, len(lines)) == (2, 1)
    assert text in lines[0]
    assert list(tmp_path.iterdir()) == [], "nothing was started or left"


VALUES = {
    "accuracy": 0.6125,
    "accuracy_low": 0.5,
    "accuracy_high": 0.7,
    "pass_at_1": 0.6125,
    "pass_at_2": 0.75,
    "mean_length": 101.25,
    "truncated": 0.025,
    "abstained": 0.0,
    "failed": 0.0,
    "dropped": 2.0,
    "num_problems": 30.0,
    "num_samples": 2.0,
}


def test_results_are_a_table_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    ungraded = {k: v for k, v in VALUES.items() if not k.startswith(("accuracy", "pass"))} | {"abstained": 1.0}
    evaluations = [
        Evaluation(step=0, name="aime-2025", values=VALUES),
        Evaluation(step=0, name="broken", values=ungraded),
    ]
    show_evaluations(evaluations, Console(width=240))
    header, first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert header == ("evaluation problems samples accuracy 95 % pass@2 mean length truncated abstained failed dropped")
    assert first == "aime-2025 30 2 61.3 % 50.0 % to 70.0 % 75.0 % 101.2 2.5 % 0.0 % 0 2"
    assert second == "broken 30 2 – – – 101.2 2.5 % 100.0 % 0 2"


def test_a_set_without_a_grade_is_an_error(tmp_path: Path, config: RunConfig) -> None:
    recorder = Recorder(tmp_path / "demo", config)
    values = {"abstained": 1.0, "mean_length": 3.0}
    recorder.record_eval(
        EvalResult(step=0, policy_version=0, name="aime-2025", num_problems=1, num_samples=1, values=values), []
    )
    ledger = {"issued": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0}
    with pytest.raises(BeamlineError, match="no sample of aime-2025 was graded: the reasons are in"):
        check_graded(recorder.finish("finished", ledger))
