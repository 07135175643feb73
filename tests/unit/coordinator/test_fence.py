"""The fence across policies and coordinators, over the in-memory bus."""

import asyncio
import time

import msgspec
import pytest

from beamline.coordinator import journal as j
from beamline.coordinator.core import Core
from beamline.coordinator.fence import FenceKeeper
from beamline.protocol.config import RunConfig
from beamline.protocol.messages import Canary, Fence, PolicyUpdate
from beamline.protocol.subjects import Subjects
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub
from ring_messages import heartbeat, policy_loaded, policy_prepared
from scripted_services import NO_MANIFEST

CONFIG = msgspec.convert({"weights": {"deadline_s": 5.0, "attempts": 2}}, RunConfig)


@pytest.fixture
def core() -> Core:
    bus = MemoryBus(MemoryHub(Subjects("beamline", "fence"), max_delay_turns=0))
    core = Core(CONFIG, bus, MemoryBlobStore())
    core.state.apply(j.Booted(time=0.0))
    core.roster.record_heartbeat(heartbeat("rollout", "rollout-0"), time.monotonic())
    return core


def update(version: int) -> PolicyUpdate:
    canary = Canary(tokens=[1, 2], logprobs=[-1.0])
    return PolicyUpdate(step=version, policy_version=version, manifest=NO_MANIFEST, canary=canary, stats={})


async def test_the_fence_opens_when_the_policy_is_prepared_and_not_before(core: Core):
    passing = asyncio.create_task(FenceKeeper(core).let_through(3))
    await asyncio.sleep(0)
    assert await core.bus.last(Fence) is None and core.pulse.waiting_for() == "rollout-0 to prepare policy 3"
    core.roster.record_prepared(policy_prepared("rollout-0", 3))
    core.pulse.beat()
    await asyncio.sleep(0)
    assert await core.bus.last(Fence) == Fence(policy_version=3, attempt=1, is_open=True)
    assert core.pulse.waiting_for() == "rollout-0 to load policy 3" and not passing.done()
    core.roster.record_loaded(policy_loaded("rollout-0", 3))
    core.pulse.beat()
    await passing


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_coordinator_that_starts_anew_goes_on_at_the_fence_that_it_finds(core: Core, is_open: bool):
    await core.bus.publish(Fence(policy_version=3, attempt=2, is_open=is_open))
    core.state.apply(j.Booted(time=1.0))
    passing = asyncio.create_task(FenceKeeper(core).let_through(3))
    await asyncio.sleep(0)
    assert await core.bus.last(Fence) == Fence(policy_version=3, attempt=3, is_open=is_open)
    core.roster.record_loaded(policy_loaded("rollout-0", 3, attempt=3))
    core.pulse.beat()
    await passing


async def test_a_coordinator_that_starts_anew_asks_for_what_was_answered_to_the_one_before(core: Core):
    await core.bus.publish(Fence(policy_version=2, attempt=1, is_open=True))
    core.state.apply(j.Booted(time=1.0))
    passing = asyncio.create_task(FenceKeeper(core).let_through(3))
    await asyncio.sleep(0)
    assert await core.bus.last(Fence) == Fence(policy_version=3, attempt=2, is_open=False)
    passing.cancel()


async def test_a_policy_that_the_trainer_has_replaced_is_not_pursued(core: Core):
    core.update = update(3)
    passing = asyncio.create_task(FenceKeeper(core).let_through(3))
    await asyncio.sleep(0)
    assert not passing.done()
    core.roster.record_prepared(policy_prepared("rollout-0", 3, error="policy 4 was heard of instead"))
    core.update = update(4)
    core.pulse.beat()
    await passing
    assert await core.bus.last(Fence) is None and core.roster.left_out() == {}
