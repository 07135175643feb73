"""A run over its bus, as user `cli`: everything that may be heard of it, into a handler or a `RunView`."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from beamline.coordinator.launch.ask import connect
from beamline.coordinator.launch.run_end import run_end
from beamline.coordinator.launch.run_folder import in_use
from beamline.coordinator.observe.recall import recall
from beamline.coordinator.observe.view import RunView
from beamline.protocol.errors import DeadlineExceeded
from beamline.protocol.messages import Message, Phase, StatusRequest
from beamline.runtime.bus import Bus
from beamline.runtime.credentials import credentials_path
from beamline.runtime.deadline import deadline

ASK_DEADLINE_S = 5.0
SET_UP_DEADLINE_S = 120.0
"""A model that is made for the run, and its data, are written first."""
LOOK_EVERY_S = 0.1


async def follow_run(run_dir: Path, view: RunView, changed: Callable[[Message], None]) -> None:
    """Feed the view what the run's files tell, then what its bus says, until the run ends.

    `changed` is called after each message of the bus, with it. A run that has ended already is only recalled.

    Raises:
        ConfigError: a file of the run is damaged.
        DeadlineExceeded: its launcher did not start its bus.
        BusUnavailable: nobody answers at the run's bus.
    """
    await until_set_up(run_dir)
    recall(run_dir, view)
    if not in_use(run_dir):
        return

    async def take(message: Message) -> None:
        view.apply(message, time.time())
        changed(message)

    bus, ended = await connect(run_dir), run_end(run_dir)
    hearing = asyncio.create_task(hear(bus, take))
    try:
        await asyncio.wait({ended, hearing}, return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            hearing.result()
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await bus.close()
    recall(run_dir, view)


async def until_set_up(run_dir: Path) -> None:
    """Wait until a live run can be asked: its launcher fills its folder, then starts its broker. Raises as above."""
    async with deadline(SET_UP_DEADLINE_S, f"the launcher of run {run_dir.name} to start the run's broker"):
        while in_use(run_dir) and not credentials_path(run_dir, "cli").is_file():
            await asyncio.sleep(LOOK_EVERY_S)


async def hear(bus: Bus, handle: Callable[[Message], Awaitable[None]]) -> None:
    """Hand over heartbeats, metrics, evaluations, errors and phases, and the status at every phase, until cancelled."""
    entered = asyncio.Event()
    entered.set()

    async def enter(phase: Message) -> None:
        await handle(phase)
        entered.set()

    async def ask() -> None:
        while True:
            await entered.wait()
            entered.clear()
            try:
                await handle(await bus.request(StatusRequest(), ASK_DEADLINE_S))
            except DeadlineExceeded:
                continue  # the coordinator starts, or is away: the next phase asks again

    names = bus.subjects
    async with asyncio.TaskGroup() as group:
        for subject in (names.heartbeat(), names.metrics(), names.evaluation, names.error()):
            group.create_task(bus.subscribe(subject, handle))
        group.create_task(bus.follow(Phase, enter))
        group.create_task(ask())
