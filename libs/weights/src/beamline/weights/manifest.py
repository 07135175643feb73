"""What a policy's weights are made of: one entry a tensor, with its place, size and checksum.

The manifest travels as a blob (`PolicyUpdate.manifest`), the tensors by the transport that it names.
"""

import math

import msgspec

from beamline.protocol.errors import WeightError

ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes an element, by torch's name of the dtype."""

ALIGNMENT_BYTES = 256
"""Tensors start at multiples of it."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: contiguous, little-endian, `num_bytes` from `offset` of the segment.

    Raises:
        WeightError: size, dtype and shape do not fit each other.
    """

    name: str
    """Hugging Face name."""
    dtype: str
    shape: list[int]
    offset: int
    num_bytes: int
    checksum: str
    """xxh3-64 of the bytes, 16 hex digits."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WeightError(f"tensor {self.name}: dtype {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.num_bytes != expected:
            raise WeightError(
                f"tensor {self.name}: {self.num_bytes} bytes, expected {expected} for {self.dtype} {self.shape}"
            )
        if self.offset < 0 or self.offset % ALIGNMENT_BYTES:
            raise WeightError(f"tensor {self.name}: offset {self.offset} is not a multiple of {ALIGNMENT_BYTES}")


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="WeightManifest/1"):
    """All tensors of one policy version.

    Raises:
        WeightError: tensors that overlap, repeat a name or leave the segment; an unknown transport.
    """

    policy_version: int
    transport: str
    segment: str
    """For "shm": path of the segment file."""
    num_bytes: int
    """Size of the segment."""
    tensors: list[TensorEntry]
    """By rising offset."""

    def __post_init__(self) -> None:
        if self.transport != "shm":
            raise WeightError(f"policy {self.policy_version}: transport {self.transport!r}, expected 'shm'")
        names: set[str] = set()
        end = 0
        for tensor in self.tensors:
            if tensor.name in names:
                raise WeightError(f"policy {self.policy_version}: tensor {tensor.name} appears twice")
            if tensor.offset < end:
                raise WeightError(f"tensor {tensor.name}: offset {tensor.offset} lies inside the one before it ({end})")
            names.add(tensor.name)
            end = tensor.offset + tensor.num_bytes
        if end > self.num_bytes:
            raise WeightError(f"policy {self.policy_version}: segment of {self.num_bytes} bytes, tensors end at {end}")

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(payload: bytes | memoryview) -> "WeightManifest":
        """Raises WeightError for bytes that are not a manifest of this version."""
        try:
            return _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightError(f"{memoryview(payload).nbytes} bytes are not a weight manifest: {error}") from error


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WeightManifest] = msgspec.msgpack.Decoder(WeightManifest)
