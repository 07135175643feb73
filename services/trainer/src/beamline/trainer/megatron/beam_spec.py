"""Which module stands where in Beam's hybrid stack."""

from functools import partial
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from beamline.trainer.megatron.beam_layers import (
    BeamAttentionLayer,
    BeamMLPLayer,
    BeamMoELayer,
    BeamMoETransformerLayer,
    BeamSelfAttention,
)
from beamline.trainer.megatron.experts import SwigluExperts, SwigluMLP
from beamline.trainer.megatron.norms import RMSNorm
from beamline.trainer.megatron.packed import AttentionRule, PackedAttention


class BeamStack(HybridStack):
    """Megatron's stack with our final norm: its own is hard-coded to Transformer Engine's."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **{**kwargs, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)


def _core_attention(config: Any, layer_number: int, **kwargs: Any) -> PackedAttention:
    """Sliding layers rotate and see a window; full layers have no positions but scaled queries."""
    if config.layer_types[(layer_number - 1) // 2] == "sliding_attention":
        rule = AttentionRule(window=config.sliding_window, rope_theta=config.rope_theta)
    else:
        rule = AttentionRule(scaled_queries=True)
    return PackedAttention(config, rule, softmax_scale=kwargs.get("softmax_scale"))


def beam_stack_spec() -> ModuleSpec:
    """The spec that `HybridModelProvider` builds its decoder from."""
    feed_forward = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    attention = ModuleSpec(
        module=BeamSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=_core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        ),
    )
    dense = partial(SwigluMLP.as_mlp_submodule, submodules=feed_forward)
    sparse = partial(BeamMoELayer, submodules=MoESubmodules(experts=partial(SwigluExperts, submodules=feed_forward)))
    return ModuleSpec(
        module=BeamStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=BeamAttentionLayer,
                submodules=TransformerLayerSubmodules(input_layernorm=RMSNorm, self_attention=attention),
            ),
            mlp_layer=ModuleSpec(
                module=BeamMLPLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=dense)
            ),
            moe_layer=ModuleSpec(
                module=BeamMoETransformerLayer,
                submodules=TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=sparse),
            ),
        ),
    )
