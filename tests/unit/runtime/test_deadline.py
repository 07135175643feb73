"""A deadline names what was awaited, and leaves other errors alone."""

import asyncio

import pytest

from beamline.protocol.errors import DeadlineExceeded
from beamline.runtime.deadline import deadline


async def test_it_names_what_was_awaited() -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the PolicyUpdate of step 3") as error:
        async with deadline(0.01, "the PolicyUpdate of step 3"):
            await asyncio.Event().wait()
    assert error.value.deadline_s == 0.01


async def test_the_inner_of_two_is_the_one_named() -> None:
    with pytest.raises(DeadlineExceeded, match="the inner"):
        async with deadline(5, "the outer"), deadline(0.01, "the inner"):
            await asyncio.Event().wait()


async def test_a_timeout_of_the_block_itself_passes() -> None:
    with pytest.raises(TimeoutError, match="a socket") as error:
        async with deadline(5, "the block"):
            raise TimeoutError("a socket")
    assert not isinstance(error.value, DeadlineExceeded)
