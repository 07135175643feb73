"""The trainer's end of `benchmarks.weights`: a process that holds a model of a given size and exports it when told.

    python -m benchmarks.weight_owner TRANSPORT NUM_BYTES DIRECTORY

For every line that it reads it exports the next policy and copies the same arrays to memory of its own, in turn first
and second, and writes a line of JSON: `Exported`. It ends when its input closes.
"""

import mmap
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from beamline.weights.choice import owner_of
from beamline.weights.manifest import merge
from beamline.weights.tensors import Shard

TENSOR_BYTES = 16 << 20
"""About what a layer's matrix has."""
COPY_BYTES = 256 << 20
"""The arrays are copied to memory of this size, again and again: a second copy of 4 GB would not fit everywhere."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """One policy."""

    manifest: bytes
    export_s: float
    """Filling the transport's memory, checksums included."""
    memcpy_s: float
    """Copying the same arrays to memory that has been written before."""
    peak_bytes: int
    """VmHWM: the most that was ever resident in this process."""
    base_bytes: int
    """Resident before the first export: the model, its copy's target, the interpreter."""


def main() -> int:
    transport, num_bytes, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    arrays = make_model(num_bytes)
    target = pages(min(num_bytes, COPY_BYTES))
    target[:] = 1
    owner, base = owner_of(transport, directory, 0), resident("VmRSS")
    for version, _ in enumerate(sys.stdin):
        arrays[0][:8] = version
        first = version % 2
        copied = [copy(arrays, target)] if first else []
        begin = time.perf_counter()
        owner.export(version, (Shard.whole(f"w{n}", "uint8", array) for n, array in enumerate(arrays)))
        export_s = time.perf_counter() - begin
        copied = copied or [copy(arrays, target)]
        exported = Exported(
            manifest=merge([owner.describe()]).encode(),
            export_s=export_s,
            memcpy_s=copied[0],
            peak_bytes=resident("VmHWM"),
            base_bytes=base,
        )
        print("exported", msgspec.json.encode(exported).decode(), flush=True)
    owner.close()
    return 0


def make_model(num_bytes: int) -> list[np.ndarray]:
    """Arrays of `TENSOR_BYTES` and less, of random bytes, in memory of one kind with what they are copied to."""
    memory = pages(num_bytes)
    noise = np.random.default_rng(0).integers(0, 256, min(num_bytes, TENSOR_BYTES), np.uint8)
    arrays = [memory[start : start + TENSOR_BYTES] for start in range(0, num_bytes, TENSOR_BYTES)]
    for array in arrays:
        array[:] = noise[: len(array)]
    return arrays


def pages(num_bytes: int) -> np.ndarray:
    """Private memory in large pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def copy(arrays: list[np.ndarray], target: np.ndarray) -> float:
    """Seconds that a memcpy of all of them takes."""
    begin, room = time.perf_counter(), len(target)
    offset = 0
    for array in arrays:
        if offset + len(array) > room:
            offset = 0
        np.copyto(target[offset : offset + len(array)], array)
        offset += len(array)
    return time.perf_counter() - begin


def resident(field: str) -> int:
    """Bytes, as the system counts this process's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
