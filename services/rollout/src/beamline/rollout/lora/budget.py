"""How large the adapter slots of an engine's rank will be: worked out from shapes before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.utils import get_pp_indices

from beamline.protocol.adapter import adapters_of, max_ranks
from beamline.protocol.config import EngineSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.lora_config import LoraSection
from beamline.rollout import checkpoint
from beamline.rollout.lora.modules import part_of

_MIB = 1 << 20
_ROW_PARALLEL = ("o_proj", "down_proj")
"""Modules of which a tensor-parallel rank has some inputs; it has some outputs of all others."""


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """The slots of one engine."""

    section: LoraSection
    num_slots: int
    dense_rank: int
    """For which a dense layer's slots have room: the smallest that vLLM offers."""
    expert_rank: int
    """For which an expert's have."""
    dense_bytes: int
    """Of all slots on the rank that has most."""
    expert_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes

    @property
    def settings(self) -> dict[str, Any]:
        """What every rank is told."""
        return {"section": msgspec.to_builtins(self.section), "expert_rank": self.expert_rank}

    def kv_cache_bytes(self, config: EngineSection) -> int:
        """What the slots leave for keys and values. Raises ConfigError where that is nothing."""
        left = (config.kv_cache_mib << 20) - self.num_bytes
        if left <= 0:
            raise ConfigError(
                f"rollout.engine.kv_cache_mib={config.kv_cache_mib} is all taken by {self.num_slots} adapter slots "
                f"(experts {self.expert_bytes / _MIB:.1f} MiB at rank {self.expert_rank}, other layers "
                f"{self.dense_bytes / _MIB:.1f} MiB at rank {self.dense_rank}): set it above "
                f"{-(-self.num_bytes // _MIB)}, or lower max_expert_lora_rank or adapter_slots"
            )
        return left


def plan_slots(model_path: Path, dtype: str, lora: LoraSection, config: EngineSection) -> SlotPlan:
    """The slots for a run's adapters.

    Raises:
        ConfigError: the model cannot have such adapters, or they do not fit the slots that are asked for.
    """
    hf_config, shape = checkpoint.read_config(model_path), checkpoint.routing_shape(model_path)
    shapes = checkpoint.tensor_shapes(model_path)
    adapters = adapters_of(shapes, lora, shape.top_k if shape else 0)
    dense, expert = max_ranks(adapters)
    ranks = _allowed_rank(dense), _slot_rank(expert, config)
    wrapped = {part.module for adapter in adapters if (part := part_of(adapter.module))}
    num_bytes = {"float32": 4}.get(dtype, 2) * config.adapter_slots
    sizes = [
        _stage_sizes(shapes, wrapped, ranks, stage, config.tensor_parallel, hf_config)
        for stage in _stages(hf_config["num_hidden_layers"], config.pipeline_parallel)
    ]
    dense_size, expert_size = max(sizes, key=sum)
    return SlotPlan(
        section=lora,
        num_slots=config.adapter_slots,
        dense_rank=ranks[0],
        expert_rank=ranks[1],
        dense_bytes=num_bytes * dense_size,
        expert_bytes=num_bytes * expert_size,
    )


def _allowed_rank(rank: int) -> int:
    allowed = [one for one in sorted(get_args(MaxLoRARanks)) if one >= rank]
    if not allowed:
        raise ConfigError(f"model.lora.rank={rank}: vLLM serves adapters up to rank {max(get_args(MaxLoRARanks))}")
    return allowed[0]


def _slot_rank(rank: int, config: EngineSection) -> int:
    if config.max_expert_lora_rank and rank > config.max_expert_lora_rank:
        raise ConfigError(
            f"rollout.engine.max_expert_lora_rank={config.max_expert_lora_rank} is less than the rank {rank} of the "
            f"run's expert adapters: set it to {rank}, or to 0, which takes the run's"
        )
    return config.max_expert_lora_rank or rank


def _stages(num_layers: int, pipeline_parallel: int) -> list[range]:
    """The layers of every pipeline stage."""
    return [range(*get_pp_indices(num_layers, stage, pipeline_parallel)) for stage in range(pipeline_parallel)]


def _stage_sizes(
    shapes: Mapping[str, tuple[int, ...]],
    wrapped: set[str],
    ranks: tuple[int, int],
    stage: range,
    tensor_parallel: int,
    hf_config: Mapping[str, Any],
) -> tuple[int, int]:
    """Elements of a slot on one rank of a stage, in dense layers and in experts."""
    sizes = [0, 0]
    for name, shape in shapes.items():
        part = part_of(name.removesuffix(".weight"))
        if part is None or part.module not in wrapped or part.layer not in stage:
            continue
        (rows, columns), kind = shape, name.split(".")[-2]
        if kind in _ROW_PARALLEL:
            columns //= tensor_parallel
        elif kind in ("k_proj", "v_proj"):
            rows //= min(tensor_parallel, hf_config["num_key_value_heads"])
        else:
            rows //= tensor_parallel
        is_expert = part.expert is not None
        sizes[is_expert] += ranks[is_expert] * (rows + columns)
    return sizes[0], sizes[1]
