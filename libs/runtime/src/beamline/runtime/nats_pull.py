"""Pulling from JetStream consumers: work queues with acks, and ordered readers without.

Each keeps one pull request open at the broker, so that an input arrives without polling. A request asks for as many
messages as there are free slots and none arrives unasked. After a reconnection the request is made anew.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping

from nats.aio.msg import Msg
from nats.js import api

from beamline.protocol.errors import BusUnavailable
from beamline.runtime.nats_connection import Inbox, NatsConnection, Reconnected

log = logging.getLogger(__name__)

_EXPIRES_S = 30.0
_READ_BATCH = 256
_SETUP_DEADLINE_S = 60.0


class PullRequest:
    """An inbox and the one pull request that may be open on it."""

    def __init__(self, connection: NatsConnection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._consumer = consumer
        self._inbox: Inbox | None = None
        self._num_due = 0
        """Messages that the open request may still bring; 0 when none is open."""

    async def next(self, num_wanted: int) -> Msg | Reconnected | None:
        """The next message; None when the consumer is gone. Opens a request for `num_wanted` if none is open."""
        if self._inbox is None:
            self._inbox = await self._connection.subscribe(self._connection.client.new_inbox(), self._subject)
        while True:
            if self._num_due == 0 and self._connection.is_up:
                request = {"batch": num_wanted, "expires": int(_EXPIRES_S * 1e9)}
                await self._connection.send(self._subject, json.dumps(request).encode(), reply=self._inbox.subject)
                self._num_due = num_wanted
            try:
                event = await asyncio.wait_for(self._inbox.next(), _EXPIRES_S + 5)
            except TimeoutError:
                self._num_due = 0
                continue
            if isinstance(event, Reconnected):
                self._num_due = 0
                return event
            status = (event.headers or {}).get(api.Header.STATUS)
            if status is None:
                self._num_due -= 1
                return event
            self._num_due = 0
            if status != api.StatusCode.REQUEST_TIMEOUT and await self._is_gone(status, event):
                return None

    async def _is_gone(self, status: str, event: Msg) -> bool:
        """Whether the consumer does not exist; any other refusal is waited out for a moment."""
        text = (event.headers or {}).get(api.Header.DESCRIPTION, "")
        log.debug("pull from %s ended: %s %s", self._consumer, status, text)
        await asyncio.sleep(0.1)
        return status == "503" or "consumer deleted" in text.lower()

    async def close(self) -> list[Msg]:
        """Withdraw the request (the broker sees that nobody listens) and return what had arrived for it."""
        inbox, self._inbox, self._num_due = self._inbox, None, 0
        if inbox is None:
            return []
        await self._connection.unsubscribe(inbox)
        arrived: list[Msg] = []
        while (msg := inbox.next_nowait()) is not None:
            if api.Header.STATUS not in (msg.headers or {}):
                arrived.append(msg)
        return arrived


class NatsDelivery:
    """A `Delivery`: one message of a work queue."""

    def __init__(self, connection: NatsConnection, msg: Msg, in_flight: set[int]) -> None:
        self._connection = connection
        self._in_flight = in_flight
        self._reply = msg.reply
        self.sequence = msg.metadata.sequence.stream
        self.num_delivered = msg.metadata.num_delivered
        self.payload: bytes = msg.data
        self.headers: Mapping[str, str] = msg.headers or {}

    async def ack(self) -> None:
        await self._finish(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._finish(b'-NAK {"delay": %d}' % int(delay_s * 1e9))

    async def term(self) -> None:
        await self._finish(b"+TERM")

    async def in_progress(self) -> None:
        await self._connection.send(self._reply, b"+WPI")

    async def _finish(self, verdict: bytes) -> None:
        self._in_flight.discard(self.sequence)
        await self._connection.send(self._reply, verdict)


class NatsSource:
    """A `Source`: a durable consumer that all workers of a service share."""

    def __init__(self, connection: NatsConnection, stream: str, durable: str) -> None:
        self._connection = connection
        self._pull = PullRequest(connection, stream, durable)
        self._where = f"work queue {durable} of stream {stream} at {connection.credentials.url}"
        self._in_flight: set[int] = set()

    async def take(self, num_free: int) -> NatsDelivery:
        """The next input that is not being handled here already (an ack wait may run out while its handler runs).

        Raises:
            BusUnavailable: the queue does not exist.
        """
        missing_since_s: float | None = None
        while True:
            event = await self._pull.next(num_free)
            if event is None:
                now_s = asyncio.get_running_loop().time()
                missing_since_s = missing_since_s or now_s
                if now_s - missing_since_s > _SETUP_DEADLINE_S:
                    raise BusUnavailable(f"{self._where} does not exist after {_SETUP_DEADLINE_S:g} s: is a run going?")
            elif isinstance(event, Msg):
                delivery = NatsDelivery(self._connection, event, self._in_flight)
                if delivery.sequence not in self._in_flight:
                    self._in_flight.add(delivery.sequence)
                    return delivery

    async def give_back(self) -> None:
        for msg in await self._pull.close():
            await self._connection.send(msg.reply, b"-NAK")


async def read(
    connection: NatsConnection, stream: str, subject: str, first: api.DeliverPolicy
) -> AsyncGenerator[tuple[int, Msg]]:
    """A stream's messages on one subject with their sequence numbers, in order and without gaps, then every new one.

    Reads through a consumer without acks that is opened again after the last sequence seen when the connection or the
    consumer was lost; the broker drops it once it is unused.
    """
    last_seen = 0
    while True:
        config = api.ConsumerConfig(
            name=connection.client.new_inbox().rpartition(".")[2],
            filter_subject=subject,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE if last_seen else first,
            opt_start_seq=last_seen + 1 if last_seen else None,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=2 * _EXPIRES_S,
            mem_storage=True,
        )

        async def create(config: api.ConsumerConfig = config) -> object:
            return await connection.jetstream.add_consumer(stream, config)

        call = f"$JS.API.CONSUMER.CREATE.{stream}.{config.name}.{subject}"
        await connection.ask(f"a reader of {subject} in stream {stream}", call, create, _SETUP_DEADLINE_S)
        pull = PullRequest(connection, stream, str(config.name))
        try:
            while isinstance(event := await pull.next(_READ_BATCH), Msg):
                last_seen = event.metadata.sequence.stream
                yield last_seen, event
        finally:
            await pull.close()
