"""Weights in shared memory: a segment a policy, written once, read by every engine of the host where it lies."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import Place, ShmPlace, WeightManifest
from beamline.weights.passing import Handed, Hold, PassingServer
from beamline.weights.pool import Pool
from beamline.weights.segment import SharedSegment, map_sealed, write
from beamline.weights.tensors import Shard
from beamline.weights.transport import Range

MAPPED_PER_OWNER = 2
"""Segments that a reader keeps mapped of those that it has let go: an owner fills two by turns."""


class ShmOwner:
    """Implements `Owner`: exports policies and hands them to readers. Close it at the end.

    Args:
        socket: where readers ask for them; its folder is made with mode 0700 if missing.

    Raises WeightError: the socket cannot be made there.
    """

    def __init__(self, socket: Path) -> None:
        self._pool = Pool(SharedSegment)
        self._server = PassingServer(socket, self._hold)
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

    def _hold(self, policy_version: int) -> Hold:
        segment = self._pool.hold(policy_version)
        return Hold(segment.num_bytes, lambda: self._pool.release(segment), segment.read_descriptor)


class ShmReader:
    """Implements `Reader`."""

    def __init__(self) -> None:
        self._mapped: dict[str, dict[int, memoryview]] = {}
        """By owner's socket and inode, the last used at the end: mapping a segment takes as long as reading it."""

    def attach(self, place: Place, policy_version: int) -> "ShmAttached":
        assert isinstance(place, ShmPlace)
        handed = Handed(Path(place.socket), policy_version)
        try:
            return ShmAttached(handed, self._map(place, handed.descriptor))
        except WeightError as error:
            handed.close()
            raise WeightError(f"policy {policy_version}: {error}") from error
        finally:
            os.close(handed.descriptor)

    def close(self) -> None:
        self._mapped = {}

    def _map(self, place: ShmPlace, descriptor: int) -> memoryview:
        inode = os.fstat(descriptor).st_ino
        known = self._mapped.get(place.socket, {})
        mapped = known.pop(inode, None)
        if mapped is None or mapped.nbytes != place.num_bytes:
            mapped = map_sealed(descriptor, place.num_bytes)
        newest = [*known.items(), (inode, mapped)][-MAPPED_PER_OWNER:]
        self._mapped[place.socket] = dict(newest)
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
