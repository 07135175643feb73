"""What vLLM leaves on a disk: the sockets of its processes, and the file by which its ranks meet."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Scratch:
    """A folder that only this user can enter. vLLM would leave it all where temporary files lie, for good."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="beamline-engine-"))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Temporary files of this process lie there inside, and for good those of processes that are forked inside."""
        before, tempfile.tempdir = tempfile.tempdir, str(self.path)
        try:
            yield
        finally:
            tempfile.tempdir = before

    def remove(self) -> None:
        """Once the engine has ended. Not by a finalizer: a forked process would run it too."""
        shutil.rmtree(self.path, ignore_errors=True)
