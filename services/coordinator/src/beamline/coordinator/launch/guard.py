"""Ends what a run has started when its launcher is killed and can do so no longer.

The launcher holds this process's standard input open and writes `+PID` for each process group that it starts and
`-PID` for each that has ended, then `done`. End of input without `done` means that the launcher was killed: every
group still noted is killed, and the run's shared memory is swept. Runs in a session of its own, out of reach of what
is sent to the launcher's.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from beamline.coordinator.launch.process_table import ProcessTable
from beamline.protocol.subjects import Subjects
from beamline.runtime.shm_blobs import sweep


class Guard:
    """The launcher's end of the pipe.

    Args:
        process: the guard's.
        table: takes note of the groups too, for whoever looks at the run.
    """

    def __init__(self, process: asyncio.subprocess.Process, table: ProcessTable) -> None:
        self._process = process
        self.table = table
        assert process.stdin is not None
        self._input = process.stdin

    @classmethod
    async def start(cls, subjects: Subjects, run_dir: Path) -> "Guard":
        """Start the guard of a run."""
        command = (sys.executable, "-m", __name__, subjects.prefix, subjects.run, str(run_dir))
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        return cls(process, ProcessTable(run_dir))

    def watch(self, name: str, pid: int) -> None:
        """Note a worker's process group, by its leader."""
        self._input.write(f"+{pid}\n".encode())
        self.table.note(name, pid)

    def forget(self, pid: int) -> None:
        """The process group has ended."""
        self._input.write(f"-{pid}\n".encode())

    async def close(self) -> None:
        """All has been ended: let the guard go."""
        self._input.write(b"done\n")
        self._input.close()
        await self._process.wait()


def end_group(pid: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def remaining(lines: Iterable[str]) -> set[int]:
    """The groups to end after these lines: none if the last one says `done`."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("done"):
            return set()
        sign, pid = line[0], int(line[1:])
        (groups.add if sign == "+" else groups.discard)(pid)
    return groups


def main() -> None:
    """Read until the launcher is gone, then end what is left."""
    # What stops the launcher is not for the guard: it ends when its input does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = remaining(sys.stdin)
    for pid in groups:
        end_group(pid)
    if groups:
        prefix, run, run_dir = sys.argv[1:]
        sweep(Subjects(prefix, run), Path(run_dir))


if __name__ == "__main__":
    main()
