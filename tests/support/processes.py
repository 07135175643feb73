"""Processes that a test watches by their ids."""

import os
import select
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid: int, deadline_s: float = 20.0) -> bool:
    """Wait for the end of any process, a child or not; False when it outlives the deadline."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], deadline_s)[0])
    finally:
        os.close(descriptor)
