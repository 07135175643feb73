"""vLLM's layers with adapter slots: the targeted ones alone, and an expert's slots sized by the experts' own rank."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA
from vllm.lora.utils import from_layer, replace_submodule
from vllm.model_executor.layers.fused_moe import MoERunner

from beamline.protocol.adapter import Adapter
from beamline.rollout.lora.modules import NUM_PARTS, Part, part_of
from beamline.weights.tensors import Box

_DOWN = 2


class ExpertSlots(FusedMoEWithLoRA):
    """A layer's experts with slots of a rank of their own: vLLM's would have that of the dense layers."""

    def create_expert_slots(self, num_slots: int, lora_config: Any, rank: int) -> None:
        sized = copy.copy(lora_config)
        sized.max_lora_rank = rank
        self.create_lora_weights(num_slots, sized)

    def pair(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """A [S, R, in] and B [S, out, R] of one expert's gate, up or down product, in every slot."""
        if part.index == _DOWN:
            a, b = self.w2_lora_a_stacked[0], self.w2_lora_b_stacked[0]
        else:
            a, b = self.w13_lora_a_stacked[part.index], self.w13_lora_b_stacked[part.index]
        return a[:, part.expert], b[:, part.expert]

    def tensors(self) -> list[torch.Tensor]:
        """All slots."""
        gate_up = [*self.w13_lora_a_stacked, *self.w13_lora_b_stacked]
        return [*gate_up, *self.w2_lora_a_stacked, *self.w2_lora_b_stacked]


def add_slots(model: nn.Module, adapters: Iterable[Adapter], vllm_config: Any, expert_rank: int) -> dict[str, Any]:
    """Put a layer with slots in the place of each that has an adapter; returns those of this stage, by name."""
    lora_config = vllm_config.lora_config
    wanted = {part.module for adapter in adapters if (part := part_of(adapter.module))}
    found = {name: module for name, module in model.named_modules() if name in wanted}
    wrapped: dict[str, Any] = {}
    for name, module in found.items():
        if isinstance(module, MoERunner):
            layer: Any = ExpertSlots(module)
            layer.create_expert_slots(lora_config.max_loras, lora_config, expert_rank)
        else:
            parts = [""] * NUM_PARTS.get(name.rpartition(".")[2], 0)
            layer = from_layer(module, lora_config.max_loras, lora_config, parts)
        assert isinstance(layer, BaseLayerWithLoRA), f"vLLM has no adapter for {name}, a {type(module).__name__}"
        wrapped[name] = replace_submodule(model, name, layer)
    return wrapped


def pair_of(layer: Any, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """A [S, R, in] and B [S, out, R] of one part of a layer, as this rank has them, in every slot."""
    if isinstance(layer, ExpertSlots):
        return layer.pair(part)
    return layer.lora_a_stacked[part.index][:, 0], layer.lora_b_stacked[part.index][:, 0]


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """All of a layer's slots."""
    return layer.tensors() if isinstance(layer, ExpertSlots) else [*layer.lora_a_stacked, *layer.lora_b_stacked]


def boxes_of(layer: Any, part: Part, adapter: Adapter) -> tuple[Box, Box]:
    """What this tensor-parallel rank keeps of A [rank, in] and of B [out, rank]."""
    inputs, outputs = (0, adapter.in_features), (0, adapter.out_features)
    if isinstance(layer, RowParallelLinearWithLoRA) or (isinstance(layer, ExpertSlots) and part.index == _DOWN):
        inputs = _share(adapter.in_features // layer.tp_size, layer.tp_rank)
    elif isinstance(layer, ExpertSlots):
        outputs = _share(adapter.out_features // layer.tp_size, layer.tp_rank)
    elif len(layer.lora_b_stacked) > 1:
        outputs = _share(layer.output_slices[part.index], layer.output_ids[part.index])
    else:
        outputs = _share(layer.output_size, layer.tp_rank)
    ranks = (0, adapter.rank)
    return (ranks, inputs), (outputs, ranks)


def _share(size: int, index: int) -> tuple[int, int]:
    return index * size, (index + 1) * size
