"""What can go wrong, each naming the thing, the value found and the mend.

DiskOptimError
├── StateError          the state on disk is damaged, truncated, foreign, or another model's
├── DirectoryError      the directory is gone, cannot be written, or belongs to another process
│   └── DiskFull        the filesystem has no room for what has to be written
└── GradientError       a gradient is missing, of another shape, or not finite

After any of them the last complete generation is what it was.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class DiskOptimError(Exception):
    """Whatever this package raises on purpose but for arguments that make no sense, which are ValueErrors."""


class StateError(DiskOptimError):
    """The state on disk is damaged, truncated, foreign, or another model's."""


class DirectoryError(DiskOptimError):
    """The directory is gone, cannot be written, or belongs to another process."""


class DiskFull(DirectoryError):
    """The filesystem has no room for what has to be written."""


class GradientError(DiskOptimError):
    """A gradient is missing, of another shape, or not finite."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def explained(folder: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turns the system's errors into ours. `num_bytes` is what is about to be written into the folder, if known."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            needed = "" if num_bytes is None else f"{num_bytes} bytes are needed, "
            raise DiskFull(
                f"{folder} has no room: {needed}{free_bytes(folder)} are free ({error.strerror}); make room and go on, "
                "the last complete generation is untouched"
            ) from error
        if not folder.is_dir():
            raise DirectoryError(
                f"{folder} is gone while it was in use ({error}); mount or restore it, or start from a checkpoint"
            ) from error
        raise DirectoryError(f"{folder} cannot be used: {error}; the last complete generation is untouched") from error


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raises DiskFull where so many bytes do not fit, before any is written."""
    if (free := free_bytes(folder)) is not None and free < num_bytes:
        raise DiskFull(f"{folder} has no room for {what}: {num_bytes} bytes are needed, {free} are free; make room")


def free_bytes(folder: Path) -> int | None:
    """What an ordinary user may still write into the folder's filesystem; None where that cannot be told."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None
