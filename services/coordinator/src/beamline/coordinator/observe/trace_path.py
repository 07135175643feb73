"""What a step waited for: the chain of spans that led to its end, with the time that none of them explains.

From the end backwards: of the spans that one waits for, the last to end is the next of the chain, and before its start
the same again. What runs beside the chain could take longer without the step taking longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from beamline.coordinator.observe.spans import Span
from beamline.coordinator.observe.trace_names import ADMIT, GENERATE
from beamline.coordinator.observe.trace_tree import Node


@dataclass(frozen=True)
class Segment:
    """A piece of the chain, in which a span worked, or `gap` says between what nothing did."""

    span: Span
    start_ns: int
    end_ns: int
    gap: str = ""

    @property
    def num_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(root: Node, groups: Sequence[Node]) -> list[Segment]:
    """The chain in order of time; its segments add up to the root's duration.

    Args:
        root: of the step.
        groups: admissions of the groups that the step trains: what its generation waited for. They may be of earlier
            steps.
    """
    chain = _back(root, root.span.end_ns, root.span.start_ns, groups)
    return [segment for segment in reversed(list(chain)) if segment.num_ns > 0]


def holds(node: Node, children: Sequence[Node]) -> bool:
    """Whether a span is there for its children, so that its own time is a gap: they fill half of it, or more."""
    span = node.span
    filled = (min(child.end_ns, span.end_ns) - max(child.span.start_ns, span.start_ns) for child in children)
    return 2 * sum(num_ns for num_ns in filled if num_ns > 0) >= span.end_ns - span.start_ns


def _back(node: Node, end_ns: int, floor_ns: int, groups: Sequence[Node]) -> Iterator[Segment]:
    """Segments from `end_ns` back to the node's start, or to the floor where that is later."""
    awaited = _awaited(node, groups)
    is_frame = bool(awaited) and holds(node, awaited)
    floor_ns = max(floor_ns, node.span.start_ns)
    now, later = end_ns, ""
    for child in awaited:
        if child.span.start_ns >= now or child.end_ns <= floor_ns or (later and not _share_before(child, now)):
            continue
        begin, end = max(child.span.start_ns, floor_ns), min(child.end_ns, now)
        yield from _own(node, end, now, _last(child), later, is_frame)
        yield from _back(child, end, begin, groups)
        now, later = begin, child.span.name
    yield from _own(node, floor_ns, now, "", later, is_frame)


def _awaited(node: Node, groups: Sequence[Node]) -> list[Node]:
    """What a span may have waited for, the last to end first."""
    children = [child for child in node.children if child.span.name != ADMIT]
    if node.span.name == GENERATE:
        children += groups
    return sorted(children, key=lambda child: child.end_ns, reverse=True)


def _last(node: Node) -> str:
    """Name of the span of a tree that ended last."""
    return max(node.walk(), key=lambda each: each.span.end_ns).span.name


def _share_before(child: Node, now: int) -> bool:
    """Whether at least half of it came before."""
    return 2 * now >= child.span.start_ns + child.end_ns


def _own(node: Node, start_ns: int, end_ns: int, earlier: str, later: str, is_frame: bool) -> Iterator[Segment]:
    """Time in which no child was on the chain, the part after the node's own end first."""
    name, own_end = node.span.name, min(max(start_ns, node.span.end_ns), end_ns)
    if own_end < end_ns:
        yield Segment(node.span, own_end, end_ns, f"from {earlier or name} to {later}" if later else f"after {name}")
    gap = _between(name, earlier, later) if is_frame else ""
    yield Segment(node.span, start_ns, own_end, gap)


def _between(name: str, earlier: str, later: str) -> str:
    if earlier and later:
        return f"{name}: between {earlier} and {later}"
    return f"{name}: after {earlier}" if earlier else f"{name}: before {later}" if later else ""
