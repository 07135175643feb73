"""What a process waits for is entered while it lasts, and the oldest waits are told."""

import asyncio

import pytest

from beamline.protocol.errors import DeadlineExceeded
from beamline.runtime.deadline import deadline
from beamline.runtime.service import WorkerStatus
from beamline.runtime.waits import MAX_WORDS, WAITS, Waits


def whats(waits: Waits) -> list[str]:
    return [wait.what for wait in waits.told()]


def test_a_wait_is_told_while_it_lasts() -> None:
    waits = Waits()
    with waits.waiting("a group", within_s=30, on=["rollout"]):
        (wait,) = waits.told()
        assert (wait.what, wait.on, wait.until - wait.since) == ("a group", ["rollout"], pytest.approx(30))
    assert waits.told() == []


def test_a_wait_that_fails_is_over() -> None:
    waits = Waits()
    with pytest.raises(KeyError), waits.waiting("a key"):
        raise KeyError
    assert waits.told() == []


def test_words_and_names_are_those_of_the_moment() -> None:
    waits, missing = Waits(), ["rollout-0", "rollout-1"]
    with waits.waiting(lambda: " and ".join(missing), on=lambda: missing):
        missing.remove("rollout-0")
        (wait,) = waits.told()
    assert (wait.what, wait.on, wait.until) == ("rollout-1", ["rollout-1"], 0.0)


def test_the_oldest_are_told_and_the_newest_left_out() -> None:
    waits = Waits()
    with waits.waiting("first"), waits.waiting("second"), waits.waiting("third" * MAX_WORDS):
        assert [wait.what for wait in waits.told(2)] == ["first", "second"]
        assert len(waits.told()[2].what) == MAX_WORDS


async def test_deadlines_enter_themselves() -> None:
    with pytest.raises(DeadlineExceeded):
        async with deadline(0.01, "the policy of step 3", on=["trainer"]):
            (wait,) = [wait for wait in WAITS.told() if wait.what == "the policy of step 3"]
            assert wait.on == ["trainer"] and wait.until > wait.since
            await asyncio.Event().wait()
    assert "the policy of step 3" not in whats(WAITS)


async def test_a_heartbeat_begins_with_what_keeps_the_worker() -> None:
    status = WorkerStatus()
    status.wait_for("the fence of policy 4", ["coordinator"])
    (first,) = status.waits
    status.wait_for("the fence of policy 4", ["coordinator"])
    with WAITS.waiting("a blob"):
        assert [wait.what for wait in status.waits] == ["the fence of policy 4", "a blob"]
        assert status.waits[0].since == first.since, "saying it again does not begin it anew"
    status.waiting_for = ""
    assert status.waits == [] and status.waiting_for == ""
