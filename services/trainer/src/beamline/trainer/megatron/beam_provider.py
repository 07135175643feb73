"""Beam's Megatron configuration."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider

from beamline.trainer.megatron.beam_spec import beam_stack_spec


@dataclass
class BeamModelProvider(HybridModelProvider):
    """A HybridModel with Beam's stack.

    Raises ValueError in `finalize` for an architecture or a layout that it cannot build.
    """

    layer_types: list[str] = field(default_factory=list)
    """"sliding_attention" or "full_attention" per Hugging Face layer."""
    mlp_layer_types: list[str] = field(default_factory=list)
    """"dense" or "sparse" per Hugging Face layer."""
    sliding_window: int = 512
    rope_theta: float = 10_000.0
    routed_scaling_factor: float = 1.0
    final_logit_softcapping: float | None = None

    hybrid_stack_spec: Callable[[], Any] = beam_stack_spec
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "none"
    """Positions restart in every packed sequence, so attention applies the rotation itself."""
    is_hybrid_model: bool = True
    qk_layernorm: bool = True
    gated_linear_unit: bool = True
    moe_router_score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    moe_router_bias_update_rate: float = 0.0
    moe_router_dtype: str | None = "fp32"
    moe_router_load_balancing_type: str = "none"
    moe_aux_loss_coeff: float = 0.0

    def finalize(self) -> None:
        # Megatron scores a group by its best topk // group_topk experts, Beam by its best two.
        if self.moe_router_topk // (self.moe_router_group_topk or 1) != 2:
            raise ValueError(
                f"num_experts_per_tok={self.moe_router_topk} over topk_group={self.moe_router_group_topk}: "
                "Megatron's group choice equals Beam's only where their quotient is 2"
            )
        self.hybrid_layer_pattern = self._pattern()
        self.num_layers = None
        super().finalize()

    def _pattern(self) -> str:
        """One `*-` or `*E` a Hugging Face layer, with `|` where a pipeline stage ends."""
        pairs = ["*-" if kind == "dense" else "*E" for kind in self.mlp_layer_types]
        num_stages = self.pipeline_model_parallel_size
        if num_stages > len(pairs):
            raise ValueError(f"pipeline size {num_stages} exceeds the model's {len(pairs)} layers: lower it")
        ends = [len(pairs) * stage // num_stages for stage in range(num_stages + 1)]
        return "|".join("".join(pairs[a:b]) for a, b in itertools.pairwise(ends))
