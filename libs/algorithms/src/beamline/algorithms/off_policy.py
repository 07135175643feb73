"""Corrections for tokens that the trainer did not sample itself; pure functions of torch tensors.

The mismatch l = old_logprobs - rollout_logprobs says how far the trainer is from the engine at a token; exp(l) is its
ratio. Corrections mask tokens or whole sequences, or weight them, in a fixed order: outlier, token mask, importance,
sequence mask. Each works on what those before it left: where they masked, l is 0, so a sequence masked earlier counts
as kept later. Weights are detached, and no mask changes the denominator of the loss.

Legend: L loss tokens, N sequences, U what a correction decides on (tokens or sequences).
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Ratios are cut off at exp(+-20), so that every weight and statistic is a finite number."""


@dataclass(frozen=True)
class LossTokens:
    """The loss tokens of whole sequences, as earlier corrections have left them."""

    mismatch_L: Tensor
    """float64, 0 where masked."""
    mask_L: Tensor
    """float64, 1 or 0."""
    sequence_L: Tensor
    """int64: the sequence of each token, 0 to N - 1."""
    num_sequences: int

    def sums_N(self, values_L: Tensor) -> Tensor:
        """Sums over the tokens of each sequence, [L] -> [N]."""
        return values_L.new_zeros(self.num_sequences).index_add_(0, self.sequence_L, values_L)

    def any_N(self, flags_L: Tensor) -> Tensor:
        """Whether any token of a sequence is flagged, bool [L] -> [N]."""
        return self.sums_N(flags_L.double()) > 0


@dataclass(frozen=True)
class Verdict:
    """What a correction decides."""

    weights_L: Tensor
    """float64, the factor of each token's loss; 0 masks it."""
    masked_U: Tensor
    over_U: Tensor
    """bool: above the upper bound, or the cap."""
    under_U: Tensor
    log_ratios: Tensor
    """float64: what was compared with the bounds, one a token or one a sequence."""
    present: Tensor
    """bool, as log_ratios: not masked before."""


class Correction(Protocol):
    """One of the corrections; pure."""

    def __call__(self, tokens: LossTokens) -> Verdict: ...


@dataclass(frozen=True)
class Bounds:
    """The ratios that a mask keeps, [low, high]. Raises ValueError unless 0 < low < high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"ratio bounds low={self.low}, high={self.high}: must be positive, and low the lower")

    def under(self, log_ratio: Tensor) -> Tensor:
        return log_ratio < math.log(self.low)

    def over(self, log_ratio: Tensor) -> Tensor:
        return log_ratio > math.log(self.high)


@dataclass(frozen=True)
class OutlierDrop(Bounds):
    """Drops a sequence with any token whose ratio lies outside the bounds. Its ratios are those of the tokens."""

    low: float = 1e-4
    high: float = 100.0

    def __call__(self, tokens: LossTokens) -> Verdict:
        over_N = tokens.any_N(self.over(tokens.mismatch_L))
        under_N = tokens.any_N(self.under(tokens.mismatch_L))
        masked_N = over_N | under_N
        weights_L = (~masked_N).double()[tokens.sequence_L]
        return Verdict(weights_L, masked_N, over_N, under_N, tokens.mismatch_L, tokens.mask_L > 0)


@dataclass(frozen=True)
class TokenMask(Bounds):
    """Drops the tokens whose ratio lies outside the bounds."""

    low: float = 0.5
    high: float = 2.0

    def __call__(self, tokens: LossTokens) -> Verdict:
        over_L, under_L = self.over(tokens.mismatch_L), self.under(tokens.mismatch_L)
        masked_L = over_L | under_L
        return Verdict((~masked_L).double(), masked_L, over_L, under_L, tokens.mismatch_L, tokens.mask_L > 0)


@dataclass(frozen=True)
class TokenImportance:
    """Truncated importance sampling: a token's weight is min(exp(l), cap); nothing is masked."""

    cap: float = 2.0

    def __call__(self, tokens: LossTokens) -> Verdict:
        return _truncated(tokens.mismatch_L, tokens.mask_L > 0, self.cap)


@dataclass(frozen=True)
class SequenceImportance:
    """Truncated importance sampling by sequence: each of its tokens weighs min(exp(sum of l), cap)."""

    cap: float = 5.0

    def __call__(self, tokens: LossTokens) -> Verdict:
        found = _truncated(tokens.sums_N(tokens.mismatch_L), tokens.any_N(tokens.mask_L > 0), self.cap)
        return replace(found, weights_L=found.weights_L[tokens.sequence_L])


