"""The spans of the newest steps, for the timeline: all others are forgotten as they come."""

from pathlib import Path

from beamline.coordinator.observe.spans import Span, SpanFiles

NUM_STEPS = 3
"""Steps that the timeline shows, with what goes on after the last of them."""
NEWEST_BYTES = 8 << 20
"""Of each worker's file, when it is opened."""
MAX_SPANS = 20_000
"""Of one step; those that come later are left out."""


class RecentSpans:
    """The newest traces of a run as its files tell of them."""

    def __init__(self, run_dir: Path) -> None:
        self._files = SpanFiles(run_dir, NEWEST_BYTES)
        self._traces: dict[str, list[Span]] = {}
        self._begins: dict[str, int] = {}

    def poll(self) -> bool:
        """Read what is new; returns whether a trace has come to its end, or whether there is any at the first time."""
        found, is_first = False, not self._traces
        for span in self._files.new():
            found = found or is_first or not span.parent_id
            self._keep(span)
        return found

    @property
    def num_damaged(self) -> int:
        return sum(self._files.num_damaged.values())

    def traces(self) -> list[list[Span]]:
        """Spans by trace, in order of their beginning."""
        return [self._traces[trace_id] for trace_id in sorted(self._traces, key=self._begins.__getitem__)]

    def _keep(self, span: Span) -> None:
        spans = self._traces.get(span.trace_id)
        if spans is None:
            if len(self._traces) > NUM_STEPS and span.start_ns < min(self._begins.values()):
                return
            spans = self._traces[span.trace_id] = []
        if len(spans) < MAX_SPANS:
            spans.append(span)
        begin = self._begins.get(span.trace_id, span.start_ns)
        self._begins[span.trace_id] = min(begin, span.start_ns)
        while len(self._traces) > NUM_STEPS + 1:
            oldest = min(self._begins, key=self._begins.__getitem__)
            del self._traces[oldest], self._begins[oldest]
