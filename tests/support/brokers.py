"""Brokers for the bus tests: a real nats-server with its users and streams, and the in-memory hub."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from beamline.protocol.messages import Message
from beamline.protocol.subjects import Subjects
from beamline.runtime.bus import Bus
from beamline.runtime.deadline import deadline
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer

ACK_WAIT_S = 0.6
SUBJECTS = Subjects(prefix="beamline", run="test")


class Broker(Protocol):
    async def client(self, service: str) -> Bus: ...


class NatsBroker:
    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.clients: list[NatsBus] = []

    async def client(self, service: str, **options: float) -> NatsBus:
        credentials = self.server.credentials(service)
        bus = await NatsBus.connect(credentials, SUBJECTS, ack_wait_s=ACK_WAIT_S, **options)  # type: ignore[arg-type]
        self.clients.append(bus)
        return bus

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))
        await self.server.stop()


class MemoryBroker:
    def __init__(self, seed: int) -> None:
        self.hub = MemoryHub(SUBJECTS, seed=seed)

    async def client(self, service: str) -> MemoryBus:
        return MemoryBus(self.hub)


class Tasks:
    """Background loops of a test, cancelled at its end."""

    def __init__(self) -> None:
        self.running: list[asyncio.Task[None]] = []

    def start(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(loop)
        self.running.append(task)
        return task

    async def cancel(self, *tasks: asyncio.Task[None]) -> None:
        chosen = tasks or tuple(self.running)
        for task in chosen:
            task.cancel()
        await asyncio.gather(*chosen, return_exceptions=True)


class Collector:
    """A handler that keeps what it was given and can be waited on."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._grown = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.ids.append(message.group_id)  # type: ignore[attr-defined]
        self._grown.set()

    async def until(self, num_distinct: int) -> None:
        async with deadline(10, f"{num_distinct} distinct messages, have {sorted(set(self.ids))}"):
            while len(set(self.ids)) < num_distinct:
                self._grown.clear()
                await self._grown.wait()
