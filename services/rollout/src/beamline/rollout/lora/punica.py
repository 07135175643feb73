"""Adapters of dense layers on a CPU: the rows of each adapter slot together, rows without one left alone.

vLLM's own way copies a slot's matrices for every token, and takes index -1, which stands for none, for the last slot.
"""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

NO_SLOT = -1


class GroupedPunica(PunicaWrapperCPU):
    """Knows which slot every token of a step reads."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self.token_slots = torch.empty(0, dtype=torch.long)
        """Slot of each token of this step, or NO_SLOT."""
        self.groups: list[tuple[int, Any]] = []
        """Every slot that is read, and which rows read it."""

    def update_metadata(
        self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take a step's mapping, whose ids are slot + 1, or 0 for none."""
        self.token_slots = torch.tensor(mapping.index_mapping, dtype=torch.long) - 1
        slots = [slot for slot in self.token_slots.unique().tolist() if slot != NO_SLOT]
        if len(slots) == 1 and bool((self.token_slots == slots[0]).all()):
            self.groups = [(slots[0], slice(None))]
        else:
            self.groups = [(slot, torch.nonzero(self.token_slots == slot).flatten()) for slot in slots]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add B A x to every part of y, each row with its own slot's A [S, 1, R, in] and B [S, 1, out, R]."""
        assert scale == 1.0, "scales are in B"
        for slot, rows in self.groups:
            x_rows, start = x[rows], 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                y[:, start : start + size][rows] += F.linear(F.linear(x_rows, a[slot, 0]), b[slot, 0])
                start += size
