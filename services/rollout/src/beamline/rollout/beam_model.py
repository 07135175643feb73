"""Beam on vLLM's layers: tensor, expert and pipeline parallel, the same code on every device.

The reference is transformers' `models/beam`. Differences of form only: q, k and v are one matrix, as are gate and up;
the attention's output gate is called `output_gate` here, because vLLM takes a `gate_proj` for half of a `gate_up_proj`.

Shapes: T tokens of the batch, H query heads and K key-value heads of this rank, D head_dim, C hidden_size.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors

SSMAX_LENGTH = 2048
SSMAX_EXPONENT = 0.1


def ssmax_scale(positions_T: torch.Tensor) -> torch.Tensor:
    """Query scale of layers without positional encoding, (1 + (pos + 1) / 2048)^0.1, fp32 [T, 1]."""
    scale_T = torch.exp(SSMAX_EXPONENT * torch.log1p((positions_T.float() + 1) / SSMAX_LENGTH))
    return scale_T[:, None]


def add_depth_scaled(branch_TC: torch.Tensor, residual_TC: torch.Tensor, k: int) -> torch.Tensor:
    """branch / sqrt(k) + residual sqrt((k - 1) / k), for the k-th term of the sum (the embedding is the first).

    Overwrites the branch.
    """
    return branch_TC.mul_(1 / math.sqrt(k)).add_(residual_TC, alpha=math.sqrt((k - 1) / k))


class BeamAttention(nn.Module):
    """Grouped-query attention with per-head q/k norms and a sigmoid gate on its output.

    Sliding layers see the last `sliding_window` tokens, themselves included, and use RoPE; full layers have no
    positional encoding and scale the query instead.
    """

    def __init__(self, vllm_config: VllmConfig, layer: int, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_text_config, vllm_config.quant_config
        tp_size = get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = max(1, config.num_key_value_heads // tp_size)
        self.qkv_sizes = [self.num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]
        layer_type = config.layer_types[layer]
        rope = config.rope_parameters[layer_type]

        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.output_gate = ColumnParallelLinear(
            config.hidden_size,
            config.num_attention_heads * self.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.output_gate",
        )
        self.gate_bias = nn.Parameter(torch.zeros(self.num_heads), requires_grad=False)
        set_weight_attrs(self.gate_bias, {"weight_loader": _load_head_shard})
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = rope and get_rope(self.head_dim, config.max_position_embeddings, rope_parameters=rope)
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions_T: torch.Tensor, hidden_TC: torch.Tensor, scale_T1: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_TC)
        q, k, v = qkv.split(self.qkv_sizes, dim=-1)
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).flatten(1)
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).flatten(1)
        if self.rotary_emb is None:
            q = (q.float() * scale_T1).to(q.dtype)
        else:
            q, k = self.rotary_emb(positions_T, q, k)
        gate, _ = self.output_gate(hidden_TC)
        gate_THD = gate.view(-1, self.num_heads, self.head_dim).add_(self.gate_bias[:, None]).sigmoid_()
        output, _ = self.o_proj(gate_THD.flatten(1).mul_(self.attn(q, k, v)))
        return output


class BeamMLP(nn.Module):
    """Dense SwiGLU; activation and product in fp32."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_text_config, vllm_config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden_TC)
        gate, up = gate_up.float().chunk(2, dim=-1)
        output, _ = self.down_proj((F.silu(gate) * up).to(hidden_TC.dtype))
        return output


class BeamMoE(nn.Module):
    """Routed experts: sigmoid scores, chosen with a bias inside the best groups, weighted without it.

    The router is fp32 in every precision of the model. `routed_scaling_factor` multiplies the sum, as in the reference.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_text_config, vllm_config.quant_config
        self.gate = ReplicatedLinear(
            config.hidden_size,
            config.num_experts,
            bias=False,
            params_dtype=torch.float32,
            quant_config=None,
            prefix=f"{prefix}.gate",
        )
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.gate.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func="sigmoid",
            e_score_correction_bias=self.gate.e_score_correction_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            apply_routed_scale_to_output=True,
            router_logits_dtype=torch.float32,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        router_logits_TE, _ = self.gate(hidden_TC.float())
        return self.experts(hidden_states=hidden_TC, router_logits=router_logits_TE)


class BeamDecoderLayer(nn.Module):
    """Attention and MLP, each between two norms and added to the residual by its depth."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.layer = extract_layer_index(prefix)
        sparse = config.mlp_layer_types[self.layer] == "sparse"
        self.self_attn = BeamAttention(vllm_config, self.layer, prefix=f"{prefix}.self_attn")
        self.mlp = (BeamMoE if sparse else BeamMLP)(vllm_config, prefix=f"{prefix}.mlp")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps)

    def forward(self, positions_T: torch.Tensor, hidden_TC: torch.Tensor, scale_T1: torch.Tensor) -> torch.Tensor:
        branch_TC = self.self_attn(positions_T, self.input_layernorm(hidden_TC), scale_T1)
        hidden_TC = add_depth_scaled(self.post_attention_layernorm(branch_TC), hidden_TC, 2 * self.layer + 2)
        branch_TC = self.mlp(self.pre_feedforward_layernorm(hidden_TC))
        return add_depth_scaled(self.post_feedforward_layernorm(branch_TC), hidden_TC, 2 * self.layer + 3)


class BeamModel(nn.Module):
    """The layers of this pipeline stage, after the embedding on the first and before the final norm on the last."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        stage = get_pp_group()
        self.embed_tokens: nn.Module = PPMissingLayer()
        if stage.is_first_rank or (config.tie_word_embeddings and stage.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.embed_tokens",
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: BeamDecoderLayer(vllm_config, prefix=prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if stage.is_last_rank else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden_TC: torch.Tensor = intermediate_tensors.tensors["hidden_states"]
        else:
            hidden_TC = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        scale_T1 = ssmax_scale(positions)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_TC = layer(positions, hidden_TC, scale_T1)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_TC})
        return self.norm(hidden_TC)


class BeamForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """Beam with its language-model head; logits are capped in fp32."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".self_attn.gate_proj.": ".self_attn.output_gate."},
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        },
    )
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules: ClassVar = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.softcap = config.final_logit_softcapping
        self.model = BeamModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            embedding: Any = self.model.embed_tokens
            self.lm_head = head.tie_weights(embedding) if config.tie_word_embeddings else head
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is None or self.softcap is None:
            return logits
        return logits.float().div_(self.softcap).tanh_().mul_(self.softcap)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _load_head_shard(param: nn.Parameter, loaded: torch.Tensor) -> None:
    """Load this tensor-parallel rank's heads of a per-head vector."""
    num_heads = param.numel()
    param.data.copy_(loaded.narrow(0, get_tensor_model_parallel_rank() * num_heads, num_heads))
