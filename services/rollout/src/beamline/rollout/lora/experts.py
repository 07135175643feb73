"""Experts with an adapter each, in torch: what stands in for vLLM's Triton experts on a CPU.

Legend: N rows, each a token at one of its experts; E experts, S adapter slots, R rank, C hidden size, I intermediate.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from beamline.rollout.plain_kernels import PlainExperts, add_weighted, silu_and_mul

type _Pairs = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""A [R, in] and the transpose [R, out] of B, by slot and expert: views of the slots."""


class LoraExperts(LoRAExpertsMixin, PlainExperts):
    """Each expert with the rows that were routed to it; of these, those that read a slot have its adapter's share."""

    def set_lora_context(self, ctx: MoELoRAContext) -> None:
        super().set_lora_context(ctx)
        gate_up = zip(ctx.w13_lora_a_stacked, ctx.w13_lora_b_stacked, strict=True)
        self._gate, self._up = (_pairs(a, b) for a, b in gate_up)
        self._down = _pairs(ctx.w2_lora_a_stacked[0], ctx.w2_lora_b_stacked[0])

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        context = self._lora_context
        punica: Any = context and context.punica_wrapper
        if context is None or not punica.groups:
            super().apply(output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *args, **kwargs)
            return
        assert activation is MoEActivation.SILU and kwargs.get("expert_map") is None
        top_k, num_kinds = topk_ids.shape[1], context.max_loras + 1
        # By expert, and within an expert by slot: rows without one come first.
        keys = (topk_ids * num_kinds + punica.token_slots[:, None] + 1).flatten()
        order = torch.argsort(keys, stable=True)
        tokens = order // top_k
        counts = torch.bincount(keys, minlength=len(w1) * num_kinds).view(len(w1), num_kinds)
        inputs = hidden_states[tokens].split(counts.sum(1).tolist())
        products = [
            self._with_adapters(expert, rows, x_NC, w1[expert], w2[expert])
            for expert, (x_NC, rows) in enumerate(zip(inputs, counts.tolist(), strict=True))
            if len(x_NC)
        ]
        add_weighted(output, products, tokens, topk_weights.flatten()[order])

    def _with_adapters(
        self, expert: int, rows: Sequence[int], x_NC: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        """One expert's output; `rows` says how many rows in turn read no slot, slot 0, slot 1 and so on."""
        gate_up = F.linear(x_NC, w1)
        gate, up = gate_up.chunk(2, dim=-1)
        _add(gate, x_NC, self._gate, expert, rows)
        _add(up, x_NC, self._up, expert, rows)
        hidden_NI = silu_and_mul(gate_up)
        output_NC = F.linear(hidden_NI, w2)
        _add(output_NC, hidden_NI, self._down, expert, rows)
        return output_NC


def _add(y: torch.Tensor, x: torch.Tensor, pairs: _Pairs, expert: int, rows: Sequence[int]) -> None:
    """Add B A x in place, each row with its slot's."""
    start = rows[0]
    for slot, num_rows in enumerate(rows[1:]):
        if num_rows:
            a, b = pairs[slot][expert]
            end = start + num_rows
            y[start:end].addmm_(F.linear(x[start:end], a), b)
            start = end


def _pairs(a_SERI: torch.Tensor, b_SEOR: torch.Tensor) -> _Pairs:
    return [
        list(zip(a_ERI.unbind(), b_EOR.transpose(1, 2).unbind(), strict=True))
        for a_ERI, b_EOR in zip(a_SERI, b_SEOR, strict=True)
    ]
