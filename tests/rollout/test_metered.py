"""What a rollout worker counts of its engine's work."""

import asyncio
from collections.abc import Callable

import pytest

from beamline.rollout.fake_engine import FakeEngine
from beamline.rollout.metered import MeteredSampler
from rollout_bench import Turns
from rollout_messages import prompt_group


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_a_step_s_work_is_counted_once(clock: Clock, is_documented: Callable[[str], bool]) -> None:
    engine = FakeEngine()
    metered = MeteredSampler("rollout-1", engine, engine.meter, clock)
    completions = [
        *await metered.generate(prompt_group([5, 6, 7], seeds=[1, 2], max_tokens=8)),
        *await metered.generate(prompt_group([5, 6], seeds=[3], max_tokens=8)),
    ]
    told = metered.take()
    assert all(map(is_documented, told)) and all(map(is_documented, metered.gauges()))
    assert told["engine/groups/rollout-1"] == 2
    assert told["engine/samples/rollout-1"] == 3
    assert told["engine/aborted/rollout-1"] == 0
    assert told["engine/prompt_tokens/rollout-1"] == 3 + 3 + 2
    assert told["engine/generated_tokens/rollout-1"] == sum(len(one.tokens) for one in completions)
    assert not {"engine/prefix_hits/rollout-1", "engine/tokens_per_s/rollout-1"} & told.keys(), "shares of nothing"
    assert set(metered.take().values()) == {0}


async def test_time_with_a_group_under_way_is_busy_and_live_numbers_tell_it(clock: Clock) -> None:
    turns = Turns()
    engine = FakeEngine(wait=turns.wait)
    metered = MeteredSampler("r", engine, engine.meter, clock)
    engine.meter.num_waiting = 3
    assert metered.gauges() == {"engine/running/r": 0, "engine/waiting/r": 0, "engine/kv_cache/r": 0}, "no work"
    clock.now += 5  # idle
    stop = asyncio.Event()
    sampling = asyncio.create_task(metered.generate(prompt_group([5], seeds=[1, 2], max_tokens=8), stop))
    await turns.next()
    engine.meter.fill(0.5)
    engine.meter.fill(0.25)
    assert metered.gauges() == {"engine/running/r": 2, "engine/waiting/r": 3, "engine/kv_cache/r": 0.25}
    clock.now += 2
    first = metered.take()
    assert (first["engine/busy_s/r"], first["engine/groups/r"]) == (2, 0), "a group under way is told where it ends"
    assert first["engine/kv_cache_peak/r"] == 0.5
    clock.now += 3
    stop.set()
    await sampling
    clock.now += 7  # idle
    second = metered.take()
    assert (second["engine/busy_s/r"], second["engine/groups/r"], second["engine/aborted/r"]) == (3, 1, 2)
    assert second["engine/tokens_per_s/r"] == second["engine/generated_tokens/r"] / 3
    assert second["engine/kv_cache_peak/r"] == 0.25


async def test_shares_are_of_what_came_since(clock: Clock) -> None:
    engine = FakeEngine()
    metered = MeteredSampler("r", engine, engine.meter, clock)
    for looked_up, hits in ((100, 25), (40, 40)):
        engine.meter.num_looked_up += looked_up
        engine.meter.num_hits += hits
        assert metered.take()["engine/prefix_hits/r"] == hits / looked_up
