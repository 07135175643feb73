"""A growing file, read once."""

import os
from pathlib import Path


class Tail:
    """Whole lines of a file, each given once, however the file comes, grows, is replaced or goes.

    Args:
        newest_bytes: begin that far before the end of a file that is longer; 0 reads it from its beginning.
    """

    def __init__(self, path: Path, newest_bytes: int = 0) -> None:
        self.path = path
        self.num_replaced = 0
        """How often another file was found in the place of one that was read, or the file was cut."""
        self._newest_bytes = newest_bytes
        self._inode = 0
        self._offset = 0

    def new(self) -> list[bytes]:
        """The lines, without their ends, that were completed since the last call; none where there is no file."""
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self.num_replaced += self._inode != 0
                self._inode, self._offset = status.st_ino, 0
                if 0 < self._newest_bytes < status.st_size:
                    file.seek(status.st_size - self._newest_bytes - 1)
                    file.readline()
                    self._offset = file.tell()
            if status.st_size == self._offset:
                return []
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(end)
        return whole.split(b"\n") if end else []
