"""A Perfetto trace as its schema reads it, with what a viewer takes for granted checked on the way."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

Pb: Any = pb


@dataclass(frozen=True)
class Slice:
    process: str
    track: str
    """Names from the process down, with dots."""
    name: str
    start_ns: int
    end_ns: int
    depth: int
    flows: tuple[int, ...]
    notes: dict[str, Any]


@dataclass
class Timeline:
    processes: list[str] = field(default_factory=list[str])
    slices: list[Slice] = field(default_factory=list[Slice])
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Values by track, in the file's order."""
    units: dict[str, str] = field(default_factory=dict[str, str])

    def named(self, name: str) -> list[Slice]:
        return [each for each in self.slices if each.name == name]


def read_timeline(path: Path) -> Timeline:
    """Read a file.

    Asserts that times never go back, that every event stands on a track that was described before, that a slice lies
    within the one that holds it, and that all of them end.
    """
    trace = Pb.Trace()
    trace.ParseFromString(path.read_bytes())
    timeline, names, now_ns = Timeline(), dict[int, tuple[str, ...]](), 0
    stacks: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            _describe(timeline, names, packet.track_descriptor)
        elif packet.HasField("track_event"):
            event, track = packet.track_event, names[packet.track_event.track_uuid]
            assert packet.timestamp >= now_ns and packet.timestamp_clock_id == pb.BUILTIN_CLOCK_REALTIME
            now_ns = packet.timestamp
            if event.type == Pb.TrackEvent.TYPE_COUNTER:
                timeline.counters[".".join(track)].append((now_ns, event.double_counter_value))
            elif event.type == Pb.TrackEvent.TYPE_SLICE_BEGIN:
                stacks[event.track_uuid].append((event, now_ns))
            else:
                begun, start_ns = stacks[event.track_uuid].pop()
                depth = len(stacks[event.track_uuid])
                timeline.slices.append(_slice(track, begun, start_ns, now_ns, depth))
    assert not any(stacks.values()), "a slice never ends"
    return timeline


def _describe(timeline: Timeline, names: dict[int, tuple[str, ...]], track: Any) -> None:
    assert track.uuid not in names
    if track.HasField("process"):
        timeline.processes.append(track.process.process_name)
        names[track.uuid] = (track.process.process_name,)
        return
    names[track.uuid] = (*names[track.parent_uuid], track.name)
    if track.HasField("counter"):
        is_bytes = track.counter.unit == Pb.CounterDescriptor.UNIT_SIZE_BYTES
        timeline.units[".".join(names[track.uuid])] = "bytes" if is_bytes else track.counter.unit_name


def _slice(track: tuple[str, ...], begun: Any, start_ns: int, end_ns: int, depth: int) -> Slice:
    notes = {note.name: getattr(note, note.WhichOneof("value")) for note in begun.debug_annotations}
    return Slice(track[0], ".".join(track), begun.name, start_ns, end_ns, depth, tuple(begun.flow_ids), notes)
