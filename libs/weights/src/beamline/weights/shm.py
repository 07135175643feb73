"""Weights in shared memory: a segment a policy version, written once, read by every engine of the host where it lies.

The owner fills one segment while engines read another, and fills that again when it is neither the newest nor
read by anybody: two in a run that goes well, one more for as long as an engine stays behind.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import Place, ShmPlace, WeightManifest
from beamline.weights.passing import Handed, PassingServer
from beamline.weights.segment import SharedSegment, map_sealed, write
from beamline.weights.tensors import Shard
from beamline.weights.transport import Range


class ShmOwner:
    """Implements `Owner`: exports policies and hands them to readers. Close it at the end.

    Args:
        socket: where readers ask for them; its folder is made with mode 0700 if missing.

    Raises WeightError: the socket cannot be made there.
    """

    def __init__(self, socket: Path) -> None:
        socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pool = _Pool()
        self._server = PassingServer(socket, self._pool.hold)
        self._described: WeightManifest | None = None

    def export(self, policy_version: int, shards: Iterable[Shard]) -> None:
        segment = self._pool.take()
        try:
            entries = write(segment, shards)
            segment.seal()
        except BaseException:
            self._pool.drop(segment)
            raise
        place = ShmPlace(num_bytes=segment.num_bytes, socket=str(self._server.path))
        self._described = WeightManifest(policy_version=policy_version, places=[place], tensors=entries)
        self._pool.publish(policy_version, segment)

    def describe(self) -> WeightManifest:
        assert self._described is not None, "nothing was exported"
        return self._described

    @property
    def num_readers(self) -> int:
        """Readers that have not let go of what they were handed."""
        return self._pool.num_readers

    def close(self) -> None:
        """Hang up on all readers and let go of the memory."""
        self._server.close()
        self._pool.close()


@dataclass
class _Held:
    """One reader's hold on a segment, for the server."""

    pool: "_Pool"
    segment: SharedSegment

    @property
    def descriptor(self) -> int:
        return self.segment.read_descriptor

    @property
    def num_bytes(self) -> int:
        return self.segment.num_bytes

    def release(self) -> None:
        self.pool.release(self.segment)


class _Pool:
    """Segments, the policies in them, and who reads which. Its methods are called from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[SharedSegment, int] = {}
        """Of every segment there is, how many read it."""
        self._versions: dict[int, SharedSegment] = {}

    @property
    def num_readers(self) -> int:
        with self._lock:
            return sum(self._readers.values())

    def take(self) -> SharedSegment:
        """One to write into: that of the oldest policy but the newest, if nobody reads it."""
        with self._lock:
            newest = self._versions[max(self._versions)] if self._versions else None
            unread = [s for s, readers in self._readers.items() if not readers and s is not newest]
            if not unread:
                return self._add()
            self._versions = {v: segment for v, segment in self._versions.items() if segment is not unread[0]}
        unread[0].restart()
        return unread[0]

    def publish(self, policy_version: int, segment: SharedSegment) -> None:
        """Let readers have it."""
        with self._lock:
            self._versions[policy_version] = segment

    def drop(self, segment: SharedSegment) -> None:
        """It was not filled to its end."""
        with self._lock:
            del self._readers[segment]
        segment.close()

    def hold(self, policy_version: int) -> _Held:
        """Raises WeightError for a policy that is not kept."""
        with self._lock:
            segment = self._versions.get(policy_version)
            if segment is None:
                kept = ", ".join(map(str, sorted(self._versions))) or "none"
                raise WeightError(f"the policies that are kept are {kept}")
            self._readers[segment] += 1
            return _Held(self, segment)

    def release(self, segment: SharedSegment) -> None:
        with self._lock:
            if segment in self._readers:
                self._readers[segment] -= 1

    def close(self) -> None:
        with self._lock:
            for segment in self._readers:
                segment.close()
            self._readers, self._versions = {}, {}

    def _add(self) -> SharedSegment:
        segment = SharedSegment()
        self._readers[segment] = 0
        return segment


class ShmReader:
    """Implements `Reader`."""

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}
        """Segments by inode: an owner uses few, and mapping one takes as long as reading it."""

    def attach(self, place: Place, policy_version: int) -> "ShmAttached":
        assert isinstance(place, ShmPlace)
        handed = Handed(Path(place.socket), policy_version)
        try:
            return ShmAttached(handed, self._map(handed.descriptor, place.num_bytes))
        except WeightError as error:
            handed.close()
            raise WeightError(f"policy {policy_version}: {error}") from error
        finally:
            os.close(handed.descriptor)

    def close(self) -> None:
        self._mapped = {}

    def _map(self, descriptor: int, num_bytes: int) -> memoryview:
        inode = os.fstat(descriptor).st_ino
        mapped = self._mapped.get(inode)
        if mapped is None or mapped.nbytes != num_bytes:
            mapped = self._mapped[inode] = map_sealed(descriptor, num_bytes)
        return mapped


class ShmAttached:
    """Implements `Attached`: the owner's memory itself, read-only. Nothing is copied."""

    def __init__(self, handed: Handed, content: memoryview) -> None:
        self._handed = handed
        self._content = content

    def fill(self, ranges: Sequence[Range]) -> None:
        """It is all there."""

    def content(self, offset: int, num_bytes: int) -> memoryview:
        return self._content[offset : offset + num_bytes]

    def fence(self) -> None:
        self._handed.close()
