"""Adapters gathered from all ranks. Megatron-Bridge's own export takes experts for those of rank 0's numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from beamline.protocol.adapter import Adapter, adapter_shapes
from beamline.trainer.megatron.buckets import buckets_of
from beamline.trainer.megatron.owners import FLAT_BYTES
from beamline.trainer.megatron.state_slots import Part
from beamline.trainer.shards import Slot


def gathered(
    adapters: list[Adapter], units: Sequence[Sequence[Slot]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whole, on every rank; all take part.

    Args:
        adapters: of the whole model, the same on every rank.
        units: what this rank has to give.
    """
    shapes, mine = adapter_shapes(adapters), dict[str, list[Slot]]()
    for slot in (slot for unit in units for slot in unit):
        mine.setdefault(slot.name, []).append(slot)
    device = next((slot.parameter.device for found in mine.values() for slot in found), torch.device("cpu"))
    sizes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for names in buckets_of(sizes, FLAT_BYTES):
        flat = torch.zeros(sum(math.prod(shapes[name]) for name in names), dtype=dtype, device=device)
        wholes = _views(flat, {name: shapes[name] for name in names})
        for name, whole in wholes.items():
            for slot in mine.get(name, ()):
                _place(slot, whole)
        # Everyone else has zeros there: as integers bytes add up to what they were, negative zeros and all.
        dist.all_reduce(flat.view(torch.uint8))
        yield from wholes.items()


def _views(flat: Tensor, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _place(slot: Slot, whole: Tensor) -> None:
    values = slot.parameter.detach()
    box = tuple(slice(*edges) for edges in Part.of(slot).box)
    whole[box].copy_(values if slot.rows is None else values[slot.rows])
