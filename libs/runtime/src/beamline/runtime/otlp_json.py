"""Spans as lines of OTLP/JSON: what a collector's file receiver reads, one batch of one worker a line."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, StatusCode

from beamline.protocol.errors import ProtocolError


class Struct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Base of all parts. What they hold beside these fields is not read."""


class AnyValue(Struct, kw_only=True):
    """One of the fields is set. Whole numbers are text, as protobuf's JSON has them."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: str | int | None = None
    double_value: float | None = None
    array_value: "ArrayValue | None" = None


class ArrayValue(Struct, kw_only=True):
    values: list[AnyValue] = []


class KeyValue(Struct, kw_only=True):
    key: str
    value: AnyValue = AnyValue()


class LinkLine(Struct, kw_only=True):
    trace_id: str
    span_id: str
    attributes: list[KeyValue] = []


class EventLine(Struct, kw_only=True):
    time_unix_nano: str
    name: str
    attributes: list[KeyValue] = []


class StatusLine(Struct, kw_only=True):
    message: str = ""
    code: int = 0
    """2 is an error."""


class SpanLine(Struct, kw_only=True):
    """Ids in hexadecimal, times in Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    name: str
    kind: int = 0
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[KeyValue] = []
    events: list[EventLine] = []
    links: list[LinkLine] = []
    status: StatusLine = StatusLine()


class ScopeLine(Struct, kw_only=True):
    name: str = ""
    version: str = ""


class ScopeSpans(Struct, kw_only=True):
    scope: ScopeLine = ScopeLine()
    spans: list[SpanLine] = []


class ResourceLine(Struct, kw_only=True):
    attributes: list[KeyValue] = []


class ResourceSpans(Struct, kw_only=True):
    resource: ResourceLine = ResourceLine()
    scope_spans: list[ScopeSpans] = []


class Batch(Struct, kw_only=True):
    """A line."""

    resource_spans: list[ResourceSpans]


_ERROR = 2
_decoder = msgspec.json.Decoder(Batch)


def encode_line(resource: Resource, spans: Sequence[ReadableSpan]) -> bytes:
    """Ended spans of one resource, with the line's end."""
    by_scope: dict[ScopeLine, list[SpanLine]] = {}
    for span in spans:
        own = span.instrumentation_scope
        scope = ScopeLine(name=own.name, version=own.version or "") if own else ScopeLine()
        by_scope.setdefault(scope, []).append(_span(span))
    scopes = [ScopeSpans(scope=scope, spans=own) for scope, own in by_scope.items()]
    of_resource = ResourceSpans(resource=ResourceLine(attributes=_attributes(resource.attributes)), scope_spans=scopes)
    return msgspec.json.encode(Batch(resource_spans=[of_resource])) + b"\n"


def decode_line(line: bytes) -> Batch:
    """Raises ProtocolError: the line was cut short, or is no OTLP/JSON."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a line of {len(line)} bytes holds no spans: {error}") from error


def plain(attributes: Sequence[KeyValue]) -> dict[str, str | int | float | bool]:
    """Attributes as Python's values; arrays are left out."""
    found = {one.key: _plain(one.value) for one in attributes}
    return {key: value for key, value in found.items() if value is not None}


def _plain(value: AnyValue) -> str | int | float | bool | None:
    if value.int_value is not None:
        return int(value.int_value)
    held = (value.string_value, value.bool_value, value.double_value)
    return next((one for one in held if one is not None), None)


def _span(span: ReadableSpan) -> SpanLine:
    context, status = span.context, span.status
    assert context is not None and span.start_time is not None and span.end_time is not None, "only ended spans"
    is_error = status.status_code is StatusCode.ERROR
    return SpanLine(
        **_ids(context),
        parent_span_id=f"{span.parent.span_id:016x}" if span.parent else "",
        name=span.name,
        kind=span.kind.value + 1,
        start_time_unix_nano=str(span.start_time),
        end_time_unix_nano=str(span.end_time),
        attributes=_attributes(span.attributes),
        events=[
            EventLine(time_unix_nano=str(event.timestamp), name=event.name, attributes=_attributes(event.attributes))
            for event in span.events
        ],
        links=[LinkLine(**_ids(link.context), attributes=_attributes(link.attributes)) for link in span.links],
        status=StatusLine(code=_ERROR, message=status.description or "") if is_error else StatusLine(),
    )


def _ids(context: SpanContext) -> dict[str, str]:
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, Any] | None) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in (attributes or {}).items()]


def _value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=str(value))
        case float():
            return AnyValue(double_value=value)
        case list() | tuple():
            values = [_value(one) for one in cast(Sequence[object], value)]
            return AnyValue(array_value=ArrayValue(values=values))
        case _:
            return AnyValue(string_value=str(value))
