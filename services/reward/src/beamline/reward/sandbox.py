"""Runs Python programs that nobody has read: no network, no files but Python's own, no processes, little of all else.

Each program is a fresh interpreter without the user's environment, packages and privileges. The kernel holds it, by
`landlock`, `seccomp` and resource limits; this process waits for it, takes what it prints, and ends it in time.
"""

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from beamline.protocol.errors import ConfigError
from beamline.protocol.reward_config import CodeSection
from beamline.reward import landlock, seccomp

_PYTHON = Path(sys.executable).resolve()
_FLAGS = ("-I", "-S", "-B")
"""Neither the environment's settings nor its packages; nothing is compiled to files."""
_READABLE = (
    Path(sys.base_prefix),
    *(Path(p) for p in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")),
)
_DEVICES = {Path("/dev/null"): landlock.READ_WRITE, Path("/dev/urandom"): landlock.READ}
_ENVIRONMENT = {"LANG": "C.UTF-8"}
_MAX_OPEN_FILES = 64
_READ_BYTES = 64 * 1024

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)

_PROBE = """
import os, socket
def tried(attempt):
    try:
        attempt()
    except OSError:
        return "refused"
    return "done"
print("network", tried(socket.socket))
print("files", tried(lambda: open("/etc/passwd")))
print("writes", tried(lambda: open("file", "w")))
print("processes", tried(os.fork))
print("signals", tried(lambda: os.kill(os.getppid(), 0)))
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended."""

    status: int | None
    """Exit status, or minus the signal that ended it; None where it ran out of time or printed too much."""
    output: bytes
    """What it printed, up to the limit."""
    why: str = ""
    """In words, where it was ended."""


class Sandbox:
    """Starts programs under the limits of a run.

    Raises:
        ConfigError: programs cannot be isolated here; says what is missing.
    """

    def __init__(self, limits: CodeSection) -> None:
        self._limits = limits
        try:
            self._filter = seccomp.build_filter()
            self._probe()
        except (ConfigError, OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"the grader code cannot isolate programs here, so it does not run any: {error}; "
                "run the reward service where it can, or use another grader"
            ) from error

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder for the files that a program may read; it is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="beamline-code-", ignore_cleanup_errors=True) as folder:
            (Path(folder) / "empty").mkdir()
            yield Path(folder)

    def start(
        self, program: Path, *arguments: str, folder: Path, stdin: int, stdout: int, passed: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a program in an empty working directory.

        Args:
            program: a Python file.
            arguments: of its command line.
            folder: of `folder()`; all that it may read beside Python.
            stdin: a descriptor, or subprocess.DEVNULL.
            stdout: a descriptor, or subprocess.PIPE. What it says on standard error goes nowhere.
            passed: further descriptors that it gets.
        """
        readable = [(path, landlock.READ) for path in (*_READABLE, _PYTHON, program, folder)]
        with landlock.ruleset([*readable, *_DEVICES.items()]) as rules:
            return subprocess.Popen(
                [_PYTHON, *_FLAGS, program, *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder / "empty",
                env=_ENVIRONMENT,
                pass_fds=passed,
                preexec_fn=self._confine(rules),  # noqa: PLW1509 - a grading process has one thread
            )

    def finish(self, process: subprocess.Popen[bytes], deadline: float) -> Ended:
        """Wait for a program's end and take what it prints on a pipe; end it at the deadline (time.monotonic)."""
        assert process.stdout is not None
        output, why = bytearray(), ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(process)
            stack.callback(process.kill)
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(process.stdout, selectors.EVENT_READ)
            while not why:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    why = "ran out of time"
                elif not (part := os.read(process.stdout.fileno(), _READ_BYTES)):
                    break
                elif len(output := output + part) > self._limits.output_kib * 1024:
                    why = f"printed more than {self._limits.output_kib} KiB"
            if not why:
                # It may have closed its pipe and live on.
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    why = "ran out of time"
        status = process.returncode
        if status == -signal.SIGXCPU:
            why = f"used more than {self._limits.cpu_s} s of processor time"
        return Ended(status=None if why else status, output=bytes(output), why=why)

    def _confine(self, rules: int) -> Callable[[], None]:
        """What a new process does before it becomes the program."""
        limits, instructions = self._limits, self._filter

        def confine() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for resource_name, limit in (
                (resource.RLIMIT_CPU, limits.cpu_s),
                (resource.RLIMIT_AS, limits.memory_mib * 1024**2),
                (resource.RLIMIT_FSIZE, 0),
                (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
                (resource.RLIMIT_CORE, 0),
            ):
                resource.setrlimit(resource_name, (limit, limit + (resource_name == resource.RLIMIT_CPU)))
            _drop_privileges()
            landlock.restrict(rules)
            seccomp.install(instructions)

        return confine

    def _probe(self) -> None:
        """Raises ConfigError unless a program is refused all that it must not do."""
        with self.folder() as folder:
            program = folder / "probe.py"
            program.write_text(_PROBE)
            process = self.start(program, folder=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            ended = self.finish(process, time.monotonic() + self._limits.wall_s)
        tried = dict(line.split() for line in ended.output.decode().splitlines())
        if ended.status != 0 or len(tried) != _PROBE.count("print("):
            raise ConfigError(f"a harmless program did not run: {ended.why or f'it ended with status {ended.status}'}")
        if open_ways := [name for name, outcome in tried.items() if outcome != "refused"]:
            raise ConfigError(f"a program could still reach {', '.join(open_ways)}")


def _drop_privileges() -> None:
    """None are left, and no program brings any."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "privileges")
