"""What this process waits for at this moment: every wait is entered here, and heartbeats tell the oldest.

`deadline` enters its own waits. A wait that ends with the run, or that another library times, uses `waiting`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from beamline.protocol.messages import Wait

MAX_TOLD = 16
"""Waits in a heartbeat; the newest are left out."""

MAX_WORDS = 500
"""Characters of one wait's text."""

BROKER = ("nats-server",)
"""Whom a wait is on that the bus has to answer."""

type Words = str | Callable[[], str]
"""What is awaited; a function says it as it is when asked."""

type Names = Sequence[str] | Callable[[], Sequence[str]]
"""Services or workers, likewise."""


class Waits:
    """The waits of a process, oldest first. Entered and asked from any thread."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[float, float, Words, Names]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, what: Words, *, within_s: float = 0.0, on: Names = ()) -> Iterator[None]:
        """Enter a wait for as long as the block runs.

        Args:
            what: in words, such as "PolicyUpdate for step 3 from the trainer".
            within_s: when it gives up; 0 for a wait that ends with the run.
            on: who must act for it to end, where that is known.
        """
        since, key = time.time(), object()
        with self._lock:
            self._open[key] = (since, since + within_s if within_s > 0 else 0.0, what, on)
        try:
            yield
        finally:
            with self._lock:
                del self._open[key]

    def told(self, limit: int = MAX_TOLD) -> list[Wait]:
        """The oldest waits."""
        with self._lock:
            oldest = list(islice(self._open.values(), limit))
        return [
            Wait(
                what=(what if isinstance(what, str) else what())[:MAX_WORDS],
                since=since,
                until=until,
                on=list(on() if callable(on) else on),
            )
            for since, until, what, on in oldest
        ]


WAITS = Waits()
"""Of this process."""

waiting = WAITS.waiting
