"""A step's trace in a terminal: the tree of its spans, then what the step waited for."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from beamline.coordinator.observe.trace_names import group_of, where
from beamline.coordinator.observe.trace_step import StepTrace
from beamline.coordinator.observe.trace_tree import Node

NS = 1e9
ALIKE = 4
"""Spans of one name beneath another that are all shown; of more, only those that the step waited for."""
SMALL = 0.005
"""Share of the step below which a piece of the chain is counted with the others."""
MARK = "●"


def show_step(trace: StepTrace, console: Console) -> None:
    """Print everything. `●` marks what the step waited for."""
    whole = trace.root.span
    console.print(f"step {trace.step} of run {trace.run}: {_seconds(whole.end_ns - whole.start_ns)}")
    console.print(f"trace {whole.trace_id}")
    table = _table("", "span", "where", "begins", "takes", "share")
    for row in _rows(trace, trace.root, trace.on_path, 0):
        table.add_row(*row)
    console.print(table)
    console.print(f"\nwhat the step waited for ({MARK}); in parentheses, what no span accounts for")
    console.print(_path_table(trace))


def label(name: str, group_id: str) -> str:
    """A span's name, with the group that it is about."""
    return f"{name} {group_id}" if group_id else name


def _rows(trace: StepTrace, node: Node, on_path: set[str], depth: int) -> Iterator[tuple[str, ...]]:
    whole, span = trace.root.span, node.span
    name = label(span.name, group_of(span)) + (f"  failed: {span.error}" if span.error else "")
    num_ns = span.end_ns - span.start_ns
    yield (
        MARK if span.span_id in on_path else "",
        "  " * depth + name,
        where(span),
        f"{(span.start_ns - whole.start_ns) / NS:+.3f} s",
        _seconds(num_ns),
        _share(num_ns, trace),
    )
    left_out: dict[str, list[int]] = {}
    times = Counter(child.span.name for child in node.children)
    for child in node.children:
        if times[child.span.name] <= ALIKE or child.span.span_id in on_path:
            yield from _rows(trace, child, on_path, depth + 1)
        else:
            left_out.setdefault(child.span.name, []).append(child.end_ns - child.span.start_ns)
    for name, all_ns in left_out.items():
        spread = f"{_seconds(min(all_ns))} to {_seconds(max(all_ns))}"
        yield "", "  " * (depth + 1) + f"{len(all_ns)} more {name}, with what followed: {spread}", "", "", "", ""


def _path_table(trace: StepTrace) -> Table:
    table = _table("span", "where", "takes", "share")
    whole = trace.root.span.end_ns - trace.root.span.start_ns
    small = 0
    for segment in trace.path:
        if segment.num_ns < SMALL * whole:
            small += segment.num_ns
            continue
        name = f"({segment.gap})" if segment.gap else label(segment.span.name, group_of(segment.span))
        table.add_row(name, where(segment.span), _seconds(segment.num_ns), _share(segment.num_ns, trace))
    if small:
        table.add_row("smaller pieces", "", _seconds(small), _share(small, trace))
    return table


def _table(*header: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, justify="right" if name in ("begins", "takes", "share") else "left", no_wrap=True)
    return table


def _seconds(num_ns: int) -> str:
    seconds = num_ns / NS
    return f"{seconds:.1f} s" if seconds >= 100 else f"{seconds:.3f} s"


def _share(num_ns: int, trace: StepTrace) -> str:
    whole = trace.root.span.end_ns - trace.root.span.start_ns
    return f"{100 * num_ns / whole:.1f} %" if whole else ""
