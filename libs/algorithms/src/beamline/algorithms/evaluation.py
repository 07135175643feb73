"""An evaluated data set in numbers. Legend: P problems, n samples of a problem; None is an abstained grade."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

NUM_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class ProblemOutcome:
    """The samples of one problem, one entry a sample in each field."""

    correct: Sequence[bool | None]
    """None where the grader abstained."""
    response_lengths: Sequence[int]
    truncated: Sequence[bool]
    """Ended by the length limit."""


def summarize(problems_P: Sequence[ProblemOutcome], *, seed: int) -> dict[str, float]:
    """The statistics of one data set, under the names that follow `eval/<data source>/`.

    `accuracy` is the mean over problems of the share of correct samples (avg@n), with `accuracy_low` and
    `accuracy_high` its 95 % bootstrap interval over problems; `pass_at_k` for k = 1, 2, 4, ... up to the fewest
    graded samples of a problem; `mean_length` in tokens; `truncated` and `abstained` as shares of samples. Abstained
    samples count in neither accuracy nor pass@k, and problems without a graded sample are left out.

    Raises:
        ValueError: no problem has a graded sample.
    """
    graded_P = [kept for problem in problems_P if (kept := [c for c in problem.correct if c is not None])]
    if not graded_P:
        raise ValueError(f"none of {len(problems_P)} problems has a graded sample: there is no accuracy to report")
    shares_P = [sum(graded) / len(graded) for graded in graded_P]
    low, high = bootstrap_interval(shares_P, seed=seed)
    values = {"accuracy": float(np.mean(shares_P)), "accuracy_low": low, "accuracy_high": high}
    fewest = min(len(graded) for graded in graded_P)
    for k in (2**i for i in range(fewest.bit_length())):
        values[f"pass_at_{k}"] = float(np.mean([pass_at_k(len(g), sum(g), k) for g in graded_P]))
    samples = [c for problem in problems_P for c in problem.correct]
    values["mean_length"] = float(np.mean([n for problem in problems_P for n in problem.response_lengths]))
    values["truncated"] = float(np.mean([t for problem in problems_P for t in problem.truncated]))
    values["abstained"] = samples.count(None) / len(samples)
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
    low, high = np.quantile(values_P[draws_RP].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
