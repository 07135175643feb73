"""Loggers by name, and library versions by interpreter."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from beamline.coordinator.loggers import ConsoleLogger, Guarded, Logger, check_loggers, open_loggers
from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.versions import library_versions
from beamline.protocol.config import RunConfig, RunSection
from beamline.protocol.errors import ConfigError
from logger_files import scalars, wandb_history, wandb_project

RECORDS = [(1, {"reward/mean": 0.5}), (1, {"engine/groups/rollout-0": 4.0}), (2, {"reward/mean": 0.75})]


def loggers_of(run_dir: Path, *names: str) -> list[Logger]:
    return open_loggers(run_dir, RunConfig(run=RunSection(name="r1", project="our-beam", loggers=list(names))))


def test_every_default_logger_exists(tmp_path: Path):
    (console,) = open_loggers(tmp_path, RunConfig())
    assert isinstance(console, Guarded)


@pytest.mark.parametrize(("name", "nearest"), [("consol", "console"), ("wand", "wandb"), ("tensorbord", "tensorboard")])
def test_an_unknown_logger_is_refused_with_the_names_that_there_are(name: str, nearest: str):
    with pytest.raises(ConfigError, match=rf"'{name}'.*'console'.*'jsonl'.*'wandb'.*such as '{nearest}'"):
        check_loggers(["jsonl", name])


def test_wandb_and_tensorboard_write_what_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    loggers = loggers_of(tmp_path, "wandb", "jsonl", "tensorboard", "console")
    assert len(loggers) == 3
    for step, values in RECORDS:
        for logger in loggers:
            logger.log(step, 1000.0 + step, values)
    for logger in loggers:
        logger.close()
    assert scalars(tmp_path / "tensorboard") == [(1000.0 + step, step, values) for step, values in RECORDS]
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in wandb_history(offline.read_bytes()) if "step" in row]
    assert [(row["step"], {k: v for k, v in row.items() if "/" in k}) for row in rows] == RECORDS, (
        "offline, as there is no key"
    )
    assert wandb_project(offline.read_bytes()) == "our-beam"


def test_a_logger_that_fails_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Full:
        def log(self, step: int, time: float, values: dict[str, float]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it hears no more")

    (console,) = loggers_of(tmp_path, "console")
    recorder = Recorder(tmp_path, RunConfig(), [Guarded("wandb", Full()), console])
    for step in (1, 2):
        recorder.record_step(step, {"reward/mean": 0.5})
    recorder.close()
    assert [record.message for record in caplog.records] == [
        "logger wandb has failed and hears no more of this run: [Errno 28] No space left on device"
    ]
    assert [line.step for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_logger_that_cannot_be_had_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "tensorboard").write_text("in the way")
    assert len(loggers_of(tmp_path, "console", "tensorboard")) == 1
    assert "logger tensorboard cannot be had, the run goes on without it" in caplog.text


def test_the_console_shows_steps_and_evaluations(capsys: pytest.CaptureFixture[str]):
    console = ConsoleLogger()
    console.log(3, 0.0, {"reward/mean": 0.4123, "policy/mismatch_abs_mean": 1.2e-5, "timing/step": 4.25})
    console.log(
        5, 0.0, {f"eval/sums/{k}": v for k, v in {"accuracy": 0.6, "accuracy_low": 0.57, "accuracy_high": 0.63}.items()}
    )
    step, evaluation = capsys.readouterr().out.splitlines()
    assert "step    3" in step and "reward 0.412" in step and "1.2e-05" in step
    assert "sums accuracy 0.600 [0.570, 0.630]" in evaluation


def test_versions_are_those_of_the_interpreter_asked():
    libraries = library_versions({"coordinator": Path(sys.executable)})["coordinator"]
    assert libraries["python"] == platform.python_version()
    assert libraries["msgspec"] == version("msgspec")


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_interpreter_that_does_not_run_is_named(python: str):
    with pytest.raises(ConfigError, match=f"rollout's interpreter {python}"):
        library_versions({"rollout": Path(python)})
