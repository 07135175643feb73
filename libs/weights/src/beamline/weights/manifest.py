"""What a policy's weights are made of: every tensor, the pieces it lies in, and the memory where those lie.

The manifest travels as a blob (`PolicyUpdate.manifest`), the bytes by the transports that its places name.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import Annotated

import msgspec
import xxhash

from beamline.protocol.errors import WeightError
from beamline.weights.tensors import ITEM_BYTES, Box, Shard, common, num_bytes

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
"""Bounds on what is decoded: sizes multiply, and a manifest comes from another process."""


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of a tensor: contiguous, little-endian, from `offset` of a place."""

    place: Count
    """Index into the manifest's places."""
    offset: Count
    start: Dims
    shape: Dims
    checksum: str
    """xxh3-64 of the bytes, 16 hex digits."""

    @property
    def box(self) -> Box:
        return tuple((start, start + size) for start, size in zip(self.start, self.shape, strict=True))


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor.

    Raises:
        WeightError: an unknown dtype, or a piece that is no box of the tensor.
    """

    name: str
    """Hugging Face name."""
    dtype: str
    """Torch's name."""
    shape: Dims
    group: str = ""
    """Tensors of one kind, such as "router"."""
    pieces: list[Piece]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WeightError(f"tensor {self.name}: dtype {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        for piece in self.pieces:
            same = len(piece.start) == len(piece.shape) == len(self.shape)
            if not same or any(b > size for (_, b), size in zip(piece.box, self.shape, strict=True)):
                raise WeightError(
                    f"tensor {self.name}: a piece of shape {list(piece.shape)} at {list(piece.start)} does not lie in "
                    f"{list(self.shape)}"
                )

    def __str__(self) -> str:
        return f"tensor {self.name}, {self.dtype} {list(self.shape)}" + (f" ({self.group})" if self.group else "")

    def num_bytes(self, piece: Piece) -> int:
        return num_bytes(self.dtype, piece.shape)

    def is_kin(self, other: "TensorEntry") -> bool:
        """Whether both can be parts of one tensor."""
        return (self.dtype, self.shape, self.group) == (other.dtype, other.shape, other.group)

    @property
    def is_whole(self) -> bool:
        """Whether its pieces make up the tensor, each element once."""
        if sum(math.prod(piece.shape) for piece in self.pieces) != math.prod(self.shape):
            return False
        return bool(self.pieces) and not any(common(a.box, b.box) for a, b in combinations(self.pieces, 2))


class Entries:
    """What an owner has written to the one place of its part, told shard by shard."""

    def __init__(self) -> None:
        self._tensors: dict[str, TensorEntry] = {}

    @property
    def tensors(self) -> list[TensorEntry]:
        return list(self._tensors.values())

    def add(self, shard: Shard, offset: int, checksum: str) -> None:
        """Raises WeightError: another shard of the tensor said otherwise of its dtype, shape or group."""
        shape = tuple(shard.values.shape)
        piece = Piece(place=0, offset=offset, start=shard.start, shape=shape, checksum=checksum)
        entry = TensorEntry(name=shard.name, dtype=shard.dtype, shape=shard.shape, group=shard.group, pieces=[piece])
        known = self._tensors.setdefault(shard.name, entry)
        if not known.is_kin(entry):
            raise WeightError(f"{known} in one shard, {entry} in another")
        if known is not entry:
            known.pieces.append(piece)


class ShmPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shm"):
    """Shared memory of the owner's host."""

    num_bytes: Count
    socket: str
    """Path of the Unix socket where the owner hands out its memory."""


class CudaChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A part of a GPU's memory, shared for itself."""

    handle: bytes
    """The driver's IPC handle of it."""
    num_bytes: Count


class CudaPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cuda_ipc"):
    """Memory of a GPU of the owner's host, in chunks. Offsets run through all of them; a piece lies in one."""

    num_bytes: Count
    socket: str
    """Path of the Unix socket where readers hold on to the memory."""
    device: str
    """UUID of the GPU."""
    chunks: list[CudaChunk]
    event: bytes
    """The driver's IPC handle of the event after which all is written."""


class NixlPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nixl"):
    """Memory that the owner has registered with NIXL, on this host or another."""

    num_bytes: Count
    agent: str
    """Name of the owner's agent."""
    metadata: bytes
    """How to reach it; NIXL's own, opaque."""
    address: int
    """Of the first byte, in the owner's address space."""
    device: int = 0
    """0 in main memory."""


class CheckpointPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="checkpoint"):
    """A safetensors file, on a filesystem that both sides see. Offsets count from its first byte."""

    num_bytes: Count
    path: str


