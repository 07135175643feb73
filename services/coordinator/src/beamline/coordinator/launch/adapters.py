"""Whether a model can have the adapters that a run asks for, and its engines room for them."""

from collections.abc import Sequence
from pathlib import Path

from beamline.models import tiny
from beamline.protocol.adapter import Adapter, adapters_of, max_ranks
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError, WeightError
from beamline.runtime.adapter_merge import adapters_in

ASSET = "asset:"
"""Before the name of a model that is yet to be made."""
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_MIB = 2**20


def check_adapters(config: RunConfig) -> None:
    """Nothing is looked at where the run trains all weights.

    Raises:
        ConfigError: a rank that the experts cannot divide, a target of which the model has no layer, or an engine whose
            slots are too small for an expert's rank or leave nothing for the key-value cache.
    """
    if config.model.lora.is_on:
        adapters = adapters_for(config)
        _check_expert_slots(config, adapters)
        _check_slot_room(config, adapters)


def adapters_for(config: RunConfig) -> list[Adapter]:
    """All adapters of a run. Raises ConfigError as `adapters_of`, or for weights that cannot be read."""
    name = config.model.path.removeprefix(ASSET)
    if name != config.model.path:
        spec = tiny.SPECS[name]
        return adapters_of(dict(spec.shapes()), config.model.lora, spec.num_experts_per_tok)
    try:
        return adapters_in(Path(name), config.model.lora)
    except WeightError as error:
        raise ConfigError(f"model.path={name}: {error}; copy the model again") from None


def num_adapter_parameters(adapters: Sequence[Adapter]) -> int:
    """Of all their matrices, a shared A once for every module."""
    return sum(adapter.rank * (adapter.in_features + adapter.out_features) for adapter in adapters)


def _check_expert_slots(config: RunConfig, adapters: Sequence[Adapter]) -> None:
    limit = config.rollout.engine.max_expert_lora_rank
    _, rank = max_ranks(list(adapters))
    if limit and limit < rank:
        raise ConfigError(
            f"rollout.engine.max_expert_lora_rank={limit} is below {rank}, the rank of an expert's adapters with "
            f"model.lora.rank={config.model.lora.rank}: use {rank}, or 0 for the run's"
        )


def _check_slot_room(config: RunConfig, adapters: Sequence[Adapter]) -> None:
    """By what a rank of the engine holds at least: its share of the layers, and of their matrices."""
    engine = config.rollout.engine
    num_values = num_adapter_parameters(adapters) / (engine.tensor_parallel * engine.pipeline_parallel)
    needed = engine.adapter_slots * num_values * WEIGHT_BYTES[config.model.dtype] / _MIB
    if needed >= engine.kv_cache_mib:
        raise ConfigError(
            f"rollout.engine.kv_cache_mib={engine.kv_cache_mib} has no room for a key-value cache beside "
            f"rollout.engine.adapter_slots={engine.adapter_slots} versions of the adapters, which take {needed:.0f} "
            "MiB of a rank: raise it, or lower model.lora.rank"
        )
