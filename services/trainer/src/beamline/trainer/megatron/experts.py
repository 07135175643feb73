"""SwiGLU feed-forward layers, dense and expert, with the activation in float32.

Legend: N rows of all local experts in expert order, F feed-forward size of this rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side, [..., 2 F] -> [..., F]: in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _linears(mlp: Any) -> tuple[Any, Any]:
    return mlp.linear_fc1, mlp.linear_fc2


class SwigluMLP(MLP):
    """A dense layer."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        fc1, fc2 = _linears(self)
        return fc2(swiglu(fc1(hidden_states)[0]))[0], None


class SwigluExperts(SequentialMLP):
    """The experts of this rank: two matrix products each, everything between them over all rows at once.

    The router's weight is applied after the second product, in float32, as Beam defines it.
    """

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """rows [N, hidden] sorted by expert, weights [N] -> weighted outputs [N, hidden]."""
        counts = tokens_per_expert.tolist()
        linears = [_linears(expert) for expert in self.local_experts]
        gate_up = [fc1(part)[0] for (fc1, _), part in zip(linears, rows.split(counts), strict=True)]
        activated = swiglu(torch.cat(gate_up)).split(counts)
        outputs = [fc2(part)[0] for (_, fc2), part in zip(linears, activated, strict=True)]
        return (torch.cat(outputs) * weights[:, None]).to(rows.dtype), None
