"""First values of adapters: the same ones in every layout, for they follow from seed and name alone."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from beamline.protocol.adapter import A
from beamline.trainer.megatron.state_slots import Part
from beamline.trainer.shards import Slot


def start_values(slots: Mapping[str, Sequence[Slot]], seed: int) -> None:
    """A uniform within 1 / sqrt(inputs), as PEFT has it (He et al., 1502.01852, with a = sqrt(5)), and B zero.

    A shared A is that of the first of its names.
    """
    for parts in slots.values():
        for slot in parts:
            box = Part.of(slot).box
            values = slot.parameter.data if slot.rows is None else slot.parameter.data[slot.rows]
            if f".{A}." in slot.name:
                values.copy_(_uniform(slot, seed)[tuple(slice(*edges) for edges in box)])
            else:
                values.zero_()


def _uniform(slot: Slot, seed: int) -> torch.Tensor:
    """The whole tensor, of which the rank takes its box; it is small."""
    generator = np.random.default_rng([seed, zlib.crc32(slot.name.encode())])
    bound = slot.shape[1] ** -0.5
    return torch.from_numpy(generator.uniform(-bound, bound, slot.shape).astype(np.float32))
