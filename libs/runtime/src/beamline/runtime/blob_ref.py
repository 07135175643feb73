"""Making and checking references to blobs: the part that all blob stores share."""

import re
import uuid

import xxhash

from beamline.protocol.errors import BlobError
from beamline.protocol.messages import BlobRef

_NAME = re.compile(r"[A-Za-z0-9_:=-]{1,200}")


def make_ref(owner: str, kind: str, payload: bytes | memoryview) -> BlobRef:
    """A reference with a key of its own, so that no two writers meet.

    Raises:
        BlobError: owner or kind cannot be part of a file name and a subject.
    """
    for field, name in (("owner", owner), ("kind", kind)):
        if not _NAME.fullmatch(name):
            raise BlobError(f"blob {field} {name!r}: use 1 to 200 letters, digits, '_', ':', '=' or '-'")
    return BlobRef(
        owner=owner,
        key=f"{kind}-{uuid.uuid4().hex}",
        kind=kind,
        num_bytes=memoryview(payload).nbytes,
        checksum=xxhash.xxh3_64_hexdigest(payload),
    )


def check_names(ref: BlobRef) -> None:
    """References come over the wire: refuse one that could point outside the store. Raises BlobError."""
    for field, name in (("owner", ref.owner), ("key", ref.key)):
        if not _NAME.fullmatch(name):
            raise BlobError(f"blob {field} {name!r} is malformed")


def check_owner(owner: str) -> None:
    """Raises BlobError when it cannot name an owner."""
    if not _NAME.fullmatch(owner):
        raise BlobError(f"blob owner {owner!r} is malformed")


def verify(ref: BlobRef, payload: bytes | memoryview) -> None:
    """Raises BlobError naming the blob when its size or checksum differs from the reference."""
    num_bytes = memoryview(payload).nbytes
    if num_bytes != ref.num_bytes:
        raise BlobError(f"blob {ref.owner}/{ref.key} has {num_bytes} bytes, expected {ref.num_bytes}")
    checksum = xxhash.xxh3_64_hexdigest(payload)
    if checksum != ref.checksum:
        raise BlobError(f"blob {ref.owner}/{ref.key} has checksum {checksum}, expected {ref.checksum}: it is damaged")


def missing(ref: BlobRef) -> BlobError:
    return BlobError(f"blob {ref.owner}/{ref.key} of {ref.num_bytes} bytes is not there: its group has ended")
