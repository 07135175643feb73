"""The spans of a trace as a tree. Times are Unix nanoseconds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from beamline.coordinator.observe.spans import Span


@dataclass(eq=False)
class Node:
    """A span with those beneath it, in order of their start."""

    span: Span
    children: list["Node"] = field(default_factory=list["Node"])
    end_ns: int = 0
    """Of the span and all beneath it: what a message sets off goes on after the span that sent it."""

    def walk(self) -> Iterator["Node"]:
        """This one and all beneath it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


def grow(root: Span, spans: Iterable[Span]) -> Node:
    """The tree of a root's spans. One whose parent is not among them stands under the root: its worker was killed."""
    by_id = {span.span_id: Node(span) for span in spans}
    top = by_id[root.span_id] = Node(root)
    for node in by_id.values():
        if node is not top:
            by_id.get(node.span.parent_id, top).children.append(node)
    return _settle(top)


def _settle(node: Node) -> Node:
    node.children.sort(key=lambda child: (child.span.start_ns, child.span.end_ns))
    for child in node.children:
        _settle(child)
    node.end_ns = max([node.span.end_ns, *(child.end_ns for child in node.children)])
    return node
