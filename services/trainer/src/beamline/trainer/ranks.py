"""Rank 0's hold on the other ranks: processes of its own interpreter, started, told what to do, watched and ended.

A rank's standard input carries its commands; when it closes, the rank ends at once, whatever it is doing. Its
standard output carries its last words: the traceback of the error that ended it.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path

from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.runtime.service import EXIT_CONFIG
from beamline.trainer.commands import AnyCommand, encode

SETTLE_S = 2.0
"""Rank 0 may meet the broken connection to a rank before it learns that the rank has ended."""
END_S = 3.0
"""How long a rank may take to end once its input is closed."""


class RankFailed(BeamlineError):
    """A rank has ended, and the others cannot go on. Names the rank, and its signal or its traceback."""


@dataclass(frozen=True)
class _Process:
    """A rank, and the end of the pipe through which it is told what to do."""

    rank: int
    process: asyncio.subprocess.Process
    pipe: int

    @classmethod
    async def start(cls, rank: int, run_dir: Path) -> "_Process":
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "beamline.trainer.rank_process"),
                *("--run-dir", str(run_dir), "--rank", str(rank)),
                stdin=theirs,
                stdout=PIPE,
            )
        finally:
            os.close(theirs)
        return cls(rank, process, ours)

    def write(self, frame: bytes) -> None:
        left = memoryview(frame)
        while left:
            left = left[os.write(self.pipe, left) :]

    async def end(self) -> BeamlineError:
        """Wait for its end; returns what to raise for it."""
        assert self.process.stdout is not None
        last_words = (await self.process.stdout.read()).decode(errors="replace").strip()
        code = await self.process.wait()
        if code == EXIT_CONFIG:
            return ConfigError(last_words)
        name = f"rank {self.rank} of the trainer (process {self.process.pid})"
        if code < 0:
            return RankFailed(f"{name} was killed by {signal.Signals(-code).name}")
        if not last_words:
            return RankFailed(f"{name} ended with exit code {code} and left no traceback")
        return RankFailed(f"{name} ended by an error:\n{last_words}\nThis was {name}.")


class OtherRanks:
    """Ranks 1 and up. `tell` is for the policy's thread, all else for the event loop."""

    def __init__(self, processes: list[_Process]) -> None:
        self._processes = processes
        self._endings: list[BeamlineError] = []
        self._ends = {asyncio.create_task(self._end(one), name=f"rank {one.rank}"): one for one in processes}

    @classmethod
    async def start(cls, world_size: int, run_dir: Path) -> "OtherRanks":
        """Start all ranks but 0 of `world_size`; they read the run's configuration from its folder."""
        return cls([await _Process.start(rank, run_dir) for rank in range(1, world_size)])

    def tell(self, command: AnyCommand) -> None:
        """Send a command to all of them. Raises BrokenPipeError where one has ended."""
        frame = encode(command)
        for one in self._processes:
            one.write(frame)

    async def watch(self) -> None:
        """Raises what ended a rank, once one has ended; returns never."""
        if not self._ends:
            await asyncio.get_running_loop().create_future()
        await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
        await self.blame()

    async def blame(self) -> None:
        """Raises what ended the first rank that has ended, if one has or does so within a moment: RankFailed, or the
        rank's own ConfigError.
        """
        if self._ends:
            await asyncio.wait(self._ends, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._endings:
            raise self._endings[0]

    async def _end(self, one: _Process) -> None:
        self._endings.append(await one.end())

    async def close(self) -> None:
        """End them all, whatever they are doing."""
        for one in self._processes:
            os.close(one.pipe)
        if self._ends:
            _, running = await asyncio.wait(self._ends, timeout=END_S)
            for end in running:
                self._ends[end].process.kill()
            await asyncio.gather(*self._ends)
