"""Spans made by hand, with times in milliseconds."""

from collections.abc import Callable
from io import StringIO

from msgspec.structs import replace
from rich.console import Console

from beamline.coordinator.observe.spans import Attributes, Link, Span

MS = 1_000_000


def span(
    name: str,
    start_ms: float,
    end_ms: float,
    parent: str = "",
    *,
    where: str = "coordinator",
    trace: str = "1",
    own_id: str = "",
    links: tuple[Link, ...] = (),
    error: str = "",
    **attributes: str | int | float | bool,
) -> Span:
    """A span that is called by its own id, which is its name unless said otherwise.

    Args:
        where: service, or service/worker.
        attributes: without their prefix `beamline.`.
    """
    service, _, worker = where.partition("/")
    return Span(
        name=name,
        service=service,
        worker=worker or service,
        trace_id=trace,
        span_id=own_id or name,
        parent_id=parent,
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
        attributes={f"beamline.{key}": value for key, value in attributes.items()},
        links=list(links),
        error=error,
    )


def link_to(group_id: str, **attributes: str | int | bool) -> Link:
    """To where a group was issued."""
    told: Attributes = {"beamline.group_id": group_id, **attributes}
    return Link(trace_id="1", span_id=f"admit {group_id}", attributes=told)


def group_spans(
    group_id: str, start_ms: float, end_ms: float, *, trace: str = "1", worker: str = "rollout-0"
) -> list[Span]:
    """A group that is admitted, generated and scored, the last tenth of its time."""
    scored_ms = end_ms - (end_ms - start_ms) / 10
    admit, generate, score = (f"{what} {group_id}" for what in ("admit", "generate", "score"))
    rollout, step = f"rollout/{worker}", f"step {trace}"
    bare = [
        span("admit", start_ms, start_ms + 1, step, own_id=admit, attempt=0),
        span("generate group", start_ms + 2, scored_ms, admit, where=rollout, own_id=generate, policy_version=0),
        span("score group", scored_ms, end_ms, generate, where="reward", own_id=score, rewards="1 0"),
    ]
    told = {"beamline.group_id": group_id}
    return [replace(each, trace_id=trace, attributes={**each.attributes, **told}) for each in bare]


def text_of(show: Callable[[Console], None]) -> list[str]:
    """The lines that something prints, each with single spaces."""
    console = Console(width=200, file=StringIO(), record=True, markup=False, highlight=False)
    show(console)
    return [" ".join(line.split()) for line in console.export_text().splitlines()]
