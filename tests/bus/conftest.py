"""A broker of each kind, and background tasks that end with their test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from beamline.runtime.nats_server import NatsServer
from brokers import SUBJECTS, Broker, MemoryBroker, NatsBroker, Tasks


@pytest_asyncio.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsBroker]:
    server = NatsServer(tmp_path, SUBJECTS, blobs=True)
    await server.start()
    broker = NatsBroker(server)
    await (await broker.client("coordinator")).ensure_streams(blobs=True)
    yield broker
    await broker.close()


@pytest_asyncio.fixture(params=["nats", "memory-0", "memory-1"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broker]:
    kind, _, seed = request.param.partition("-")
    if kind == "memory":
        yield MemoryBroker(int(seed))
        return
    server = NatsServer(tmp_path, SUBJECTS)
    await server.start()
    real = NatsBroker(server)
    await (await real.client("coordinator")).ensure_streams()
    yield real
    await real.close()


@pytest_asyncio.fixture
async def tasks() -> AsyncIterator[Tasks]:
    started = Tasks()
    yield started
    await started.cancel()
