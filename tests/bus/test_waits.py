"""What a process waits for of its broker is told while it lasts."""

import asyncio
import os
import signal

from beamline.runtime.waits import BROKER, WAITS
from brokers import NatsBroker, Tasks


async def test_a_request_to_a_broker_that_is_stopped_is_a_wait_on_it(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    os.kill(nats.server.pid, signal.SIGSTOP)
    try:
        appending = tasks.start(coordinator.append(b"a record"))
        await asyncio.sleep(0)
        (wait,) = [wait for wait in WAITS.told() if tuple(wait.on) == BROKER]
        assert "journal" in wait.what and wait.until > wait.since
    finally:
        os.kill(nats.server.pid, signal.SIGCONT)
    await appending
    assert [wait for wait in WAITS.told() if tuple(wait.on) == BROKER] == []
