"""Where a run's metrics are shown while it goes on. Each logger is one small object; a recipe names them."""

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError

log = logging.getLogger(__name__)


class Logger(Protocol):
    """Takes every record of a run, once and in order."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Show finite values of a step; `time` is Unix time in seconds."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class ConsoleLogger:
    """One line a record on standard output: the figures by which one follows a run."""

    STEP_FIGURES = (
        ("reward/mean", "reward", "{:.3f}"),
        ("tokens/response_mean", "response length", "{:.1f}"),
        ("policy/mismatch_abs_mean", "mismatch", "{:.1e}"),
        ("policy/grad_norm", "grad norm", "{:.3f}"),
        ("throughput/tokens_per_s", "tokens/s", "{:.0f}"),
        ("timing/step", "seconds", "{:.1f}"),
    )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        figures = [f"{label} {form.format(values[name])}" for name, label, form in self.STEP_FIGURES if name in values]
        figures += [self._accuracy(name, values) for name in values if self._is_accuracy(name)]
        if figures:
            print(f"step {step:>4}  " + "  ".join(figures), flush=True)

    def close(self) -> None:
        """Nothing is held open."""

    @staticmethod
    def _is_accuracy(name: str) -> bool:
        return name.startswith("eval/") and name.endswith("/accuracy")

    @staticmethod
    def _accuracy(name: str, values: Mapping[str, float]) -> str:
        source = name.removeprefix("eval/").removesuffix("/accuracy")
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        return f"{source} accuracy {values[name]:.3f}{interval}"


class Guarded:
    """A logger that may fail: it is then left out for the rest of the run, which is said once.

    Args:
        name: as the run's configuration calls it.
        logger: the one that may fail.
    """

    def __init__(self, name: str, logger: Logger) -> None:
        self._name = name
        self._logger: Logger | None = logger

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """As `Logger.log`, and raises nothing."""
        if self._logger is not None:
            self._guard(lambda logger: logger.log(step, time, values))

    def close(self) -> None:
        """As `Logger.close`, and raises nothing."""
        if self._logger is not None:
            self._guard(lambda logger: logger.close())

    def _guard(self, use: Callable[[Logger], None]) -> None:
        assert self._logger is not None
        try:
            use(self._logger)
        except Exception as error:  # whatever another's library raises: no reason to end a run
            self._logger = None
            log.error("logger %s has failed and hears no more of this run: %s", self._name, error)


type Open = Callable[[Path, RunConfig, int | None], Logger]
"""Makes a logger for the run of a folder; what was told of a step, and of later ones, may be void."""


def _console(run_dir: Path, config: RunConfig, void_from: int | None) -> Logger:
    return ConsoleLogger()


def _tensorboard(run_dir: Path, config: RunConfig, void_from: int | None) -> Logger:
    from beamline.coordinator.tensorboard_logger import TensorboardLogger  # protobuf

    return TensorboardLogger(run_dir / "tensorboard", void_from)


def _wandb(run_dir: Path, config: RunConfig, void_from: int | None) -> Logger:
    """A run that goes on is another one of the same group there, so nothing of the earlier one is void."""
    from beamline.coordinator.wandb_logger import WandbLogger  # takes seconds to import

    return WandbLogger(run_dir, config)


_OPENERS: dict[str, Open | None] = {
    "console": _console,
    "jsonl": None,  # the recorder writes metrics.jsonl in every run: the summary is made from it
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def check_loggers(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no logger's, with the nearest that is."""
    for name in names:
        if name not in _OPENERS:
            nearest = difflib.get_close_matches(name, _OPENERS, n=1)
            hint = f", such as {nearest[0]!r}" if nearest else ""
            raise ConfigError(f"run.loggers has {name!r}: use {' or '.join(map(repr, _OPENERS))}{hint}")


def open_loggers(run_dir: Path, config: RunConfig, void_from: int | None = None) -> list[Logger]:
    """The loggers of `run.loggers`, in that order. `jsonl` is the recorder's own file and adds none.

    One that cannot be had is left out, which is said: a run is not for its loggers' sake. May take seconds.

    Args:
        run_dir: the run's folder.
        config: of the run.
        void_from: what an earlier part of the run has told of this step and later ones is told anew; None for nothing.

    Raises:
        ConfigError: a name that is none of them.
    """
    check_loggers(config.run.loggers)
    loggers: list[Logger] = []
    for name in config.run.loggers:
        if (opener := _OPENERS[name]) is None:
            continue
        try:
            loggers.append(Guarded(name, opener(run_dir, config, void_from)))
        except Exception as error:
            log.error("logger %s cannot be had, the run goes on without it: %s", name, error)
    return loggers
