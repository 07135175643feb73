"""How fast weights cross from a trainer's process to an engine's, beside a memcpy of the same bytes.

    bin/python trainer -m benchmarks.weights [--transports=shm,nixl,checkpoint] [--sizes=4 MB,1 GiB] [--out=FILE]

Two processes; this one is the engine. Both sides of every ratio are taken in the same process, in turn, first and
second by turns, and medians count. Export: the owner fills memory that an earlier policy has filled before, checksums
included; beside it np.copyto of the same arrays to memory that has been written before. Fetch: the reader attaches and
fills memory that it has filled before (with shared memory and files there is nothing to fill); beside it as many bytes
by np.copyto. Verify: the checksums of all that came.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import xxhash
from benchmarks.weight_figures import FETCH, SIZES, Moved, line
from benchmarks.weight_owner import COPY_BYTES, Exported, copy, pages

from beamline.weights.choice import free_memory_bytes, reader_of
from beamline.weights.manifest import WeightManifest
from beamline.weights.transport import Reader

TRANSPORTS = ("shm", "nixl", "checkpoint")
NUM_WARM_UP = 2
"""Policies until both of the owner's segments have been filled once."""
NUM_ROUNDS = {"4 MB": 9, "256 MB": 7, "1 GiB": 5, "4 GB": 2}
COPIES = {"shm": 3, "nixl": 4, "checkpoint": 3}
"""The model, two policies, and what a reader fetches; a checkpoint's lie on disk, and in its cache."""
DEADLINE_S = 120.0
"""For one policy."""


def main() -> int:
    """Measure, print a line for each transport and size as it is there, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    moved: list[Moved] = []
    for transport in arguments.transports.split(","):
        for size in arguments.sizes.split(","):
            if why := lacking(transport, size):
                print(f"{transport:<11}{size:>7}  left out: {why}", flush=True)
                continue
            moved.append(move(transport, size))
            print(line(moved[-1]), flush=True)
    print("cuda_ipc: left out: both sides must have their parameters on one GPU; see tests marked gpu")
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.encode(moved))
    return 0


def lacking(transport: str, size: str) -> str | None:
    """What this machine has too little of."""
    needed, free = COPIES[transport] * SIZES[size] + (1 << 30), free_memory_bytes()
    if needed > free:
        return f"{needed / 2**30:.1f} GiB of memory are needed, {free / 2**30:.1f} GiB are free"
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    if transport == "checkpoint" and 3 * SIZES[size] > disk:
        return f"{3 * SIZES[size] / 2**30:.1f} GiB of disk are needed, {disk / 2**30:.1f} GiB are free"
    return None


def move(transport: str, size: str) -> Moved:
    """All rounds of a transport at a size."""
    num_bytes, rounds = SIZES[size], []
    source = pages(min(num_bytes, COPY_BYTES))
    target = pages(len(source))
    source[:], target[:] = 1, 2
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "benchmarks.weight_owner", transport, str(num_bytes), directory]
        owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        reader: Reader | None = None
        try:
            for number in range(NUM_WARM_UP + NUM_ROUNDS[size]):
                exported = ask(owner)
                manifest = WeightManifest.decode(exported.manifest)
                reader = reader or reader_of(manifest.places[0])
                before = [memcpy(source, target, num_bytes)] if number % 2 else []
                fetch_s, verify_s = fetch(reader, manifest)
                copied = before or [memcpy(source, target, num_bytes)]
                rounds.append((exported, fetch_s, verify_s, copied[0]))
            owner.communicate(timeout=DEADLINE_S)
        finally:
            owner.kill()
            owner.wait()
            if reader is not None:
                reader.close()
    return summary(transport, size, rounds[NUM_WARM_UP:])


def ask(owner: subprocess.Popen[str]) -> Exported:
    """The next policy. Raises RuntimeError: the owner has ended, or was killed at the deadline."""
    assert owner.stdin is not None and owner.stdout is not None
    late = threading.Timer(DEADLINE_S, owner.kill)
    late.start()
    try:
        owner.stdin.write("\n")
        owner.stdin.flush()
        for said in owner.stdout:
            if said.startswith("exported "):
                return msgspec.json.decode(said.removeprefix("exported "), type=Exported)
    finally:
        late.cancel()
    raise RuntimeError(f"the owner of the weights ended, or exported nothing within {DEADLINE_S:g} s")


def fetch(reader: Reader, manifest: WeightManifest) -> tuple[float, float]:
    """Seconds to have all bytes of a policy readable, and to check them. Raises RuntimeError: they are others."""
    place = manifest.places[0]
    pieces = [
        (piece.offset, entry.num_bytes(piece), piece.checksum) for entry in manifest.tensors for piece in entry.pieces
    ]
    first = min(offset for offset, _, _ in pieces)
    begin = time.perf_counter()
    attached = reader.attach(place, manifest.policy_version)
    attached.fill([(first, max(offset + size for offset, size, _ in pieces) - first)])
    filled = time.perf_counter()
    for offset, size, checksum in pieces:
        if xxhash.xxh3_64_hexdigest(attached.content(offset, size)) != checksum:
            raise RuntimeError(f"policy {manifest.policy_version}: what came is not what was exported")
    verified = time.perf_counter()
    attached.fence()
    return filled - begin, verified - filled


def memcpy(source: np.ndarray, target: np.ndarray, num_bytes: int) -> float:
    """Seconds for so many bytes."""
    repeated = [source] * (num_bytes // len(source))
    return copy([*repeated, source[: num_bytes % len(source)]], target)


def summary(transport: str, size: str, rounds: list[tuple[Exported, float, float, float]]) -> Moved:
    """Medians; of the memory the most."""
    exports = [exported for exported, *_ in rounds]
    return Moved(
        transport=transport,
        size=size,
        export_s=median(exported.export_s for exported in exports),
        export_memcpy_s=median(exported.memcpy_s for exported in exports),
        export_vs_memcpy=median(exported.memcpy_s / exported.export_s for exported in exports),
        fetch_s=median(fetch_s for _, fetch_s, _, _ in rounds),
        verify_s=median(verify_s for _, _, verify_s, _ in rounds),
        fetch_memcpy_s=median(copied for *_, copied in rounds),
        fetch_vs_memcpy=median(copied / fetch_s for _, fetch_s, _, copied in rounds) if FETCH[transport] else None,
        owner_base_bytes=exports[0].base_bytes,
        owner_peak_bytes=max(exported.peak_bytes for exported in exports),
    )


if __name__ == "__main__":
    sys.exit(main())
