"""Waits that end: every one has a deadline and says what it waits for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from beamline.protocol.errors import DeadlineExceeded


@asynccontextmanager
async def deadline(seconds: float, waiting_for: str) -> AsyncIterator[None]:
    """Cancel the block after `seconds`.

    Args:
        seconds: how long the block may take.
        waiting_for: what it waits for, in words, such as "PolicyUpdate for step 3 from the trainer".

    Raises:
        DeadlineExceeded: the block took longer.
    """
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded) or not timeout.expired():
            raise
        raise DeadlineExceeded(waiting_for, seconds) from None
