"""The adapter slots of one rank: written from memory, and named by the ids that requests carry."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from beamline.protocol.adapter import Adapter, adapters_of
from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.rollout import checkpoint
from beamline.rollout.lora.layers import ExpertSlots, boxes_of, pair_of, tensors_of
from beamline.rollout.lora.manager import SlotManager
from beamline.rollout.lora.modules import part_of
from beamline.weights.tensors import Box


@dataclass(frozen=True)
class _Place:
    """Where one tensor of an adapter belongs."""

    box: Box
    """What of it this rank keeps."""
    slots: torch.Tensor
    """Room for that in every slot [S, rows, columns]."""
    scale: float


class LoraSlots:
    """Holds `num_slots` adapters of a model at once. No slot but the one that is named is touched.

    Args:
        manager: of the runner, its layers made.
        adapters: of the whole model.
    """

    def __init__(self, manager: SlotManager, adapters: Iterable[Adapter]) -> None:
        self._manager = manager
        self.num_slots = manager.num_slots
        self._places = {name: place for adapter in adapters for name, place in _places(manager, adapter)}
        self.needs: dict[str, list[Box]] = {name: [place.box] for name, place in self._places.items()}
        """The boxes of every adapter tensor that this rank keeps, of its pipeline stage's modules alone."""

    @property
    def num_bytes(self) -> int:
        """Of all slots on this rank."""
        return self.num_dense_bytes + self.num_expert_bytes

    @property
    def num_dense_bytes(self) -> int:
        return sum(
            t.nbytes for layer in self._layers() if not isinstance(layer, ExpertSlots) for t in tensors_of(layer)
        )

    @property
    def num_expert_bytes(self) -> int:
        return sum(t.nbytes for layer in self._layers() if isinstance(layer, ExpertSlots) for t in tensors_of(layer))

    @torch.no_grad()
    def write(self, slot: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put an adapter into a slot that no request reads.

        Args:
            tensors: whole ones, of which what is not in `needs` may be anything; others than this rank's are passed
                over. Without the scale, which goes into B.

        Raises:
            WeightError: one that this rank needs is missing.
        """
        missing = set(self._places)
        for name, tensor in tensors:
            if place := self._places.get(name):
                cut = tensor[tuple(slice(*edges) for edges in place.box)]
                room = place.slots[slot].copy_(cut, non_blocking=True)
                if place.scale != 1:
                    room.mul_(place.scale)
                missing.discard(name)
        if missing:
            raise WeightError(f"the adapter lacks {len(missing)} tensors, one of them {min(missing)}")
        self._enable(slot, True)

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Make a slot's adapter that of B = 0."""
        for layer in self._layers():
            for tensor in tensors_of(layer):
                tensor[slot].zero_()
        self._enable(slot, False)

    def bind(self, lora_int_id: int, slot: int) -> None:
        """From the next step on, requests with this id read the slot; several ids may read one."""
        assert lora_int_id > 0 and 0 <= slot < self.num_slots
        self._manager.slots[lora_int_id] = slot

    def unbind(self, lora_int_id: int) -> None:
        """No request has this id any more."""
        self._manager.slots.pop(lora_int_id, None)

    def _layers(self) -> Iterable[Any]:
        return self._manager.layers.values()

    def _enable(self, slot: int, enabled: bool) -> None:
        for layer in self._layers():
            if isinstance(layer, ExpertSlots):
                layer.adapter_enabled[slot] = int(enabled)


def prepare(runner: Any, settings: dict[str, Any]) -> None:
    """Have vLLM's runner make slots in the place of its own adapters, when it loads its model."""
    runner.load_lora_model = partial(_make_slots, runner, settings)


def _make_slots(
    runner: Any, settings: dict[str, Any], model: nn.Module, vllm_config: Any, device: torch.device
) -> nn.Module:
    lora = msgspec.convert(settings["section"], LoraSection)
    path = Path(vllm_config.model_config.model)
    shape = checkpoint.routing_shape(path)
    adapters = adapters_of(checkpoint.tensor_shapes(path), lora, shape.top_k if shape else 0)
    runner.lora_manager = SlotManager(model, vllm_config, device, adapters, settings["expert_rank"])
    return model


def _places(manager: SlotManager, adapter: Adapter) -> Iterable[tuple[str, _Place]]:
    """Both of an adapter's, where its module is of this stage."""
    part = part_of(adapter.module)
    layer = part and manager.layers.get(part.module)
    if part is None or layer is None:
        return
    box_a, box_b = boxes_of(layer, part, adapter)
    a, b = pair_of(layer, part)
    yield adapter.a, _Place(box_a, _room(a, box_a), 1.0)
    yield adapter.b, _Place(box_b, _room(b, box_b), adapter.scale)


def _room(slots: torch.Tensor, box: Box) -> torch.Tensor:
    """The first rows and columns of every slot; what is left of a slot stays zero."""
    (first_row, last_row), (first_column, last_column) = box
    return slots[:, : last_row - first_row, : last_column - first_column]