type Place = ShmPlace | CudaPlace | NixlPlace | CheckpointPlace


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="WeightManifest/1"):
    """One policy version.

    Raises:
        WeightError: a name that appears twice, or a piece outside its place.
    """

    policy_version: int
    places: list[ShmPlace | CudaPlace | NixlPlace | CheckpointPlace]
    tensors: list[TensorEntry]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise WeightError(f"policy {self.policy_version}: tensor {tensor.name} appears twice")
            names.add(tensor.name)
            for piece in tensor.pieces:
                if piece.place >= len(self.places):
                    raise WeightError(f"tensor {tensor.name}: place {piece.place}, there are {len(self.places)}")
                end, size = piece.offset + tensor.num_bytes(piece), self.places[piece.place].num_bytes
                if end > size:
                    raise WeightError(f"tensor {tensor.name}: bytes {piece.offset} to {end} of a place of {size} bytes")

    @property
    def layout(self) -> str:
        """Digest of all but contents, version and places: policies with the same one are read by the same plan."""
        rows = [
            (t.name, t.dtype, t.shape, [(p.place, p.offset, p.start, p.shape) for p in t.pieces]) for t in self.tensors
        ]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((len(self.places), rows)))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes(piece) for tensor in self.tensors for piece in tensor.pieces)

    @property
    def contents(self) -> frozenset[tuple[object, ...]]:
        """What makes weights the same ones, wherever they lie."""
        return frozenset(
            (tensor.name, tensor.dtype, piece.start, piece.shape, piece.checksum)
            for tensor in self.tensors
            for piece in tensor.pieces
        )

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(payload: bytes | memoryview) -> "WeightManifest":
        """Raises WeightError for bytes that are not a manifest of this version."""
        try:
            return _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightError(f"{memoryview(payload).nbytes} bytes are not a weight manifest: {error}") from error


def merge(parts: Sequence[WeightManifest]) -> WeightManifest:
    """The policy of which every rank of the owner has exported a part.

    Raises WeightError: the parts are of different versions, disagree about a tensor, or do not make up all of it.
    """
    version = parts[0].policy_version
    tensors: dict[str, TensorEntry] = {}
    first_places = accumulate((len(part.places) for part in parts), initial=0)
    for part, first_place in zip(parts, first_places, strict=False):
        if part.policy_version != version:
            raise WeightError(f"parts of policies {version} and {part.policy_version} are no policy")
        for entry in part.tensors:
            moved = [msgspec.structs.replace(piece, place=piece.place + first_place) for piece in entry.pieces]
            known = tensors.get(entry.name)
            if known and not known.is_kin(entry):
                raise WeightError(f"policy {version}: {known} on one rank, {entry} on another")
            pieces = [*known.pieces, *moved] if known else moved
            tensors[entry.name] = msgspec.structs.replace(entry, pieces=pieces)
    for entry in tensors.values():
        if not entry.is_whole:
            raise WeightError(f"policy {version}: the pieces of {entry} do not make it up, each element once")
    return WeightManifest(
        policy_version=version,
        places=[place for part in parts for place in part.places],
        tensors=list(tensors.values()),
    )


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WeightManifest] = msgspec.msgpack.Decoder(WeightManifest)
