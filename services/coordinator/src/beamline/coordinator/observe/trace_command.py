"""`beamline trace`: from what a user names to what is printed or written."""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from beamline.coordinator.launch.find_run import find_run
from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.coordinator.observe.spans import Span
from beamline.coordinator.observe.trace_group import GroupTrace, read_group
from beamline.coordinator.observe.trace_group_show import ending, show_group
from beamline.coordinator.observe.trace_show import show_step
from beamline.coordinator.observe.trace_step import StepTrace, read_step
from beamline.protocol.errors import ConfigError

GROUP = re.compile(r"g-\d+|.+-\d{5}")
"""Ids of groups that are trained, and of those that are evaluated."""


def trace(target: str, runs: Path, run: str, step: int | None) -> StepTrace | GroupTrace:
    """The step of a run, or the way of a group.

    Args:
        target: a run's name under `runs`, its folder, or a group's id.
        run: where a group is looked for; empty takes the newest run that has it.
        step: of the run; None takes the last one that has ended.

    Raises:
        ConfigError: there is no such run, step or group; the nearest is named.
    """
    if _is_run(target, runs) or not GROUP.fullmatch(target):
        if run:
            raise ConfigError(f"--run {run} says where a group is looked for, and {target!r} is not a group's id")
        return read_step(find_run(target, runs), step)
    if step is not None:
        raise ConfigError(f"--step {step} belongs to a run, and {target!r} is a group's id")
    return _group(target, [find_run(run, runs)] if run else list(_newest(runs)), runs)


def show(found: StepTrace | GroupTrace, console: Console) -> None:
    """Print what was found."""
    if isinstance(found, StepTrace):
        show_step(found, console)
    else:
        show_group(found, console)


def write_perfetto(target: str, runs: Path, step: int | None, path: Path) -> str:
    """Write a run's timeline to a file. Returns what to say about it.

    Raises ConfigError: no such run, or a part of one is asked for.
    """
    from beamline.coordinator.observe.perfetto_timeline import write_timeline

    if step is not None:
        raise ConfigError(f"--perfetto writes a whole run: leave out --step {step}, and look for it on the timeline")
    if GROUP.fullmatch(target) and not _is_run(target, runs):
        raise ConfigError(f"--perfetto writes a whole run, and {target!r} is a group's id: name the run")
    num_spans = write_timeline(find_run(target, runs), path)
    return f"{path}: {num_spans} spans; open it at https://ui.perfetto.dev"


def as_json(trace: StepTrace | GroupTrace) -> str:
    """Everything; times are seconds since the step's or the group's first span, and Unix seconds where it is said."""
    content = _step_content(trace) if isinstance(trace, StepTrace) else _group_content(trace)
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def _is_run(target: str, runs: Path) -> bool:
    return any((path / LOCK_FILE).is_file() for path in (runs / target, Path(target)))


def _newest(runs: Path) -> Iterator[Path]:
    """Folders of runs, the newest first."""
    locks = sorted(runs.glob(f"*/{LOCK_FILE}"), key=lambda lock: lock.stat().st_mtime, reverse=True)
    yield from (lock.parent for lock in locks if (lock.parent / "traces").is_dir())


def _group(group_id: str, folders: list[Path], runs: Path) -> GroupTrace:
    nearest, where = "", f"the runs in {runs} with traces"
    for folder in folders:
        found, others = read_group(folder, group_id)
        if found:
            return found
        if not nearest and others:
            nearest = f": the nearest is {_nearest(group_id, others)!r} of run {folder.name}"
    if len(folders) == 1:
        where = f"run {folders[0].name}"
    if not folders:
        raise ConfigError(f"no run in {runs} has traces, so group {group_id!r} cannot be followed")
    raise ConfigError(f"no group is called {group_id!r} in {where}{nearest}")


def _nearest(group_id: str, others: Iterable[str]) -> str:
    """The next number of the same kind of group, or of any kind where there is no such."""
    kind, _, number = group_id.rpartition("-")
    alike = [other for other in others if other.rpartition("-")[0] == kind]
    if alike:
        return min(alike, key=lambda other: abs(int(other.rpartition("-")[2]) - int(number)))
    return max(others, key=lambda other: difflib.SequenceMatcher(None, group_id, other).ratio())


def _step_content(trace: StepTrace) -> dict[str, Any]:
    begin, on_path = trace.root.span.start_ns, trace.on_path
    spans = [_content(node.span, begin) | {"critical": node.span.span_id in on_path} for node in trace.root.walk()]
    path = [
        {
            "span_id": segment.span.span_id,
            "name": segment.span.name,
            "gap": segment.gap,
            "start_s": _s(segment.start_ns - begin),
            "duration_s": _s(segment.num_ns),
        }
        for segment in trace.path
    ]
    duration_s = _s(trace.root.span.end_ns - begin)
    return {"run": trace.run, "step": trace.step, "duration_s": duration_s, "spans": spans, "critical_path": path}


def _group_content(trace: GroupTrace) -> dict[str, Any]:
    begin = trace.stops[0].span.start_ns
    return {
        "run": trace.run,
        "group_id": trace.group_id,
        "outcome": trace.outcome,
        "step": trace.step,
        "ending": ending(trace),
        "spans": [
            _content(stop.span, begin) | {"trace_step": stop.step, "redelivered": stop.is_redelivered}
            for stop in trace.stops
        ],
    }


def _content(span: Span, begin_ns: int) -> dict[str, Any]:
    """A span with its times made readable."""
    times = {"start_s": _s(span.start_ns - begin_ns), "duration_s": _s(span.end_ns - span.start_ns)}
    left_out = ("start_ns", "end_ns")
    return {key: value for key, value in msgspec.structs.asdict(span).items() if key not in left_out} | times


def _s(num_ns: int) -> float:
    return round(num_ns / 1e9, 6)
