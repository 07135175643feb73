"""Trace context between spans that are far apart: in message headers (W3C traceparent and baggage), and in messages.

One trace follows a step through the services. Baggage `beamline.step` tells the step to whatever is done for it.
Without a tracer provider in the process all of this costs next to nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import baggage, context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind

from beamline.protocol.messages import GroupFailed, Message, PromptGroup, ScoredGroup, TrainBatch, TrajectoryGroup

STEP = "beamline.step"
GROUP_ID = "beamline.group_id"
TRACEPARENT = "traceparent"

WORK: dict[type[Message], str] = {
    PromptGroup: "generate group",
    TrajectoryGroup: "score group",
    ScoredGroup: "collect group",
    GroupFailed: "collect failure",
    TrainBatch: "train step",
}
"""What is done for a message; its span's name."""

_tracer = trace.get_tracer("beamline.bus")


def trace_headers() -> dict[str, str]:
    """Headers that carry the current span and its step to the receiver; empty outside a trace."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


def traceparent() -> str:
    """The current span as text, for a message or a journal; empty outside a trace."""
    return trace_headers().get(TRACEPARENT, "")


def current_step() -> str:
    """The step for which this is done; empty where it is done for none."""
    return str(baggage.get_baggage(STEP) or "")


@contextmanager
def within(of: Context) -> Iterator[None]:
    """Spans of the block are children of what was current when the context was taken, by `context.get_current`."""
    token = context.attach(of)
    try:
        yield
    finally:
        context.detach(token)


def continuing(headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Spans of the block are children of the sender's."""
    return within(propagate.extract(headers, context=Context()))


@contextmanager
def handling_span(service: str, message: Message, headers: Mapping[str, str], num_delivered: int = 1) -> Iterator[None]:
    """A span around the handler of a message, child of the sender's span; at a repeated delivery also linked to it."""
    kind = type(message).__name__
    attributes = {"messaging.system": "nats", "beamline.service": service, "beamline.message": kind}
    attributes |= {f"beamline.{name}": value for name in _TOLD if (value := getattr(message, name, None)) is not None}
    with continuing(headers):
        sender = trace.get_current_span().get_span_context()
        again = {"messaging.redelivered": True, "messaging.num_delivered": num_delivered}
        links = [Link(sender, again)] if num_delivered > 1 and sender.is_valid else []
        with _tracer.start_as_current_span(
            WORK.get(type(message), f"collect {kind}"), kind=SpanKind.CONSUMER, attributes=attributes, links=links
        ):
            yield


@contextmanager
def linked_span(name: str, groups: Mapping[str, str], told: Mapping[str, Mapping[str, str]] = {}) -> Iterator[None]:
    """A span around what is done with groups, with a link to where each one was issued.

    Args:
        groups: the traceparent of each group by its id.
        told: further attributes of a group's link.
    """
    found = {group_id: _span_context(parent) for group_id, parent in groups.items() if parent}
    links = [Link(of, {GROUP_ID: group_id, **told.get(group_id, {})}) for group_id, of in found.items()]
    with _tracer.start_as_current_span(name, links=links):
        yield


_TOLD = ("group_id", "attempt", "purpose", "step", "policy_version")
"""Fields of messages that become attributes."""


def _span_context(parent: str) -> trace.SpanContext:
    return trace.get_current_span(propagate.extract({TRACEPARENT: parent}, context=Context())).get_span_context()
