"""What a policy is made of on its way: boxes of tensors, each under its Hugging Face name."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from beamline.protocol.errors import WeightError

ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes an element, by torch's name of the dtype."""

STORAGE = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
"""How elements of a size are carried: as bits, for numpy does not know all of torch's dtypes."""

type Box = tuple[tuple[int, int], ...]
"""Start and stop in every dimension."""


class DeviceArray(Protocol):
    """An array on a GPU, such as a torch tensor, which need not be contiguous."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of a tensor, as one rank of the owner has it.

    Raises:
        WeightError: an unknown dtype, or values that are not a box of the tensor.
    """

    name: str
    """Hugging Face name."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Where the box begins, in every dimension."""
    values: np.ndarray | DeviceArray
    """The box: any strides, elements of the dtype's size. On a GPU for `cuda_ipc` alone."""
    group: str = ""
    """What kind of tensor it is, such as "router"."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WeightError(f"tensor {self.name}: dtype {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        if self.values.itemsize != ITEM_BYTES[self.dtype]:
            raise WeightError(f"tensor {self.name}: elements of {self.values.itemsize} bytes are not {self.dtype}")
        box = list(zip(self.start, self.values.shape, self.shape, strict=False))
        fits = len(self.start) == len(self.shape) == self.values.ndim and all(s >= 0 and s + n <= d for s, n, d in box)
        if not fits:
            raise WeightError(
                f"tensor {self.name}: a box of shape {list(self.values.shape)} at {list(self.start)} does not lie in "
                f"{list(self.shape)}"
            )

    @classmethod
    def whole(cls, name: str, dtype: str, values: np.ndarray | DeviceArray, group: str = "") -> "Shard":
        """A tensor that is not shared out."""
        start = (0,) * values.ndim
        return cls(name=name, dtype=dtype, shape=tuple(values.shape), start=start, values=values, group=group)

    def cut(self, dim: int, parts: int) -> Iterator["Shard"]:
        """Cut at the tensor's `parts` equal parts along a dimension, from 0; as it is where they are not equal."""
        assert 0 <= dim < max(1, len(self.shape)), f"tensor {self.name} of {list(self.shape)} has no dimension {dim}"
        size = self.shape[dim] if self.shape else 0
        if parts == 1 or size == 0 or size % parts:
            yield self
            return
        step, begin = size // parts, self.start[dim]
        end = begin + self.values.shape[dim]
        edges = [begin, *range((begin // step + 1) * step, end, step), end]
        for first, last in pairwise(edges):
            inside = (slice(None),) * dim + (slice(first - begin, last - begin),)
            start = (*self.start[:dim], first, *self.start[dim + 1 :])
            yield replace(self, start=start, values=self.values[inside])


def on_host(shard: Shard) -> np.ndarray:
    """Its values, for a transport through main memory. Raises WeightError: they lie on a GPU."""
    if not isinstance(shard.values, np.ndarray):
        raise WeightError(f"tensor {shard.name} lies on a GPU: copy it to main memory, or use transport cuda_ipc")
    return shard.values


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Of a tensor or a box."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def common(one: Box, other: Box) -> int:
    """Elements that two boxes of a tensor have in common. Raises ValueError: one has more dimensions."""
    return math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(one, other, strict=True))
