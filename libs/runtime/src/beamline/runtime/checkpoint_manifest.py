"""The manifest of a checkpoint: size and checksum of every file, sealed by a checksum of its own.

A `.state` file of the optimizer is read by nobody to make it: the `.json` beside it has a checksum of each of its
buckets, and the checksum of that `.json` is in the manifest.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

FORMAT = "beamline-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
"""What the last verification found; no part of the checkpoint."""
VERIFIED_DRAFT = ".verified.json.draft"
_IGNORED = {MANIFEST, VERIFIED, VERIFIED_DRAFT}
_STATE = ".state"
_READ_BYTES = 16 * 1024 * 1024

type Advance = Callable[[int], None]
"""Told how many bytes more have been read."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file."""

    path: str
    """Below the checkpoint's folder, with `/`."""
    num_bytes: int
    xxh3_128: str = ""
    buckets_in: str = ""
    """The file with the checksums of its buckets, in the place of one over the whole."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it."""

    format: str = FORMAT
    version: int = VERSION
    step: int
    created: float
    """Unix time."""
    files: list[Entry]
    seal: str = ""
    """xxh3_128 of the manifest's bytes with nothing here."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(entry.num_bytes for entry in self.files)


class _Kind(msgspec.Struct):
    """As much of a manifest as every version of it has."""

    format: str = ""
    version: int = 0


class _Bucket(msgspec.Struct, frozen=True):
    offset: int
    num_bytes: int
    xxh3_64: str


class _Buckets(msgspec.Struct, frozen=True):
    """As much of an optimizer's state as has to be known to check it."""

    buckets: list[_Bucket]


class Unusable(ValueError):
    """What is wrong with a manifest, in words."""


def manifest_of(folder: Path, step: int, created: float | None = None, *, advance: Advance = lambda _: None) -> bytes:
    """The manifest of what is in a folder, to be written there last. Reads every file that no buckets cover."""
    entries = [_entry(folder, path, advance) for path in files_of(folder)]
    manifest = Manifest(step=step, created=time.time() if created is None else created, files=entries)
    unsealed = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    return unsealed.replace(_seal(""), _seal(xxhash.xxh3_128_hexdigest(unsealed)))


def read_manifest(folder: Path) -> Manifest:
    """Raises Unusable: there is none, it is of something else, or it is no longer what was written."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        wrong = f"it has no {MANIFEST}, which is written last" if folder.is_dir() else "it does not exist"
        raise Unusable(f"{'incomplete' if folder.is_dir() else 'missing'}: {wrong}") from None
    except OSError as error:
        raise Unusable(f"damaged: its {MANIFEST} cannot be read ({error.strerror})") from error
    return decode_manifest(content)


def decode_manifest(content: bytes) -> Manifest:
    """Raises Unusable: it is of something else, or a byte is not what was written."""
    try:
        kind = msgspec.json.decode(content, type=_Kind)
        if (kind.format, kind.version) != (FORMAT, VERSION):
            found = f"{kind.format!r} version {kind.version}" if kind.format else "no format that it names"
            raise Unusable(f"foreign: its {MANIFEST} is of {found}, not of {FORMAT!r} version {VERSION}")
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unusable(f"damaged: its {MANIFEST} cannot be understood ({error})") from error
    if manifest.seal != xxhash.xxh3_128_hexdigest(content.replace(_seal(manifest.seal), _seal(""))):
        raise Unusable(f"damaged: its {MANIFEST} is not what was written")
    return manifest


def files_of(folder: Path) -> Iterator[Path]:
    """A checkpoint's own files, sorted."""
    return (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in _IGNORED
    )


def first_damage(folder: Path, manifest: Manifest, *, deep: bool, advance: Advance) -> str:
    """The first thing about the files that is not as the manifest says, in words; empty where all is."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_of(folder)}
    listed = {entry.path for entry in manifest.files}
    if missing := sorted(listed - found.keys()):
        return f"incomplete: {_some(missing)} missing"
    if unlisted := sorted(found.keys() - listed):
        return f"changed: {_some(unlisted)} not in its {MANIFEST}"
    for entry in manifest.files:
        if found[entry.path] != entry.num_bytes:
            what = "truncated" if found[entry.path] < entry.num_bytes else "changed"
            return f"{what}: {entry.path} has {found[entry.path]} bytes, its {MANIFEST} says {entry.num_bytes}"
    # A bucket's checksum counts for as much as the file that it stands in, so that one is looked at first.
    for entry in sorted(manifest.files, key=lambda e: bool(e.buckets_in)) if deep else ():
        if wrong := _changed(folder, entry, advance):
            return wrong
    return ""


def _changed(folder: Path, entry: Entry, advance: Advance) -> str:
    path = folder / entry.path
    if entry.buckets_in:
        return _changed_bucket(path, folder / entry.buckets_in, advance)
    if hash_of(path, advance) != entry.xxh3_128:
        return f"damaged: {entry.path} is not what its {MANIFEST} says: bytes have changed"
    return ""


def _changed_bucket(path: Path, described: Path, advance: Advance) -> str:
    name = path.name
    for number, bucket in enumerate(_buckets(described)):
        with path.open("rb") as file:
            file.seek(bucket.offset)
            digest, left = xxhash.xxh3_64(), bucket.num_bytes
            while left and (block := file.read(min(left, _READ_BYTES))):
                digest.update(block)
                advance(len(block))
                left -= len(block)
        if left or digest.hexdigest() != bucket.xxh3_64:
            return f"damaged: bucket {number} of {name} (at {bucket.offset}) is not what {described.name} says"
    return ""


def _buckets(described: Path) -> list[_Bucket]:
    return msgspec.json.decode(described.read_bytes(), type=_Buckets).buckets


def _entry(folder: Path, path: Path, advance: Advance) -> Entry:
    name, num_bytes = path.relative_to(folder).as_posix(), path.stat().st_size
    described = path.with_suffix(".json")
    if path.suffix == _STATE and described.is_file():
        return Entry(path=name, num_bytes=num_bytes, buckets_in=described.relative_to(folder).as_posix())
    return Entry(path=name, num_bytes=num_bytes, xxh3_128=hash_of(path, advance))


def hash_of(path: Path, advance: Advance = lambda _: None) -> str:
    """xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _seal(seal: str) -> bytes:
    return f'"seal": "{seal}"'.encode()


def _some(names: list[str]) -> str:
    """Such as "a, b and 3 more are"."""
    shown, more = ", ".join(names[:2]), len(names) - 2
    if more > 0:
        return f"{shown} and {more} more are"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
