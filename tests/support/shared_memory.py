"""What lies in shared memory and is nobody else's: tests of other processes may run at the same time."""

import os
import re
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MAPPED = re.compile(rf" {SHARED_MEMORY}/(\S+)$", re.MULTILINE)


def segments() -> set[str]:
    """Names of files in shared memory that no other live process has mapped: this one's own, and what was left."""
    return {path.name for path in SHARED_MEMORY.iterdir() if path.is_file()} - _mapped_by_others()


def _mapped_by_others() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name == str(os.getpid()):
            continue
        try:
            found |= set(MAPPED.findall(maps.read_text()))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found
