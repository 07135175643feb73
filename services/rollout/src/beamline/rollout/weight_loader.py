"""The loader by which an engine's rank reads its checkpoint: vLLM's own for safetensors, with a recorder in between."""

import copy
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from beamline.rollout.direct_load import DirectLoad
from beamline.rollout.lora.experts import LoraExperts
from beamline.rollout.needs_recorder import Need, NeedsRecorder
from beamline.rollout.plain_kernels import keep_plain, use_experts

LOAD_FORMAT = "beamline"
"""What vLLM calls it."""


class RecordingLoader(DefaultModelLoader):
    """Leaves behind, on the model, what was kept of every tensor, and how to load it again: `needs_of`, `direct_of`."""

    def __init__(self, load_config: LoadConfig) -> None:
        config = copy.copy(load_config)
        config.load_format = "safetensors"
        super().__init__(config)
        self._recorder = NeedsRecorder()
        self._loaded: dict[str, torch.Tensor] = {}
        """Views of the checkpoint's file, which is mapped."""

    def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from self._recorder.follow(self._kept(super().get_all_weights(model_config, model)))

    def load_weights(self, model: Any, model_config: Any) -> None:
        super().load_weights(model, model_config)
        needs = model.beamline_needs = self._recorder.needs
        settings: Any = get_current_vllm_config().additional_config
        if settings["lora"]:
            if current_platform.is_cpu():
                use_experts(model, LoraExperts)
        elif settings["shared_parameters"]:
            keep_plain(model)
        elif current_platform.is_cpu():
            model.beamline_direct = DirectLoad(model, needs, self._loaded, model_config.dtype)
        self._loaded = {}

    def _kept(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._loaded[name] = tensor
            yield name, tensor


def needs_of(model: Any) -> dict[str, Need]:
    """What a model that this loader has loaded keeps of every tensor of its checkpoint, by Hugging Face name."""
    return model.beamline_needs


def direct_of(model: Any) -> DirectLoad | None:
    """How a model that this loader has loaded takes further policies, where that is not left to vLLM."""
    return getattr(model, "beamline_direct", None)


def register() -> None:
    """Make vLLM know the loader."""
    register_model_loader(LOAD_FORMAT)(RecordingLoader)
