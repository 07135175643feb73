"""An evaluated data set in numbers. Legend: P problems, N samples of a problem."""

from collections.abc import Sequence
from math import comb
from typing import cast

import numpy as np

NUM_RESAMPLES = 1000


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

    Args:
        num_samples: n, at least k.
        num_correct: c, from 0 to n.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def bootstrap_interval(means_P: Sequence[float], *, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems, the same for the same seed."""
    values_P = np.asarray(means_P, dtype=np.float64)
    generator = np.random.default_rng(seed)
    draws_RP = generator.integers(0, len(values_P), size=(NUM_RESAMPLES, len(values_P)))
    means_R = values_P[draws_RP].mean(axis=1)
    low, high = cast("list[float]", np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2]).tolist())
    return low, high
