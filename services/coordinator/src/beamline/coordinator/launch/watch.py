"""Follows a run over the bus as user `cli` and shows what it says."""

import asyncio

from beamline.coordinator.launch.display import Display
from beamline.coordinator.launch.progress import Progress
from beamline.coordinator.launch.watchdog import Watchdog
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import Heartbeat, Message, Phase
from beamline.runtime.bus import Bus


async def watch(bus: Bus, progress: Progress, display: Display, watchdog: Watchdog) -> None:
    """Show heartbeats, phases, steps, evaluations, errors and silences until cancelled.

    A run does not end because nobody can watch it: if the bus refuses, that is shown and the watching ends.
    """

    async def show(message: Message) -> None:
        if isinstance(message, Heartbeat):
            watchdog.hear(message)
        for line in progress.lines(message):
            display.line(line)
        display.position(progress)

    names = bus.subjects
    plain = (names.heartbeat(), names.metrics("coordinator"), names.evaluation, names.error())
    try:
        async with asyncio.TaskGroup() as group:
            for subject in plain:
                group.create_task(bus.subscribe(subject, show))
            group.create_task(bus.follow(Phase, show))
            group.create_task(watchdog.run())
    except* BeamlineError as errors:
        display.line(f"progress is no longer shown: {errors.exceptions[0]}")
