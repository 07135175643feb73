"""The shared-memory transport: one file a policy version under /dev/shm, written once and mapped by every reader.

Buffers are contiguous arrays of any kind; torch users pass `tensor.view(torch.uint8).numpy()` and wrap what they
read with `torch.frombuffer`.
"""

import errno
import mmap
import os
from collections.abc import Buffer, Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import ALIGNMENT_BYTES, TensorEntry, WeightManifest

type NamedTensor = tuple[str, str, Sequence[int], Buffer]
"""HF name, dtype (torch's name), shape, contiguous buffer."""

_PREFIX, _SUFFIX = "policy-", ".weights"


class ShmExporter:
    """Writes segments into a folder and unlinks old ones; a reader that has one open keeps it until it lets go."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        """Args:
        directory: under /dev/shm; made with mode 0700 if missing.
        keep: newest segments left in place.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest segment must stay")
        self._directory = directory
        self._keep = keep
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def export(self, policy_version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        """Stream tensors into a new segment, one at a time; nothing is held twice.

        The segment takes its name when it is complete, so that a death in between leaves no half of one.

        Raises:
            WeightError: shared memory is full, or a buffer does not have the size that its dtype and shape ask for.
        """
        segment = self._directory / f"{_PREFIX}{policy_version:08d}-{os.getpid()}{_SUFFIX}"
        draft = segment.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                entries = [self._write(file.fileno(), *tensor) for tensor in tensors]
                num_bytes = file.tell()
                file.truncate(num_bytes)  # a last tensor without elements has only moved the position
            manifest = WeightManifest(
                policy_version=policy_version,
                transport="shm",
                segment=str(segment),
                num_bytes=num_bytes,
                tensors=entries,
            )
            draft.rename(segment)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._unlink_old()
        return manifest

    def _write(self, descriptor: int, name: str, dtype: str, shape: Sequence[int], buffer: Buffer) -> TensorEntry:
        view = memoryview(buffer)
        content = view.cast("B") if view.nbytes else memoryview(b"")
        offset = -(-os.lseek(descriptor, 0, os.SEEK_CUR) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        entry = TensorEntry(
            name=name,
            dtype=dtype,
            shape=list(shape),
            offset=offset,
            num_bytes=content.nbytes,
            checksum=xxhash.xxh3_64_hexdigest(content),
        )
        os.lseek(descriptor, offset, os.SEEK_SET)
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError as error:
            raise self._explain(error, entry) from error
        return entry

    def _explain(self, error: OSError, entry: TensorEntry) -> WeightError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return WeightError(f"tensor {entry.name}: cannot write to {self._directory}: {error.strerror}")
        space = os.statvfs(self._directory)
        return WeightError(
            f"shared memory is full: tensor {entry.name} needs {entry.num_bytes} bytes, {self._directory} has "
            f"{space.f_bavail * space.f_frsize} free: give /dev/shm room for {self._keep + 1} copies of the weights"
        )

    def _unlink_old(self) -> None:
        """Older segments beyond `keep`, and drafts of exporters that died."""
        segments = sorted(self._directory.glob(f"{_PREFIX}*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in [*segments[: -self._keep], *self._directory.glob(f"{_PREFIX}*.draft")]:
            path.unlink(missing_ok=True)


class ShmReader:
    """One policy version, mapped read-only. Views stay valid as long as they are held."""

    def __init__(self, manifest: WeightManifest, segment: memoryview) -> None:
        """Use `open`."""
        self.manifest = manifest
        self._segment = segment

    @classmethod
    def open(cls, manifest: WeightManifest) -> "ShmReader":
        """Map the segment. Raises WeightError when it is gone or has another size than the manifest says."""
        path, version = Path(manifest.segment), manifest.policy_version
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if num_bytes else b""
        except OSError as error:
            raise WeightError(f"policy {version}: cannot open segment {path}: {error.strerror}") from error
        if num_bytes != manifest.num_bytes:
            raise WeightError(f"policy {version}: segment {path} has {num_bytes} bytes, expected {manifest.num_bytes}")
        return cls(manifest, memoryview(mapped))

    def tensors(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each tensor with its bytes (read-only uint8 view), in the manifest's order."""
        for entry in self.manifest.tensors:
            yield entry, self._segment[entry.offset : entry.offset + entry.num_bytes]

    def verify(self) -> None:
        """Check every checksum, before any tensor is used. Raises WeightError naming the first that differs."""
        for entry, content in self.tensors():
            checksum = xxhash.xxh3_64_hexdigest(content)
            if checksum != entry.checksum:
                raise WeightError(
                    f"policy {self.manifest.policy_version}: tensor {entry.name} has checksum {checksum}, "
                    f"expected {entry.checksum}: the segment {self.manifest.segment} is damaged"
                )
