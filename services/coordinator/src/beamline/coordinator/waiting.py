"""Waiting on the coordinator's own state: conditions that every event wakes, deadlines that say what is awaited."""

import asyncio
from collections.abc import Callable

from beamline.protocol.errors import DeadlineExceeded
from beamline.runtime.waits import Names, waiting


class Pulse:
    """One event that stands for "something changed".

    `when` waits on one condition; there are no sleeps and no polling. Conditions that depend on the clock (a worker
    that falls silent) are looked at again with every heartbeat of the others, because each of them pulses.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.waiting_for: Callable[[], str] = _nothing
        """What the main loop waits for at this moment, in words."""

    def beat(self) -> None:
        """Wake everyone who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def when[T](
        self, condition: Callable[[], T | None], waiting_for: Callable[[], str], deadline_s: float, on: Names = ()
    ) -> T:
        """The condition's first value that is neither None nor False.

        `waiting_for` says in words what is still missing; it is asked when somebody wants to know. `on` names the
        services or workers that must act, likewise.

        Raises:
            DeadlineExceeded: it did not come within `deadline_s` seconds.
        """
        self.waiting_for = waiting_for
        try:
            with waiting(waiting_for, within_s=deadline_s, on=on):
                async with asyncio.timeout(deadline_s):
                    return await self.until(condition)
        except TimeoutError:
            raise DeadlineExceeded(waiting_for(), deadline_s) from None
        finally:
            self.waiting_for = _nothing

    async def until[T](self, condition: Callable[[], T | None]) -> T:
        """As `when`, for a loop beside the main one: it ends with the run, not with a deadline."""
        while True:
            changed = self._changed
            value = condition()
            if value is not None and value is not False:
                return value
            await changed.wait()


def _nothing() -> str:
    return ""
