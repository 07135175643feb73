"""Grading where it can be killed: a `GraderPool` holds the grading processes of one grader, `Graders` a run's pools.

A grade that takes too long or takes its process down abstains; another process goes on with the texts that are left,
so that each text has exactly one outcome.
"""

import asyncio
from collections.abc import Iterable

import msgspec

from beamline.protocol.reward_config import RewardSection
from beamline.reward.fork_client import ForkServer, ForkServerLost, GradingProcess
from beamline.reward.frames import (
    MAX_REPLY_BYTES,
    Abstained,
    Job,
    Outcome,
    decode_outcome,
    encode_frame,
)
from beamline.runtime.foreign_code import HEADER
from beamline.runtime.waits import waiting

MEMORY_BYTES = 4 * 1024**3
"""Address space of a grading process."""


class GraderPool:
    """Processes with the same grader, made when they are needed and kept while they are well.

    Args:
        grader: a known name, or an import path.
        settings: `grade_timeout_s` of one grade, and what the grader is made with.
        slots: gradings at a time; shared by the pools of a run.
        memory_bytes: limit of each process's address space.
    """

    def __init__(
        self, grader: str, settings: RewardSection, slots: asyncio.Semaphore, *, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._grader = grader
        self._timeout_s = settings.grade_timeout_s
        self._slots = slots
        self._server = ForkServer(grader, settings, memory_bytes=memory_bytes)
        self._idle: list[GradingProcess] = []

    async def start(self) -> None:
        """Load the grader. Raises ConfigError or DeadlineExceeded, and then leaves nothing running."""
        await self._server.start()

    async def grade(self, texts: list[str], ground_truth: str) -> list[Outcome]:
        """One outcome a text, in order; takes at most `grade_timeout_s` a text, and waits for a slot first.

        Raises:
            ConfigError, DeadlineExceeded: a lost fork server did not start again.
        """
        async with self._slots:
            outcomes: list[Outcome] = []
            while len(outcomes) < len(texts):
                outcomes += await self._grade_until_failure(texts[len(outcomes) :], ground_truth)
            return outcomes

    @property
    def num_processes(self) -> int:
        """Grading processes that are alive."""
        return self._server.num_processes

    async def close(self) -> None:
        """End all processes."""
        await self._server.close()

    async def _grade_until_failure(self, texts: list[str], ground_truth: str) -> list[Outcome]:
        """The outcomes of all texts, or up to and including the first that took the process down."""
        try:
            process = await self._take()
        except ForkServerLost as loss:
            return [Abstained("crash", str(loss))]
        outcomes, healthy = list[Outcome](), False
        try:
            # One write for the whole group. A dead process shows when it is read from.
            process.writer.write(encode_frame(Job(texts=texts, ground_truth=ground_truth)))
            healthy = True
            while healthy and len(outcomes) < len(texts):
                outcome, healthy = await self._next_outcome(process)
                outcomes.append(outcome)
            if healthy:
                self._idle.append(process)
        finally:
            # Failed, or cancelled in the middle: what it would still write belongs to no one.
            if process not in self._idle:
                await process.kill()
        return outcomes

    async def _take(self) -> GradingProcess:
        while self._idle:
            if not (process := self._idle.pop()).status.done():
                return process
            process.writer.close()
        return await self._server.fork()

    async def _next_outcome(self, process: GradingProcess) -> tuple[Outcome, bool]:
        """The outcome of one text, and whether the process is fit for the next."""
        reading = asyncio.ensure_future(_read_outcome(process.reader))
        try:
            # Not a cancelling timeout: an outcome that came while this process itself had to wait is in time.
            with waiting(f"grader {self._grader} (process {process.pid}) to grade a text", within_s=self._timeout_s):
                done, _ = await asyncio.wait([reading], timeout=self._timeout_s)
            if not done:
                return Abstained("timeout", f"no verdict within {self._timeout_s:g} s"), False
            outcome = reading.result()
        except (EOFError, ConnectionError):
            return Abstained("crash", f"grading process {await process.describe_end()}"), False
        except msgspec.DecodeError as error:
            return Abstained("crash", f"grading process wrote what is not an outcome: {error}"), False
        finally:
            reading.cancel()
        # A process that could not have the memory it wanted may hold what a former text left.
        return outcome, not (isinstance(outcome, Abstained) and outcome.kind == "memory")


class Graders:
    """The pools of a run, one a grader, with `settings.workers` gradings at a time in all of them together.

    Args:
        names: of the run's graders.
        settings: of the configuration.
    """

    def __init__(self, names: Iterable[str], settings: RewardSection, *, memory_bytes: int = MEMORY_BYTES) -> None:
        slots = asyncio.Semaphore(settings.workers)
        self._num_slots, self._num_asked = settings.workers, 0
        self._pools = {name: GraderPool(name, settings, slots, memory_bytes=memory_bytes) for name in names}

    @property
    def names(self) -> list[str]:
        """The graders that a group may ask for."""
        return list(self._pools)

    async def start(self) -> None:
        """Load all graders. Raises ConfigError or DeadlineExceeded, and then leaves nothing running."""
        started = await asyncio.gather(*(pool.start() for pool in self._pools.values()), return_exceptions=True)
        failures = [failure for failure in started if failure is not None]
        if failures:
            await self.close()
            raise failures[0]

    async def grade(self, name: str, texts: list[str], ground_truth: str) -> list[Outcome]:
        """One outcome a text, in order, of one of `names`. Errors are those of `GraderPool.grade`."""
        self._num_asked += 1
        try:
            return await self._pools[name].grade(texts, ground_truth)
        finally:
            self._num_asked -= 1

    @property
    def num_running(self) -> int:
        """Gradings that have a slot."""
        return min(self._num_asked, self._num_slots)

    @property
    def num_waiting(self) -> int:
        """Gradings that wait for one."""
        return self._num_asked - self.num_running

    @property
    def num_processes(self) -> int:
        """Grading processes that are alive."""
        return sum(pool.num_processes for pool in self._pools.values())

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


async def _read_outcome(reader: asyncio.StreamReader) -> Outcome:
    """Raises EOFError when the process has ended, msgspec.DecodeError when it wrote anything but an outcome."""
    (num_bytes,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if num_bytes > MAX_REPLY_BYTES:
        raise msgspec.DecodeError(f"a frame of {num_bytes} bytes")
    return decode_outcome(await reader.readexactly(num_bytes))
