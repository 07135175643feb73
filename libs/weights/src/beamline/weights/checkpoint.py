"""Weights in safetensors files, in a directory that trainer and engines both see.

A file has its name once all of it is on the disk, and is never written again: a reader that has it mapped is not
disturbed when it is removed.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import CheckpointPlace, Entries, Place, TensorEntry, WeightManifest
from beamline.weights.safetensors_file import HEADER_BYTES, SafetensorsWriter
from beamline.weights.tensors import Shard
from beamline.weights.transport import Range

_POPULATE_READ = 22
"""MADV_POPULATE_READ (Linux 5.14; not in `mmap`): read now, so that what cannot be read is an error and no signal."""


class CheckpointOwner:
    """Implements `Owner`: one file a policy, `policy-<version>/rank-<rank>.safetensors`, of the newest two policies.

    A tensor of the file is a piece: NAME where it is whole, else NAME@i,j with the indices where it starts.

    Args:
        directory: made if missing. Files that an owner of this rank left there are removed.
        rank: of the trainer.

    Raises WeightError: the directory cannot be written.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._name = f"rank-{rank:05d}.safetensors"
        self._header_bytes = HEADER_BYTES
        self._kept: list[Path] = []
        self._described: WeightManifest | None = None
        with _told(directory):
            directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"policy-*/{self._name}*"):
            _remove(left)

    def export(self, policy_version: int, shards: Iterable[Shard]) -> None:
        path = self._directory / f"policy-{policy_version:08d}" / self._name
        draft = path.with_name(f"{self._name}.draft")
        for old in self._kept[:-1]:
            _remove(old)
        self._kept = self._kept[-1:]
        try:
            with _told(draft):
                path.parent.mkdir(exist_ok=True)
                num_bytes, tensors = self._write(draft, shards)
                draft.rename(path)
        except BaseException:
            _remove(draft)
            raise
        self._kept = [*(kept for kept in self._kept if kept != path), path]
        place = CheckpointPlace(num_bytes=num_bytes, path=str(path))
        self._described = WeightManifest(policy_version=policy_version, places=[place], tensors=tensors)

    def describe(self) -> WeightManifest:
        assert self._described is not None, "nothing was exported"
        return self._described

    def close(self) -> None:
        """Remove the files."""
        for path in self._kept:
            _remove(path)
        self._kept = []

    def _write(self, draft: Path, shards: Iterable[Shard]) -> tuple[int, list[TensorEntry]]:
        entries = Entries()
        with draft.open("w+b") as file:
            writer = SafetensorsWriter(file, self._header_bytes)
            for shard in shards:
                entries.add(shard, *writer.append(shard))
            num_bytes = writer.finish()
        self._header_bytes = writer.header_bytes
        return num_bytes, [_behind(entry, writer.first_byte) for entry in entries.tensors]


class CheckpointReader:
    """Implements `Reader`."""

    def attach(self, place: Place, policy_version: int) -> "CheckpointAttached":
        assert isinstance(place, CheckpointPlace)
        what = f"policy {policy_version}: cannot read its weights from {place.path}"
        try:
            with open(place.path, "rb", opener=_open_at_once) as file:
                size = os.fstat(file.fileno()).st_size
                if size != place.num_bytes:
                    raise WeightError(f"{what}: it has {size} bytes, expected {place.num_bytes}: it was cut short")
                return CheckpointAttached(what, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise WeightError(
                f"{what}: {error}: weights.directory must be one that trainer and engines see, and the two newest "
                "policies are kept there"
            ) from error

    def close(self) -> None:
        """It has nothing of its own."""


class CheckpointAttached:
    """Implements `Attached`: a file, mapped read-only."""

    def __init__(self, what: str, memory: mmap.mmap) -> None:
        self._what = what
        self._memory = memory

    def fill(self, ranges: Sequence[Range]) -> None:
        for offset, num_bytes in ranges:
            begin = offset - offset % mmap.PAGESIZE
            try:
                self._memory.madvise(_POPULATE_READ, begin, offset + num_bytes - begin)
            except OSError as error:
                if error.errno != errno.EINVAL:  # an older kernel reads it when it is looked at
                    raise WeightError(f"{self._what}: {error.strerror}: it was cut short, or the disk fails") from error

    def content(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._memory)[offset : offset + num_bytes]

    def fence(self) -> None:
        """A file is not written again."""


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for a writer, if a pipe is there."""
    return os.open(path, flags | os.O_NONBLOCK)


def _behind(entry: TensorEntry, first_byte: int) -> TensorEntry:
    return replace(entry, pieces=[replace(piece, offset=piece.offset + first_byte) for piece in entry.pieces])


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raises WeightError for what the system refuses there."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        mend = "make room, or choose another" if full else "choose another"
        raise WeightError(f"cannot write weights to {path}: {error.strerror}: {mend} weights.directory") from error


def _remove(path: Path) -> None:
    """And its folder with the last file."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
