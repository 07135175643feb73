"""The service's side of a fork server: grading processes on demand, and how each of them ended."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

import msgspec

from beamline.protocol.errors import ConfigError
from beamline.protocol.reward_config import RewardSection
from beamline.reward.fork_frames import (
    MAX_PACKET_BYTES,
    Ended,
    Fork,
    Forked,
    Kill,
    Loaded,
    Refused,
    Report,
    Request,
    decode_report,
    encode_packet,
)
from beamline.runtime.deadline import deadline
from beamline.runtime.foreign_code import describe_status

LOAD_DEADLINE_S = 120.0
"""Importing a symbolic library on a busy machine takes many seconds."""
SEND_DEADLINE_S = 5.0
FORK_DEADLINE_S = 30.0
KILL_DEADLINE_S = 10.0
_KILLED = -int(signal.SIGKILL)


class ForkServerLost(Exception):
    """The fork server was killed while a grading process was awaited of it."""


class GradingProcess:
    """One grading process: its streams, and its end.

    Args:
        pid: process id.
        kill: asks for the end of a process.
    """

    reader: asyncio.StreamReader
    """Of its outcomes."""
    writer: asyncio.StreamWriter
    """Of its jobs."""

    def __init__(self, pid: int, kill: Callable[[int], None]) -> None:
        self.pid = pid
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Of its end: exit status, or minus the signal."""
        self._kill = kill

    async def kill(self) -> None:
        """End it with whatever it started, which is in its session."""
        if not self.status.done():
            self._kill(self.pid)
        async with deadline(KILL_DEADLINE_S, f"the end of grading process {self.pid}"):
            await asyncio.shield(self.status)
        self.writer.close()

    async def describe_end(self) -> str:
        """In words, how it ended, its socket being closed."""
        try:
            async with asyncio.timeout(1.0):
                status = await asyncio.shield(self.status)
        except TimeoutError:
            return "closed its socket"
        return describe_status(status)


class ForkServer:
    """Started on demand, and again should it have been killed.

    Args:
        grader: a known name, or an import path.
        settings: its limits, and what it is made with.
        memory_bytes: address space of each grading process.
    """

    def __init__(self, grader: str, settings: RewardSection, *, memory_bytes: int) -> None:
        self._grader = grader
        self._settings = settings
        self._memory_bytes = memory_bytes
        self._server: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._loaded: asyncio.Future[Loaded | Refused | None]
        self._forks = deque[asyncio.Future[GradingProcess]]()
        """Of the requests without an answer, in order."""
        self._processes: dict[int, GradingProcess] = {}
        """Those that have not ended."""

    async def start(self) -> None:
        """Load the grader; does nothing where it is loaded.

        Raises:
            ConfigError: it cannot be loaded.
            DeadlineExceeded: it is not loaded in time.
        """
        async with self._starting:
            if self._control is not None:
                return
            await self.close()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = await self._spawn(theirs)
            # For what is sent. It is read when there is something to read.
            ours.settimeout(SEND_DEADLINE_S)
            self._control = ours
            self._loaded = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(ours, self._read_reports, ours)
            try:
                await self._await_loaded(self._server)
            except BaseException:
                await self.close()
                raise

    async def fork(self) -> GradingProcess:
        """A new grading process.

        Raises:
            ConfigError, DeadlineExceeded: as `start` does.
            ForkServerLost: it was killed meanwhile; the next call starts another.
        """
        await self.start()
        ours, theirs = socket.socketpair()
        answer: asyncio.Future[GradingProcess] = asyncio.get_running_loop().create_future()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                self._ask(Fork(), theirs)
            self._forks.append(answer)
            async with deadline(FORK_DEADLINE_S, f"a grading process of {self._grader}"):
                process = await answer
        except BaseException:
            writer.close()
            raise
        process.reader, process.writer = reader, writer
        return process

    @property
    def num_processes(self) -> int:
        """Grading processes that have not ended."""
        return len(self._processes)

    async def close(self) -> None:
        """End all its grading processes, and the server."""
        ends = [process.status for process in self._processes.values()]
        for pid in list(self._processes):
            self._kill(pid)
        async with deadline(KILL_DEADLINE_S, f"the end of {len(ends)} grading processes"):
            await asyncio.gather(*ends)
        self._forget()
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            async with deadline(KILL_DEADLINE_S, f"the end of the fork server {server.pid}"):
                await server.wait()

    async def _spawn(self, control: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "beamline.reward.fork_server",
            f"--grader={self._grader}",
            f"--settings={msgspec.json.encode(self._settings).decode()}",
            f"--memory-bytes={self._memory_bytes}",
            f"--parent={os.getpid()}",
            stdin=control.fileno(),
            start_new_session=True,
        )

    async def _await_loaded(self, server: asyncio.subprocess.Process) -> None:
        async with deadline(LOAD_DEADLINE_S, f"grader {self._grader} to be loaded"):
            answer = await self._loaded
        if answer is None:
            raise ConfigError(
                f"grader {self._grader}: its process ended with status {await server.wait()} while loading it; "
                "its last words are in the log of the reward service"
            )
        if isinstance(answer, Refused):
            raise ConfigError(f"grader {self._grader} cannot be loaded: {answer.why}")

    def _ask(self, request: Request, *sockets: socket.socket) -> None:
        try:
            if self._control is not None:
                socket.send_fds(self._control, [encode_packet(request)], [each.fileno() for each in sockets])
                return
        except OSError:
            self._forget()
        raise ForkServerLost(f"the fork server of grader {self._grader} was killed")

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ForkServerLost):  # then so is the process
            self._ask(Kill(pid))

    def _read_reports(self, control: socket.socket) -> None:
        """The next report; an end of them is the end of the server and of all its processes."""
        try:
            packet = control.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if packet:
            self._on_report(decode_report(packet))
        else:
            self._forget()

    def _on_report(self, report: Report) -> None:
        match report:
            case Loaded() | Refused():
                self._loaded.set_result(report)
            case Forked(pid=pid):
                process = self._processes[pid] = GradingProcess(pid, self._kill)
                if (answer := self._forks.popleft()).cancelled():
                    self._kill(pid)
                else:
                    answer.set_result(process)
            case Ended(pid=pid, status=status):
                self._processes.pop(pid).status.set_result(status)

    def _forget(self) -> None:
        """There is no server any more: nothing that was asked of it will come, and its processes are gone."""
        if (control := self._control) is None:
            return
        self._control = None
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        if not self._loaded.done():
            self._loaded.set_result(None)
        while self._forks:
            if not (answer := self._forks.popleft()).done():
                answer.set_exception(ForkServerLost(f"the fork server of grader {self._grader} was killed"))
        while self._processes:
            _, process = self._processes.popitem()
            process.status.set_result(_KILLED)
