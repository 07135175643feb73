"""RMSNorm as Hugging Face models compute it, with the marks that Megatron's parallelism needs."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    """Half the passes over memory of autograd's own; norms are a tenth of a tiny model's step on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(wide.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        unit, wide_grad = x.float() * scale, grad.float()
        product = wide_grad * unit
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = torch.mv(product.flatten(0, -2), weight.float()).view(scale.shape).div_(x.shape[-1])
        grad_x = (wide_grad * weight).addcmul_(unit, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


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
        return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return]
