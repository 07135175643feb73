"""Policy losses, per token; pure functions of torch tensors.

Legend: L loss tokens of whole sequences. Reductions are the caller's: it weighs the tokens by the whole mini-batch
before it sums over micro-batches and ranks, so that no split changes the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from beamline.algorithms.kl import KLPenalty
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
    """float32, detached: exp(logprobs - old_logprobs), the sequence's where the loss is the sequence's."""
    clipped_L: Tensor
    """bool: the clip decided."""
    kl_L: Tensor | None = None
    """Detached: the divergence from the reference, before its coefficient; None where it is no term of the loss."""


type Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, int, Clip], TokenLoss]
"""A loss that a recipe names, one of Beamline's or a user's own; pure.

(logprobs_L, old_logprobs_L, advantages_L, sequence_L, num_sequences, clip) -> TokenLoss. Only logprobs_L has a
gradient. sequence_L is int64, the sequence of each token, 0 to num_sequences - 1; all loss tokens of a sequence are
there, and a sequence may have none.
"""


def clipped_loss(
    logprobs_L: Tensor,
    old_logprobs_L: Tensor,
    advantages_L: Tensor,
    sequence_L: Tensor,
    num_sequences: int,
    clip: Clip,
) -> TokenLoss:
    """-min(ratio A, clip(ratio) A), with ratio = exp(clamp(logprobs - old_logprobs, -20, 20)).

    PPO (arXiv 1707.06347, eq. 7) per token; with `clip.dual` = c, at most -c A where A < 0. A token for which the clip
    decides has no gradient.
    """
    return _clipped(logprobs_L - old_logprobs_L, advantages_L, clip)


def gspo_loss(
    logprobs_L: Tensor,
    old_logprobs_L: Tensor,
    advantages_L: Tensor,
    sequence_L: Tensor,
    num_sequences: int,
    clip: Clip,
) -> TokenLoss:
    """-min(s A, clip(s) A) at each token, s = exp(clamp(mean of logprobs - old_logprobs, -20, 20)) of its sequence.

    GSPO in its form by tokens (arXiv 2507.18071, eq. 13 and 14): the value is the sequence's, and each token carries
    its own part of the gradient, so that the sum over a sequence is GSPO's (eq. 5) and a token that is masked has none.
    The clip decides for a sequence as a whole; its usual bounds are three orders of magnitude narrower than PPO's.
    """
    log_ratio_L = logprobs_L - old_logprobs_L
    lengths_N = log_ratio_L.new_zeros(num_sequences).index_add_(0, sequence_L, torch.ones_like(log_ratio_L))
    sums_N = log_ratio_L.new_zeros(num_sequences).index_add_(0, sequence_L, log_ratio_L.detach())
    mean_L = (sums_N / lengths_N.clamp(min=1))[sequence_L]
    return _clipped(mean_L + (logprobs_L - logprobs_L.detach()), advantages_L, clip)


def cispo_loss(
    logprobs_L: Tensor,
    old_logprobs_L: Tensor,
    advantages_L: Tensor,
    sequence_L: Tensor,
    num_sequences: int,
    clip: Clip,
) -> TokenLoss:
    """-clip(ratio) A logprobs, the clipped ratio detached (CISPO, arXiv 2506.13585, eq. 4 and 5).

    Every token keeps a gradient; the clip bounds its weight. A `clip.low` of 1 or more bounds it from above alone.
    """
    ratio_L = _ratio(logprobs_L.detach() - old_logprobs_L)
    weight_L = ratio_L.clamp(1.0 - clip.low, 1.0 + clip.high)
    return TokenLoss(-weight_L * advantages_L * logprobs_L, ratio_L, weight_L != ratio_L)


LOSSES: dict[str, Surrogate] = {"clipped": clipped_loss, "gspo": gspo_loss, "cispo": cispo_loss}
"""By the names that a recipe gives."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a run: a surrogate, weighted by the corrections for the gap between engine and trainer, and the terms
    that hold the policy back."""

    clip: Clip = Clip()
    off_policy: OffPolicy = field(default_factory=OffPolicy)
    surrogate: Surrogate = clipped_loss
    kl: KLPenalty | None = None
    """coefficient x its estimate is added; None where there is none, or where it is taken off the rewards."""
    entropy_coefficient: float = 0.0
    """coefficient x entropy is taken off the loss."""

    def __call__(
        self,
        logprobs_L: Tensor,
        old_logprobs_L: Tensor,
        rollout_logprobs_L: Tensor,
        advantages_L: Tensor,
        sequence_L: Tensor,
        num_sequences: int,
        *,
        reference_logprobs_L: Tensor | None = None,
        entropy_L: Tensor | None = None,
    ) -> TokenLoss:
        """The loss of the tokens of whole sequences.

        The corrections weigh the surrogate alone: what holds the policy back does so at every loss token.

        Args:
            sequence_L: int64, the sequence of each token, 0 to num_sequences - 1.
            reference_logprobs_L: needed where `kl` is set.
            entropy_L: of the whole distribution at each token, with gradient; needed where the bonus is on.
        """
        found = self.surrogate(logprobs_L, old_logprobs_L, advantages_L, sequence_L, num_sequences, self.clip)
        weights_L = self.off_policy.weights(old_logprobs_L - rollout_logprobs_L, sequence_L, num_sequences)
        loss_L, kl_L = found.loss_L * weights_L, None
        if self.kl is not None:
            assert reference_logprobs_L is not None, "a divergence needs the reference's log-probabilities"
            kl_L = self.kl.estimator(logprobs_L, reference_logprobs_L)
            loss_L, kl_L = loss_L + self.kl.coefficient * kl_L, kl_L.detach()
        if self.entropy_coefficient:
            assert entropy_L is not None, "an entropy bonus needs the entropy"
            loss_L = loss_L - self.entropy_coefficient * entropy_L
        return replace(found, loss_L=loss_L, kl_L=kl_L)


def _ratio(log_ratio_L: Tensor) -> Tensor:
    return log_ratio_L.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(log_ratio_L: Tensor, advantages_L: Tensor, clip: Clip) -> TokenLoss:
    """PPO's pessimistic bound for any ratio."""
    ratio_L = _ratio(log_ratio_L)
    unclipped_L = -ratio_L * advantages_L
    clipped_L = -ratio_L.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages_L
    loss_L = torch.maximum(unclipped_L, clipped_L)
    decided_L = clipped_L > unclipped_L
    if clip.dual is not None:
        ceiling_L = -clip.dual * advantages_L
        beyond_L = (advantages_L < 0) & (loss_L > ceiling_L)
        loss_L = torch.where(beyond_L, ceiling_L, loss_L)
        decided_L = decided_L | beyond_L
    return TokenLoss(loss_L, ratio_L.detach(), decided_L.detach())
