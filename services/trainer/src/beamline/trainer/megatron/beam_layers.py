"""What Beam's layers have beside Megatron's own: post-norms with a depth-scaled residual, the attention
output gate, and the scaled sum of the experts.

A Hugging Face layer i is two hybrid layers here, attention 2 i + 1 and feed-forward 2 i + 2 (numbered from 1).
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from torch import Tensor, nn

from beamline.trainer.megatron.norms import RMSNorm
from beamline.trainer.megatron.replay import replaying


class PostNormResidual(nn.Module):
    """In the place of bias-dropout-add: norm(f) / sqrt(k) + residual * sqrt((k - 1) / k), k = layer number + 1."""

    def __init__(self, config: Any, layer_number: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        k = layer_number + 1
        self.output_scale, self.residual_scale = 1.0 / math.sqrt(k), math.sqrt((k - 1) / k)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Any], Tensor, float], Tensor]:
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Any], residual: Tensor, dropout: float) -> Tensor:
        return self.norm(output_with_bias[0]) * self.output_scale + residual * self.residual_scale


class BeamAttentionLayer(TransformerLayer):
    """Norm, attention, post-norm residual."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn_bda = PostNormResidual(self.config, self.layer_number)


class BeamMLPLayer(MLPLayer):
    """Norm, dense feed-forward, post-norm residual."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mlp_bda = PostNormResidual(self.config, self.layer_number)


class BeamMoETransformerLayer(MoETransformerLayer):
    """Norm, experts, post-norm residual; the experts are the micro-batch's routes where it has some."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mlp_bda = PostNormResidual(self.config, self.layer_number)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with replaying(self.mlp, kwargs["packed_seq_params"].routes, (self.layer_number - 1) // 2):
            return super()._forward_mlp(hidden_states, *args, **kwargs)


class BeamMoELayer(MoELayer):
    """The experts' weighted sum times routed_scaling_factor, applied after combination."""

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        provider: Any = self.config
        return super().postprocess(output, shared_expert_output) * provider.routed_scaling_factor


class BeamSelfAttention(SelfAttention):
    """Attention whose output is multiplied by sigmoid(gate_proj(h) + gate_bias[head]) before the projection."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size = self.query_projection_size
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size,
            size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )
        self.gate_bias = nn.Parameter(torch.zeros(self.num_attention_heads_per_partition, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.gate_bias, is_parallel=True, dim=0, stride=1)
        # The flag makes forward() apply the gate. Set only now, for at construction it would also widen
        # linear_qkv by Megatron's own, biasless gate.
        self.config = copy.copy(config)
        self.config.attention_output_gate = True

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """hidden_states [s, b, h] -> query, key, value and gate, each [s, b, heads, head_dim]."""
        query_key_value: Any = super().get_query_key_value_tensors(hidden_states, key_value_states)
        gate, _ = self.linear_gate(hidden_states)
        gate = gate.view(*gate.shape[:2], -1, self.hidden_size_per_attention_head)
        return *query_key_value, gate + self.gate_bias[:, None]
