"""An evaluated data set in numbers. Legend: P problems, N samples of a problem, R resamples, V different values."""

from collections.abc import Sequence
from math import comb
from typing import cast

import numpy as np

NUM_RESAMPLES = 10_000
"""Enough that an end of an interval moves by a hundredth of its width from seed to seed."""


def summarise(correct_PN: Sequence[Sequence[bool]], *, seed: int) -> dict[str, float]:
    """Accuracy and pass@k of one data set, under the names that follow `eval/<data source>/`.

    `accuracy` is the mean over problems of the share of correct samples (avg@n), with `accuracy_low` and
    `accuracy_high` its 95 % bootstrap interval over problems; `pass_at_k` for k = 1, 2, 4, ... up to the fewest
    samples of a problem.

    Args:
        correct_PN: the graded samples of each problem, at least one; abstained samples and problems without a graded
            one are left out by the caller, so that they count neither as correct nor as wrong.
        seed: of the bootstrap.

    Returns:
        The statistics; none at all for no problems, which have no accuracy.
    """
    if not correct_PN:
        return {}
    shares_P = [sum(samples_N) / len(samples_N) for samples_N in correct_PN]
    low, high = bootstrap_interval(shares_P, seed=seed)
    values = {"accuracy": float(np.mean(shares_P)), "accuracy_low": low, "accuracy_high": high}
    fewest = min(len(samples_N) for samples_N in correct_PN)
    for k in (2**i for i in range(fewest.bit_length())):
        values[f"pass_at_{k}"] = float(np.mean([pass_at_k(len(c), sum(c), k) for c in correct_PN]))
    return values


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Computed in integers, so that no n overflows and only the last division rounds.

    Args:
        num_samples: n.
        num_correct: c, from 0 to n.
        k: from 1 to n; nothing unbiased can be said of more samples than there are.

    Raises:
        ValueError: a c or k out of these bounds.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} of num_samples={num_samples}: must be from 0 to num_samples")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} with num_samples={num_samples}: must be from 1 to num_samples")
    subsets = comb(num_samples, k)
    return (subsets - comb(num_samples - num_correct, k)) / subsets


def bootstrap_interval(values_P: Sequence[float], *, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems, the same for the same seed (Efron, 1979).

    A resample draws P problems with replacement. Which of the problems with one value were drawn does not matter, only
    how many, so the counts of the different values are drawn: they are multinomial.
    """
    values_V, counts_V = np.unique(np.asarray(values_P, dtype=np.float64), return_counts=True)
    num_problems = len(values_P)
    draws_RV = np.random.default_rng(seed).multinomial(num_problems, counts_V / num_problems, size=NUM_RESAMPLES)
    means_R = draws_RV @ values_V / num_problems
    low, high = cast("list[float]", np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2]).tolist())
    return low, high
