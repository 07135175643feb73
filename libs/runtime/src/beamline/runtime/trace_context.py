"""Trace context in message headers (W3C traceparent): one trace follows a prompt group through the services.

Without a tracer provider in the process all of this costs next to nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace

from beamline.protocol.messages import Message

_tracer = trace.get_tracer("beamline.bus")


def trace_headers() -> dict[str, str]:
    """Headers that carry the current span to the receiver; empty outside a trace."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


@contextmanager
def handling_span(service: str, message: Message, headers: Mapping[str, str]) -> Iterator[None]:
    """A span around the handler of a message, child of the sender's span."""
    kind = type(message).__name__
    group_id: str = getattr(message, "group_id", "")
    attributes = {"messaging.system": "nats", "beamline.service": service, "beamline.group_id": group_id}
    with _tracer.start_as_current_span(
        f"{service} {kind}", context=propagate.extract(headers), kind=trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield
