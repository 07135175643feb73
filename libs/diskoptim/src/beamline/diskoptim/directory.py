"""A directory with two generations of a state: the present one, and the place of the next.

    even.state even.json    odd.state odd.json    lock

The slot whose header has the higher generation is the present one. A step takes the other slot's header away, writes
its state, waits for the disk, and writes its header at once in one rename: before that the old generation is the
present one, after it the new one. A state file that has a second name (a snapshot's hard link) is never written again:
the slot gets a new file.

One process at a time: `lock` is locked while the directory is open, and holds the process's id.
"""

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from beamline.diskoptim.errors import DirectoryError, StateError, check_room, explained
from beamline.diskoptim.files import replace_durably, reserve, share_blocks, sync_folder
from beamline.diskoptim.header import Header, header_path, state_path
from beamline.diskoptim.state_file import StateFile

SLOTS = ("even", "odd")


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A snapshot: how it was taken, and its two files."""

    how: Literal["hard link", "reflink", "copy"]
    paths: list[Path]


class Generations:
    """The directory, locked by this process until `close`. `present` is None until the first generation is complete."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with explained(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory / "lock")
        try:
            self.present = self._newest()
        except Exception:
            self.close()
            raise

    @property
    def spare(self) -> str:
        """The slot of the next generation."""
        return SLOTS[(self._generation + 1) % len(SLOTS)]

    def make_room(self, num_bytes: int) -> Path:
        """The spare slot's state file, so long and with room on the disk. Its old content is given up.

        Raises DiskFull, DirectoryError, StateError (the present generation is gone).
        """
        if self.present is not None:
            self.check_present(self.present)
        self._check_open()
        path = state_path(self.directory, self.spare)
        with explained(self.directory, num_bytes):
            header_path(self.directory, self.spare).unlink(missing_ok=True)
            if path.exists() and path.stat().st_nlink > 1:
                path.unlink()
            reserve(path, num_bytes)
        return path

    def flip(self, header: Header) -> None:
        """The spare slot, whose state is on the disk, is the present generation from now on."""
        slot = self.spare
        with explained(self.directory):
            header.write(self.directory, slot)
        self.present = StateFile(header, self.directory, slot)

    def adopt(self) -> None:
        """The spare slot has been written in full, header and all, by `write_state`."""
        self.present = StateFile.open(self.directory, self.spare)

    def snapshot(self, folder: Path, stem: str) -> Copied:
        """The present generation under another name. Raises DirectoryError where that name is taken."""
        self._check_open()
        present = self.present
        assert present is not None
        self.check_present(present)
        target = state_path(folder, stem)
        if target.exists() or header_path(folder, stem).exists():
            raise DirectoryError(f"{target} or its header is there already: give another folder or stem")
        with explained(folder, present.header.num_bytes):
            folder.mkdir(parents=True, exist_ok=True)
            how = _link_or_copy(present.path, target)
            sync_folder(folder)
            replace_durably(header_path(folder, stem), present.header.encode())
        return Copied(how=how, paths=[target, header_path(folder, stem)])

    def check_present(self, state: StateFile) -> None:
        """Raises StateError or DirectoryError where the present generation is not where it was left."""
        if not self.directory.is_dir():
            raise DirectoryError(
                f"{self.directory} is gone, and generation {state.header.generation} with it: restore it, or start "
                "from a checkpoint"
            )
        StateFile.open(self.directory, state.stem)

    def close(self) -> None:
        """Another process may open it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_open(self) -> None:
        if self._lock < 0:
            raise DirectoryError(f"{self.directory} was closed, and may be another process's: make the optimizer anew")

    @property
    def _generation(self) -> int:
        return -1 if self.present is None else self.present.header.generation

    def _newest(self) -> StateFile | None:
        found = [slot for slot in SLOTS if header_path(self.directory, slot).exists()]
        headers = {slot: Header.read(header_path(self.directory, slot)) for slot in found}
        if not headers:
            return None
        slot = max(headers, key=lambda name: headers[name].generation)
        if slot != SLOTS[headers[slot].generation % len(SLOTS)]:
            raise StateError(
                f"{header_path(self.directory, slot)} is of generation {headers[slot].generation}, which belongs in "
                f"the other slot: the files were moved; restore the directory, or empty it to start anew"
            )
        return StateFile.open(self.directory, slot)


def _lock(path: Path) -> int:
    """A locked file with this process's id in it. Raises DirectoryError naming the process that has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise DirectoryError(
            f"{path.parent} is in use by process {holder} ({_command(holder)}): stop it, or give another directory"
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


def _command(pid: str) -> str:
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "on another machine, or gone"
    return " ".join(" ".join(word.decode(errors="replace") for word in words).split())[:80]


def _link_or_copy(source: Path, target: Path) -> Literal["hard link", "reflink", "copy"]:
    try:
        os.link(source, target)
        return "hard link"
    except FileExistsError:
        raise
    except OSError:  # another filesystem, or one without hard links
        if share_blocks(source, target):
            return "reflink"
    check_room(target.parent, source.stat().st_size, "a copy")
    try:
        shutil.copyfile(source, target)
        _sync(target)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    return "copy"


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
