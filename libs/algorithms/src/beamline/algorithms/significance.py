"""Whether two policies differ on the same problems. Legend: P problems, V different sizes of a difference, S sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from beamline.algorithms.evaluation import bootstrap_interval

MAX_SUM = 2**19
"""Bounds the table of the sums' distribution."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean over problems of the second policy's accuracy less the first's, as shares."""

    mean: float
    low: float
    """Lower end of its 95 % bootstrap interval over problems."""
    high: float
    p_value: float


def paired_difference(first_P: Sequence[Fraction], second_P: Sequence[Fraction], *, seed: int) -> PairedDifference:
    """Compare the accuracies of the same problems, at least one, in the same order."""
    differences_P = [second - first for first, second in zip(first_P, second_P, strict=True)]
    low, high = bootstrap_interval([float(difference) for difference in differences_P], seed=seed)
    mean = float(sum(differences_P, Fraction(0)) / len(differences_P))
    return PairedDifference(mean=mean, low=low, high=high, p_value=sign_flip_p_value(differences_P))


def sign_flip_p_value(differences_P: Sequence[Fraction]) -> float:
    """Two-sided p-value of the paired permutation test (Fisher, 1935; Good, Permutation Tests): how often the sum of
    the differences would be at least as far from zero if each of them had its sign by the toss of a coin.

    All 2^P tosses count: the distribution of the sum comes from its characteristic function, the product over problems
    of cos(t |difference|). With differences of -1, 0 and 1, one sample a problem, it is McNemar's exact test.

    Differences are rounded to a common grid. It holds them exactly unless there are very many problems or mixed numbers
    of samples; the test is exact even then, of the rounded ones.
    """
    grid = min(lcm(*(difference.denominator for difference in differences_P)), max(1, MAX_SUM // len(differences_P)))
    signed_P = np.array([round(difference * grid) for difference in differences_P])
    steps_P = np.abs(signed_P)
    largest, observed = int(steps_P.sum()), abs(int(signed_P.sum()))
    sizes_V, counts_V = np.unique(steps_P[steps_P > 0], return_counts=True)
    angles_S = 2 * np.pi * np.arange(2 * largest + 1) / (2 * largest + 1)
    transform_S = np.ones_like(angles_S)
    for size, count in zip(sizes_V, counts_V, strict=True):
        transform_S *= np.cos(size * angles_S) ** count
    if observed == 0:
        return 1.0
    chance_S = np.fft.ifft(transform_S).real  # of the sums 0, 1, ..., largest, -largest, ..., -1
    return float(np.clip(2 * chance_S[observed : largest + 1].sum(), 0, 1))
