"""A run's numbers, those of its files and those to come.

Of steps and evaluations the bus says when to look, and the file is what is shown. Live numbers are shown as they are
heard; a run that has ended has those that its coordinator kept.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from beamline.coordinator.launch.ask import connect
from beamline.coordinator.launch.run_end import run_end
from beamline.coordinator.launch.run_folder import in_use
from beamline.coordinator.metrics_file import MetricsLine, MetricsTail, read_metrics
from beamline.coordinator.observe.gauge_lines import GaugeLine, read_gauges
from beamline.protocol.messages import Message, Metrics

type Line = MetricsLine | GaugeLine
type Show = Callable[[Line], None]
type Take = Callable[[Message | None], Awaitable[None]]
"""Told of a message of the bus; of None when the files are to be looked at."""


def recorded(run_dir: Path, *, live: bool) -> list[Line]:
    """What the run's files have: live numbers, or records of steps and evaluations.

    Raises:
        ConfigError: a damaged record.
    """
    return [*read_gauges(run_dir)] if live else [*read_metrics(run_dir / "metrics.jsonl")]


async def follow_metrics(run_dir: Path, show: Show, *, live: bool) -> None:
    """Show what the run's files have, then what comes, until the run has ended.

    Raises:
        ConfigError: a file of the run is damaged, or it has no credentials.
        BusUnavailable: nobody answers at the run's bus.
    """
    take = _heard(run_dir, show) if live else _added(run_dir, show)
    await take(None)
    if not in_use(run_dir):
        return
    bus, ended = await connect(run_dir), run_end(run_dir)
    subjects = (bus.subjects.metrics(), bus.subjects.evaluation)
    following = [asyncio.create_task(bus.subscribe(subject, take)) for subject in subjects]
    try:
        await asyncio.wait({ended, *following}, return_when=asyncio.FIRST_COMPLETED)
        if not live:
            await take(None)
    finally:
        for task in following:
            task.cancel()
        await bus.close()


def _added(run_dir: Path, show: Show) -> Take:
    """Shows what was added to the run's file, whatever was heard."""
    tail = MetricsTail(run_dir / "metrics.jsonl")

    async def take(_: Message | None) -> None:
        for line in tail.read():
            show(line)

    return take


def _heard(run_dir: Path, show: Show) -> Take:
    """Shows what was kept, and then what is heard."""

    async def take(message: Message | None) -> None:
        if isinstance(message, Metrics) and message.step < 0:
            show(GaugeLine(time=time.time(), service=message.service, worker=message.worker, values=message.values))
        elif message is None:
            for line in read_gauges(run_dir):
                show(line)

    return take
