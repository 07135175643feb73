"""Packets of a Perfetto trace: processes, tracks, slices and counters. The one file that imports `perfetto`.

The format: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from beamline.coordinator.observe.spans import Attributes

SEQUENCE = 1
"""All packets come from one writer."""
FIRST_PID = 1
REALTIME, BOOTTIME = pb.BUILTIN_CLOCK_REALTIME, pb.BUILTIN_CLOCK_BOOTTIME
_Event: Any = pb.TrackEvent
_Track: Any = pb.TrackDescriptor


def number_of(*path: str) -> int:
    """The same 64-bit number for the same names: a track's, or a flow's."""
    return int.from_bytes(blake2b("\0".join(path).encode(), digest_size=8).digest()) or 1


class PacketWriter:
    """Writes a trace packet by packet. Times are Unix nanoseconds; events must come in their order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._tracks: set[int] = set()
        self._num_processes = 0

    def clock(self, now_ns: int) -> None:
        """Say that times are those of the wall clock. Comes first."""
        packet = self._packet()
        packet.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for clock in (BOOTTIME, REALTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=now_ns)
        self._builder.write_packet(packet)

    def process(self, name: str) -> int:
        """The track of a process; it is described when it is first asked for, as all tracks are."""
        uuid = number_of("process", name)
        if track := self._describe(uuid):
            track.track_descriptor.process.pid = FIRST_PID + self._num_processes
            track.track_descriptor.process.process_name = name
            track.track_descriptor.child_ordering = _Track.LEXICOGRAPHIC
            self._num_processes += 1
            self._builder.write_packet(track)
        return uuid

    def track(self, parent: int, name: str, lane: int = 0, rank: int = 0) -> int:
        """A track beneath another. Lanes of one name are shown as one; `rank` orders names."""
        uuid = number_of("track", str(parent), name, str(lane))
        if track := self._describe(uuid, parent, name, rank):
            track.track_descriptor.child_ordering = _Track.EXPLICIT
            self._builder.write_packet(track)
        return uuid

    def counter_track(self, parent: int, name: str, unit: str, rank: int = 0) -> int:
        """A track of values."""
        uuid = number_of("counter", str(parent), name)
        if track := self._describe(uuid, parent, name, rank):
            counter = track.track_descriptor.counter
            if unit == "bytes":
                counter.unit = pb.CounterDescriptor.UNIT_SIZE_BYTES
            else:
                counter.unit_name = unit
            self._builder.write_packet(track)
        return uuid

    def begin(self, track: int, now_ns: int, name: str, notes: Attributes, flows: Iterable[int]) -> None:
        """A slice begins on a track."""
        packet = self._event(track, now_ns, _Event.TYPE_SLICE_BEGIN)
        packet.track_event.name = name
        packet.track_event.categories.append("beamline")
        packet.track_event.flow_ids.extend(flows)
        for key, value in notes.items():
            _annotate(packet.track_event.debug_annotations.add(name=key), value)
        self._builder.write_packet(packet)

    def end(self, track: int, now_ns: int) -> None:
        """The innermost slice of a track ends."""
        self._builder.write_packet(self._event(track, now_ns, _Event.TYPE_SLICE_END))

    def count(self, track: int, now_ns: int, value: float) -> None:
        """A counter has a value from now on."""
        packet = self._event(track, now_ns, _Event.TYPE_COUNTER)
        packet.track_event.double_counter_value = value
        self._builder.write_packet(packet)

    def _describe(self, uuid: int, parent: int = 0, name: str = "", rank: int = 0) -> Any:
        """A packet that describes a track; None where it was described before."""
        if uuid in self._tracks:
            return None
        self._tracks.add(uuid)
        packet = self._packet()
        packet.track_descriptor.uuid = uuid
        if parent:
            packet.track_descriptor.parent_uuid = parent
            packet.track_descriptor.name = name
            packet.track_descriptor.sibling_order_rank = rank
        return packet

    def _event(self, track: int, now_ns: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = now_ns
        packet.timestamp_clock_id = REALTIME
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet


def _annotate(annotation: Any, value: str | int | float | bool) -> None:
    match value:
        case bool():
            annotation.bool_value = value
        case int():
            annotation.int_value = value
        case float():
            annotation.double_value = value
        case str():
            annotation.string_value = value
