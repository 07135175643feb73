"""Spans of a run as its services wrote them: `<run folder>/traces/<worker>.jsonl`."""

import msgspec


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A span that another one refers to without being its child."""

    trace_id: str
    span_id: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work of one worker. Ids are in hexadecimal, times are Unix nanoseconds."""

    name: str
    service: str
    worker: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    """Empty for a root."""
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool] = {}
    links: list[Link] = []
    error: str = ""
    """Why it failed, where it did."""
