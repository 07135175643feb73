"""Grading where it can be killed: a `GradingProcess` holds one grader, a `GraderPool` several processes.

A grade that takes too long or takes its process down abstains; the process is replaced and goes on with the texts that
are left, so that each text has exactly one outcome.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from beamline.protocol.errors import ConfigError
from beamline.reward.frames import (
    HEADER,
    MAX_REPLY_BYTES,
    Abstained,
    Job,
    Outcome,
    Ready,
    Refused,
    Reply,
    decode_reply,
    encode_frame,
)
from beamline.reward.grader import Verdict, import_path
from beamline.runtime.deadline import deadline

START_DEADLINE_S = 120.0
"""Importing a symbolic library on a busy machine takes many seconds."""
KILL_DEADLINE_S = 10.0
MEMORY_BYTES = 4 * 1024**3
"""Address space of a grading process."""


class _Lost(Exception):
    """The process has to be replaced; the text is the reason for the grade's abstention."""


class GradingProcess:
    """One process with a grader loaded, replaced when it fails. Not for two callers at a time.

    Args:
        grader: import path.
        timeout_s: of one grade.
        memory_bytes: limit of the process's address space.
    """

    def __init__(self, grader: str, *, timeout_s: float, memory_bytes: int = MEMORY_BYTES) -> None:
        self._grader = grader
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """None before the start and between a failure and the next grade."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Make it ready to grade; does nothing if it is.

        Raises:
            ConfigError: the grader cannot be loaded.
            DeadlineExceeded: it is not loaded in time.
        """
        if self._process is None:
            self._process = await self._spawn()
            try:
                await self._await_ready(self._process)
            except BaseException:
                await self.kill()
                raise

    async def grade(self, texts: list[str], ground_truth: str) -> list[Outcome]:
        """One outcome a text, in order. Errors are those of `start`, should a replacement not start."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(texts):
            outcomes += await self._grade_until_failure(texts[len(outcomes) :], ground_truth)
        return outcomes

    async def kill(self) -> None:
        """End the process and whatever it started, which is in its session."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            async with deadline(KILL_DEADLINE_S, f"the end of grading process {process.pid}"):
                await process.wait()

    async def _grade_until_failure(self, texts: list[str], ground_truth: str) -> list[Outcome]:
        """The outcomes of all texts, or up to and including the first that took the process down."""
        await self.start()
        process, outcomes, healthy = self._process, list[Outcome](), False
        assert process is not None and process.stdin is not None
        try:
            # One write for the whole group. A dead process shows when it is read from.
            process.stdin.write(encode_frame(Job(texts=texts, ground_truth=ground_truth)))
            for _ in texts:
                outcomes.append(await self._next_outcome(process))
            healthy = True
        except _Lost as loss:
            outcomes.append(Abstained(str(loss)))
        finally:
            # Failed, or cancelled in the middle: what it would still write belongs to no one.
            if not healthy:
                await self.kill()
        return outcomes

    async def _next_outcome(self, process: Process) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await _read_reply(process)
        except TimeoutError as error:
            raise _Lost(f"no verdict within {self._timeout_s:g} s") from error
        except EOFError as error:
            raise _Lost(f"grading process {await _describe_end(process)}") from error
        except msgspec.DecodeError as error:
            raise _Lost(f"grading process wrote what is not a reply: {error}") from error
        if not isinstance(reply, Verdict | Abstained):
            raise _Lost(f"grading process wrote {type(reply).__name__} in place of a verdict")
        return reply

    async def _spawn(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "beamline.reward.grading_process",
            f"--grader={self._grader}",
            f"--timeout-s={self._timeout_s}",
            f"--memory-bytes={self._memory_bytes}",
            f"--parent={os.getpid()}",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )

    async def _await_ready(self, process: Process) -> None:
        try:
            async with deadline(START_DEADLINE_S, f"grader {self._grader} to be loaded"):
                reply = await _read_reply(process)
        except EOFError as error:
            raise ConfigError(
                f"grader {self._grader}: its process {await _describe_end(process)} while loading it; "
                "the traceback is in the log of the reward service"
            ) from error
        if isinstance(reply, Refused):
            raise ConfigError(
                f"grader {self._grader} cannot be loaded: {reply.why}; it is imported as package.module:function from "
                "the folder in which the reward service was started, or from PYTHONPATH"
            )
        assert isinstance(reply, Ready), f"{reply} before the grader was loaded"


class GraderPool:
    """Several processes with the same grader; callers wait for a free one.

    Args:
        grader: a name of `GRADERS`, or an import path.
        num_workers: processes.
        timeout_s: of one grade.
        memory_bytes: limit of each process's address space.

    Raises:
        ConfigError: no such grader.
    """

    def __init__(self, grader: str, *, num_workers: int, timeout_s: float, memory_bytes: int = MEMORY_BYTES) -> None:
        self.grader = grader
        path = import_path(grader)
        self.processes = [
            GradingProcess(path, timeout_s=timeout_s, memory_bytes=memory_bytes) for _ in range(num_workers)
        ]
        self._idle = asyncio.Queue[GradingProcess]()
        for process in self.processes:
            self._idle.put_nowait(process)

    async def start(self) -> None:
        """Load the grader in all processes. Raises ConfigError or DeadlineExceeded, and then leaves nothing running."""
        started = await asyncio.gather(*(process.start() for process in self.processes), return_exceptions=True)
        failures = [failure for failure in started if failure is not None]
        if failures:
            await self.close()
            raise failures[0]

    async def grade(self, texts: list[str], ground_truth: str) -> list[Outcome]:
        """One outcome a text, in order; takes at most `timeout_s` a text, and as long again for each group before it.

        Raises:
            ConfigError, DeadlineExceeded: a process that had to be replaced did not start again.
        """
        process = await self._idle.get()
        try:
            return await process.grade(texts, ground_truth)
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.kill() for process in self.processes))


async def _read_reply(process: Process) -> Reply:
    """Raises EOFError when the process has ended, msgspec.DecodeError when it wrote anything but a reply."""
    assert process.stdout is not None
    (num_bytes,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    if num_bytes > MAX_REPLY_BYTES:
        raise msgspec.DecodeError(f"a frame of {num_bytes} bytes")
    return decode_reply(await process.stdout.readexactly(num_bytes))


async def _describe_end(process: Process) -> str:
    """In words, how a process ended whose pipe is closed."""
    try:
        async with asyncio.timeout(1.0):
            status = await process.wait()
    except TimeoutError:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
