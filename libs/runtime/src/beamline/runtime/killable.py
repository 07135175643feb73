"""A child process for code that may hang, crash or eat memory: frames go in and out, and it can be killed.

This is the parent's side; what the child does first is in `beamline.runtime.foreign_code`.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Self

from beamline.runtime.deadline import deadline
from beamline.runtime.foreign_code import HEADER, describe_status, frame

KILL_DEADLINE_S = 10.0


class ProcessLost(Exception):
    """The process has ended or wrote what is no frame; the text says how."""


class KillableProcess:
    """A started child in a session of its own.

    Args:
        process: with pipes on its standard input and output.
        max_frame_bytes: a longer frame is no frame.
    """

    def __init__(self, process: Process, max_frame_bytes: int) -> None:
        self._process = process
        self._max_frame_bytes = max_frame_bytes

    @classmethod
    async def start(cls, module: str, *arguments: str, memory_bytes: int, max_frame_bytes: int) -> Self:
        """Start `python -m module` with the arguments of `foreign_code.add_arguments` and these."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            f"--memory-bytes={memory_bytes}",
            f"--parent={os.getpid()}",
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        return cls(process, max_frame_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, payload: bytes) -> None:
        """Hand over a frame. That the process is dead shows when it is read from."""
        assert self._process.stdin is not None
        self._process.stdin.write(frame(payload))

    async def receive(self) -> bytes:
        """The next frame. Raises ProcessLost."""
        assert self._process.stdout is not None
        try:
            (num_bytes,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
            if num_bytes > self._max_frame_bytes:
                raise ProcessLost(f"wrote a frame of {num_bytes} bytes, at most {self._max_frame_bytes}")
            return await self._process.stdout.readexactly(num_bytes)
        except EOFError as error:
            raise ProcessLost(await self._how_it_ended()) from error

    async def kill(self) -> None:
        """End it and whatever it started, which is in its session. Raises DeadlineExceeded."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        async with deadline(KILL_DEADLINE_S, f"the end of process {self._process.pid}"):
            await self._process.wait()

    async def _how_it_ended(self) -> str:
        """In words, of a process whose pipe is closed."""
        try:
            async with asyncio.timeout(1.0):
                status = await self._process.wait()
        except TimeoutError:
            return "closed its pipe"
        return describe_status(status)
