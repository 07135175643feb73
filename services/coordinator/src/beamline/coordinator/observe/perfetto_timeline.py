"""A whole run as a timeline that ui.perfetto.dev opens: what its workers did, and the numbers beside it.

Every service is a process. Of each of its workers there are the phases and what lies in them, the prompt groups with
an arrow from each place of theirs to the next, and counters. Spans and gauges are read as they come and written at
once: only what is open at a time is held, and the order is made on disk.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from beamline.coordinator.observe.gauge_lines import GaugeLine, read_gauges
from beamline.coordinator.observe.perfetto_lanes import Lanes, Overlap
from beamline.coordinator.observe.perfetto_packets import PacketWriter, number_of
from beamline.coordinator.observe.span_order import in_order
from beamline.coordinator.observe.spans import Attributes, Span, read_spans
from beamline.coordinator.observe.trace_names import GENERATE_GROUP, SCORE_GROUP, group_of, named_groups
from beamline.protocol.errors import ConfigError
from beamline.protocol.metric_schema import find

PHASES, GROUPS, COUNTERS = range(3)
"""Order of a worker's tracks."""
COUNTED = (GENERATE_GROUP, SCORE_GROUP)
"""Work of which a worker does several at once."""
BYTES = "num_bytes"
"""How attributes that count bytes end."""


def write_timeline(run_dir: Path, path: Path) -> int:
    """Write a run's timeline, as a whole or not at all. Returns the number of its spans.

    Raises ConfigError: the run has no spans yet; or as `read_spans`.
    """
    unfinished = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            timeline = Timeline(PacketWriter(file))
            timeline.write(in_order(read_spans(run_dir)), read_gauges(run_dir))
        if not timeline.num_spans:
            raise ConfigError(f"run {run_dir.name} has no spans yet: they come as its services work")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return timeline.num_spans


class Timeline:
    """Places spans on tracks."""

    def __init__(self, packets: PacketWriter) -> None:
        self.num_spans = 0
        self._packets = packets
        self._lanes: dict[int, Lanes] = {}
        """By track."""
        self._ends: list[tuple[int, int, Span, int]] = []
        """Of the slices that are open: the next end first, and of those that end together the innermost."""
        self._in_flight = Counter[int]()
        """Groups by track."""
        self._num_bytes = Counter[int]()
        """So far, by track."""

    def write(self, spans: Iterable[Span], gauges: Iterable[GaugeLine]) -> None:
        """Write everything. Both must come in order of time."""
        moments: Iterator[tuple[int, Span | GaugeLine]] = heapq.merge(
            ((span.start_ns, span) for span in spans),
            ((int(line.time * 1e9), line) for line in gauges),
            key=lambda moment: moment[0],
        )
        for number, (now_ns, what) in enumerate(moments):
            if number == 0:
                self._packets.clock(now_ns)
            self._end_until(now_ns)
            if isinstance(what, Span):
                self._begin(what)
            else:
                self._gauges(now_ns, what)
        while self._ends:
            self._end_until(self._ends[0][0])

    def _begin(self, span: Span) -> None:
        self.num_spans += 1
        group_id = group_of(span)
        worker = self._worker(span.service, span.worker)
        name, rank = ("groups", GROUPS) if group_id else ("phases", PHASES)
        whole = self._packets.track(worker, name, rank=rank)
        lanes = self._lanes.setdefault(whole, Lanes(Overlap.NONE if group_id else Overlap.NESTED))
        track = self._packets.track(worker, name, lanes.place(span.start_ns, span.end_ns), rank)
        notes: Attributes = {**span.attributes, "trace_id": span.trace_id} | (
            {"error": span.error} if span.error else {}
        )
        flows = sorted({number_of("flow", each) for each in named_groups(span)})
        self._packets.begin(track, span.start_ns, f"{span.name} {group_id}".strip(), notes, flows)
        self._count_groups(span, worker, 1, span.start_ns)
        heapq.heappush(self._ends, (span.end_ns, -self.num_spans, span, track))

    def _end_until(self, now_ns: int) -> None:
        """End the slices that end before or at this time."""
        while self._ends and self._ends[0][0] <= now_ns:
            end_ns, _, span, track = heapq.heappop(self._ends)
            self._packets.end(track, end_ns)
            worker = self._worker(span.service, span.worker)
            self._count_groups(span, worker, -1, end_ns)
            for key, value in span.attributes.items():
                if key.endswith(BYTES) and isinstance(value, int):
                    counter = self._packets.counter_track(worker, f"bytes so far: {span.name}", "bytes", COUNTERS)
                    self._num_bytes[counter] += value
                    self._packets.count(counter, end_ns, self._num_bytes[counter])

    def _count_groups(self, span: Span, worker: int, change: int, now_ns: int) -> None:
        if span.name not in COUNTED:
            return
        counter = self._packets.counter_track(worker, f"in flight: {span.name}", "groups", COUNTERS)
        self._in_flight[counter] += change
        self._packets.count(counter, now_ns, self._in_flight[counter])

    def _gauges(self, now_ns: int, line: GaugeLine) -> None:
        worker = self._worker(line.service, line.worker)
        for name, value in line.values.items():
            metric = find(name)
            counter = self._packets.counter_track(worker, name, metric.unit if metric else "", COUNTERS)
            self._packets.count(counter, now_ns, value)

    def _worker(self, service: str, worker: str) -> int:
        return self._packets.track(self._packets.process(service), worker)
