"""A broker of the user's own outlives its runs: nothing of an earlier one is delivered to the next of that name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator.launch.broker import UserBroker
from beamline.coordinator.launch.streams import make_streams
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import Message, Phase, PhaseName, StatusReply
from beamline.protocol.subjects import Subjects
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.run_files import run_dir


class OpenServer(NatsServer):
    """A broker without users, as somebody may have one on the local machine."""

    def _config(self) -> dict[str, object]:
        return {key: value for key, value in super()._config().items() if key != "authorization"}


@pytest.fixture
def subjects(config: RunConfig) -> Subjects:
    return Subjects(config.bus.prefix, config.run.name)


@pytest.fixture
async def server(tmp_path: Path, subjects: Subjects) -> AsyncIterator[NatsServer]:
    server = OpenServer(tmp_path / "broker", subjects)
    await server.start()
    yield server
    await server.stop()


async def start(config: RunConfig, subjects: Subjects, url: str) -> NatsBus:
    """As a launcher does with the user's broker; returns a connection to it."""
    there = replace(config, bus=replace(config.bus, url=url))
    credentials = await UserBroker(url, run_dir(config)).start()
    await make_streams(there, subjects, run_dir(config))
    return await NatsBus.connect(credentials, subjects)


async def test_nothing_of_an_earlier_run_is_left(config: RunConfig, subjects: Subjects, server: NatsServer) -> None:
    earlier = await start(config, subjects, server.url)
    await earlier.append(b"a record")
    await earlier.publish(Phase(sequence=9, step=3, phase=PhaseName.TRAIN, policy_version=2, granted=True))
    assert [record async for record in earlier.replay()] == [b"a record"]
    assert await earlier.last(Phase) is not None
    await earlier.close()
    later = await start(config, subjects, server.url)
    assert [record async for record in later.replay()] == []
    assert await later.last(Phase) is None
    await later.append(b"its own")
    assert [record async for record in later.replay()] == [b"its own"]
    await later.close()


async def test_a_live_run_of_that_name_is_spared(config: RunConfig, subjects: Subjects, server: NatsServer) -> None:
    live = await start(config, subjects, server.url)

    async def answer(_: Message) -> StatusReply:
        return StatusReply(
            run=config.run.name, step=3, num_steps=9, phase=PhaseName.TRAIN, policy_version=2, paused=False,
            waiting_for="", ledger={}, workers=[], metrics={},
        )  # fmt: skip

    await live.append(b"a record")
    serving = asyncio.create_task(live.serve(answer))
    with pytest.raises(ConfigError, match=r"a run called 'trial' is live there under bus.prefix=beamline: use another"):
        await start(config, subjects, server.url)
    assert [record async for record in live.replay()] == [b"a record"]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await live.close()


async def test_a_broker_that_does_not_let_it_be_emptied_is_refused_by_name(
    config: RunConfig, subjects: Subjects, tmp_path: Path
) -> None:
    """The users of a run's own broker may not delete streams."""
    server = NatsServer(tmp_path / "strict", subjects)
    await server.start()
    login = server.credentials("coordinator")
    url = server.url.replace("//", f"//{login.user}:{login.password}@")
    with pytest.raises(ConfigError, match=r"what an earlier run called 'trial' may have left there cannot be removed"):
        await start(config, subjects, url)
    await server.stop()