@dataclass(frozen=True)
class GeometricMask(Bounds):
    """Keeps a sequence whose geometric mean ratio, exp(clamp(mean of l, +-20)), lies in the bounds."""

    low: float = 0.99
    high: float = 1.01

    def __call__(self, tokens: LossTokens) -> Verdict:
        mean_N = tokens.sums_N(tokens.mismatch_L) / tokens.sums_N(tokens.mask_L).clamp(min=1)
        return _kept_sequences(tokens, mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), self)


@dataclass(frozen=True)
class ProductMask(Bounds):
    """Keeps a sequence whose ratio, exp(sum of l), lies in the bounds."""

    low: float = 0.5
    high: float = 2.0

    def __call__(self, tokens: LossTokens) -> Verdict:
        return _kept_sequences(tokens, tokens.sums_N(tokens.mismatch_L), self)


@dataclass(frozen=True)
class OffPolicy:
    """The corrections of a run, in their order; None leaves one out. Without any, all weights are 1."""

    outlier: OutlierDrop | None = None
    token_mask: TokenMask | None = None
    importance: TokenImportance | SequenceImportance | None = None
    sequence_mask: GeometricMask | ProductMask | None = None

    def weights(self, mismatch_L: Tensor, sequence_L: Tensor, num_sequences: int) -> Tensor:
        """The factor of each token's loss, [L] of the mismatch's type, detached; 0 where a correction masks.

        Args:
            mismatch_L: old_logprobs - rollout_logprobs.
            sequence_L: int64 [L], the sequence of each token. All loss tokens of a sequence must be there.
            num_sequences: N; some may have no loss token.
        """
        return self._apply(mismatch_L, sequence_L, num_sequences)[0].to(mismatch_L.dtype)

    def metrics(self, mismatch_L: Tensor, sequence_L: Tensor, num_sequences: int) -> dict[str, float]:
        """What the corrections do to these tokens, as `<correction>/<name>`; arguments as for `weights`.

        masked, over and under are shares of all tokens, or of all sequences where those are decided on. ratio_mean,
        ratio_std, ratio_min and ratio_max are over what was not masked before, and absent where nothing is left.
        """
        found: dict[str, float] = {}
        for name, verdict in self._apply(mismatch_L, sequence_L, num_sequences)[1].items():
            shares = {"masked": verdict.masked_U, "over": verdict.over_U, "under": verdict.under_U}
            values = {short: flags.double().mean() for short, flags in shares.items()}
            ratios = _ratio(verdict.log_ratios[verdict.present])
            if len(ratios):
                values |= {"ratio_mean": ratios.mean(), "ratio_std": ratios.std(correction=0)}
                values |= {"ratio_min": ratios.min(), "ratio_max": ratios.max()}
            found |= {f"{name}/{short}": value.item() for short, value in values.items()}
        return found

    def _apply(self, mismatch_L: Tensor, sequence_L: Tensor, num_sequences: int) -> tuple[Tensor, dict[str, Verdict]]:
        mismatch_L = mismatch_L.detach().double()
        weights_L = torch.ones_like(mismatch_L)
        verdicts: dict[str, Verdict] = {}
        for name, correction in self._in_order().items():
            kept_L = weights_L > 0
            # Not a product: what is masked may be infinite.
            left_L = torch.where(kept_L, mismatch_L, 0.0)
            verdicts[name] = correction(LossTokens(left_L, kept_L.double(), sequence_L, num_sequences))
            weights_L = weights_L * verdicts[name].weights_L
        return weights_L, verdicts

    def _in_order(self) -> dict[str, Correction]:
        order = {
            "outlier": self.outlier,
            "token_mask": self.token_mask,
            "importance": self.importance,
            "sequence_mask": self.sequence_mask,
        }
        return {name: correction for name, correction in order.items() if correction is not None}


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _truncated(log_ratio_U: Tensor, present_U: Tensor, cap: float) -> Verdict:
    none_U = torch.zeros_like(present_U)
    return Verdict(
        _ratio(log_ratio_U).clamp(max=cap), none_U, log_ratio_U > math.log(cap), none_U, log_ratio_U, present_U
    )


def _kept_sequences(tokens: LossTokens, log_ratio_N: Tensor, bounds: Bounds) -> Verdict:
    over_N, under_N = bounds.over(log_ratio_N), bounds.under(log_ratio_N)
    masked_N = over_N | under_N
    present_N = tokens.any_N(tokens.mask_L > 0)
    return Verdict((~masked_N).double()[tokens.sequence_L], masked_N, over_N, under_N, log_ratio_N, present_N)
