"""All messages of a run's metrics, from its beginning to its end, beside the test that starts the run."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from beamline.coordinator.launch.ask import connect
from beamline.coordinator.launch.run_end import run_end
from beamline.protocol.messages import Message, Metrics
from beamline.runtime.deadline import deadline

BEGIN_S = 60.0


@contextmanager
def heard(run_dir: Path) -> Iterator[Future[list[Metrics]]]:
    """Listen to the run that the block starts; the messages are there when the block is left."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: asyncio.run(_hear(run_dir)))


async def _hear(run_dir: Path) -> list[Metrics]:
    async with deadline(BEGIN_S, f"the broker of {run_dir}"):
        while not (run_dir / "credentials" / "cli.json").is_file():
            await asyncio.sleep(0.1)  # a file of another process: nothing tells when it comes
    messages: list[Metrics] = []

    async def take(message: Message) -> None:
        assert isinstance(message, Metrics)
        messages.append(message)

    bus, ended = await connect(run_dir), run_end(run_dir)
    hearing = asyncio.create_task(bus.subscribe(bus.subjects.metrics(), take))
    try:
        await asyncio.wait({ended, hearing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hearing.cancel()
        await bus.close()
    return messages
