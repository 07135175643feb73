"""Serving a work queue: take, call the handler, publish its result, acknowledge. Both buses run this code.

The one broad `except` of Beamline is the task group of `serve`: what a handler raises beside Retryable and Rejected
leaves `serve`, and the process ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol, cast

from beamline.protocol.codec import decode
from beamline.protocol.errors import BeamlineError, ProtocolError, Rejected, Retryable
from beamline.protocol.messages import Message
from beamline.runtime.bus import Gate, Handler, OnRejected
from beamline.runtime.trace_answers import tell_answer
from beamline.runtime.trace_context import handling_span
from beamline.runtime.waits import waiting

log = logging.getLogger(__name__)

_INPUTS = {
    "coordinator": ("an answer from the ring", ("rollout", "reward", "trainer")),
    "rollout": ("a prompt group", ("coordinator",)),
    "reward": ("a trajectory group to grade", ("rollout",)),
    "trainer": ("a train batch", ("coordinator",)),
}
"""By service, what its queue brings, and who puts it there."""

_GATE_GRACE_S = 0.5
"""How long an input that came before the gate was open is kept for it, so long as it may be held at all."""


class Delivery(Protocol):
    """One input, taken but not yet acknowledged."""

    @property
    def payload(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def num_delivered(self) -> int:
        """1 at the first delivery."""
        ...

    async def ack(self) -> None:
        """Done: never deliver it again."""
        ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Deliver it again, to anyone, after a delay."""
        ...

    async def term(self) -> None:
        """Unreadable: never deliver it again."""
        ...

    async def in_progress(self) -> None:
        """Still at it: start the ack wait anew."""
        ...


class Source(Protocol):
    """Where a queue's inputs come from."""

    async def take(self, num_free: int) -> Delivery:
        """The next input; up to `num_free` may be fetched from the broker at once."""
        ...

    async def give_back(self) -> None:
        """Return everything that was fetched but not taken, and fetch nothing more until the next `take`."""
        ...


class WorkQueue:
    """One worker's place at a service's queue.

    Args:
        service: whose queue it is.
        source: yields the inputs.
        handle: message in, message out.
        publish: sends a result; returns when it is stored.
        on_rejected: makes the failure to publish for an input that will never work.
        concurrency: handlers at a time.
        gate: awaited before an input is taken; an open gate returns without waiting on anything.
        max_deliveries: an input delivered more often is rejected as "redelivered".
        in_progress_every_s: period of the acks that hold an input while its handler runs.
    """

    def __init__(
        self,
        service: str,
        source: Source,
        handle: Handler,
        publish: Callable[[Message], Awaitable[None]],
        *,
        on_rejected: OnRejected | None,
        concurrency: int,
        gate: Gate | None,
        max_deliveries: int,
        in_progress_every_s: float,
    ) -> None:
        self._service = service
        self._source = source
        self._handle = handle
        self._publish = publish
        self._on_rejected = on_rejected
        self._concurrency = concurrency
        self._gate = gate
        self._max_deliveries = max_deliveries
        self._in_progress_every_s = in_progress_every_s
        self._unsettled: dict[Delivery, None] = {}
        """Taken, and neither acked nor given back, in order: what a cancelled or failed handler leaves behind."""
        self._num_free = concurrency
        self._slot_freed = asyncio.Event()

    async def serve(self) -> None:
        """Serve until cancelled, or until a handler fails; inputs without an answer are then given back.

        Consumes the queue's messages, produces their results, waits for a free slot, the gate and the next input.
        """
        try:
            async with asyncio.TaskGroup() as handlers:
                while True:
                    delivery = await self._next()
                    self._num_free -= 1
                    handlers.create_task(self._answer(delivery)).add_done_callback(self._free_slot)
        except BaseExceptionGroup as failures:
            raise _first_leaf(failures) from None
        finally:
            with suppress(BeamlineError):
                for delivery in self._unsettled:
                    await delivery.nak()
                await self._source.give_back()

    async def _next(self) -> Delivery:
        while True:
            while self._num_free == 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
            if self._gate is not None:
                await self._gate()
            what, on = _INPUTS.get(self._service, ("an input", ()))
            with waiting(what, on=on):
                delivery = await self._source.take(self._num_free)
            self._unsettled[delivery] = None
            # Inputs and the news that opens the gate come by different ways: an input may be the first. Giving it back
            # withdraws a pull, and what the broker has on its way then is lost until its ack wait ends.
            if self._gate is None or await _opens(self._gate, min(_GATE_GRACE_S, self._in_progress_every_s)):
                return delivery
            self._unsettled.pop(delivery, None)
            await delivery.nak()
            await self._source.give_back()

    def _free_slot(self, _: asyncio.Task[None]) -> None:
        self._num_free += 1
        self._slot_freed.set()

    async def _answer(self, delivery: Delivery) -> None:
        """Take one input to its ack, nak or term."""
        try:
            message = decode(delivery.payload)
        except ProtocolError as error:
            log.error("dropped a message from the queue of %s: %s", self._service, error)
            self._unsettled.pop(delivery, None)
            await delivery.term()
            return
        holding = asyncio.create_task(self._hold(delivery))
        try:
            with handling_span(self._service, message, delivery.headers, delivery.num_delivered):
                result = await self._result(message, delivery.num_delivered)
                if result is not None:
                    tell_answer(result)
                    await self._publish(result)
            self._unsettled.pop(delivery, None)
            await delivery.ack()
        except Retryable as error:
            log.warning("%s will see %s again: %s", self._service, type(message).__name__, error)
            self._unsettled.pop(delivery, None)
            await delivery.nak(error.delay_s)
        finally:
            holding.cancel()

    async def _result(self, message: Message, num_delivered: int) -> Message | None:
        kind = type(message).__name__
        try:
            if num_delivered > self._max_deliveries:
                raise Rejected("redelivered", f"{kind} was delivered {num_delivered} times without an answer")
            return await self._handle(message)
        except Rejected as rejected:
            log.warning("%s rejected %s (%s): %s", self._service, kind, rejected.kind, rejected)
            return self._on_rejected(message, rejected) if self._on_rejected is not None else None

    async def _hold(self, delivery: Delivery) -> None:
        with suppress(BeamlineError):  # a broker that is gone for good fails the publish of the result
            while True:
                await asyncio.sleep(self._in_progress_every_s)
                await delivery.in_progress()


async def _opens(gate: Gate, within_s: float) -> bool:
    """Whether the gate is open, or opens in time."""
    try:
        async with asyncio.timeout(within_s):
            await gate()
    except TimeoutError:
        return False
    return True


def _first_leaf(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = cast(BaseExceptionGroup[BaseException], failure).exceptions[0]
    return failure
