"""The loader by which an engine's rank reads its checkpoint: vLLM's own for safetensors, with a recorder in between."""

import copy
from collections.abc import Generator
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from beamline.rollout.needs_recorder import Need, NeedsRecorder
from beamline.rollout.plain_kernels import keep_plain

LOAD_FORMAT = "beamline"
"""What vLLM calls it."""


class RecordingLoader(DefaultModelLoader):
    """Leaves behind, on the model, what was kept of every tensor: see `needs_of`."""

    def __init__(self, load_config: LoadConfig) -> None:
        config = copy.copy(load_config)
        config.load_format = "safetensors"
        super().__init__(config)
        self._recorder = NeedsRecorder()

    def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from self._recorder.follow(super().get_all_weights(model_config, model))

    def load_weights(self, model: Any, model_config: Any) -> None:
        super().load_weights(model, model_config)
        model.beamline_needs = self._recorder.needs
        settings: Any = get_current_vllm_config().additional_config
        if settings["shared_parameters"]:
            keep_plain(model)


def needs_of(model: Any) -> dict[str, Need]:
    """What a model that this loader has loaded keeps of every tensor of its checkpoint, by Hugging Face name."""
    return model.beamline_needs


def register() -> None:
    """Make vLLM know the loader."""
    register_model_loader(LOAD_FORMAT)(RecordingLoader)
