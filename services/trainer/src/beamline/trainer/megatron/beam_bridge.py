"""Beam between Hugging Face names and Megatron names."""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, create_bridge_decorator
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel

from beamline.trainer.megatron.beam_provider import BeamModelProvider


class BeamBridge(MegatronModelBridge):
    """Explicit mappings per layer (layer i is hybrid layers 2 i and 2 i + 1), a wildcard for experts alone."""

    def provider_bridge(self, hf_pretrained: Any) -> BeamModelProvider:
        c = hf_pretrained.config
        if not c.norm_topk_prob or c.attention_bias or c.tie_word_embeddings:
            raise ValueError(
                f"norm_topk_prob={c.norm_topk_prob}, attention_bias={c.attention_bias}, "
                f"tie_word_embeddings={c.tie_word_embeddings}: Beam is supported with True, False, False"
            )
        return BeamModelProvider(
            hidden_size=c.hidden_size,
            ffn_hidden_size=c.intermediate_size,
            num_attention_heads=c.num_attention_heads,
            num_query_groups=c.num_key_value_heads,
            kv_channels=c.head_dim,
            vocab_size=c.vocab_size,
            seq_length=c.max_position_embeddings,
            layernorm_epsilon=c.rms_norm_eps,
            num_moe_experts=c.num_experts,
            moe_router_topk=c.num_experts_per_tok,
            moe_router_num_groups=c.n_group,
            moe_router_group_topk=c.topk_group,
            moe_ffn_hidden_size=c.moe_intermediate_size,
            layer_types=list(c.layer_types),
            mlp_layer_types=list(c.mlp_layer_types),
            sliding_window=c.sliding_window,
            rope_theta=c.rope_parameters["sliding_attention"]["rope_theta"],
            routed_scaling_factor=float(c.routed_scaling_factor),
            final_logit_softcapping=c.final_logit_softcapping,
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        mappings = [
            AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            AutoMapping("output_layer.weight", "lm_head.weight"),
            ReplicatedMapping("decoder.final_norm.weight", "model.norm.weight"),
        ]
        config: Any = self.hf_config
        for layer, kind in enumerate(config.mlp_layer_types):
            hf = f"model.layers.{layer}"
            mappings += _attention(f"decoder.layers.{2 * layer}", hf)
            mappings += _feed_forward(f"decoder.layers.{2 * layer + 1}", hf, sparse=kind == "sparse")
        return MegatronMappingRegistry(*mappings)


def _attention(mcore: str, hf: str) -> list[Any]:
    attention, hf_attention = f"{mcore}.self_attention", f"{hf}.self_attn"
    return [
        ReplicatedMapping(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight"),
        ReplicatedMapping(f"{mcore}.self_attn_bda.norm.weight", f"{hf}.post_attention_layernorm.weight"),
        QKVMapping(
            f"{attention}.linear_qkv.weight",
            q=f"{hf_attention}.q_proj.weight",
            k=f"{hf_attention}.k_proj.weight",
            v=f"{hf_attention}.v_proj.weight",
        ),
        ColumnParallelMapping(f"{attention}.linear_gate.weight", f"{hf_attention}.gate_proj.weight"),
        ColumnParallelMapping(f"{attention}.gate_bias", f"{hf_attention}.gate_bias"),
        AutoMapping(f"{attention}.linear_proj.weight", f"{hf_attention}.o_proj.weight"),
        ReplicatedMapping(f"{attention}.q_layernorm.weight", f"{hf_attention}.q_norm.weight"),
        ReplicatedMapping(f"{attention}.k_layernorm.weight", f"{hf_attention}.k_norm.weight"),
    ]


def _feed_forward(mcore: str, hf: str, sparse: bool) -> list[Any]:
    mappings: list[Any] = [
        ReplicatedMapping(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.pre_feedforward_layernorm.weight"),
        ReplicatedMapping(f"{mcore}.mlp_bda.norm.weight", f"{hf}.post_feedforward_layernorm.weight"),
    ]
    where, hf_where = f"{mcore}.mlp", f"{hf}.mlp"
    if sparse:
        mappings += [
            ReplicatedMapping(f"{where}.router.weight", f"{hf_where}.gate.weight"),
            ReplicatedMapping(f"{where}.router.expert_bias", f"{hf_where}.gate.e_score_correction_bias"),
        ]
        where, hf_where = f"{where}.experts.local_experts.*", f"{hf_where}.experts.*"
    return [
        *mappings,
        GatedMLPMapping(
            f"{where}.linear_fc1.weight", gate=f"{hf_where}.gate_proj.weight", up=f"{hf_where}.up_proj.weight"
        ),
        AutoMapping(f"{where}.linear_fc2.weight", f"{hf_where}.down_proj.weight"),
    ]


create_bridge_decorator(source="BeamForCausalLM", target=HybridModel, provider=BeamModelProvider, model_type="beam")(
    BeamBridge
)
