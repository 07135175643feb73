"""`BlobStore` in shared memory of one host: a file a blob under /dev/shm, mapped by its readers without a copy.

A run's files lie in one folder (`shm_root`), mode 0700; the launcher removes it at the run's end (`sweep`).
"""

import asyncio
import errno
import hashlib
import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from beamline.protocol.errors import BlobError
from beamline.protocol.messages import BlobRef
from beamline.protocol.subjects import Subjects
from beamline.runtime.blob_ref import check_names, check_owner, make_ref, missing, verify
from beamline.runtime.blob_store import BlobUsage

_SHARED_MEMORY = Path("/dev/shm")


def shm_root(subjects: Subjects, run_dir: Path) -> Path:
    """The run's folder in shared memory; runs of one name in different folders do not meet."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:10]
    return _SHARED_MEMORY / f"beamline-{subjects.prefix}-{subjects.run}-{digest}"


def sweep(subjects: Subjects, run_dir: Path) -> int:
    """Remove everything that the run keeps in shared memory, weights included; returns the bytes freed."""
    root = shm_root(subjects, run_dir)
    num_bytes = _tree_bytes(root)
    _remove(root)
    return num_bytes


class ShmBlobStore:
    """Blobs are `<root>/<owner>/<key>`, written under another name first, so that a reader never sees half of one."""

    def __init__(self, root: Path) -> None:
        """Args:
        root: see `shm_root`; made if missing.
        """
        self._root = root
        _private_dir(root)

    async def put(self, owner: str, kind: str, payload: bytes | memoryview) -> BlobRef:
        ref = make_ref(owner, kind, payload)
        folder = self._root / owner
        draft = folder / f".{ref.key}"
        try:
            _private_dir(folder)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(payload).cast("B"))
            draft.rename(folder / ref.key)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise self._explain(error, ref) from error
        return ref

    async def get(self, ref: BlobRef) -> memoryview:
        check_names(ref)
        try:
            with (self._root / ref.owner / ref.key).open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if num_bytes else b""
        except FileNotFoundError:
            raise missing(ref) from None
        payload = memoryview(mapped)
        verify(ref, payload)
        return payload

    async def release(self, owner: str) -> None:
        check_owner(owner)
        _remove(self._root / owner)

    async def usage(self) -> BlobUsage:
        return await asyncio.to_thread(self._usage)

    async def close(self) -> None:
        """Nothing is held open."""

    def _usage(self) -> BlobUsage:
        space = os.statvfs(self._root)
        return BlobUsage(used_bytes=_tree_bytes(self._root), free_bytes=space.f_bavail * space.f_frsize)

    def _explain(self, error: OSError, ref: BlobRef) -> BlobError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return BlobError(f"cannot write blob {ref.owner}/{ref.key} to {self._root}: {error.strerror}")
        space = os.statvfs(self._root)
        free = space.f_bavail * space.f_frsize
        return BlobError(
            f"shared memory is full: blob {ref.owner}/{ref.key} needs {ref.num_bytes} bytes, {self._root.parent} has "
            f"{free} free: lower rollout.sampling.groups_per_step, or give {self._root.parent} more room"
        )


def _tree_bytes(root: Path) -> int:
    """Of all files under a folder that others write to and remove from meanwhile."""
    num_bytes = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(folder, name)).st_size
    return num_bytes


def _private_dir(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write_all(descriptor: int, payload: memoryview) -> None:
    while payload:
        payload = payload[os.write(descriptor, payload) :]


def _remove(folder: Path) -> None:
    """Remove a folder that others may be removing too."""

    def ignore_missing(_: Callable[..., Any], __: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    shutil.rmtree(folder, onexc=ignore_missing)
