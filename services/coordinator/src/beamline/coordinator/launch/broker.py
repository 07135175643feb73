"""The run's broker: a nats-server of its own that is started again when it dies, or one that the user has."""

import asyncio
from pathlib import Path
from typing import Protocol

from beamline.coordinator.launch.guard import Guard
from beamline.coordinator.launch.process_table import BROKER
from beamline.coordinator.launch.supervisor import Notify, RestartPolicy, RunFailed
from beamline.protocol.config import BusSection
from beamline.protocol.subjects import Subjects
from beamline.runtime.credentials import SERVICES, Credentials, write_credentials
from beamline.runtime.nats_server import NatsServer


class Broker(Protocol):
    """Writes the services' credentials when it starts."""

    async def start(self) -> Credentials:
        """Start; returns the credentials of the command line's user."""
        ...

    async def keep(self) -> None:
        """Keep it alive until cancelled. Raises RunFailed when that cannot be done."""
        ...

    async def stop(self) -> None: ...


class OwnBroker:
    """A nats-server on loopback that lives as long as the run."""

    def __init__(self, server: NatsServer, guard: Guard, policy: RestartPolicy, notify: Notify) -> None:
        self._server = server
        self._guard = guard
        self._policy = policy
        self._notify = notify

    async def start(self) -> Credentials:
        await self._server.start()
        self._guard.watch(BROKER, self._server.pid)
        return self._server.credentials("cli")

    async def keep(self) -> None:
        for num_restarts in range(self._policy.max_restarts):
            error = await self._server.died()
            self._guard.forget(self._server.pid)
            self._notify(f"{str(error).splitlines()[0]}; starting it again")
            await asyncio.sleep(self._policy.delay_s(num_restarts))
            await self._server.restart()
            self._guard.watch(BROKER, self._server.pid)
        raise RunFailed(f"nats-server was started {self._policy.max_restarts} times again: {await self._server.died()}")

    async def stop(self) -> None:
        await self._server.stop()


class UserBroker:
    """The broker at `bus.url`; the run neither starts nor ends it."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self._credentials = Credentials(url=url)
        self._run_dir = run_dir

    async def start(self) -> Credentials:
        for service in SERVICES:
            write_credentials(self._run_dir, service, self._credentials)
        return self._credentials

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        pass


def choose_broker(
    bus: BusSection, run_dir: Path, subjects: Subjects, guard: Guard, policy: RestartPolicy, notify: Notify
) -> Broker:
    """The user's broker if the recipe names one, else one of the run's own."""
    if bus.url:
        return UserBroker(bus.url, run_dir)
    server = NatsServer(run_dir, subjects, port=bus.port, blobs=bus.blob_store == "jetstream")
    return OwnBroker(server, guard, policy, notify)
