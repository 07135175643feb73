"""What an earlier start of a run may have left: processes that are still ending, and what only it could use."""

import os
import select
import shutil
import time
from contextlib import suppress
from pathlib import Path

from beamline.protocol.errors import ConfigError

END_DEADLINE_S = 20.0
"""The guard of a killed launcher ends its processes within a second or so."""

_OF_ONE_START = ("jetstream", "nats", "credentials", "processes.json")
"""Made anew. What the folder tells of later steps the coordinator sets aside."""


def clear(run_dir: Path) -> None:
    """Remove what is of one start alone: the broker's store, and who may talk to it."""
    for name in _OF_ONE_START:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def await_end(run_dir: Path, deadline_s: float = END_DEADLINE_S) -> None:
    """Wait until no process of the run's earlier start is left: one that is ending would take the new start's things.

    Raises:
        ConfigError: one does not end.
    """
    until = time.monotonic() + deadline_s
    for pid, command in _processes(run_dir).items():
        if not _ended(pid, until - time.monotonic()):
            raise ConfigError(
                f"process {pid} of an earlier start of {run_dir} has not ended within {deadline_s:g} s ({command}): "
                f"end it with `kill -9 {pid}`"
            )


def _processes(run_dir: Path) -> dict[int, str]:
    """Command lines by pid: the services and the guard have the run's folder as an argument, the broker its file."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if _is_of(arguments, run_dir):
                    found[int(entry.name)] = " ".join(arguments).strip()
    return found


def _is_of(arguments: list[str], run_dir: Path) -> bool:
    is_service = "--run-dir" in arguments or any(name.endswith("launch.guard") for name in arguments)
    return (is_service and str(run_dir) in arguments) or str(run_dir / "nats" / "server.conf") in arguments


def _ended(pid: int, within_s: float) -> bool:
    """Whether the process ends in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([process], [], [], max(0.0, within_s))
        return bool(readable)
    finally:
        os.close(process)
