"""A run's folder as its launcher leaves it while the run is on: configuration, credentials, a real broker, the lock."""

import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.protocol.config import RunConfig
from beamline.protocol.subjects import Subjects
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.run_files import write_config


class LiveRun:
    """Made by `live_run`. The run ends for whoever follows it when `end` is called."""

    def __init__(self, config: RunConfig, server: NatsServer) -> None:
        self.config = config
        self.run_dir = server.run_dir
        self.subjects = Subjects(config.bus.prefix, config.run.name)
        self.server = server
        self._buses: list[NatsBus] = []
        self._lock = (self.run_dir / LOCK_FILE).open("a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    async def bus(self, service: str) -> NatsBus:
        """A connection as one of the services; closed with the run."""
        bus = await NatsBus.connect(self.server.credentials(service), self.subjects)
        self._buses.append(bus)
        return bus

    def end(self) -> None:
        """Give up the lock, as a launcher does last."""
        self._lock.close()

    async def close(self) -> None:
        self.end()
        for bus in self._buses:
            await bus.close()
        await self.server.stop()


@asynccontextmanager
async def live_run(runs: Path, config: RunConfig) -> AsyncIterator[LiveRun]:
    """A run called `config.run.name` under `runs`, whose services are up to the test."""
    run_dir = runs / config.run.name
    run_dir.mkdir(parents=True)
    write_config(run_dir, msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(runs))))
    server = NatsServer(run_dir, Subjects(config.bus.prefix, config.run.name))
    await server.start()
    run = LiveRun(config, server)
    try:
        await (await run.bus("coordinator")).ensure_streams()
        yield run
    finally:
        await run.close()
