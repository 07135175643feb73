"""Safetensors files with numpy alone, bfloat16 included, a few rows of a tensor at a time."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from beamline.protocol.errors import WeightError

FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Safetensors' names of what can be calculated with."""
_STORAGE = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Safetensors' own limit."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a tensor lies in a file."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


class TensorFile:
    """One file, by its header; tensors are read when they are asked for.

    Raises:
        WeightError: it cannot be read, is no such file, or is shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.header = _read_header(file)
            size = path.stat().st_size
        except OSError as error:
            raise WeightError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise WeightError(f"{path} is no safetensors file: {error}") from error
        self.tensors = dict(_entries(self.header))
        """By name, in the order of the header."""
        expected = max((t.first_byte + t.num_bytes for t in self.tensors.values()), default=len(self.header))
        if size != expected:
            raise WeightError(f"{path} has {size:,} bytes where its header says {expected:,}: it is damaged")

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Some rows of a tensor of floats, as float32, or as float64 where they are stored so."""
        stored = self.tensors[name]
        if stored.dtype not in _STORAGE:
            raise WeightError(f"tensor {name} in {self.path} is of {stored.dtype}, expected {', '.join(_STORAGE)}")
        first, stop, _ = rows.indices(stored.shape[0] if stored.shape else 1)
        row_bytes = stored.num_bytes // max(1, stored.shape[0]) if stored.shape else stored.num_bytes
        raw = self.raw(stored.first_byte + first * row_bytes, (stop - first) * row_bytes)
        values = np.frombuffer(raw, _STORAGE[stored.dtype]).reshape(stop - first, *stored.shape[1:])
        return widened(values, stored.dtype)

    def raw(self, first_byte: int, num_bytes: int) -> bytes:
        """Bytes of the file as they are."""
        with self.path.open("rb") as file:
            file.seek(first_byte)
            found = file.read(num_bytes)
        if len(found) != num_bytes:
            raise WeightError(f"{self.path} ends before byte {first_byte + num_bytes:,}: it is damaged")
        return found


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What stands before tensors that follow each other: dtype, by safetensors' name, and shape of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    filled = 0
    for name, (dtype, shape) in tensors.items():
        begin, filled = filled, filled + math.prod(shape) * _STORAGE[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, filled]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    return _LENGTH.pack(len(text)) + text


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Stored floats as float32, which holds all of them but float64."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == "F16" else values


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 or float64 in the form in which they are stored, to the nearest, ties to even. bfloat16 of float64 goes
    through float32, as everywhere. Finite values alone."""
    if dtype != "BF16":
        return np.ascontiguousarray(values, _STORAGE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(_STORAGE[dtype])


def _read_header(file: BinaryIO) -> bytes:
    prefix = file.read(_LENGTH.size)
    (length,) = _LENGTH.unpack(prefix)
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length:,} bytes")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("it ends inside its header")
    for _ in _entries(prefix + text):
        pass
    return prefix + text


def _entries(header: bytes) -> Iterable[tuple[str, Stored]]:
    found: dict[str, Any] = json.loads(header[_LENGTH.size :])
    for name, entry in found.items():
        if name != "__metadata__":
            begin, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            where = {"first_byte": len(header) + begin, "num_bytes": end - begin}
            yield name, Stored(dtype=str(entry["dtype"]), shape=shape, **where)
