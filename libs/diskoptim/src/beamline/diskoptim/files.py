"""Files on a disk: whole reads and writes at an offset, O_DIRECT where there is such, room kept, durable names."""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from beamline.diskoptim.layout import ALIGNMENT

log = logging.getLogger(__name__)

Io = Literal["auto", "direct", "buffered"]
ChosenIo = Literal["direct", "buffered"]
FICLONE = 0x40049409
"""From linux/fs.h: make a file share another one's blocks, copied when either is written."""
NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
PROBE = ".direct-io"


def choose_io(folder: Path, io: Io) -> ChosenIo:
    """What `auto` means in a folder, said once where it is not direct. Raises ValueError where direct is impossible."""
    if io == "buffered":
        return io
    path = folder / PROBE
    try:
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as file, mmap.mmap(-1, ALIGNMENT) as block:
            os.pwrite(file, block, 0)
        return "direct"
    except OSError as error:
        if error.errno not in NO_DIRECT_IO:
            raise
        if io == "direct":
            raise ValueError(f"io=direct, and {folder} has no O_DIRECT ({error}): use io=auto") from error
        log.warning("%s has no O_DIRECT: optimizer state goes through the page cache, more slowly", folder)
        return "buffered"
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor for the time of a `with`."""
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def read_exactly(file: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill all views. Raises EOFError where the file ends before."""
    rest = list(views)
    while rest:
        num_read = os.preadv(file, rest, offset)
        if not num_read:
            raise EOFError(f"the file ends at {offset}")
        offset += num_read
        rest = _after(rest, num_read)


def write_exactly(file: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all views, one after the other."""
    rest = list(views)
    while rest:
        num_written = os.pwritev(file, rest, offset)
        offset += num_written
        rest = _after(rest, num_written)


def reserve(path: Path, num_bytes: int) -> None:
    """Make the file so long, with blocks of its own: what is written later finds its room."""
    with opened(path, os.O_RDWR | os.O_CREAT) as file:
        os.ftruncate(file, num_bytes)
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)


def replace_durably(path: Path, content: bytes) -> None:
    """The file has its old content or the new one, whatever happens, and the new one when this returns."""
    temporary = path.with_name(path.name + ".new")
    with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        write_exactly(file, [memoryview(content)], 0)
        os.fsync(file)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names in the folder are on the disk."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        os.fsync(file)


def share_blocks(source: Path, target: Path) -> bool:
    """Make target a reflink of source; False where the filesystem has none, and nothing is left."""
    with opened(source, os.O_RDONLY) as old, opened(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new:
        try:
            fcntl.ioctl(new, FICLONE, old)
            os.fsync(new)
            return True
        except OSError:
            target.unlink()
            return False


def _after(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of views after so many bytes."""
    left: list[memoryview] = []
    for view in views:
        taken = min(num_bytes, len(view))
        num_bytes -= taken
        if taken < len(view):
            left.append(view[taken:])
    return left
