"""A run's spans as trees, and what holds of every run's."""

from collections import Counter
from pathlib import Path

from beamline.coordinator.observe.spans import Span, read_spans

PHASES = ("evaluate", "generate", "train", "sync", "report")
"""Children of a step's root that follow each other."""


class Traces:
    """Spans of a run, by what is asked of them."""

    def __init__(self, run_dir: Path) -> None:
        self.spans = list(read_spans(run_dir))
        self.by_id = {span.span_id: span for span in self.spans}

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    def steps(self) -> dict[int, Span]:
        """Roots by step."""
        return {int(span.attributes["beamline.step"]): span for span in self.named("step")}

    def phases(self, step: Span) -> list[Span]:
        """In the order in which they began."""
        return sorted((s for s in self.children(step) if s.name in PHASES), key=lambda span: span.start_ns)

    def root_of(self, span: Span) -> Span:
        while span.parent_id:
            span = self.by_id[span.parent_id]
        return span


def check_trees(traces: Traces, num_steps: int) -> None:
    """One root a trace, one trace a step, and no span without its parent or written twice."""
    assert len(traces.by_id) == len(traces.spans), "no span is written twice"
    roots = [span for span in traces.spans if not span.parent_id]
    assert set(Counter(root.trace_id for root in roots).values()) == {1}, "one root a trace"
    assert sorted(traces.steps()) == list(range(1, num_steps + 1)) and len(traces.named("step")) == num_steps
    for span in traces.spans:
        assert traces.root_of(span).trace_id == span.trace_id, span


def seconds(*spans: Span) -> float:
    """Together."""
    return sum(span.end_ns - span.start_ns for span in spans) * 1e-9
