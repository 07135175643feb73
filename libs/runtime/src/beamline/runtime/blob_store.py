"""The data plane: blobs are put once, read by reference, and released by their owner's end.

`shm_blobs.ShmBlobStore` keeps them in shared memory of one host; `jetstream_blobs.JetStreamBlobStore` moves them
between hosts in chunks. A blob belongs to an owner (a group id, or "policy"); the ledger releases the owner when the
group ends.
"""

from typing import Protocol

import msgspec

from beamline.protocol.messages import BlobRef


class BlobUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's blobs take."""

    used_bytes: int
    free_bytes: int | None = None
    """What they may still take, where that is known."""


class BlobStore(Protocol):
    """Keys are unique to the writer, so that a redelivered group never overwrites what a message already refers to."""

    async def put(self, owner: str, kind: str, payload: bytes | memoryview) -> BlobRef:
        """Store bytes. Raises BlobError when the store is full, naming what is needed and what is there."""
        ...

    async def get(self, ref: BlobRef) -> memoryview:
        """The bytes, size and checksum verified. Raises BlobError naming the blob, expected and found."""
        ...

    async def release(self, owner: str) -> None:
        """Drop all blobs of an owner; a repeat does nothing. Views already handed out stay valid."""
        ...

    async def usage(self) -> BlobUsage:
        """What all blobs of the run take now; the coordinator may ask."""
        ...

    async def close(self) -> None:
        """Let go of the store, without dropping blobs that others may need."""
        ...
