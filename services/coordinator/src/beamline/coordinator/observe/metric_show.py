"""A run's numbers for people and for programs: tables and lines of text, or JSON lines."""

from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.table import Table

from beamline.coordinator.launch.follow_metrics import Line
from beamline.coordinator.metrics_file import MetricsLine
from beamline.coordinator.observe.metric_filter import MetricFilter
from beamline.protocol.metric_schema import find


def last_values(lines: Iterable[Line]) -> dict[str, tuple[float, Line]]:
    """The newest value of each name, with the record that has it."""
    return {name: (value, line) for line in lines for name, value in line.values.items()}


def show_table(lines: Iterable[Line], wanted: MetricFilter, console: Console, now: float) -> None:
    """The last value of each wanted name, with its unit, and its step or its age."""
    newest = last_values(lines)
    table = Table("metric", "value", "unit", "as of", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = table.columns[3].justify = "right"
    for name in wanted.of({name: value for name, (value, _) in sorted(newest.items())}):
        value, line = newest[name]
        table.add_row(name, format_value(value), unit_of(name), _as_of(line, now))
    console.print(table)


def text_lines(line: Line, wanted: MetricFilter) -> list[str]:
    """A record as lines of text, one a wanted value."""
    told = f"step {line.step:>5}" if isinstance(line, MetricsLine) else "live"
    values = sorted(wanted.of(line.values).items())
    return [f"{told}  {name}  {format_value(value)} {unit_of(name)}".rstrip() for name, value in values]


def json_line(line: Line, wanted: MetricFilter) -> list[str]:
    """A record with its wanted values alone, as one line of JSON; none where it has others alone."""
    values = wanted.of(line.values)
    if line.values and not values:
        return []
    return [msgspec.json.encode(msgspec.structs.replace(line, values=values)).decode()]


def format_value(value: float) -> str:
    """Six significant digits; whole numbers as they are."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


def unit_of(name: str) -> str:
    """By the schema; empty where that has no such name, and for plain ratios."""
    metric = find(name)
    return "" if metric is None or metric.unit == "1" else metric.unit


def _as_of(line: Line, now: float) -> str:
    return f"step {line.step}" if isinstance(line, MetricsLine) else f"{max(0.0, now - line.time):.0f} s ago"
