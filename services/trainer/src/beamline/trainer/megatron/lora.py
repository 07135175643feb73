"""Low-rank adapters on a frozen model, by Megatron-Bridge's layers.

`LoRA` gives a matrix of Megatron's one adapter, whose A is that of all modules in it; `CanonicalLoRA` gives each module
its own. Experts are linear layers one by one, so that each has an adapter of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.walk_utils import walk
from torch import Tensor, nn

from beamline.models.routing import RoutingShape
from beamline.models.weight_files import tensor_shapes
from beamline.protocol.adapter import Adapter, adapters_of
from beamline.protocol.lora_config import LoraSection
from beamline.trainer.megatron.adapter_folder import AdapterFolder
from beamline.trainer.megatron.lora_export import gathered
from beamline.trainer.megatron.lora_init import start_values
from beamline.trainer.megatron.lora_slots import AdapterParts, parts_of
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.slots import check_bridge
from beamline.trainer.shards import Slot


def with_adapters(model: Model, lora: LoraSection, seed: int) -> Model:
    """The model, loaded, with adapters that add nothing yet; all else is frozen.

    Args:
        seed: of A, and of dropout, which is another one on every rank.

    Raises:
        ConfigError: the model has no layers for a target, or experts whose rank cannot be normalised.
    """
    adapters = adapters_of(tensor_shapes(model.path), lora, RoutingShape.of(model.path).top_k)
    check_bridge(model)
    tasks = model.bridge.get_conversion_tasks([model.module])  # by the names that parameters have without adapters
    attach(model.module, lora, adapters)
    parts = parts_of(model, tasks)
    start_values(parts.slots, seed)
    if lora.dropout:
        torch.manual_seed(seed + dist.get_rank())
    if model.config.recompute_granularity == "full":
        _let_gradients_begin(model.module)
    return replace(model, adapters=Adapters(model, adapters, parts))


def attach(module: nn.Module, lora: LoraSection, adapters: list[Adapter]) -> None:
    """Freeze all that there is, and give it these adapters, whose first values come later."""
    module.requires_grad_(False)
    walk(module, _bridge_lora(lora, sorted({adapter.target for adapter in adapters})).transform)
    _fill_gaps(module)


@dataclass(frozen=True)
class Adapters:
    """Implements `Trained`: adapters alone, under the names of `protocol.adapter`."""

    model: Model
    adapters: list[Adapter]
    """Of the whole model."""
    parts: AdapterParts

    @property
    def folder(self) -> AdapterFolder:
        return AdapterFolder(self.adapters, self.model.path)

    def slots(self) -> dict[str, list[Slot]]:
        return self.parts.slots

    def units(self) -> list[list[Slot]]:
        return self.parts.units

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(self.adapters, self.parts.units, self.model.config.params_dtype)

    def reference(self) -> "WithoutAdapters":
        return WithoutAdapters(self.model.module)


class WithoutAdapters:
    """Implements `Reference`: the frozen model beneath the adapters, whose first values added nothing to it."""

    def __init__(self, module: nn.Module) -> None:
        self._wrappers = [part for part in module.modules() if isinstance(part, AdapterWrapper)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Nothing is moved: every layer leaves its adapter out."""
        try:
            for wrapper in self._wrappers:
                wrapper.disable_adapter_layers()
            yield
        finally:
            for wrapper in self._wrappers:
                wrapper.enable_adapter_layers()


def _bridge_lora(lora: LoraSection, targets: list[str]) -> LoRA | CanonicalLoRA:
    common: dict[str, Any] = {
        "target_modules": targets,
        "dim": lora.rank,
        "alpha": lora.scale_numerator,
        "dropout": lora.dropout,
        "normalize_moe_lora": lora.normalize_moe_lora,
        "share_expert_adapters": False,
        "lora_A_init_method": "zero",  # ours come afterwards
    }
    if lora.is_split:
        return CanonicalLoRA(**common)
    return LoRA(**common, sequence_parallel_input_regather=lora.sequence_parallel_input_regather)


class _NoAdapter(nn.Module):
    """In the place of a module's adapter where others of its matrix have one: nothing, of the shape of its output."""

    def __init__(self, num_features: int, num_parts: int) -> None:
        super().__init__()
        self._num_features = num_features
        self._num_parts = num_parts

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """x [rows, ..., inputs] -> zeros [rows of all ranks, ..., outputs of this one]."""
        return x.new_zeros(x.shape[0] * self._num_parts, *x.shape[1:-1], self._num_features)


def _fill_gaps(module: Any) -> None:
    """The bridge's layers expect all of q, k and v, and both of gate and up."""
    for wrapper in [part for part in module.modules() if isinstance(part, AdapterWrapper)]:
        if isinstance(wrapper.adapter, nn.ModuleDict):
            matrix: Any = wrapper.to_wrap
            num_parts = matrix.tp_group.size() if matrix.sequence_parallel else 1
            for key in [key for key, adapter in wrapper.adapter.items() if adapter is None]:
                wrapper.adapter[key] = _NoAdapter(_num_features(key, matrix), num_parts)


def _num_features(key: str, matrix: Any) -> int:
    """Rows of the matrix on this rank that are those of a module."""
    num_rows: int = matrix.weight.shape[0]
    if key in ("adapter_gate", "adapter_up"):
        return num_rows // 2
    heads, groups = matrix.config.num_attention_heads, matrix.config.num_query_groups
    return num_rows // (heads + 2 * groups) * (heads if key == "adapter_q" else groups)


def _let_gradients_begin(module: Any) -> None:
    """Megatron computes a layer again only if its input has a gradient, which frozen embeddings do not give it."""
    if module.pre_process:
        module.embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_())
