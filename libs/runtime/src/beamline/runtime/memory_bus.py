"""`Bus` without a broker: clients of one `MemoryHub` in one process, with the delivery rules of the real one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from beamline.protocol.codec import decode, decode_as, encode
from beamline.protocol.messages import Message
from beamline.protocol.subjects import Subjects
from beamline.runtime.bus import QUEUES, Gate, Handler, OnRejected, QueueDepth, kept_subject
from beamline.runtime.deadline import deadline
from beamline.runtime.memory_hub import MemoryHub, Question, QueuedInput
from beamline.runtime.trace_context import continuing, trace_headers
from beamline.runtime.work_queue import WorkQueue

_IN_PROGRESS_EVERY_S = 3600.0
"""Nothing is taken from a handler that is slow; duplicates play that part."""


class MemoryBus:
    """One client. Messages are encoded and decoded on their way, as on the wire."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub

    @property
    def subjects(self) -> Subjects:
        return self._hub.subjects

    async def publish(self, message: Message) -> None:
        route, payload = self.subjects.route(message), encode(message)
        if route.persistent:
            await self._hub.store(route.subject, payload, trace_headers(), route.dedupe_id)
        else:
            self._hub.send(route.subject, payload, trace_headers())

    async def work(
        self,
        service: str,
        handle: Handler,
        *,
        concurrency: int = 1,
        gate: Gate | None = None,
        on_rejected: OnRejected | None = None,
    ) -> None:
        queue = WorkQueue(
            service,
            MemorySource(self._hub, service),
            handle,
            self.publish,
            on_rejected=on_rejected,
            concurrency=concurrency,
            gate=gate,
            max_deliveries=self._hub.max_deliveries,
            in_progress_every_s=_IN_PROGRESS_EVERY_S,
        )
        await queue.serve()

    async def follow[M: Message](self, kind: type[M], handle: Callable[[M], Awaitable[None]]) -> None:
        subject = kept_subject(self.subjects, kind)
        newer = self._hub.listen(subject)
        try:
            if (kept := self._hub.last(subject)) is not None:
                with continuing(kept.headers):
                    await handle(decode_as(kind, kept.payload))
            while True:
                message = await newer.get()
                await self._hub.pause()
                while not newer.empty():
                    message = newer.get_nowait()
                with continuing(message.headers):
                    await handle(decode_as(kind, message.payload))
        finally:
            self._hub.forget(newer)

    async def last[M: Message](self, kind: type[M]) -> M | None:
        kept = self._hub.last(kept_subject(self.subjects, kind))
        return None if kept is None else decode_as(kind, kept.payload)

    async def subscribe(self, subject: str, handle: Callable[[Message], Awaitable[None]]) -> None:
        messages = self._hub.listen(subject)
        try:
            while True:
                await handle(decode((await messages.get()).payload))
        finally:
            self._hub.forget(messages)

    async def request(self, request: Message, deadline_s: float = 5.0) -> Message:
        question = Question(payload=encode(request), answer=asyncio.get_running_loop().create_future())
        async with deadline(deadline_s, f"the coordinator to answer {type(request).__name__}"):
            self._hub.questions.put_nowait(question)
            return decode(await question.answer)

    async def serve(self, answer: Callable[[Message], Awaitable[Message]]) -> None:
        while True:
            question = await self._hub.questions.get()
            reply = encode(await answer(decode(question.payload)))
            if not question.answer.done():
                question.answer.set_result(reply)

    async def append(self, record: bytes) -> None:
        self._hub.journal.append(bytes(record))
        await self._hub.pause()

    async def replay(self) -> AsyncIterator[bytes]:
        for record in tuple(self._hub.journal):
            yield record

    async def queue_depths(self, deadline_s: float = 5.0) -> dict[str, QueueDepth]:
        hub = self._hub
        return {
            service: QueueDepth(pending=hub.num_waiting(service), unacked=hub.num_held(service)) for service in QUEUES
        }

    async def close(self) -> None:
        """Nothing to flush."""


class MemorySource:
    """A `Source` over one of the hub's queues."""

    def __init__(self, hub: MemoryHub, service: str) -> None:
        self._hub = hub
        self._service = service

    async def take(self, num_free: int) -> "MemoryDelivery":
        return MemoryDelivery(self._hub, self._service, await self._hub.take(self._service))

    async def give_back(self) -> None:
        """Inputs are taken one at a time, so there is none to return."""


class MemoryDelivery:
    """A `Delivery`."""

    def __init__(self, hub: MemoryHub, service: str, item: QueuedInput) -> None:
        self._hub = hub
        self._service = service
        self._item = item

    @property
    def payload(self) -> bytes:
        return self._item.payload

    @property
    def headers(self) -> Mapping[str, str]:
        return self._item.headers

    @property
    def num_delivered(self) -> int:
        return self._item.num_delivered

    async def ack(self) -> None:
        self._hub.settle(self._service)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._hub.put_back(self._service, self._item, delay_s)

    async def term(self) -> None:
        self._hub.settle(self._service)

    async def in_progress(self) -> None:
        """It is held for as long as its handler runs."""
