"""Prints the bytes of a rank's parameters, and by how much a first and a second export of them raise the peak memory of
the process. Parameters are such as a layer of Megatron's has: query, key and value in rows of each other, and experts.
"""

import tempfile
from pathlib import Path

import torch

from beamline.trainer.shards import Slot, shards_of
from beamline.weights.shm import ShmOwner

HIDDEN, NUM_ROWS, NUM_LAYERS = 1024, 4096, 16


def slots(layer: int) -> list[Slot]:
    parameter = torch.full((NUM_ROWS, HIDDEN), float(layer))
    half = NUM_ROWS // 2
    common = {"shape": (half, HIDDEN), "start": (0, 0), "parameter": parameter, "dim": layer % 2}
    return [
        Slot(name=f"{layer}.gate", rows=slice(0, half), **common),
        Slot(name=f"{layer}.up", rows=slice(half, NUM_ROWS), **common),
    ]


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    units = [slots(layer) for layer in range(NUM_LAYERS)]
    with tempfile.TemporaryDirectory() as folder:
        owner = ShmOwner(Path(folder) / "rank-0.sock")
        peaks = [peak_bytes()]
        for version in range(2):
            owner.export(version, shards_of(units, cuts=2))
            peaks.append(peak_bytes())
        num_bytes = sum(NUM_ROWS * HIDDEN * 4 for _ in units)
        print(num_bytes, peaks[1] - peaks[0], peaks[2] - peaks[1])
        owner.close()


if __name__ == "__main__":
    main()
