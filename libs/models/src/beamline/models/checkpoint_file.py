"""Writing a safetensors file with numpy alone, bfloat16 included (numpy has no such type)."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

HEADER_ALIGNMENT_BYTES = 8
_NAMES = {"float32": "F32", "bfloat16": "BF16"}


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 `values` rounded to nearest, ties to even, as uint16. NaN is not handled."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write(path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    """Write float32 `tensors` by name, each stored as `dtypes[name]`: "float32" or "bfloat16".

    The layout is safetensors': a little-endian length, a JSON header, then the raw buffers in order.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    buffers, offset = [], 0
    for name in sorted(tensors):
        array = tensors[name]
        stored = to_bfloat16_bits(array) if dtypes[name] == "bfloat16" else np.ascontiguousarray(array, dtype="<f4")
        buffer = stored.astype(stored.dtype.newbyteorder("<"), copy=False).tobytes()
        header[name] = {
            "dtype": _NAMES[dtypes[name]],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(buffer)],
        }
        buffers.append(buffer)
        offset += len(buffer)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(buffers)
