"""How the losses of a mini-batch's tokens become one number: a weight for the tokens of each trajectory.

The loss of a mini-batch is the sum over all its loss tokens, on all ranks, of weight x token loss. The weights are made
once from the whole mini-batch, so that no split into micro-batches, no packing and no number of ranks changes the
gradient. They are made of the loss mask as it was sampled, before any off-policy mask; a trajectory without loss tokens
weighs 0 and is not counted.

Legend: N trajectories of a mini-batch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Reduction(Protocol):
    """One way to weigh trajectories.

    Args:
        num_tokens_N: loss tokens of each trajectory of the mini-batch, on all ranks.
        prompt_N: the prompt group of each, as any integer.
        max_response_tokens: the longest response that the run allows.

    Returns:
        float64 [N], the weight of each loss token of the trajectory; 0 where it has none.
    """

    def __call__(
        self, num_tokens_N: Sequence[int], prompt_N: Sequence[int], max_response_tokens: int
    ) -> np.ndarray: ...


def token_mean(num_tokens_N: Sequence[int], prompt_N: Sequence[int], max_response_tokens: int) -> np.ndarray:
    """1 / all loss tokens: every token counts alike (DAPO, arXiv 2503.14476, section 3.3)."""
    tokens_N = np.asarray(num_tokens_N, np.float64)
    return _weights(tokens_N, np.full_like(tokens_N, tokens_N.sum()))


def sequence_mean(num_tokens_N: Sequence[int], prompt_N: Sequence[int], max_response_tokens: int) -> np.ndarray:
    """1 / (sequences x the sequence's loss tokens): every sequence counts alike (GRPO, arXiv 2402.03300, eq. 3)."""
    tokens_N = np.asarray(num_tokens_N, np.float64)
    return _weights(tokens_N, np.count_nonzero(tokens_N) * tokens_N)


def seq_mean_token_sum_norm(
    num_tokens_N: Sequence[int], prompt_N: Sequence[int], max_response_tokens: int
) -> np.ndarray:
    """1 / (sequences x max_response_tokens): every token counts alike, whatever the batch's lengths (Dr.GRPO, arXiv
    2503.20783, section 3.2)."""
    tokens_N = np.asarray(num_tokens_N, np.float64)
    return _weights(tokens_N, np.full_like(tokens_N, np.count_nonzero(tokens_N) * max_response_tokens))


def prompt_mean(num_tokens_N: Sequence[int], prompt_N: Sequence[int], max_response_tokens: int) -> np.ndarray:
    """1 / (prompts x loss tokens of the prompt's group): every prompt counts alike (arXiv 2510.13786, section 3.2)."""
    tokens_N = np.asarray(num_tokens_N, np.float64)
    prompts, index_N = np.unique(np.asarray(prompt_N, np.int64), return_inverse=True)
    tokens_P = np.bincount(index_N, weights=tokens_N, minlength=len(prompts))
    return _weights(tokens_N, np.count_nonzero(tokens_P) * tokens_P[index_N])


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "prompt_mean": prompt_mean,
}
"""By the names that a recipe gives."""


def _weights(tokens_N: np.ndarray, denominators_N: np.ndarray) -> np.ndarray:
    """1 / denominator, 0 for a trajectory without loss tokens."""
    return np.divide(1.0, denominators_N, out=np.zeros_like(tokens_N), where=tokens_N > 0)
