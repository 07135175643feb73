"""A rank's parameters as shards of Hugging Face tensors: views all the way, so that nothing is held twice."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from beamline.weights.tensors import Shard

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""As what elements of a size are handed on: numpy does not know bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a box of a Hugging Face tensor lies: in some rows of a parameter, or in all of it."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Where the box begins, in every dimension."""
    parameter: Tensor
    rows: slice | None = None
    dim: int | None = None
    """Along which tensor parallelism cuts it."""
    group: str = ""
    """"router", "norm" or nothing."""

    def shards(self, cuts: int) -> Iterator[tuple[int, Shard]]:
        """The box, cut where the tensor's `cuts` equal parts begin; each piece with the number of its part."""
        values = self.parameter.detach()
        shard = Shard(
            name=self.name,
            dtype=str(values.dtype).removeprefix("torch."),
            shape=self.shape,
            start=self.start,
            values=values if self.rows is None else values[self.rows],
            group=self.group,
        )
        if self.dim is None:
            yield 0, shard
            return
        for piece in shard.cut(self.dim, cuts):
            yield piece.start[self.dim] * cuts // max(1, self.shape[self.dim]), piece


def shards_of(units: Iterable[Sequence[Slot]], cuts: int, on_device: bool = False) -> Iterator[Shard]:
    """The shards of a rank; they are valid until the next update.

    Args:
        units: slots of which an engine may make one parameter. Whatever one of its tensor-parallel ranks needs of a
            unit comes one piece behind the other, so that it can be read as one array.
        cuts: tensor-parallel ranks of an engine.
        on_device: leave values on the GPU where they lie there; else each shard is copied to the host as it comes.
    """
    for unit in units:
        pieces = [piece for slot in unit for piece in slot.shards(cuts)]
        for _, shard in sorted(pieces, key=itemgetter(0)):
            assert isinstance(shard.values, Tensor)
            bits = shard.values.view(_BITS[shard.values.itemsize])
            yield replace(shard, values=bits if on_device and bits.is_cuda else bits.cpu().numpy())
