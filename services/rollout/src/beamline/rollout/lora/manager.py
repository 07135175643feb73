"""What vLLM's runner asks about adapters, answered from slots: nothing is loaded, counted or thrown out.

vLLM's own manager reads an adapter's directory when a request names it, and gives every id a slot of its own. Here the
slots are written from memory, and it is said which of them an id reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.platforms import current_platform

from beamline.protocol.adapter import Adapter
from beamline.rollout.lora.layers import add_slots
from beamline.rollout.lora.punica import GroupedPunica


class SlotManager:
    """One rank's. The runner has it as its `lora_manager`.

    Args:
        adapters: of the whole model.
        expert_rank: for which an expert's slots have room.
    """

    def __init__(
        self, model: nn.Module, vllm_config: Any, device: torch.device, adapters: list[Adapter], expert_rank: int
    ) -> None:
        self.adapters = adapters
        self.num_slots: int = vllm_config.lora_config.max_loras
        self.slots: dict[int, int] = {}
        """By id of a request's adapter."""
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        scheduler = vllm_config.scheduler_config
        if current_platform.is_cpu():
            self.punica: Any = GroupedPunica(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, device)
        else:
            self.punica = get_punica_wrapper(
                -(-scheduler.max_num_batched_tokens // 8) * 8,
                max_batches=scheduler.max_num_seqs,
                device=device,
                lora_config=vllm_config.lora_config,
            )
        self.layers = add_slots(model, adapters, vllm_config, expert_rank)
        """Of this pipeline stage, by vLLM's name."""
        for layer in self.layers.values():
            layer.set_mapping(self.punica)

    def set_active_adapters(self, requests: set[Any], mapping: Any) -> None:
        """A step begins: its tokens read the slots of their requests' ids."""
        places = {0: 0} | {one: slot + 1 for one, slot in self.slots.items()}
        unknown = {*mapping.index_mapping, *mapping.prompt_mapping} - places.keys()
        assert not unknown, f"no slot is bound to the adapter ids {sorted(unknown)}: bind comes before a request"
        by_slot = replace(
            mapping,
            index_mapping=tuple(places[one] for one in mapping.index_mapping),
            prompt_mapping=tuple(places[one] for one in mapping.prompt_mapping),
        )
        ids = list(range(1, self.num_slots + 1))
        self.punica.update_metadata(by_slot, ids, self.num_slots + 1, self._vocab_size)

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        """While vLLM measures a device: ids from 1 read the slots from 0."""
        self.slots[request.lora_int_id] = request.lora_int_id - 1
        return True

    def remove_all_adapters(self) -> None:
        self.slots.clear()

    def list_adapters(self) -> set[int]:
        return set(self.slots)

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        yield

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    def supports_tower_connector_lora(self) -> bool:
        return False
