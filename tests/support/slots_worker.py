"""A rank whose adapter slots a test fills by itself, and requests that read the slots which the test names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from beamline.protocol.adapter import Adapter, adapters_of
from beamline.rollout import checkpoint
from beamline.rollout.engine import Engine
from beamline.rollout.engine_worker import EngineWorker
from beamline.rollout.late_outputs import FIRST_ARG
from beamline.rollout.lora.slots import LoraSlots
from beamline.weights.tensors import Box
from lora_variants import ALL
from made_adapters import made

_NAMES = count()
BASE = 0
"""Id of a request without adapters."""

type Tensors = dict[str, np.ndarray]
type Fault = Callable[[list[Adapter], Tensors, int], tuple[list[Adapter], Tensors]]
"""Spoils adapters and their tensors, of a model with so many experts a token."""


def expert_scale_off_by_top_k(adapters: list[Adapter], tensors: Tensors, top_k: int) -> tuple[list[Adapter], Tensors]:
    return [replace(one, alpha=one.alpha * top_k) if one.is_expert else one for one in adapters], tensors


def experts_permuted(adapters: list[Adapter], tensors: Tensors, top_k: int) -> tuple[list[Adapter], Tensors]:
    first, second = (f".experts.{index}." for index in (0, 1))
    return adapters, {
        name: tensors[name.replace(first, second) if first in name else name.replace(second, first)] for name in tensors
    }


def one_a_for_q_k_and_v(adapters: list[Adapter], tensors: Tensors, top_k: int) -> tuple[list[Adapter], Tensors]:
    def source(name: str) -> str:
        return name.replace("k_proj", "q_proj").replace("v_proj", "q_proj") if "lora_A" in name else name

    return adapters, {name: tensors[source(name)] for name in tensors}


def gate_left_out(adapters: list[Adapter], tensors: Tensors, top_k: int) -> tuple[list[Adapter], Tensors]:
    return adapters, {name: 0 * array if "self_attn.gate_proj" in name else array for name, array in tensors.items()}


FAULTS: dict[str, Fault] = {
    one.__name__: one for one in (expert_scale_off_by_top_k, experts_permuted, one_a_for_q_k_and_v, gate_left_out)
}


class SlotsWorker(EngineWorker):
    """Writes adapters of any variant, whichever the engine was started for, into any slot."""

    def write_variant(self, slot: int, variant: str, seed: int = 0, fault: str = "") -> None:
        """Make a variant's adapters, spoilt where a fault is named, and write them into a cleared slot."""
        path = Path(self.model_runner.model_config.model)
        shape = checkpoint.routing_shape(path)
        top_k = shape.top_k if shape else 0
        adapters = adapters_of(checkpoint.tensor_shapes(path), ALL[variant], top_k)
        tensors = made(adapters, seed)
        if fault:
            adapters, tensors = FAULTS[fault](adapters, tensors, top_k)
        slots = LoraSlots(self.model_runner.lora_manager, adapters)
        slots.clear(slot)
        slots.write(slot, ((name, _as_fetched(slots, name, array)) for name, array in tensors.items()))

    def clear_slot(self, slot: int) -> None:
        self._own_slots().clear(slot)

    def bind_ids(self, bindings: list[list[int]]) -> None:
        """Id, slot and policy version of each."""
        assert self._adapters is not None
        self._adapters.bind(bindings)

    def needed(self) -> dict[str, list[Box]]:
        """What the rank keeps of the adapters for which it was started."""
        return self._own_slots().needs

    def slot_bytes(self) -> tuple[int, int]:
        """Of dense layers and of experts."""
        return self._own_slots().num_dense_bytes, self._own_slots().num_expert_bytes

    def cache_blocks(self) -> tuple[int, int]:
        """How many the key-value cache has, and the bytes of one."""
        config = self.model_runner.kv_cache_config
        return config.num_blocks, sum(one.size for one in config.kv_cache_tensors) // config.num_blocks

    def wrapped(self) -> list[str]:
        """Modules that have slots."""
        return sorted(self.model_runner.lora_manager.layers)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        slots = self.model_runner.lora_manager.punica.token_slots.tolist()
        self._most_mixed = max(getattr(self, "_most_mixed", []), sorted(set(slots)), key=len)
        return output

    def most_mixed(self) -> list[int]:
        """The slots that the tokens of one step have read, -1 for none, of the step that read most."""
        return self._most_mixed

    def _own_slots(self) -> LoraSlots:
        assert self.lora_slots is not None
        return self.lora_slots


class ChosenAdapters:
    """Stands in for an engine's policies: a request reads the adapters that are chosen where it is made."""

    def __init__(self) -> None:
        self._id = ContextVar("id", default=BASE)

    @contextmanager
    def choose(self, id: int) -> Iterator[None]:
        """Requests that are made inside, and tasks that are begun inside, have this id."""
        token = self._id.set(id)
        try:
            yield
        finally:
            self._id.reset(token)

    @contextmanager
    def read(self, _policy: str) -> Iterator[LoRARequest | None]:
        """What the engine asks of its policies."""
        id = self._id.get()
        yield LoRARequest(f"adapters-{id}", id, "memory") if id else None


async def call(engine: Engine, method: str, *args: Any) -> list[Any]:
    """A method of every rank's worker."""
    return await engine.__getattribute__("_call")(method, *args)


async def prompt_logprobs(engine: Engine, tokens: list[int]) -> list[float]:
    """As `Engine.score`, which lets nobody else in meanwhile."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=True, detokenize=False)
    params.extra_args, params.output_kind = {FIRST_ARG: True}, RequestOutputKind.FINAL_ONLY
    output = await engine.__getattribute__("_request")(tokens, params, f"scored-{next(_NAMES)}")
    return [row[token].logprob for token, row in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]


def _as_fetched(slots: LoraSlots, name: str, array: np.ndarray) -> torch.Tensor:
    """A tensor as a rank has it: what it does not need is not there."""
    cut = np.full_like(array, np.nan)
    for box in slots.needs.get(name, []):
        inside = tuple(slice(*edges) for edges in box)
        cut[inside] = array[inside]
    return torch.from_numpy(cut)
