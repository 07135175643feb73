"""The bus as every service sees it. `nats_bus.NatsBus` and `memory_bus.MemoryBus` implement it.

Delivery is at least once: a handler may see a message twice and must answer it the same way. The bus publishes what a
handler returns, awaits the broker's ack, and only then acks the input. While a handler runs, the bus sends in-progress
acks on a timer. The one broad `except` of Beamline is here: Retryable asks for redelivery, Rejected publishes what
`on_rejected` makes of it and acks, anything else leaves `work` and ends the process.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

from beamline.protocol.errors import Rejected
from beamline.protocol.messages import Fence, Message, Phase, PolicyUpdate
from beamline.protocol.subjects import Subjects

type Handler = Callable[[Message], Awaitable[Message | None]]
"""Message in, message out; None publishes nothing."""

type Gate = Callable[[], Awaitable[None]]
"""Awaited before each input is taken: a worker that cannot serve leaves its inputs to others.

An open gate returns without waiting on anything; an input that arrives while it is closed is given back at once.
"""

type OnRejected = Callable[[Message, Rejected], Message | None]
"""The failure to publish for an input that will never work."""


QUEUES = ("rollout", "reward", "coordinator", "trainer")
"""Services with a work queue."""


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a work queue."""

    pending: int
    """Nobody holds them yet."""
    unacked: int
    """A worker holds them and has not answered."""


class Bus(Protocol):
    """Publish, work queues, last values, plain subscriptions, requests and the journal of one run."""

    @property
    def subjects(self) -> Subjects: ...

    async def publish(self, message: Message) -> None:
        """Send to the subject that `Subjects.route` names.

        A persistent message is stored by the broker when this returns; it is retried with its dedupe id while the
        broker is away. Raises DeadlineExceeded when the broker stays away.
        """
        ...

    async def work(
        self,
        service: str,
        handle: Handler,
        *,
        concurrency: int = 1,
        gate: Gate | None = None,
        on_rejected: OnRejected | None = None,
    ) -> None:
        """Serve the service's work queue until cancelled; at most `concurrency` handlers at a time.

        Inputs without an answer are given back when this ends, by cancellation or by a handler's error. A handler
        that keeps the event loop busy for longer than the ack wait lets its input be delivered elsewhere too.

        An input that was delivered more often than the bus allows (its handler keeps killing the process) is treated
        as Rejected with kind "redelivered". Each Retryable counts as a delivery.
        """
        ...

    async def follow[M: Message](self, kind: type[M], handle: Callable[[M], Awaitable[None]]) -> None:
        """Hand over the last kept PolicyUpdate, Fence or Phase and then newer ones, in order, until cancelled.

        The newest always arrives; one that was replaced before this follower got to it may be left out.
        """
        ...

    async def last[M: Message](self, kind: type[M]) -> M | None:
        """The last kept PolicyUpdate, Fence or Phase, if any."""
        ...

    async def subscribe(self, subject: str, handle: Callable[[Message], Awaitable[None]]) -> None:
        """Hand over plain messages (heartbeats, metrics, errors, evaluations) until cancelled; wildcards allowed."""
        ...

    async def request(self, request: Message, deadline_s: float = 5.0) -> Message:
        """Ask the coordinator. Raises DeadlineExceeded."""
        ...

    async def serve(self, answer: Callable[[Message], Awaitable[Message]]) -> None:
        """Answer requests until cancelled."""
        ...

    async def append(self, record: bytes) -> None:
        """Add a record to the journal; stored when this returns. Raises DeadlineExceeded."""
        ...

    def replay(self) -> AsyncIterator[bytes]:
        """The journal's records from the first to the last that was stored when called."""
        ...

    async def queue_depths(self, deadline_s: float = 5.0) -> dict[str, QueueDepth]:
        """Of each service's work queue; the coordinator's user may ask. Raises DeadlineExceeded."""
        ...

    async def close(self) -> None:
        """Flush and disconnect."""
        ...


def kept_subject(subjects: Subjects, kind: type[Message]) -> str:
    """The subject whose last value is kept for a message type. Raises TypeError for a type without one."""
    if kind is PolicyUpdate:
        return subjects.policy
    if kind is Phase:
        return subjects.phase
    if kind is Fence:
        return subjects.fence
    raise TypeError(f"no last value is kept of {kind.__name__}")
