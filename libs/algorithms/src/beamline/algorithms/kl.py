"""Estimates of the divergence KL(policy || reference) at the tokens that the policy sampled; pure functions of tensors.

With d = reference_logprobs - logprobs, after Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html):

    k1 = -d              unbiased, of high variance, and its gradient as a loss is 0 on average
    k2 = d^2 / 2         biased, of low variance; as a loss its gradient is that of KL(policy || reference)
    k3 = e^d - d - 1     unbiased, never negative; d is clamped to +-20 and the estimate to +-10

Legend: L loss tokens, N sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0

type Estimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs_L, reference_logprobs_L) -> [L], with gradient where the first has one."""


def k1(logprobs_L: Tensor, reference_logprobs_L: Tensor) -> Tensor:
    """logprobs - reference."""
    return logprobs_L - reference_logprobs_L


def k2(logprobs_L: Tensor, reference_logprobs_L: Tensor) -> Tensor:
    """(logprobs - reference)^2 / 2."""
    return (logprobs_L - reference_logprobs_L).square() / 2


def k3(logprobs_L: Tensor, reference_logprobs_L: Tensor) -> Tensor:
    """e^d - d - 1 (GRPO, arXiv 2402.03300, eq. 4). Where a clamp decides there is no gradient."""
    d_L = (reference_logprobs_L - logprobs_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (d_L.exp() - d_L - 1).clamp(-MAX_K3, MAX_K3)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
"""By the names that a recipe gives."""


@dataclass(frozen=True)
class KLPenalty:
    """What the divergence costs. It is a term of the loss or taken off the rewards, never both."""

    coefficient: float
    estimator: Estimator = k3

    def of_trajectories(
        self, logprobs_L: Tensor, reference_logprobs_L: Tensor, sequence_L: Tensor, num_sequences: int
    ) -> Tensor:
        """What is taken off each trajectory's reward: coefficient x the sum over its loss tokens.

        Args:
            sequence_L: int64, the sequence of each token, 0 to num_sequences - 1.

        Returns:
            float64 [N], detached; 0 for a sequence without loss tokens.
        """
        found_L = self.estimator(logprobs_L.detach().double(), reference_logprobs_L.detach().double())
        return found_L.new_zeros(num_sequences).index_add_(0, sequence_L, found_L) * self.coefficient
