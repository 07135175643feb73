"""A rank whose adapter slots a test fills by itself, with adapters made where they are needed."""

from pathlib import Path

import numpy as np
import torch

from beamline.protocol.adapter import Adapter, adapters_of
from beamline.rollout import checkpoint
from beamline.rollout.engine_worker import EngineWorker
from beamline.rollout.lora.slots import LoraSlots
from lora_variants import ALL
from made_adapters import made


class SlotsWorker(EngineWorker):
    """Writes any of the variants into any slot, whichever it was started for."""

    def write_variant(self, slot: int, id: int, variant: str, seed: int) -> None:
        """Put one made of `variant` and `seed` into a slot, and have the id read it."""
        path = Path(self.model_runner.model_config.model)
        shape = checkpoint.routing_shape(path)
        adapters = adapters_of(checkpoint.tensor_shapes(path), ALL[variant], shape.top_k if shape else 0)
        slots = self.slots_for(adapters)
        tensors = made(adapters, seed)
        slots.clear(slot)
        slots.write(slot, ((name, _only(slots, name, tensor)) for name, tensor in tensors.items()))
        self._bindings = {**getattr(self, "_bindings", {}), id: [id, slot, seed]}
        assert self._adapters is not None
        self._adapters.bind(list(self._bindings.values()))

    def slots_for(self, adapters: list[Adapter]) -> LoraSlots:
        return LoraSlots(self.model_runner.lora_manager, adapters)

    def slot_bytes(self) -> tuple[int, int]:
        """Of dense layers and of experts."""
        slots = self.slots_for([])
        return slots.num_dense_bytes, slots.num_expert_bytes

    def num_blocks(self) -> int:
        """Of the key-value cache."""
        return self.model_runner.kv_cache_config.num_blocks


def _only(slots: LoraSlots, name: str, tensor: np.ndarray) -> torch.Tensor:
    """The tensor as it is fetched: what the rank does not need of it is anything."""
    cut = np.full_like(tensor, np.nan)
    for box in slots.needs.get(name, []):
        inside = tuple(slice(*edges) for edges in box)
        cut[inside] = tensor[inside]
    return torch.from_numpy(cut)
