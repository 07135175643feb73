"""The in-memory broker is as unkind as the real one, and the same seed is the same run."""

import asyncio
from collections import Counter

import pytest

from beamline.protocol import messages as m
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub, _matches
from brokers import SUBJECTS, Collector
from bus_messages import group_failed, prompt_group


async def order_of_deliveries(seed: int, num_groups: int = 40) -> list[str]:
    hub = MemoryHub(SUBJECTS, seed=seed)
    coordinator, rollout = MemoryBus(hub), MemoryBus(hub)
    collected = Collector()
    working = asyncio.create_task(rollout.work("rollout", collected, concurrency=4))
    for index in range(num_groups):
        await coordinator.publish(prompt_group(index))
    await collected.until(num_groups)
    for _ in range(100):
        await asyncio.sleep(0)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return collected.ids


async def test_the_same_seed_is_the_same_run() -> None:
    runs = [await order_of_deliveries(seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


async def test_deliveries_are_repeated_and_reordered() -> None:
    ids = await order_of_deliveries(0)
    firsts = list(dict.fromkeys(ids))
    assert firsts != sorted(firsts, key=lambda group: int(group.removeprefix("group-")))
    assert max(Counter(ids).values()) > 1


async def test_a_hub_can_be_kind() -> None:
    hub = MemoryHub(SUBJECTS, duplicate=0, reorder=0, max_delay_turns=0)
    bus, collected = MemoryBus(hub), Collector()
    for index in range(10):
        await bus.publish(prompt_group(index))
    working = asyncio.create_task(bus.work("rollout", collected))
    await collected.until(10)
    working.cancel()
    assert collected.ids == [f"group-{index}" for index in range(10)]


@pytest.mark.parametrize("seed", range(10))
async def test_a_worker_cancelled_at_any_moment_loses_nothing(seed: int) -> None:
    """Each input's result arrives though workers die all the time, also between the result's store and the ack."""
    hub = MemoryHub(SUBJECTS, seed=seed)
    coordinator, rollout = MemoryBus(hub), MemoryBus(hub)
    collected = Collector()

    async def answer(group: m.Message) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        await hub.pause()
        return group_failed(group)

    collecting = asyncio.create_task(coordinator.work("coordinator", collected))
    for index in range(20):
        await coordinator.publish(prompt_group(index))
    for lifetime in range(30):
        working = asyncio.create_task(rollout.work("rollout", answer, concurrency=3))
        for _ in range(lifetime):
            await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    working = asyncio.create_task(rollout.work("rollout", answer, concurrency=3))
    await collected.until(20)
    for task in (collecting, working):
        task.cancel()
    await asyncio.gather(collecting, working, return_exceptions=True)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.b", "a.c", False),
        ("*.b", "a.b", True),
        (">", "a", True),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert _matches(pattern, subject) is expected


async def test_an_input_of_a_failed_handler_comes_again() -> None:
    """A process that ends by an error, and its successor."""
    hub = MemoryHub(SUBJECTS, duplicate=0)
    bus, collected = MemoryBus(hub), Collector()

    async def fail(_: m.Message) -> None:
        raise OSError("out of memory")

    await bus.publish(prompt_group(0))
    with pytest.raises(OSError, match="out of memory"):
        await bus.work("rollout", fail)
    working = asyncio.create_task(bus.work("rollout", collected))
    await collected.until(1)
    working.cancel()
