"""RMSNorm as Hugging Face models compute it, with the marks that Megatron's parallelism needs."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in float32, cast back to x's type.

    The weight is replicated over tensor parallelism while each rank sees a part of the rows (sequence
    parallelism) or of the heads (query and key norms), so its gradient is a sum over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)
