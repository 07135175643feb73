"""A model's configuration and the shapes of its tensors, without its weights."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.memory_figures import BEAM
from transformers import AutoConfig, PreTrainedConfig

from beamline.models import beam_config, tiny
from beamline.protocol.errors import ConfigError

ASSET = "asset:"
SPECS: dict[str, type[tiny.Spec]] = {"BeamForCausalLM": tiny.TinyBeam, "Qwen3MoeForCausalLM": tiny.TinyQwen3Moe}
OTHERWISE_NAMED = {"num_layers": "num_hidden_layers"}


@dataclass(frozen=True)
class ModelShapes:
    """All that is needed to build a model on the meta device."""

    config: PreTrainedConfig
    tensors: dict[str, tuple[int, ...]]
    """By Hugging Face name, experts one by one."""

    @property
    def top_k(self) -> int:
        """Experts a token."""
        return self.config.num_experts_per_tok


def shapes_of(model: str) -> ModelShapes:
    """Of a Hugging Face directory (its config.json is enough), of `asset:NAME`, or of Beam by its name.

    Raises:
        ConfigError: there is no such model, or the trainer does not have its architecture.
    """
    beam_config.register()
    config = _config(model)
    architecture = (config.architectures or ["none"])[0]
    if architecture not in SPECS:
        raise ConfigError(f"model.path={model!r} is a {architecture}: the trainer has {', '.join(SPECS)}")
    return ModelShapes(config, dict(_spec(config, SPECS[architecture]).shapes()))


def _config(model: str) -> PreTrainedConfig:
    if model == BEAM:
        return beam_config.BeamConfig(architectures=["BeamForCausalLM"])
    if (name := model.removeprefix(ASSET)) != model and name in tiny.SPECS:
        return _of_description(tiny.SPECS[name].config())
    if (file := Path(model) / "config.json").is_file():
        return _of_description(json.loads(file.read_bytes()))
    raise ConfigError(
        f"model.path={model!r} is no folder with a config.json, and no model of a known shape: give a Hugging Face "
        f"directory, {BEAM}, or one of {', '.join(ASSET + name for name in tiny.SPECS)}"
    )


def _of_description(description: dict[str, Any]) -> PreTrainedConfig:
    """Raises ConfigError for a type that transformers does not have."""
    try:
        return AutoConfig.for_model(**description)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json of type {description.get('model_type')!r} cannot be read: {error}") from None


def _spec(config: PreTrainedConfig, kind: type[tiny.Spec]) -> tiny.Spec:
    """The same shape as one of ours, which lists its tensors."""
    sizes = {field.name: OTHERWISE_NAMED.get(field.name, field.name) for field in fields(kind)}
    found = {name: getattr(config, key) for name, key in sizes.items() if hasattr(config, key)}
    if kind is tiny.TinyBeam:
        found["num_dense_layers"] = list(config.mlp_layer_types).count("dense")
    return kind(**found)
