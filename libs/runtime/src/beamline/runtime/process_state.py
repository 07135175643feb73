"""What the kernel says about a process of this machine: whether it runs, is stopped, or has ended."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

STOPPED, TRACED, ENDED = "T", "t", "Z"
"""State letters of /proc: stopped by a signal, held by a debugger, over but not reaped."""

_START = 19
"""Place of a process's start, in clock ticks since the machine's, among what follows its name in `stat`."""

_WORDS = {
    "R": "runs on a CPU",
    "S": "sleeps until something happens",
    "D": "waits for a device or a file system",
    STOPPED: "is stopped by a signal, as SIGSTOP does",
    TRACED: "is held by a debugger",
}


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """A process at one moment."""

    pid: int
    state: str
    """R, S, D, T, t or Z, as in /proc."""
    name: str
    command: str
    """With its arguments."""
    age_s: float = 0.0
    """Since its start."""

    @property
    def is_stopped(self) -> bool:
        return self.state in (STOPPED, TRACED)

    @property
    def words(self) -> str:
        """As the end of "its process 7 ..."."""
        return f"{_WORDS.get(self.state, 'is in an unusual state')} (state {self.state})"


def look_at(pid: int) -> ProcessState | None:
    """None for a process that has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        name, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = rest.split()
    state, age_s = fields[0], uptime_s - int(fields[_START]) / os.sysconf("SC_CLK_TCK")
    return None if state == ENDED else ProcessState(pid=pid, state=state, name=name, command=command, age_s=age_s)


def process_tree(pid: int) -> list[int]:
    """The process and all that it started, so far as they run."""
    tree = [pid]
    for parent in tree:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                tree += map(int, children.read_text().split())
    return tree


def stopped_in(pid: int) -> list[ProcessState]:
    """The processes of a tree that are stopped."""
    states = [look_at(one) for one in process_tree(pid)]
    return [state for state in states if state is not None and state.is_stopped]


def stop_in_words(process: ProcessState, leader: int) -> str:
    """That a process is stopped, and the mend; `leader` is the process whose tree it is in."""
    whose = "its process" if process.pid == leader else f"{process.name}, which it started, process"
    mend = f"`kill -CONT {process.pid}` lets it go on" if process.state == STOPPED else "end the debugger's session"
    return f"{whose} {process.pid} {process.words}: {mend}"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal. False for one that has ended or belongs to another user."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
