"""A CPU model whose parameters stay as the checkpoint has them: products by torch, nothing is packed.

vLLM packs linears and experts into its kernels' own layouts, which is faster but leaves no parameter that another
process could write.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class PlainExperts(CPUUnquantizedExperts):
    """Experts one after the other, each with the tokens that were routed to it. SwiGLU only."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """They stay as they are."""

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
        apply_router_weight_on_input: bool = False,
        **kwargs: Any,
    ) -> None:
        assert activation is MoEActivation.SILU and not apply_router_weight_on_input
        assert kwargs.get("expert_map") is None, "expert parallelism needs packed experts"
        top_k, ids = topk_ids.shape[1], topk_ids.flatten()
        order = torch.argsort(ids, stable=True)
        tokens = order // top_k
        counts = torch.bincount(ids, minlength=len(w1)).tolist()
        inputs = hidden_states[tokens].split(counts)
        products = [
            F.linear(silu_and_mul(F.linear(x, w1[expert])), w2[expert]) for expert, x in enumerate(inputs) if len(x)
        ]
        add_weighted(output, products, tokens, topk_weights.flatten()[order])


def keep_plain(model: nn.Module) -> None:
    """Have a model that was just loaded keep its parameters so, whenever it would pack them."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            method.process_weights_after_loading = _use_torch
    use_experts(model, PlainExperts)


def use_experts(model: nn.Module, experts: type[PlainExperts]) -> None:
    """Have a model that was just loaded compute its experts by this class."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.experts_cls = experts


def add_weighted(
    output: torch.Tensor, products: Sequence[torch.Tensor], tokens: torch.Tensor, weights: torch.Tensor
) -> None:
    """Make the output [T, C] the weighted sum of its tokens' rows: products [N, C], `tokens` and weights [N]."""
    output.zero_().index_add_(0, tokens, (torch.cat(list(products)) * weights.unsqueeze(1)).to(output.dtype))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of rows whose first half is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _use_torch(layer: Any) -> None:
    layer.cpu_linear = F.linear
