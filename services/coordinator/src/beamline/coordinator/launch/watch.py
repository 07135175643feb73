"""Follows a run over the bus as user `cli` and shows what it says."""

import asyncio
import time

from beamline.coordinator.launch.display import Display
from beamline.coordinator.launch.progress import Progress
from beamline.coordinator.launch.watchdog import Watchdog
from beamline.coordinator.observe.follow import hear
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import Heartbeat, Message
from beamline.runtime.bus import Bus


async def watch(bus: Bus, progress: Progress, display: Display, watchdog: Watchdog) -> None:
    """Show heartbeats, phases, steps, evaluations, errors and silences until cancelled.

    A run does not end because nobody can watch it: if the bus refuses, that is shown and the watching ends.
    """

    async def show(message: Message) -> None:
        if isinstance(message, Heartbeat):
            watchdog.hear(message)
        progress.view.apply(message, time.time())
        for line in progress.lines(message):
            display.line(line)
        display.position(progress)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(hear(bus, show))
            group.create_task(watchdog.run())
    except* BeamlineError as errors:
        display.line(f"progress is no longer shown: {errors.exceptions[0]}")
