"""Memory for one policy's weights: written by its owner alone, its size fixed before anyone reads it.

A memfd has no name: it is gone with the last process that has it, however that one ended.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import Entries, TensorEntry
from beamline.weights.tensors import Shard, on_host

RESERVED_BYTES = 4 * 1024**4
"""Address space set aside for a segment whose size is not known yet; memory is taken as it is filled."""

ALIGNMENT_BYTES = 256
"""Arrays start at multiples of it."""

CHUNK_BYTES = 1 << 20
"""Copied and hashed in one go, while it is in the processor's cache."""

MIN_BESIDE_BYTES = 4 << 20
"""From here on a second thread saves more than it costs."""

_MAP_NORESERVE = 0x4000
"""Not in `mmap` of this Python."""

_F_SEAL_FUTURE_WRITE = 0x0010
"""Nobody may map or write the memory any more but through a mapping made before (Linux 5.1; not in `fcntl`)."""


class Segment:
    """Memory that its owner fills, front to back, and fills again once nobody reads it.

    Args:
        content: the memory, of `RESERVED_BYTES`.
    """

    def __init__(self, content: np.ndarray) -> None:
        self._bytes = content
        self._filled = 0
        self._size: int | None = None

    @property
    def num_bytes(self) -> int:
        """What has been filled since `restart`."""
        return self._filled

    def take(self, num_bytes: int) -> int:
        """Room behind what is there; returns its offset. Raises WeightError: memory is full, or the size is fixed."""
        offset = -(-self._filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._make_room(offset, num_bytes)
        self._filled = offset + num_bytes
        return offset

    def fill(self, offset: int, values: np.ndarray) -> str:
        """Copy an array, without strides, to room that was taken; two threads may fill two rooms.

        Returns its checksum, xxh3-64 as 16 hex digits, taken of each part while it is in the processor's cache.
        """
        rows = values.reshape(-1) if values.flags.c_contiguous or not values.ndim else values
        target = self._bytes[offset : offset + values.nbytes].view(values.dtype).reshape(rows.shape)
        row_bytes = values.nbytes // max(1, len(rows))
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        checksum = xxhash.xxh3_64()
        for first in range(0, len(rows) if row_bytes else 0, step):
            last = min(first + step, len(rows))
            np.copyto(target[first:last], rows[first:last])
            checksum.update(self._bytes[offset + first * row_bytes : offset + last * row_bytes])
        return checksum.hexdigest()

    def seal(self) -> None:
        """Fix the size at what is filled. Raises WeightError: it was fixed before, at another."""
        if self._size is None:
            self._size = self._filled
        elif self._size != self._filled:
            raise self._does_not_fit(self._filled)

    def restart(self) -> None:
        """Fill from the front again."""
        self._filled = 0

    def _make_room(self, offset: int, num_bytes: int) -> None:
        if self._size is not None and offset + num_bytes > self._size:
            raise self._does_not_fit(offset + num_bytes)

    def _does_not_fit(self, num_bytes: int) -> WeightError:
        return WeightError(
            f"weights of {num_bytes} bytes or more do not fit the {self._size} of the policy before: "
            "a policy's tensors must keep their shapes"
        )


class HeapSegment(Segment):
    """Memory of one process, in pages as large as the system has: a transport reads those twice as fast."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, RESERVED_BYTES, flags)
        memory.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(np.frombuffer(memory, np.uint8))

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._bytes.ctypes.data

    def close(self) -> None:
        """Let go of the memory."""
        self._bytes = np.empty(0, np.uint8)


class SharedSegment(Segment):
    """Memory that other processes of the host can map: no process can resize it, and no other one write to it.

    Raises WeightError: the system gives no memory.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("beamline-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, RESERVED_BYTES)
            super().__init__(np.frombuffer(mmap.mmap(self.descriptor, RESERVED_BYTES), np.uint8))
            os.ftruncate(self.descriptor, 0)  # the mapping stays, and the memory grows as it is filled
        except OSError as error:
            os.close(self.descriptor)
            raise WeightError(f"cannot set aside shared memory for weights: {error.strerror}") from error
        self.read_descriptor = -1
        """What readers are handed; there once it is sealed."""

    def seal(self) -> None:
        is_new = self._size is None
        super().seal()
        if is_new:
            os.ftruncate(self.descriptor, self._filled)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.read_descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the memory; readers that have it keep it."""
        for descriptor in (self.descriptor, self.read_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self.read_descriptor = -1
        self._bytes = np.empty(0, np.uint8)

    def _make_room(self, offset: int, num_bytes: int) -> None:
        super()._make_room(offset, num_bytes)
        if self._size is not None:
            return
        try:
            # Without it a full memory would show as a signal that ends the process, in the middle of a copy.
            os.posix_fallocate(self.descriptor, offset, max(num_bytes, 1))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
            what = "shared memory is full" if full else f"cannot take shared memory ({error.strerror})"
            raise WeightError(
                f"{what}: {num_bytes} bytes more are needed after {offset}; weights in shared memory take twice the "
                "size of the model"
            ) from error


def write(segment: Segment, shards: Iterable[Shard]) -> list[TensorEntry]:
    """Append shards as they come; returns what was written, each tensor once. Raises WeightError as `take` does.

    Large shards are shared out to this thread and another one; no more than those under way are held.
    """
    entries = Entries()
    under_way: deque[tuple[Shard, int, Future[str]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="weights-copy") as helper:
        beside: Future[str] | None = None
        for shard in shards:
            values = on_host(shard)
            offset = segment.take(values.nbytes)
            if values.nbytes >= MIN_BESIDE_BYTES and (beside is None or beside.done()):
                filling = beside = helper.submit(segment.fill, offset, values)
            else:
                filling = Future[str]()
                filling.set_result(segment.fill(offset, values))
            under_way.append((shard, offset, filling))
            while under_way and under_way[0][2].done():
                _add(entries, *under_way.popleft())
        for written in under_way:
            _add(entries, *written)
    return entries.tensors


def _add(entries: Entries, shard: Shard, offset: int, filling: "Future[str]") -> None:
    entries.add(shard, offset, filling.result())


def map_sealed(descriptor: int, num_bytes: int) -> memoryview:
    """Another process's segment, read-only. The descriptor may be closed afterwards.

    Raises WeightError: the memory has another size, or could still be cut short under its reader.
    """
    size = os.fstat(descriptor).st_size
    if size != num_bytes:
        raise WeightError(f"the weights' segment has {size} bytes, expected {num_bytes}")
    if num_bytes == 0:
        return memoryview(b"")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WeightError(f"the weights' segment is not sealed memory ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WeightError("the weights' segment is not sealed: its owner could cut it short")
    return memoryview(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
