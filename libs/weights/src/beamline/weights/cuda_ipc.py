"""Weights in the memory of a GPU that trainer and engine share: the engine reads the trainer's copy where it lies.

The driver does not say who has a handle open. So a reader also holds a connection to the owner for as long as it reads,
and lets go by dying, as with shared memory.
"""

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from beamline.protocol.errors import WeightError
from beamline.weights.cuda import DeviceMemory, Gpu, require_gpu
from beamline.weights.manifest import CudaChunk, CudaPlace, Entries, Place, WeightManifest
from beamline.weights.passing import Handed, Hold, PassingServer
from beamline.weights.pool import Pool
from beamline.weights.strided import as_rows
from beamline.weights.tensors import Shard
from beamline.weights.transport import Range

CHUNK_BYTES = 256 << 20
"""Taken from the GPU at a time. A larger shard has a chunk of its own."""

GRANULE_BYTES = 2 << 20
"""Chunks are multiples of it: two that shared one of the driver's pages would be opened together."""

ALIGNMENT_BYTES = 256


class CudaOwner:
    """Implements `Owner`. Shards may lie on the GPU or in main memory. Close it at the end.

    Args:
        socket: where readers say what they read; its folder is made with mode 0700 if missing.
        device: index of the GPU among those that this process sees.

    Raises:
        ConfigError: the machine has no such GPU, or no driver for it.
        WeightError: the socket cannot be made there.
    """

    def __init__(self, socket: Path, device: int = 0) -> None:
        self._gpu = Gpu(device)
        self._pool = Pool(lambda: CudaSegment(self._gpu))
        self._server = PassingServer(socket, self._hold)
        self._described: WeightManifest | None = None

    def export(self, policy_version: int, shards: Iterable[Shard]) -> None:
        segment, entries = self._pool.take(), Entries()
        try:
            for shard in shards:
                entries.add(shard, *segment.append(shard))
            self._gpu.record(segment.event)
        except BaseException:
            self._pool.drop(segment)
            raise
        place = CudaPlace(
            num_bytes=segment.num_bytes,
            socket=str(self._server.path),
            device=self._gpu.uuid,
            chunks=segment.chunks,
            event=segment.event_handle,
        )
        self._described = WeightManifest(policy_version=policy_version, places=[place], tensors=entries.tensors)
        self._pool.publish(policy_version, segment)

    def describe(self) -> WeightManifest:
        assert self._described is not None, "nothing was exported"
        return self._described

    @property
    def num_readers(self) -> int:
        """Readers that have not let go of what they opened."""
        return self._pool.num_readers

    def close(self) -> None:
        """Hang up on all readers and let go of the memory: what they have open must not be read any more."""
        self._server.close()
        self._pool.close()
        self._gpu.close()

    def _hold(self, policy_version: int) -> Hold:
        segment = self._pool.hold(policy_version)
        return Hold(segment.num_bytes, lambda: self._pool.release(segment))


class CudaSegment:
    """Memory for one policy, filled front to back: every shard lies inside one chunk."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.chunks: list[CudaChunk] = []
        self._addresses: list[int] = []
        self.event, self.event_handle = gpu.new_event()
        self.restart()

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    def restart(self) -> None:
        self._number, self._filled = 0, 0

    def append(self, shard: Shard) -> tuple[int, str]:
        """Copy a shard; returns its offset, and the xxh3-64 of its bytes as 16 hex digits.

        Raises WeightError: the GPU's memory is full, or does not fit another policy's shapes.
        """
        num_bytes = shard.values.itemsize * int(np.prod(shard.values.shape, dtype=np.int64))
        begin = self._room(num_bytes)
        address = self._addresses[self._number] + begin
        if isinstance(shard.values, np.ndarray):
            self._gpu.copy_from_host(address, np.ascontiguousarray(shard.values))
        elif num_bytes:
            self._gpu.synchronize()  # its values may have been made on any stream
            interface = shard.values.__cuda_array_interface__
            rows = as_rows(interface["shape"], interface.get("strides"), shard.values.itemsize)
            if rows is None:
                raise WeightError(f"tensor {shard.name}: its strides are {interface['strides']}: make it contiguous")
            self._gpu.copy_rows(address, interface["data"][0], *rows)
        self._filled = begin + num_bytes
        checksum = xxhash.xxh3_64()
        for part in DeviceMemory(self._gpu, address, num_bytes).host_parts():
            checksum.update(part)
        return sum(chunk.num_bytes for chunk in self.chunks[: self._number]) + begin, checksum.hexdigest()

    def close(self) -> None:
        for address, chunk in zip(self._addresses, self.chunks, strict=True):
            self._gpu.free(address, chunk.handle)
        self._gpu.destroy(self.event, self.event_handle)
        self.chunks, self._addresses = [], []

    def _room(self, num_bytes: int) -> int:
        """Go to a chunk with so much room; returns where it begins there."""
        begin = -(-self._filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._number < len(self.chunks) and begin + num_bytes > self.chunks[self._number].num_bytes:
            self._number, begin = self._number + 1, 0
        if self._number == len(self.chunks):
            size = max(CHUNK_BYTES, -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES)
            address, handle = self._gpu.allocate(size)
            self.chunks.append(CudaChunk(handle, size))
            self._addresses.append(address)
        if begin + num_bytes > self.chunks[self._number].num_bytes:
            raise WeightError(
                f"a shard of {num_bytes} bytes does not fit the chunk of the policy before: "
                "a policy's tensors must keep their shapes"
            )
        return begin


class CudaReader:
    """Implements `Reader`. Raises ConfigError: the machine has no GPU, or no driver for it."""

    def __init__(self) -> None:
        self._gpus: dict[str, Gpu] = {}
        require_gpu()

    def attach(self, place: Place, policy_version: int) -> "CudaAttached":
        assert isinstance(place, CudaPlace)
        if place.device not in self._gpus:
            self._gpus[place.device] = Gpu.find(place.device)
        handed = Handed(Path(place.socket), policy_version, has_descriptor=False)
        attached = CudaAttached(self._gpus[place.device], handed, place)
        try:
            attached.open()
        except WeightError as error:
            attached.fence()
            raise WeightError(f"policy {policy_version}: {error}") from error
        return attached

    def close(self) -> None:
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus = {}


class CudaAttached:
    """Implements `Attached`: the owner's memory itself. Nothing is copied."""

    def __init__(self, gpu: Gpu, handed: Handed, place: CudaPlace) -> None:
        self._gpu = gpu
        self._handed = handed
        self._place = place
        self._addresses: list[int] = []
        self._begins = list(accumulate((chunk.num_bytes for chunk in place.chunks), initial=0))

    def open(self) -> None:
        """Raises WeightError: the owner is gone."""
        for chunk in self._place.chunks:
            self._addresses.append(self._gpu.open(chunk.handle))
        self._gpu.wait_for(self._place.event)

    def fill(self, ranges: Sequence[Range]) -> None:
        """It is all there."""

    def content(self, offset: int, num_bytes: int) -> DeviceMemory:
        number = bisect.bisect_right(self._begins, offset) - 1
        if number >= len(self._addresses) or offset + num_bytes > self._begins[number + 1]:
            raise WeightError(f"bytes {offset} to {offset + num_bytes} do not lie in one chunk of GPU memory")
        return DeviceMemory(self._gpu, self._addresses[number] + offset - self._begins[number], num_bytes)

    def fence(self) -> None:
        """Once the GPU has done what it was given with these bytes."""
        if self._addresses:
            self._gpu.synchronize()
        for address in self._addresses:
            self._gpu.close_opened(address)
        self._addresses = []
        self._handed.close()
