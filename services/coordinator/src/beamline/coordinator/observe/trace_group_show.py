"""A group's way in a terminal, one line a span."""

from rich.console import Console
from rich.table import Table

from beamline.coordinator.observe import trace_names as names
from beamline.coordinator.observe.trace_group import GroupTrace, Outcome, Stop
from beamline.coordinator.observe.trace_show import NS

PREFIX = "beamline."
HIDDEN = {
    *(names.GROUP_ID, names.GROUP_IDS, names.FILTERED, names.STALE, names.FAILED, names.IS_FINAL),
    *(PREFIX + name for name in ("run", "service", "message", "purpose")),
}
"""What stands elsewhere on the line, or says nothing of the group."""


def show_group(trace: GroupTrace, console: Console) -> None:
    """Print how the group ended, and every span of its way."""
    console.print(f"{trace.group_id} of run {trace.run}: {ending(trace)}")
    table = Table("after", "takes", "span", "where", "trace", "", box=None, pad_edge=False)
    begin = trace.stops[0].span.start_ns
    for stop in trace.stops:
        span = stop.span
        table.add_row(
            f"+{(span.start_ns - begin) / NS:.3f} s",
            f"{(span.end_ns - span.start_ns) / NS:.3f} s",
            span.name,
            names.where(span),
            "" if stop.step is None else f"step {stop.step}",
            ", ".join(notes(stop)),
        )
    console.print(table)


def ending(trace: GroupTrace) -> str:
    """How the group ended, in words."""
    match trace.outcome:
        case Outcome.TRAINED:
            return f"trained in step {trace.step}"
        case Outcome.FILTERED:
            return f"filtered: nothing was to be learned from it when the batch of step {trace.step} was drawn"
        case Outcome.STALE if trace.step is None:
            return "stale: left over when the run ended"
        case Outcome.STALE:
            return f"stale: sampled from too old a policy for step {trace.step}"
        case Outcome.FAILED:
            return "failed: its last attempt came to nothing"
        case Outcome.EVALUATED:
            return "part of an evaluation, which trains nothing"
        case Outcome.OPEN:
            return f"on its way, last seen in {trace.stops[-1].span.name}"


def notes(stop: Stop) -> list[str]:
    """What a span says of the group, in words."""
    span = stop.span
    told = [
        f"{key.removeprefix(PREFIX).replace('_', ' ')} {_plain(value)}"
        for key, value in span.attributes.items()
        if key.startswith(PREFIX) and key not in HIDDEN and (key, value) != (names.ATTEMPT, 0)
    ]
    if stop.is_redelivered:
        told.append("delivered again")
    if span.error:
        told.append(f"failed: {span.error}")
    return told


def _plain(value: str | int | float | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
