"""A step of DiskAdamW beside what the disk and the processor need for their shares of it alone.

    bin/python trainer -m benchmarks.disk_adam [--largest] [--bucket-mib=64] [--rounds=7] [--folder=DIR] [--out=FILE]

Every size is a process of its own. In it torch's fused AdamW steps in memory first and is dropped; then steps of
DiskAdamW take turns with passes that only read the state's file and write the other slot's, with as many bytes, the
same blocks and the same two threads. Parameters and gradients are float32 on the CPU, gradients are clipped.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import msgspec
import torch
from benchmarks.disk_figures import LARGEST, SIZES, DiskStep, line

from beamline.diskoptim.buffers import Buffer
from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.errors import free_bytes
from beamline.diskoptim.files import opened
from beamline.diskoptim.header import Header, state_path
from beamline.diskoptim.layout import bytes_needed
from beamline.weights.choice import free_memory_bytes

NUM_TENSORS = 24
"""Of different lengths; some lie in one bucket, some in several."""
MAX_NORM = 1.0
DEADLINE_S = 900.0
"""For one size."""
MEMORY_A_PARAM = 18
"""Bytes: weights, gradients and moments, and an eighth for the rest."""


def main() -> int:
    """Measure, print a line for each size as it is there, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", type=int)
    arguments = parser.parse_args()
    if arguments.size:
        sys.stdout.buffer.write(msgspec.json.encode(measure(arguments)))
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    steps: list[DiskStep] = []
    for size in (*SIZES, LARGEST) if arguments.largest else SIZES:
        if why := lacking(size, arguments.folder):
            print(f"{size // 10**6} M: left out: {why}", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.disk_adam", *sys.argv[1:], f"--size={size}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True)
        steps.append(msgspec.json.decode(done.stdout, type=DiskStep))
        print(f"{size // 10**6} M: {steps[-1].vs_limit:.2f} x; {line(steps[-1])}", flush=True)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.encode(steps))
    return 0


def lacking(size: int, folder: Path) -> str:
    """Why a size cannot be measured here; "" where it can."""
    if (free := free_bytes(folder) or 0) < bytes_needed(size):
        return f"{bytes_needed(size)} bytes of disk are needed, {free} are free"
    if (free := free_memory_bytes()) < (needed := MEMORY_A_PARAM * size):
        return f"{needed} bytes of memory are needed, {free} are free"
    return ""


def measure(arguments: argparse.Namespace) -> DiskStep:
    """One size, in this process."""
    torch.set_num_threads(arguments.threads)
    parameters = make_parameters(arguments.size)
    memory_s = step_in_memory(parameters, arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident size is counted from here on
        optimizer = DiskAdamW(
            parameters, folder, lr=1e-4, max_grad_norm=MAX_NORM, bucket_bytes=arguments.bucket_mib * 2**20
        )
        optimizer.step()
        rounds, peaks = [], []
        for number in range(arguments.rounds):
            sides = (optimizer.step, lambda: move_alone(optimizer))
            times = {side: seconds(sides[side]) for side in ((0, 1) if number % 2 else (1, 0))}
            rounds.append((times[0], times[1]))
            peaks.append(resident_bytes("VmHWM") - before)
        optimizer.close()
    return DiskStep(
        num_params=arguments.size,
        bucket_bytes=arguments.bucket_mib * 2**20,
        step_s=median(step for step, _ in rounds),
        disk_s=median(disk for _, disk in rounds),
        memory_s=memory_s,
        vs_limit=median(step / max(disk, memory_s) for step, disk in rounds),
        first_peak_bytes=peaks[0],
        peak_bytes=peaks[-1],
    )


def make_parameters(size: int) -> list[torch.nn.Parameter]:
    """Lengths grow from tensor to tensor; with gradients."""
    generator = torch.Generator().manual_seed(0)
    shares = list(range(1, NUM_TENSORS + 1))
    lengths = [size * share // sum(shares) for share in shares]
    lengths[-1] += size - sum(lengths)
    made = [torch.nn.Parameter(torch.randn(length, generator=generator)) for length in lengths]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def step_in_memory(parameters: list[torch.nn.Parameter], num_rounds: int) -> float:
    """Of torch's optimizer: its moments are dropped with it. Clipping scales the gradients in place, by 1 from the
    second round on."""
    fused = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        fused.step()

    step()
    return median(seconds(step) for _ in range(num_rounds))


def move_alone(optimizer: DiskAdamW) -> None:
    """Read the present generation's file and write the other slot's, which the next step writes again."""
    generations = optimizer._generations
    assert generations.present is not None
    header, buffers = generations.present.header, optimizer._buffers
    with (
        opened(generations.present.path, os.O_RDONLY | os.O_DIRECT) as source,
        opened(state_path(optimizer.directory, generations.spare), os.O_WRONLY | os.O_DIRECT) as target,
        ThreadPoolExecutor(2) as threads,
    ):
        moves = [threads.submit(read_all, source, header, buffers[0])]
        moves.append(threads.submit(write_all, target, header, buffers[1]))
        for move in moves:
            move.result()


def read_all(file: int, header: Header, buffer: Buffer) -> None:
    for bucket in header.buckets:
        buffer.read(file, bucket)


def write_all(file: int, header: Header, buffer: Buffer) -> None:
    for bucket in header.buckets:
        buffer.write(file, bucket)
    os.fdatasync(file)


def seconds(action: object) -> float:
    """How long a call takes."""
    assert callable(action)
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(text.split()[1]) * 1024 for text in lines if text.startswith(key))


if __name__ == "__main__":
    sys.exit(main())
