"""Training that is killed again and again, and goes on each time where the disk says.

    python killed_training.py FOLDER SEED NUM_KILLS

Every other child kills itself in a system call that random numbers choose, in the middle of a write where it is one;
the others are killed by this process at a random moment. Only deaths in mid-step count, those that leave a single
header. After each the state is opened and hashed, and compared with a training that was never killed. Prints what was
found as JSON. Children are forked, which spares them the imports; so this process starts no threads that stay.
"""

import json
import os
import random
import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from beamline.diskoptim.directory import SLOTS
from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.header import header_path
from beamline.diskoptim.state_file import StateFile

SHAPES = {"embedding": (500, 48), "bias": (7,), "scale": (), "head": (48, 500)}
NUM_STEPS = 40
"""Until a training is complete; the next one begins in a new directory."""
CALLS_A_STEP = 34
CALLS = ("preadv", "pwritev", "fdatasync", "fsync", "replace", "unlink", "ftruncate", "posix_fallocate")
MAX_DEATHS = 400
DEADLINE_S = 20.0

Sums = list[str]


def optimizer_in(directory: Path) -> tuple[dict[str, torch.nn.Parameter], DiskAdamW]:
    generator = torch.Generator().manual_seed(2)
    model = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    optimizer = DiskAdamW(model.items(), directory, lr=1e-2, max_grad_norm=1.0, bucket_bytes=64 * 1024)
    optimizer.load_params()
    return model, optimizer


def train(directory: Path, num_steps: int, ready: Callable[[], None] = lambda: None) -> list[Sums]:
    """Steps until so many are done; the sums of all buckets after each. A gradient depends on weights and step."""
    model, optimizer = optimizer_in(directory)
    sums = [[bucket.xxh3_64 for bucket in optimizer._present.header.buckets]]
    ready()
    while optimizer.num_steps < num_steps:
        generator = torch.Generator().manual_seed(optimizer.num_steps)
        for parameter in model.values():
            parameter.grad = parameter.detach() * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        sums.append([bucket.xxh3_64 for bucket in optimizer._present.header.buckets])
    optimizer.close()
    return sums


class Doom:
    """The call after which there are `left` calls is the last; it tells its name through a pipe first."""

    def __init__(self, left: int, chance: random.Random, pipe: int) -> None:
        self._left, self._chance, self._pipe = left, chance, pipe
        self._lock = threading.Lock()
        for name in CALLS:
            setattr(os, name, self._doomed(name, getattr(os, name)))

    def _doomed(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            with self._lock:
                self._left -= 1
                if self._left < 0:
                    if name == "pwritev":
                        self._tear(call, *arguments)
                    os.write(self._pipe, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted

    def _tear(self, call: Callable[..., object], file: int, views: Sequence[memoryview], offset: int) -> None:
        """The write gets on so far and no further: whole blocks, as a disk does it."""
        blocks = self._chance.randrange(len(views[0]) // 4096 + 1)
        if blocks:
            call(file, [views[0][: blocks * 4096]], offset)


def die_in_a_call(directory: Path, chance: random.Random) -> str:
    """Returns the call's name, or "" when the training was complete before."""
    read, write = os.pipe()
    left = chance.randrange(3 * CALLS_A_STEP)
    child = os.fork()
    if not child:
        try:
            train(directory, NUM_STEPS, lambda: Doom(left, chance, write) and None)
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        name = pipe.read()
    assert await_death(child, DEADLINE_S) == (signal.SIGKILL if name else 0), name
    return name


def die_by_the_clock(directory: Path, chance: random.Random) -> str:
    """Killed by this process, so long after it began to train. Returns "clock", or "" when it was complete before."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            train(directory, NUM_STEPS, lambda: os.write(write, b"!") and None)
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        pipe.read(1)
        code = await_death(child, chance.uniform(0.001, 0.06))
    assert code in (0, signal.SIGKILL), code
    return "clock" if code else ""


def await_death(child: int, seconds: float) -> int:
    """The signal that ended it, 0 for none; killed by us when the time is up."""
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], seconds)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code <= 0, "the child failed"
    return -code


def check(directory: Path, reference: Sequence[Sums]) -> int:
    """The newest generation is complete, and what it would be without any death. Returns how many steps it has."""
    headers = [slot for slot in SLOTS if header_path(directory, slot).exists()]
    state = max((StateFile.open(directory, slot) for slot in headers), key=lambda state: state.num_steps)
    state.verify()
    assert [bucket.xxh3_64 for bucket in state.header.buckets] == reference[state.num_steps], state.num_steps
    return state.num_steps


def main() -> None:
    folder, seed, num_kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    chance = random.Random(seed)
    reference = train(folder / "reference", NUM_STEPS)
    deaths: Counter[str] = Counter()
    steps: list[int] = []
    num_trainings = completed = others = 0
    while deaths.total() < num_kills and others < MAX_DEATHS:
        directory = folder / str(num_trainings)
        how = (die_in_a_call if deaths.total() % 2 else die_by_the_clock)(directory, chance)
        steps.append(check(directory, reference))
        if how and sum(header_path(directory, slot).exists() for slot in SLOTS) == 1 and steps[-1] > 0:
            deaths[how] += 1
        else:
            others += 1
        if steps[-1] == NUM_STEPS:
            num_trainings += 1
            completed += 1
    completed += train(folder / str(num_trainings), NUM_STEPS)[-1] == reference[-1]
    print(json.dumps({"deaths": deaths, "others": others, "completed": completed, "trainings": num_trainings + 1}))


if __name__ == "__main__":
    main()
