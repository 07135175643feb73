"""Waits end by a change, or by a deadline that says what was awaited."""

import asyncio

import pytest

from beamline.coordinator.waiting import Pulse
from beamline.protocol.errors import DeadlineExceeded


async def test_a_wait_ends_by_the_change_it_waits_for():
    pulse, box = Pulse(), list[int]()
    wait = asyncio.create_task(pulse.when(lambda: box[0] if box else None, lambda: "a number", 5))
    await asyncio.sleep(0)
    pulse.beat()
    await asyncio.sleep(0)
    assert not wait.done() and pulse.waiting_for() == "a number"
    box.append(4)
    pulse.beat()
    assert await wait == 4 and pulse.waiting_for() == ""


async def test_a_wait_that_runs_out_says_what_is_missing_now():
    missing = ["rollout-0", "rollout-1"]
    wait = asyncio.create_task(Pulse().when(lambda: None, lambda: ", ".join(missing), 0.01))
    missing.pop()
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for rollout-0$"):
        await wait
