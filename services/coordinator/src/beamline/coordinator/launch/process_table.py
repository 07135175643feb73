"""Which processes a run consists of: `processes.json` in its folder, pids by worker, as the launcher started them."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

PROCESSES_FILE = "processes.json"
LAUNCHER, BROKER = "launcher", "nats-server"
"""Their names among the workers'."""


class ProcessTable:
    """Kept by the launcher, which is in it itself; the file holds the newest process of each name.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PROCESSES_FILE
        self._pids: dict[str, int] = {}
        self.noted_s: dict[str, float] = {}
        """By name, the monotonic time when its process was noted."""
        self.note(LAUNCHER, os.getpid())

    @property
    def pids(self) -> Mapping[str, int]:
        """By name."""
        return self._pids

    def note(self, name: str, pid: int) -> None:
        """A process was started; it replaces one of its name."""
        self._pids[name] = pid
        self.noted_s[name] = time.monotonic()
        draft = self._path.with_suffix(".json.draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self._pids), indent=2) + b"\n")
        draft.replace(self._path)


def read_processes(run_dir: Path) -> dict[str, int]:
    """Pids by name; empty where the file is missing or damaged."""
    try:
        return msgspec.json.decode((run_dir / PROCESSES_FILE).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}
