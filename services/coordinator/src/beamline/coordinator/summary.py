"""`summary.json`: what a run came to. Made from the metrics file; the report and every comparison read it."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from beamline.coordinator.metrics_file import MetricsLine
from beamline.protocol.errors import ConfigError

EVAL_PREFIX = "eval/"
TIMING_PREFIX = "timing/"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of a summary."""


class Evaluation(_Record, frozen=True, kw_only=True):
    """One data source after `step` policy updates; `values` are under the names that follow `eval/<name>/`."""

    step: int
    name: str
    values: dict[str, float]


class StepValues(_Record, frozen=True, kw_only=True):
    step: int
    values: dict[str, float]


class LedgerCounts(_Record, frozen=True, kw_only=True):
    """Prompt groups."""

    issued: int
    trained: int
    filtered: int
    stale: int
    failed: int
    in_flight: int = 0

    @property
    def unaccounted(self) -> int:
        """Issued groups that are neither in flight nor ended: 0 when the ledger closes."""
        return self.issued - self.trained - self.filtered - self.stale - self.failed - self.in_flight


class Artifacts(_Record, frozen=True, kw_only=True):
    """Paths, relative to where the run was started if `run.dir` is."""

    report: str
    metrics: str
    logs: str
    checkpoint: str
    evals: str
    export: str = ""
    """A Hugging Face directory; empty where there is none."""
    traces: str = ""
    """Empty where none were kept."""


class Summary(_Record, frozen=True, kw_only=True):
    run: str
    status: str
    started: str
    """ISO 8601, UTC."""
    finished: str
    duration_s: float
    """From the first start to the end, restarts included."""
    config: dict[str, Any]
    evaluations: list[Evaluation]
    steps: list[StepValues]
    timing_total: dict[str, float]
    """Seconds by phase, summed over the steps."""
    tokens_per_s: float | None
    """Prompt and response tokens by seconds spent on steps, over the whole run; None before the first step."""
    ledger: LedgerCounts
    versions: dict[str, dict[str, str]]
    """Library versions by service."""
    artifacts: Artifacts


def fold(lines: Sequence[MetricsLine]) -> tuple[list[Evaluation], list[StepValues]]:
    """Records by step and by evaluation, in order of step.

    What is recorded twice, as by a coordinator that was killed and started again, counts once: the later value holds.
    """
    evaluations: dict[tuple[int, str], dict[str, float]] = {}
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        for metric, value in line.values.items():
            if metric.startswith(EVAL_PREFIX):
                name, _, short = metric.removeprefix(EVAL_PREFIX).rpartition("/")
                evaluations.setdefault((line.step, name), {})[short] = value
            else:
                steps.setdefault(line.step, {})[metric] = value
    return (
        [Evaluation(step=step, name=name, values=values) for (step, name), values in _by_step(evaluations)],
        [StepValues(step=step, values=values) for step, values in sorted(steps.items())],
    )


def timing_total(steps: Sequence[StepValues]) -> dict[str, float]:
    """Seconds by phase, summed over the steps."""
    totals: dict[str, float] = {}
    for step in steps:
        for metric, seconds in step.values.items():
            if metric.startswith(TIMING_PREFIX):
                phase = metric.removeprefix(TIMING_PREFIX)
                totals[phase] = totals.get(phase, 0.0) + seconds
    return totals


def tokens_per_s(steps: Sequence[StepValues]) -> float | None:
    """Prompt and response tokens by the seconds of the steps that tell both; `timing/step` has neither evaluations nor
    checkpoints in it."""
    told = [step.values for step in steps if {"tokens/prompt", "tokens/response", "timing/step"} <= step.values.keys()]
    tokens = sum(values["tokens/prompt"] + values["tokens/response"] for values in told)
    seconds = sum(values["timing/step"] for values in told)
    return tokens / seconds if seconds > 0 else None


def write_summary(path: Path, summary: Summary) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read_summary(path: Path) -> Summary:
    """Raises ConfigError naming the file when it is missing or not a summary."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        raise ConfigError(f"no {path}: name the folder of a run that has ended") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not the summary of a run: {error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a reader, or a crash at any moment, finds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def iso(unix_s: float) -> str:
    """Unix time in seconds as ISO 8601 in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _by_step(
    evaluations: Mapping[tuple[int, str], dict[str, float]],
) -> list[tuple[tuple[int, str], dict[str, float]]]:
    """By step; within a step in the order in which the data sources were evaluated."""
    return sorted(evaluations.items(), key=lambda item: item[0][0])
