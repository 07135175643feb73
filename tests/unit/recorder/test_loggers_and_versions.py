"""Loggers by name, and library versions by interpreter."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from beamline.coordinator.loggers import ConsoleLogger, make_loggers
from beamline.coordinator.versions import library_versions
from beamline.protocol.config import RunSection
from beamline.protocol.errors import ConfigError


def test_every_default_logger_exists():
    assert [type(logger) for logger in make_loggers(RunSection().loggers)] == [ConsoleLogger]


def test_an_unknown_logger_is_refused_with_the_names_that_there_are():
    with pytest.raises(ConfigError, match=r"'consol'.*'console'.*'jsonl'.*such as 'console'"):
        make_loggers(["jsonl", "consol"])


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
