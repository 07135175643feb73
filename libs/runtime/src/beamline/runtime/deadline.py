"""Waits that end: every one has a deadline, says what it waits for, and is told by the heartbeat while it lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from beamline.protocol.errors import DeadlineExceeded
from beamline.runtime.waits import Names, waiting


@asynccontextmanager
async def deadline(seconds: float, waiting_for: str, on: Names = ()) -> AsyncIterator[None]:
    """Cancel the block after `seconds`.

    Args:
        seconds: how long the block may take.
        waiting_for: what it waits for, in words, such as "PolicyUpdate for step 3 from the trainer".
        on: services or workers that must act for it to end, where that is known.

    Raises:
        DeadlineExceeded: the block took longer.
    """
    timeout = asyncio.timeout(seconds)
    try:
        with waiting(waiting_for, within_s=seconds, on=on):
            async with timeout:
                yield
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded) or not timeout.expired():
            raise
        raise DeadlineExceeded(waiting_for, seconds) from None
