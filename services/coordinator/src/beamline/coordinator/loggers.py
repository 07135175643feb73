"""Where a run's metrics are shown while it goes on. Each logger is one small object; a recipe names them."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from beamline.protocol.errors import ConfigError


class Logger(Protocol):
    """Takes every record of a run, once and in order."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Show finite values of a step; `time` is Unix time in seconds."""
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

    @staticmethod
    def _is_accuracy(name: str) -> bool:
        return name.startswith("eval/") and name.endswith("/accuracy")

    @staticmethod
    def _accuracy(name: str, values: Mapping[str, float]) -> str:
        source = name.removeprefix("eval/").removesuffix("/accuracy")
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        return f"{source} accuracy {values[name]:.3f}{interval}"


_FACTORIES: dict[str, Callable[[], Logger] | None] = {
    "console": ConsoleLogger,
    "jsonl": None,  # the recorder writes metrics.jsonl in every run: the summary is made from it
}


def make_loggers(names: Sequence[str]) -> list[Logger]:
    """The loggers of `run.loggers`, in that order. `jsonl` is the recorder's own file and adds none.

    Raises:
        ConfigError: a name that is none of them.
    """
    loggers: list[Logger] = []
    for name in names:
        if name not in _FACTORIES:
            nearest = difflib.get_close_matches(name, _FACTORIES, n=1)
            hint = f", such as {nearest[0]!r}" if nearest else ""
            raise ConfigError(f"run.loggers has {name!r}: use {' or '.join(map(repr, _FACTORIES))}{hint}")
        factory = _FACTORIES[name]
        if factory is not None:
            loggers.append(factory())
    return loggers
