"""`BlobStore` inside one process, beside `memory_bus`."""

from beamline.protocol.messages import BlobRef
from beamline.runtime.blob_ref import check_owner, make_ref, missing, verify
from beamline.runtime.blob_store import BlobUsage


class MemoryBlobStore:
    """Blobs by owner and key; share one object between the services of a simulation."""

    def __init__(self) -> None:
        self.blobs: dict[str, dict[str, bytes]] = {}

    async def put(self, owner: str, kind: str, payload: bytes | memoryview) -> BlobRef:
        ref = make_ref(owner, kind, payload)
        self.blobs.setdefault(owner, {})[ref.key] = bytes(payload)
        return ref

    async def get(self, ref: BlobRef) -> memoryview:
        payload = self.blobs.get(ref.owner, {}).get(ref.key)
        if payload is None:
            raise missing(ref)
        verify(ref, payload)
        return memoryview(payload)

    async def release(self, owner: str) -> None:
        check_owner(owner)
        self.blobs.pop(owner, None)

    async def usage(self) -> BlobUsage:
        return BlobUsage(used_bytes=sum(len(blob) for owned in self.blobs.values() for blob in owned.values()))

    async def close(self) -> None:
        """Nothing to let go of."""
