"""`beamline metrics`: the last value of each number of a run, or every record as it comes."""

import time
from pathlib import Path

from rich.console import Console

from beamline.coordinator.launch.follow_metrics import Line, follow_metrics, recorded
from beamline.coordinator.observe.metric_filter import MetricFilter
from beamline.coordinator.observe.metric_show import json_line, last_values, show_table, text_lines
from beamline.protocol.errors import ConfigError

WIDE = 200
"""Columns of the table: names are not to be cut off in a narrow terminal or a pipe."""


async def show_metrics(run_dir: Path, glob: str, *, live: bool, follow: bool, json: bool) -> None:
    """Print to standard output.

    Args:
        glob: over names; empty shows all.
        live: the live numbers instead of those of steps.
        follow: go on until the run has ended.
        json: whole records, each a line, instead of text.

    Raises:
        ConfigError: a glob that matches nothing, a run without numbers, or a damaged file.
    """
    wanted, lines = MetricFilter(glob), recorded(run_dir, live=live)
    wanted.check(last_values(lines))
    printed = json_line if json else text_lines

    def show(line: Line) -> None:
        for text in printed(line, wanted):
            print(text, flush=True)

    if follow:
        await follow_metrics(run_dir, show, live=live)
        return
    if not lines:
        come = "with its workers" if live else "with its first evaluation or step"
        raise ConfigError(f"run {run_dir.name} has no metrics yet: they come {come}")
    if json:
        for line in lines:
            show(line)
    elif wanted.of(dict.fromkeys(last_values(lines), 0.0)):
        console = Console(width=WIDE, soft_wrap=True, markup=False, highlight=False)
        show_table(lines, wanted, console, time.time())
    else:
        raise ConfigError(f"run {run_dir.name} has no metric that matches {glob!r} yet: `--follow` waits for it")
