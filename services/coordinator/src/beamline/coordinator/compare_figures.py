"""Settings and figures of two runs side by side. Pure functions over their summaries."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from beamline.coordinator.summary import EVAL_PREFIX, Summary
from beamline.protocol.errors import ConfigError

PHASES = ("generate", "train", "sync", "step", "evaluate", "checkpoint")
"""Whose times are compared; the parts of them can be asked for."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One that the runs do not share; None where a run does not have it."""

    key: str
    first: Any
    second: Any


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of each run; None where it was not measured."""

    name: str
    first: float | None
    second: float | None


def differing_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Setting]:
    """By dotted key. A run's name and folder are left out, and a path in a run's own folder is told from `<run>`."""
    flat = [dict(_flatten("", config, _folder(config))) for config in (first, second)]
    return [
        Setting(key=key, first=flat[0].get(key), second=flat[1].get(key))
        for key in dict.fromkeys([*flat[0], *flat[1]])
        if flat[0].get(key) != flat[1].get(key) and key not in ("run.name", "run.dir")
    ]


def figures(first: Summary, second: Summary, metrics: Sequence[str]) -> list[Figure]:
    """The usual ones, then mean over the steps and last value of each of `metrics`.

    Raises:
        ConfigError: a metric that neither run has.
    """
    usual = [_usual_figures(summary) for summary in (first, second)]
    found = [
        Figure(name=name, first=usual[0].get(name), second=usual[1].get(name))
        for name in dict.fromkeys([*usual[0], *usual[1]])
    ]
    for metric in metrics:
        values = [_values(summary, metric) for summary in (first, second)]
        if not any(values):
            raise ConfigError(_unknown_metric(metric, first, second))
        means = [sum(told) / len(told) if told else None for told in values]
        lasts = [told[-1] if told else None for told in values]
        found.append(Figure(name=f"{metric}, mean", first=means[0], second=means[1]))
        found.append(Figure(name=f"{metric}, last", first=lasts[0], second=lasts[1]))
    return found


def _usual_figures(summary: Summary) -> dict[str, float]:
    """Work, speed, mismatch and time of a run."""
    gaps = _values(summary, "policy/mismatch_abs_mean")
    found = {"steps": float(sum("timing/step" in step.values for step in summary.steps))}
    if summary.tokens_per_s is not None:
        found["tokens/s"] = summary.tokens_per_s
    if gaps:
        found |= {"mismatch, mean of steps": sum(gaps) / len(gaps), "mismatch, largest step": max(gaps)}
    found["duration s"] = summary.duration_s
    return found | {f"{phase} s": summary.timing_total[phase] for phase in PHASES if phase in summary.timing_total}


def _values(summary: Summary, metric: str) -> list[float]:
    """In order of the steps."""
    if metric.startswith(EVAL_PREFIX):
        name, _, short = metric.removeprefix(EVAL_PREFIX).rpartition("/")
        return [e.values[short] for e in summary.evaluations if e.name == name and short in e.values]
    return [step.values[metric] for step in summary.steps if metric in step.values]


def _unknown_metric(metric: str, *summaries: Summary) -> str:
    known = {name for summary in summaries for step in summary.steps for name in step.values}
    known |= {
        f"{EVAL_PREFIX}{e.name}/{short}" for summary in summaries for e in summary.evaluations for short in e.values
    }
    nearest = difflib.get_close_matches(metric, sorted(known), n=1, cutoff=0.0)
    return f"--metric {metric}: neither run has recorded it" + (f"; the nearest is {nearest[0]}" if nearest else "")


def _folder(config: Mapping[str, Any]) -> str:
    run = config.get("run", {})
    return f"{run.get('dir', '')}/{run.get('name', '')}/"


def _flatten(key: str, value: Any, folder: str) -> Iterable[tuple[str, Any]]:
    """Leaves by dotted key; lists of plain values are leaves."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flatten(f"{key}.{name}" if key else str(name), part, folder)
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield from _flatten(f"{key}.{index}", part, folder)
    elif isinstance(value, str) and value.startswith(folder):
        yield key, f"<run>/{value.removeprefix(folder)}"
    else:
        yield key, value
