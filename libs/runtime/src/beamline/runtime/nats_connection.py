"""One connection to a nats-server that outlives the server's restarts, with errors that say what to mend.

Only this file, `nats_pull`, `nats_bus` and `jetstream_blobs` import nats.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from beamline.protocol.errors import BeamlineError, BusUnavailable, DeadlineExceeded, PermissionDenied
from beamline.runtime.credentials import Credentials
from beamline.runtime.waits import BROKER, WAITS

log = logging.getLogger(__name__)

_DENIED = re.compile(r"permissions violation for (?:publish|subscription) to \"(?P<subject>[^\"]+)\"", re.IGNORECASE)
_ATTEMPT_S = 2.0
_PAUSE_S = 0.05
_LOG_EVERY_S = 10.0

_AWAY = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.NotFoundError,
)
"""Answers of a broker that is away, or whose streams are not there yet: worth another try."""


class Reconnected:
    """Put into an inbox when the connection is new: whatever was asked of the server before is forgotten there."""


class Failed:
    """Put into an inbox when it will never receive again."""

    def __init__(self, error: BeamlineError) -> None:
        self.error = error


class Inbox:
    """Messages of one subscription, in order, mixed with news of the connection.

    Args:
        subject: what it listens to.
        asks: what is published to receive answers here, if anything; a refusal of either fails the inbox.
    """

    def __init__(self, subject: str, asks: str = "") -> None:
        self.subject = subject
        self.asks = asks
        self._events: asyncio.Queue[Msg | Reconnected | Failed] = asyncio.Queue()
        self._subscription: Any = None

    async def next(self) -> Msg | Reconnected:
        """The next message or reconnection. Raises PermissionDenied or BusUnavailable when there will be none."""
        event = await self._events.get()
        if isinstance(event, Failed):
            self._events.put_nowait(event)
            raise event.error
        return event

    def next_nowait(self) -> Msg | None:
        """A message that has already arrived."""
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, Msg):
                return event
        return None

    def tell(self, event: Msg | Reconnected | Failed) -> None:
        self._events.put_nowait(event)


class NatsConnection:
    """Use `open`. Requests are retried while the broker is away; subscriptions come back with it."""

    def __init__(self, credentials: Credentials, name: str) -> None:
        self.credentials = credentials
        self.name = name
        self.client: Client = Client()
        self.jetstream: JetStreamContext = self.client.jetstream(timeout=_ATTEMPT_S)
        self.is_up = True
        """False from a loss of the connection until the inboxes have been told of the new one."""
        self._inboxes: set[Inbox] = set()
        self._asked: dict[str, set[asyncio.Future[BeamlineError]]] = {}
        self._failure: BeamlineError | None = None
        self._refused: asyncio.Future[BeamlineError] | None = None
        self._last_error = ""
        self._last_logged_s = 0.0
        self._num_unlogged = 0

    @classmethod
    async def open(cls, credentials: Credentials, name: str, deadline_s: float = 10.0) -> "NatsConnection":
        """Connect. Raises BusUnavailable naming the address when nobody answers there or the login is refused."""
        connection = cls(credentials, name)
        connection._refused = asyncio.get_running_loop().create_future()
        connecting = asyncio.ensure_future(connection._connect())
        await asyncio.wait({connecting, connection._refused}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and not connection._refused.done():
            connecting.result()
            return connection
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        if connection._refused.done():
            raise connection._refused.result()
        raise BusUnavailable(
            f"no nats-server at {credentials.url} within {deadline_s:g} s ({connection._last_error or 'no answer'}): "
            "start the run with `beamline run`, or correct bus.url"
        )

    async def subscribe(self, subject: str, asks: str = "") -> Inbox:
        """Listen to a subject; close the inbox with `unsubscribe`."""
        inbox = Inbox(subject, asks)

        async def receive(msg: Msg) -> None:
            inbox.tell(msg)

        self._check()
        self._inboxes.add(inbox)
        inbox._subscription = await self.client.subscribe(subject, cb=receive)  # pyright: ignore[reportPrivateUsage]
        return inbox

    async def unsubscribe(self, inbox: Inbox) -> None:
        """Stop listening. What the broker had sent by then is in the inbox on return, unless the broker is away."""
        self._inboxes.discard(inbox)
        subscription = inbox._subscription  # pyright: ignore[reportPrivateUsage]
        if self.client.is_connected:
            with suppress(nats.errors.Error, TimeoutError):
                await asyncio.wait_for(subscription.drain(), _ATTEMPT_S)
                return
        if not self.client.is_closed:
            with suppress(nats.errors.BadSubscriptionError):
                await subscription.unsubscribe()

    async def send(self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = "") -> None:
        """Publish without an answer; kept back while the broker is away, dropped when too much is."""
        self._check()
        try:
            await self.client.publish(subject, payload, reply=reply, headers=headers)
        except nats.errors.OutboundBufferLimitError:
            self._log("dropped a message to %s: the broker is away", subject)

    async def ask[T](self, what: str, subject: str, attempt: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """Repeat a request until it is answered.

        Args:
            what: what is awaited, in words, for the error.
            subject: what the request publishes to, by which the broker's refusal is recognised.
            attempt: one try; it may time out.
            deadline_s: for all tries.

        Raises:
            DeadlineExceeded: the broker stayed away.
            PermissionDenied: the user may not publish to the subject.
            BusUnavailable: the broker answered with an error, or the connection is closed for good.
        """
        denied: asyncio.Future[BeamlineError] = asyncio.get_running_loop().create_future()
        waiting = self._asked.setdefault(subject.lower(), set())
        waiting.add(denied)
        try:
            with WAITS.waiting(what, within_s=deadline_s, on=BROKER):
                async with asyncio.timeout(deadline_s):
                    return await self._try(subject, attempt, denied)
        except TimeoutError:
            raise DeadlineExceeded(f"{what} ({self._state})", deadline_s) from None
        finally:
            waiting.discard(denied)
            if not waiting:
                self._asked.pop(subject.lower(), None)

    async def close(self) -> None:
        """Send what is left and disconnect."""
        if self.client.is_connected:
            try:
                await self.client.flush(timeout=2)
            except (nats.errors.Error, TimeoutError) as error:
                log.warning("the last messages to %s may be lost: %s", self.credentials.url, error)
        else:
            # nats-py would write what is kept back to the dead socket, and fail.
            self.client._pending.clear()  # pyright: ignore[reportPrivateUsage]
            self.client._pending_data_size = 0  # pyright: ignore[reportPrivateUsage]
        if not self.client.is_closed:
            await self.client.close()

    @property
    def _state(self) -> str:
        state = "connected" if self.client.is_connected else "disconnected"
        return f"{state} to {self.credentials.url}" + (f", last error: {self._last_error}" if self._last_error else "")

    async def _connect(self) -> None:
        await self.client.connect(
            self.credentials.url,
            name=self.name,
            user=self.credentials.user or None,
            password=self.credentials.password or None,
            inbox_prefix=self.credentials.inbox_prefix,
            connect_timeout=2,
            reconnect_time_wait=0.1,  # pyright: ignore[reportArgumentType]  # annotated int, used as seconds to sleep
            max_reconnect_attempts=-1,
            pending_size=16 * 1024 * 1024,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )

    async def _try[T](
        self, subject: str, attempt: Callable[[], Awaitable[T]], denied: asyncio.Future[BeamlineError]
    ) -> T:
        while True:
            self._check()
            trying = asyncio.ensure_future(attempt())
            try:
                await asyncio.wait({trying, denied}, return_when=asyncio.FIRST_COMPLETED)
                if denied.done():
                    raise denied.result()
                return trying.result()
            except _AWAY as error:
                self._last_error = f"{type(error).__name__} {error}".strip()
                await asyncio.sleep(_PAUSE_S)
            except nats.js.errors.APIError as error:
                raise BusUnavailable(f"{self.credentials.url} refused {subject}: {error.description}") from error
            except nats.errors.ConnectionClosedError:
                self._fail(BusUnavailable(f"the connection to {self.credentials.url} is closed"))
            finally:
                trying.cancel()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BeamlineError) -> None:
        self._failure = self._failure or error
        for inbox in self._inboxes:
            inbox.tell(Failed(self._failure))
        for waiting in [future for futures in self._asked.values() for future in futures]:
            if not waiting.done():
                waiting.set_result(self._failure)

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self._last_error = text
        if self._refused is not None and not self._refused.done() and "authorization" in text.lower():
            self._refused.set_result(
                BusUnavailable(
                    f"{self.credentials.url} turned user {self.credentials.user!r} away ({text}): "
                    "the credentials are those of another run; start the run anew"
                )
            )
        if found := _DENIED.search(text):
            self._deny(found["subject"], text)
        self._log("nats: %s", text)

    def _deny(self, subject: str, text: str) -> None:
        error = PermissionDenied(
            f"{self.credentials.url} does not let {self.credentials.user!r} use this subject ({text}): "
            "another service owns it"
        )
        for waiting in self._asked.get(subject.lower(), ()):
            if not waiting.done():
                waiting.set_result(error)
        for inbox in self._inboxes:
            if subject.lower() in (inbox.subject.lower(), inbox.asks.lower()):
                inbox.tell(Failed(error))

    async def _on_disconnected(self) -> None:
        self.is_up = False

    async def _on_reconnected(self) -> None:
        self.is_up = True
        log.info("%s is connected to %s again", self.name, self.credentials.url)
        for inbox in self._inboxes:
            inbox.tell(Reconnected())

    async def _on_closed(self) -> None:
        self._fail(BusUnavailable(f"the connection to {self.credentials.url} is closed ({self._last_error})"))

    def _log(self, text: str, *args: object) -> None:
        """A warning, at most one every ten seconds: a server that is away calls this several times a second."""
        now_s = time.monotonic()
        if now_s - self._last_logged_s < _LOG_EVERY_S:
            self._num_unlogged += 1
            return
        log.warning(text + " (%d more like it)", *args, self._num_unlogged)
        self._last_logged_s, self._num_unlogged = now_s, 0
