"""A broker inside one process, for tests and simulations: what nats-server promises and no more.

By seed it delivers inputs twice, out of order and late; an input whose worker is cancelled comes again. Time passes in
turns of the event loop, never on the clock, so the same seed gives the same run.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

import msgspec

from beamline.protocol.subjects import Subjects

_TURNS_PER_S = 200
"""Turns of the event loop that stand for a second of a nak's delay."""


class QueuedInput(msgspec.Struct, frozen=True, kw_only=True):
    """A message that waits in a work queue."""

    payload: bytes
    headers: Mapping[str, str]
    num_delivered: int = 0


class PlainMessage(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    payload: bytes
    headers: Mapping[str, str]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits for the coordinator."""

    payload: bytes
    answer: asyncio.Future[bytes]


class MemoryHub:
    """Queues, last values, journal and subscriptions of one run.

    Args:
        subjects: the run's names.
        seed: of everything random.
        duplicate: share of deliveries after which the input is delivered once more.
        reorder: share of deliveries that take any waiting input instead of the oldest.
        max_delay_turns: each delivery and each publish takes up to this many turns of the event loop.
        max_deliveries: tries of one input before it is rejected.
    """

    def __init__(
        self,
        subjects: Subjects,
        *,
        seed: int = 0,
        duplicate: float = 0.1,
        reorder: float = 0.3,
        max_delay_turns: int = 8,
        max_deliveries: int = 10,
    ) -> None:
        self.subjects = subjects
        self.max_deliveries = max_deliveries
        self.journal: list[bytes] = []
        self.questions: asyncio.Queue[Question] = asyncio.Queue()
        self._random = random.Random(seed)
        self._duplicate = duplicate
        self._reorder = reorder
        self._max_delay_turns = max_delay_turns
        self._queues: dict[str, list[QueuedInput]] = {}
        self._num_held = Counter[str]()
        self._arrived: dict[str, asyncio.Event] = {}
        self._seen_ids: set[str] = set()
        self._kept: dict[str, PlainMessage] = {}
        self._listeners: list[tuple[str, asyncio.Queue[PlainMessage]]] = []
        self._delayed: set[asyncio.Task[None]] = set()

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str], dedupe_id: str | None = None
    ) -> None:
        """Keep a persistent message; a repeat of a dedupe id is acknowledged and forgotten.

        The pause after the store is where a publisher may be cancelled although its message is there.
        """
        if dedupe_id is None or dedupe_id not in self._seen_ids:
            if dedupe_id is not None:
                self._seen_ids.add(dedupe_id)
            queue = self._queue_of(subject)
            if queue is None:
                self._kept[subject] = PlainMessage(subject=subject, payload=payload, headers=headers)
                self.send(subject, payload, headers)
            else:
                self._enqueue(queue, QueuedInput(payload=payload, headers=headers))
        await self.pause()

    async def take(self, service: str) -> QueuedInput:
        """The next input of a service's queue; perhaps not the oldest, and perhaps not for the last time."""
        while True:
            await self.pause()
            if waiting := self._queues.get(service):
                break
            arrived = self._arrived.setdefault(service, asyncio.Event())
            arrived.clear()
            await arrived.wait()
        index = self._random.randrange(len(waiting)) if self._random.random() < self._reorder else 0
        taken = waiting.pop(index)
        self._num_held[service] += 1
        taken = msgspec.structs.replace(taken, num_delivered=taken.num_delivered + 1)
        if self._random.random() < self._duplicate:
            self._enqueue(service, taken)
        return taken

    def put_back(self, service: str, item: QueuedInput, delay_s: float = 0.0) -> None:
        """Deliver an input that was taken again, after a delay."""
        self.settle(service)
        if delay_s <= 0:
            self._enqueue(service, item)
            return

        async def later() -> None:
            for _ in range(round(delay_s * _TURNS_PER_S)):
                await asyncio.sleep(0)
            self._enqueue(service, item)

        task = asyncio.create_task(later())
        self._delayed.add(task)
        task.add_done_callback(self._delayed.discard)

    def num_waiting(self, service: str) -> int:
        """Inputs in a service's queue."""
        return len(self._queues.get(service, ()))

    def num_held(self, service: str) -> int:
        """Inputs of a service's queue that were taken and not answered."""
        return self._num_held[service]

    def settle(self, service: str) -> None:
        """An input that was taken is held no longer."""
        self._num_held[service] -= 1

    def last(self, subject: str) -> PlainMessage | None:
        return self._kept.get(subject)

    def send(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Hand a plain message to everyone who listens now."""
        for pattern, listener in self._listeners:
            if _matches(pattern, subject):
                listener.put_nowait(PlainMessage(subject=subject, payload=payload, headers=headers))

    def listen(self, pattern: str) -> asyncio.Queue[PlainMessage]:
        """Messages from now on; end with `forget`."""
        listener: asyncio.Queue[PlainMessage] = asyncio.Queue()
        self._listeners.append((pattern, listener))
        return listener

    def forget(self, listener: asyncio.Queue[PlainMessage]) -> None:
        self._listeners = [entry for entry in self._listeners if entry[1] is not listener]

    async def pause(self) -> None:
        """Let others run for a random number of turns."""
        for _ in range(self._random.randint(0, self._max_delay_turns)):
            await asyncio.sleep(0)

    def _enqueue(self, service: str, item: QueuedInput) -> None:
        self._queues.setdefault(service, []).append(item)
        if service in self._arrived:
            self._arrived[service].set()

    def _queue_of(self, subject: str) -> str | None:
        root = f"{self.subjects.root}.work."
        return subject.removeprefix(root).partition(".")[0] if subject.startswith(root) else None


def _matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, a last `>` one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1] if len(tokens) >= len(wanted) else []
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))
