"""Which module stands where in a Qwen3-MoE layer: Megatron's GPT layer on our packed attention and experts.

The provider and the name mapping are Megatron-Bridge's own.
"""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from beamline.trainer.megatron.experts import SwigluExperts
from beamline.trainer.megatron.norms import RMSNorm
from beamline.trainer.megatron.packed import AttentionRule, PackedAttention
from beamline.trainer.megatron.replay import replaying


class Qwen3MoeLayer(TransformerLayer):
    """Megatron's own; the experts are the micro-batch's routes where it has some."""

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with replaying(self.mlp, kwargs["packed_seq_params"].routes, self.layer_number - 1):
            return super()._forward_mlp(hidden_states, *args, **kwargs)


def _core_attention(config: Any, **kwargs: Any) -> PackedAttention:
    rule = AttentionRule(rope_theta=float(config.rotary_base))
    return PackedAttention(config, rule, softmax_scale=kwargs.get("softmax_scale"))


def qwen3_moe_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    feed_forward = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=_core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        ),
    )
    residual_add: Any = get_bias_dropout_add
    layer = ModuleSpec(
        module=Qwen3MoeLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=residual_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(MoELayer, submodules=MoESubmodules(experts=partial(SwigluExperts, submodules=feed_forward))),
            mlp_bda=residual_add,
        ),
    )
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
