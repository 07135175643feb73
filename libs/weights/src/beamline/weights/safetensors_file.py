"""Shards written as a safetensors file as they come, though its header, which names them all, stands before them."""

import json
import os
import struct
from typing import BinaryIO

import numpy as np
import xxhash

from beamline.protocol.errors import WeightError
from beamline.weights.tensors import Shard, on_host

DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Safetensors' names."""

CHUNK_BYTES = 1 << 20
"""Written and hashed in one go, while it is in the processor's cache."""

HEADER_BYTES = 64 << 10
"""Set aside for the header at first; what it does not need is blanks."""

_LENGTH = struct.Struct("<Q")


class SafetensorsWriter:
    """Fills one file; one part of one shard is in memory at a time.

    Args:
        file: empty, open for reading and writing.
        header_bytes: set aside for the header.
    """

    def __init__(self, file: BinaryIO, header_bytes: int = HEADER_BYTES) -> None:
        self._file = file
        self.header_bytes = header_bytes
        self._header: dict[str, object] = {}
        self._filled = 0
        file.seek(self.first_byte)

    @property
    def first_byte(self) -> int:
        """Of the tensors."""
        return _LENGTH.size + self.header_bytes

    def append(self, shard: Shard) -> tuple[int, str]:
        """Returns its offset behind `first_byte`, and the xxh3-64 of its bytes as 16 hex digits.

        Raises WeightError: it was written before, or lies on a GPU.
        """
        key, values = _key(shard), on_host(shard)
        if key in self._header:
            raise WeightError(f"tensor {shard.name}: the box at {list(shard.start)} was exported twice")
        offset, self._filled = self._filled, self._filled + values.nbytes
        shape, offsets = list(values.shape), [offset, self._filled]
        self._header[key] = {"dtype": DTYPES[shard.dtype], "shape": shape, "data_offsets": offsets}
        rows = values.reshape(-1) if values.flags.c_contiguous or not values.ndim else values
        step = max(1, CHUNK_BYTES * len(rows) // max(1, values.nbytes))
        checksum = xxhash.xxh3_64()
        for first in range(0, len(rows) if values.nbytes else 0, step):
            part = np.ascontiguousarray(rows[first : first + step]).view(np.uint8).data
            self._file.write(part)
            checksum.update(part)
        return offset, checksum.hexdigest()

    def finish(self) -> int:
        """Write the header, and all to the disk; returns the file's size. Tensors move up if the header is longer."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        if len(header) > self.header_bytes:
            self._move_up(-(-len(header) // HEADER_BYTES) * HEADER_BYTES)
        self._file.seek(0)
        self._file.write(_LENGTH.pack(self.header_bytes) + header.ljust(self.header_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.first_byte + self._filled

    def _move_up(self, header_bytes: int) -> None:
        before, self.header_bytes = self.first_byte, header_bytes
        for first in reversed(range(0, self._filled, CHUNK_BYTES)):
            self._file.seek(before + first)
            part = self._file.read(min(CHUNK_BYTES, self._filled - first))
            self._file.seek(self.first_byte + first)
            self._file.write(part)


def _key(shard: Shard) -> str:
    if shard.values.shape == shard.shape:
        return shard.name
    return f"{shard.name}@{','.join(map(str, shard.start))}"
