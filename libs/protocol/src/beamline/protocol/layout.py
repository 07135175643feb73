"""Whether a model can be cut as a run's configuration says; looked at before anything starts, and by the services.

Sizes are those of the model's config.json; one that it does not have is not checked.
"""

from collections.abc import Mapping
from typing import Any

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError

BEAM = "BeamForCausalLM"


def check_layout(config: RunConfig, description: Mapping[str, Any]) -> None:
    """Raises ConfigError with the numbers that clash.

    Args:
        description: the model's config.json.
    """
    _check_ranks(config, description)
    _check_shares(config)
    _check_budget(config)
    _check_engine(config, description)


def _check_ranks(config: RunConfig, description: Mapping[str, Any]) -> None:
    """The trainer's cut of the model."""
    parallel, key = config.trainer.parallel, "trainer.parallel"
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        _divides(f"{key}.tensor", parallel.tensor, size, description)
    _check_rank(config)
    _divides(f"{key}.expert", parallel.expert, "num_experts", description)
    _check_pipeline(
        f"{key}.pipeline",
        parallel.pipeline,
        description,
        evenly=BEAM not in (description.get("architectures") or ()),
    )
    if (stage := parallel.tensor * parallel.data) % parallel.expert:
        raise ConfigError(
            f"{key}.expert={parallel.expert} does not divide {key}.tensor={parallel.tensor} x "
            f"{key}.data={parallel.data} = {stage}, the ranks that share out the experts: "
            f"use {_choices(stage)}, or raise {key}.data"
        )


def _check_rank(config: RunConfig) -> None:
    """Adapters of layers that are cut along their outputs are cut along their rank; experts' are not cut."""
    tensor, rank = config.trainer.parallel.tensor, config.model.lora.rank
    if rank % tensor:
        lower = rank // tensor * tensor
        raise ConfigError(
            f"trainer.parallel.tensor={tensor} does not divide model.lora.rank={rank}: use rank "
            f"{f'{lower} or ' if lower else ''}{lower + tensor}, or another tensor"
        )


def _check_shares(config: RunConfig) -> None:
    """The batch, dealt to data-parallel ranks."""
    data, sampling = config.trainer.parallel.data, config.rollout.sampling
    num_trajectories = sampling.groups_per_step * sampling.samples_per_group
    if num_trajectories % data:
        raise ConfigError(
            f"trainer.parallel.data={data} does not divide rollout.sampling.groups_per_step="
            f"{sampling.groups_per_step} x samples_per_group={sampling.samples_per_group} = {num_trajectories}, the "
            f"trajectories of a step: use a divisor of it"
        )
    num_mini_batches = config.algorithm.num_mini_batches
    smallest = sampling.groups_per_step // num_mini_batches * sampling.samples_per_group
    if smallest < data:
        raise ConfigError(
            f"trainer.parallel.data={data} exceeds the {smallest} trajectories of a mini-batch "
            f"(rollout.sampling.groups_per_step={sampling.groups_per_step} / algorithm.num_mini_batches="
            f"{num_mini_batches} x rollout.sampling.samples_per_group={sampling.samples_per_group}): lower it to "
            f"{smallest} or less"
        )


def _check_budget(config: RunConfig) -> None:
    budget = config.trainer.max_tokens_per_micro_batch
    if budget < config.max_train_tokens:
        raise ConfigError(
            f"trainer.max_tokens_per_micro_batch={budget} is below the longest sequence, data.max_prompt_tokens + "
            f"rollout.sampling.max_response_tokens = {config.max_train_tokens}: raise it"
        )


def _check_engine(config: RunConfig, description: Mapping[str, Any]) -> None:
    """The engine's cut of the model. It pads the vocabulary, and may give its stages unequal numbers of layers."""
    engine, key = config.rollout.engine, "rollout.engine"
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        _divides(f"{key}.tensor_parallel", engine.tensor_parallel, size, description)
    _check_pipeline(f"{key}.pipeline_parallel", engine.pipeline_parallel, description, evenly=False)


def _check_pipeline(key: str, stages: int, description: Mapping[str, Any], *, evenly: bool) -> None:
    if evenly:
        _divides(key, stages, "num_hidden_layers", description)
    layers = description.get("num_hidden_layers", stages)
    if stages > layers:
        raise ConfigError(f"{key}={stages} exceeds the model's num_hidden_layers={layers}: use {layers} or less")


def _divides(key: str, parts: int, size: str, description: Mapping[str, Any]) -> None:
    number = description.get(size)
    if isinstance(number, int) and number % parts:
        raise ConfigError(f"{key}={parts} does not divide the model's {size}={number}: use {_choices(number)}")


def _choices(number: int, limit: int = 64) -> str:
    """Small divisors, for a sentence."""
    *most, last = [n for n in range(1, min(number, limit) + 1) if number % n == 0]
    return f"{', '.join(map(str, most))} or {last}" if most else str(last)
