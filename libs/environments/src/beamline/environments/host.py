"""Environments where they can be killed: an `EnvironmentHost` is one process with many of them, a pool several hosts.

A call that takes too long, or takes the process down, ends its own episode. The others in the same process are made
again in the next one when they are next called, by the calls that they have had: an environment is deterministic.
"""

import asyncio
from itertools import count
from types import TracebackType

import msgspec

from beamline.environments.environment import EpisodeTask, Start, Step, import_path
from beamline.environments.frames import (
    MAX_REPLY_BYTES,
    Act,
    Answer,
    Answered,
    Forget,
    Raised,
    Ready,
    Refused,
    Reset,
    encode,
    replies,
)
from beamline.environments.host_process import KEY
from beamline.protocol.errors import ConfigError
from beamline.runtime.deadline import deadline
from beamline.runtime.killable import KillableProcess, ProcessLost

START_DEADLINE_S = 120.0
"""Importing a user's libraries on a busy machine takes many seconds."""
_PROGRAM = "beamline.environments.host_process"


class EnvironmentFailed(Exception):
    """An environment did not answer: its trajectory is over. The text says why."""


class Episode:
    """The environment of one trajectory; leaving the block forgets it.

    Args:
        host: runs it.
        number: tells it from the host's others.
        task: with which it begins.
    """

    def __init__(self, host: "EnvironmentHost", number: int, task: EpisodeTask) -> None:
        self._host = host
        self._task = task
        self.number = number
        self.past: list[tuple[Answered, Answer]] = []
        """Calls and answers so far."""
        self.process: KillableProcess | None = None
        """In which it runs; another one than the host's after that was replaced."""

    def __enter__(self) -> "Episode":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host.forget(self)

    async def reset(self) -> Start:
        """Begin. Raises EnvironmentFailed."""
        answer = await self._host.call(self, Reset(self.number, self._task))
        assert isinstance(answer, Start)
        return answer

    async def step(self, text: str) -> Step:
        """The answer to one turn. Raises EnvironmentFailed."""
        answer = await self._host.call(self, Act(self.number, text))
        assert isinstance(answer, Step)
        return answer


class EnvironmentHost:
    """One process with the environment's class loaded, replaced when it fails. Callers wait for each other.

    Args:
        environment: import path.
        timeout_s: of one call.
        memory_bytes: limit of the process's address space.
    """

    def __init__(self, environment: str, *, timeout_s: float, memory_bytes: int) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._numbers = count()
        self._turn = asyncio.Lock()
        self._process: KillableProcess | None = None

    @property
    def pid(self) -> int | None:
        """None before the start and between a failure and the next call."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Load the environment. Raises ConfigError where that cannot be done, DeadlineExceeded where it takes long."""
        async with self._turn:
            await self._started()

    def episode(self, task: EpisodeTask) -> Episode:
        """A trajectory's environment, which begins with its `reset`."""
        return Episode(self, next(self._numbers), task)

    async def call(self, episode: Episode, call: Answered) -> Answer:
        """An answer of the kind that the call has.

        Raises:
            EnvironmentFailed: there is none.
            ConfigError, DeadlineExceeded: a process that had to be replaced did not start again.
        """
        async with self._turn:
            process = await self._started()
            if episode.process is not process:
                episode.process = process
                await self._repeat(process, episode)
            answer = await self._ask(process, call)
        episode.past.append((call, answer))
        return answer

    def forget(self, episode: Episode) -> None:
        """Drop an episode that is over."""
        if self._process is not None and episode.process is self._process:
            self._process.send(encode(Forget(episode.number)))

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _repeat(self, process: KillableProcess, episode: Episode) -> None:
        for call, before in episode.past:
            if await self._ask(process, call) != before:
                raise EnvironmentFailed("is not deterministic: made again, it answered the same turns otherwise")

    async def _ask(self, process: KillableProcess, call: Answered) -> Answer:
        healthy = False
        try:
            process.send(encode(call))
            async with deadline(self._timeout_s, f"environment {self._environment} to answer"):
                payload = await process.receive()
            healthy = True
        except TimeoutError as error:
            raise EnvironmentFailed(f"did not answer within {self._timeout_s:g} s") from error
        except ProcessLost as lost:
            raise EnvironmentFailed(f"took its process down, which {lost}") from lost
        finally:
            # Failed, or cancelled in the middle: what it would still write belongs to no one.
            if not healthy:
                await self.close()
        return _answer(payload, call)

    async def _started(self) -> KillableProcess:
        if self._process is None:
            self._process = await KillableProcess.start(
                _PROGRAM,
                f"--environment={self._environment}",
                f"--timeout-s={self._timeout_s}",
                memory_bytes=self._memory_bytes,
                max_frame_bytes=MAX_REPLY_BYTES,
            )
            try:
                await self._await_ready(self._process)
            except BaseException:
                await self.close()
                raise
        return self._process

    async def _await_ready(self, process: KillableProcess) -> None:
        try:
            async with deadline(START_DEADLINE_S, f"environment {self._environment} to be loaded"):
                reply = replies.decode(await process.receive())
        except ProcessLost as lost:
            raise ConfigError(
                f"{KEY}={self._environment}: its process {lost} while loading it; what it wrote is in the log of the "
                "rollout service"
            ) from lost
        if isinstance(reply, Refused):
            raise ConfigError(reply.why)
        assert isinstance(reply, Ready), f"{reply} before the environment was loaded"


class EnvironmentPool:
    """Several hosts of one environment, episodes dealt among them in turn.

    Args:
        name: one of `ENVIRONMENTS`, or an import path.
        num_workers: processes.
        timeout_s: of one call.
        memory_bytes: limit of each process's address space.
    """

    def __init__(self, name: str, *, num_workers: int, timeout_s: float, memory_bytes: int) -> None:
        self.name = name
        self.hosts = [
            EnvironmentHost(import_path(name), timeout_s=timeout_s, memory_bytes=memory_bytes)
            for _ in range(num_workers)
        ]
        self._dealt = count()

    async def start(self) -> None:
        """Load the environment in all of them. Raises ConfigError or DeadlineExceeded, and leaves nothing running."""
        started = await asyncio.gather(*(host.start() for host in self.hosts), return_exceptions=True)
        failures = [failure for failure in started if failure is not None]
        if failures:
            await self.close()
            raise failures[0]

    def episode(self, task: EpisodeTask) -> Episode:
        """A trajectory's environment."""
        return self.hosts[next(self._dealt) % len(self.hosts)].episode(task)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(host.close() for host in self.hosts))


def _answer(payload: bytes, call: Answered) -> Answer:
    """What a process said to a call. Raises EnvironmentFailed."""
    try:
        reply = replies.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        method = "reset" if isinstance(call, Reset) else "step"
        raise EnvironmentFailed(f"{method} returned what is no answer: {error}") from error
    if isinstance(reply, Raised):
        raise EnvironmentFailed(reply.why)
    assert isinstance(reply, Start if isinstance(call, Reset) else Step), f"{reply} answers {call}"
    return reply
