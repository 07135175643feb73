"""Policy losses, per token; pure functions of torch tensors.

Legend: L loss tokens. Reductions are the caller's: it divides by the mini-batch's global denominator before it
sums over micro-batches and ranks, so that no split changes the gradient.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from beamline.algorithms.off_policy import OffPolicy

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Clip:
    """The trust region of the ratio, [1 - low, 1 + high]. Equal bounds are PPO and GRPO; clip-higher (DAPO,
    arXiv 2503.14476) raises `high`. `dual` > 1 bounds the loss where the advantage is negative (arXiv 1912.09729).

    Raises ValueError for bounds that are not positive, or `dual` not above 1.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low <= 0 or self.high <= 0:
            raise ValueError(f"clip low={self.low}, high={self.high}: both must be positive")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual clip {self.dual}: must be above 1")


@dataclass(frozen=True)
class TokenLoss:
    """A loss and what it saw, each [L]."""

    loss_L: Tensor
    """float32, with gradient."""
    ratio_L: Tensor
    """float32, detached: exp(logprobs - old_logprobs)."""
    clipped_L: Tensor
    """bool: the clip decided, so the token has no gradient."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a run: clipped, and weighted by the corrections for the gap between engine and trainer."""

    clip: Clip = Clip()
    off_policy: OffPolicy = field(default_factory=OffPolicy)

    def __call__(
        self,
        logprobs_L: Tensor,
        old_logprobs_L: Tensor,
        rollout_logprobs_L: Tensor,
        advantages_L: Tensor,
        sequence_L: Tensor,
        num_sequences: int,
    ) -> TokenLoss:
        """The loss of the tokens of whole sequences; `sequence_L` holds each token's, from 0 to num_sequences - 1."""
        found = clipped_loss(logprobs_L, old_logprobs_L, advantages_L, self.clip)
        weights_L = self.off_policy.weights(old_logprobs_L - rollout_logprobs_L, sequence_L, num_sequences)
        return replace(found, loss_L=found.loss_L * weights_L)


def clipped_loss(logprobs_L: Tensor, old_logprobs_L: Tensor, advantages_L: Tensor, clip: Clip) -> TokenLoss:
    """-min(ratio A, clip(ratio) A), with ratio = exp(clamp(logprobs - old_logprobs, -20, 20)).

    PPO (arXiv 1707.06347, eq. 7) per token; with `clip.dual` = c, at most -c A where A < 0.
    """
    log_ratio = (logprobs_L - old_logprobs_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages_L
    clipped = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages_L
    loss = torch.maximum(unclipped, clipped)
    decided = clipped > unclipped
    if clip.dual is not None:
        ceiling = -clip.dual * advantages_L
        beyond = (advantages_L < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        decided = decided | beyond
    return TokenLoss(loss, ratio.detach(), decided.detach())
