"""`Bus` over nats-server: JetStream for what must not be lost, plain subjects for the rest.

Streams (`ensure_streams`): work (a queue, one durable consumer a service), last (one message a subject), journal, and
blob where blobs travel over the bus.
"""

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from beamline.protocol.codec import decode, decode_as, encode
from beamline.protocol.errors import ProtocolError
from beamline.protocol.messages import Message
from beamline.protocol.subjects import Subjects
from beamline.runtime.bus import QUEUES, Gate, Handler, OnRejected, QueueDepth, kept_subject
from beamline.runtime.credentials import Credentials
from beamline.runtime.nats_connection import NatsConnection
from beamline.runtime.nats_pull import NatsSource, read
from beamline.runtime.trace_context import continuing, trace_headers
from beamline.runtime.work_queue import WorkQueue

log = logging.getLogger(__name__)

DUPLICATE_WINDOW_S = 20 * 60.0
"""A repeat within it is stored once."""

_MAX_ACK_PENDING = 65536
_MAX_WAITING = 4096


class NatsBus:
    """Use `connect`.

    Args:
        connection: an open connection.
        subjects: the run's names.
        ack_wait_s: an input is delivered again after this long without a sign of its handler.
        publish_deadline_s: how long a persistent publish waits for the broker.
        max_deliveries: tries of one input.
    """

    def __init__(
        self,
        connection: NatsConnection,
        subjects: Subjects,
        *,
        ack_wait_s: float,
        publish_deadline_s: float,
        max_deliveries: int,
    ) -> None:
        self.connection = connection
        self._subjects = subjects
        self._ack_wait_s = ack_wait_s
        self._publish_deadline_s = publish_deadline_s
        self._max_deliveries = max_deliveries

    @classmethod
    async def connect(
        cls,
        credentials: Credentials,
        subjects: Subjects,
        *,
        name: str = "",
        ack_wait_s: float = 15.0,
        publish_deadline_s: float = 60.0,
        max_deliveries: int = 10,
        connect_deadline_s: float = 5.0,
    ) -> "NatsBus":
        """Connect as a user. Raises BusUnavailable when nobody answers at the address or the login is refused."""
        connection = await NatsConnection.open(credentials, name or credentials.user, connect_deadline_s)
        return cls(
            connection,
            subjects,
            ack_wait_s=ack_wait_s,
            publish_deadline_s=publish_deadline_s,
            max_deliveries=max_deliveries,
        )

    @property
    def subjects(self) -> Subjects:
        return self._subjects

    async def ensure_streams(self, *, blobs: bool = False) -> None:
        """Create what is missing of the run's streams and work queues; the coordinator's user may."""
        for config in self._streams(blobs=blobs):
            await self._ensure_stream(config)
        stream = self._subjects.stream("work")
        for service in QUEUES:
            queue = api.ConsumerConfig(
                name=service,
                durable_name=service,
                filter_subject=self._subjects.queue(service),
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=self._ack_wait_s,
                max_ack_pending=_MAX_ACK_PENDING,
                max_waiting=_MAX_WAITING,
            )
            call = f"$JS.API.CONSUMER.CREATE.{stream}.{service}.{queue.filter_subject}"

            async def create(queue: api.ConsumerConfig = queue) -> object:
                return await self.connection.jetstream.add_consumer(stream, queue)

            await self.connection.ask(f"work queue {service}", call, create, self._publish_deadline_s)

    async def remove_streams(self) -> None:
        """Remove the run's streams with all that is in them, those that are there."""
        for name in self.stream_names:

            async def remove(name: str = name) -> object:
                with suppress(nats.js.errors.NotFoundError):
                    await self.connection.jetstream.delete_stream(name)

            call = f"$JS.API.STREAM.DELETE.{name}"
            await self.connection.ask(f"stream {name} to be removed", call, remove, self._publish_deadline_s)

    @property
    def stream_names(self) -> list[str]:
        """Of all that a run may have."""
        return [str(config.name) for config in self._streams(blobs=True)]

    async def publish(self, message: Message) -> None:
        route, payload, headers = self._subjects.route(message), encode(message), trace_headers()
        if not route.persistent:
            await self.connection.send(route.subject, payload, headers or None)
            return
        if route.dedupe_id is not None:
            headers[api.Header.MSG_ID] = route.dedupe_id
        await self._store(f"{type(message).__name__} to be stored", route.subject, payload, headers)

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
            NatsSource(self.connection, self._subjects.stream("work"), service),
            handle,
            self.publish,
            on_rejected=on_rejected,
            concurrency=concurrency,
            gate=gate,
            max_deliveries=self._max_deliveries,
            in_progress_every_s=self._ack_wait_s / 3,
        )
        await queue.serve()

    async def follow[M: Message](self, kind: type[M], handle: Callable[[M], Awaitable[None]]) -> None:
        stream, subject = self._subjects.stream("last"), kept_subject(self.subjects, kind)
        async for _, msg in read(self.connection, stream, subject, api.DeliverPolicy.LAST_PER_SUBJECT):
            try:
                message = decode_as(kind, msg.data)
            except ProtocolError as error:
                log.error("dropped a message on %s: %s", msg.subject, error)
                continue
            with continuing(msg.headers or {}):
                await handle(message)

    async def last[M: Message](self, kind: type[M]) -> M | None:
        stream, subject = self._subjects.stream("last"), kept_subject(self.subjects, kind)

        async def get() -> bytes | None:
            try:
                return (await self.connection.jetstream.get_last_msg(stream, subject)).data or b""
            except nats.js.errors.NotFoundError as error:
                if error.err_code == _NO_MESSAGE:
                    return None
                raise

        call = f"$JS.API.STREAM.MSG.GET.{stream}"
        payload = await self.connection.ask(f"the last {kind.__name__}", call, get, self._publish_deadline_s)
        return None if payload is None else decode_as(kind, payload)

    async def subscribe(self, subject: str, handle: Callable[[Message], Awaitable[None]]) -> None:
        async for message, _ in self._listen(subject):
            await handle(message)

    async def request(self, request: Message, deadline_s: float = 5.0) -> Message:
        payload, subject = encode(request), self._subjects.control

        async def attempt() -> Msg:
            return await self.connection.client.request(subject, payload, timeout=deadline_s)

        what = f"the coordinator to answer {type(request).__name__}"
        return decode((await self.connection.ask(what, subject, attempt, deadline_s)).data)

    async def serve(self, answer: Callable[[Message], Awaitable[Message]]) -> None:
        async for request, msg in self._listen(self._subjects.control):
            await self.connection.send(msg.reply, encode(await answer(request)))

    async def append(self, record: bytes) -> None:
        headers = {api.Header.MSG_ID.value: uuid.uuid4().hex}
        await self._store("a journal record to be stored", self._subjects.journal, record, headers)

    async def replay(self) -> AsyncIterator[bytes]:
        stream, subject = self._subjects.stream("journal"), self._subjects.journal

        async def count() -> int:
            return (await self.connection.jetstream.stream_info(stream)).state.last_seq

        call = f"$JS.API.STREAM.INFO.{stream}"
        last = await self.connection.ask("the journal's length", call, count, self._publish_deadline_s)
        if last == 0:
            return
        records = read(self.connection, stream, subject, api.DeliverPolicy.ALL)
        async for sequence, msg in records:
            yield msg.data
            if sequence >= last:
                break
        await records.aclose()

    async def queue_depths(self, deadline_s: float = 5.0) -> dict[str, QueueDepth]:
        return {service: await self._depth(service, deadline_s) for service in QUEUES}

    async def close(self) -> None:
        await self.connection.close()

    def _streams(self, *, blobs: bool) -> list[api.StreamConfig]:
        names = self._subjects
        work = api.StreamConfig(
            name=names.stream("work"), subjects=[names.work], retention=api.RetentionPolicy.WORK_QUEUE
        )
        kept = [names.policy, names.fence, names.phase]
        last = api.StreamConfig(name=names.stream("last"), subjects=kept, max_msgs_per_subject=1)
        journal = api.StreamConfig(name=names.stream("journal"), subjects=[names.journal])
        blob = api.StreamConfig(name=names.stream("blob"), subjects=[names.blob("*")])
        return [work, last, journal, *([blob] if blobs else [])]

    async def _depth(self, service: str, deadline_s: float) -> QueueDepth:
        stream = self._subjects.stream("work")

        async def get() -> api.ConsumerInfo:
            return await self.connection.jetstream.consumer_info(stream, service)

        call = f"$JS.API.CONSUMER.INFO.{stream}.{service}"
        info = await self.connection.ask(f"the depth of work queue {service}", call, get, deadline_s)
        return QueueDepth(pending=info.num_pending or 0, unacked=info.num_ack_pending or 0)

    async def _ensure_stream(self, config: api.StreamConfig) -> None:
        config = config.evolve(storage=api.StorageType.FILE, duplicate_window=DUPLICATE_WINDOW_S)

        async def create() -> object:
            return await self.connection.jetstream.add_stream(config)

        call = f"$JS.API.STREAM.CREATE.{config.name}"
        await self.connection.ask(f"stream {config.name}", call, create, self._publish_deadline_s)

    async def _store(self, what: str, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        """Publish into a stream; a try that timed out may have landed, so each one carries the same headers."""

        async def attempt() -> api.PubAck:
            return await self.connection.jetstream.publish(subject, payload, headers=dict(headers))

        await self.connection.ask(f"{what} on {subject}", subject, attempt, self._publish_deadline_s)

    async def _listen(self, subject: str) -> AsyncIterator[tuple[Message, Msg]]:
        """Messages of a plain subject until closed; malformed ones are logged and left out."""
        inbox = await self.connection.subscribe(subject)
        try:
            while True:
                msg = await inbox.next()
                if not isinstance(msg, Msg):
                    continue
                try:
                    message = decode(msg.data)
                except ProtocolError as error:
                    log.error("dropped a message on %s: %s", msg.subject, error)
                    continue
                yield message, msg
        finally:
            await self.connection.unsubscribe(inbox)


_NO_MESSAGE = 10037
"""JetStream's error code for a stream that holds no message on the subject."""
