"""Where a gap between engine and trainer comes from: the same tokens, read by the trainer in other ways.

A variant is a reading that does one thing differently ("routes replayed", "softcap dropped"). The variant that comes
closest to the engine tells what the two sides do differently. Pure functions of numpy arrays.

Legend: L tokens; every array is over the same ones in the same order. NaN stands where a variant has no reading, as a
shifted one has none at a sequence's end; those tokens are left out of its comparison.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bucket:
    """Tokens at positions [start, end) of their responses."""

    start: int
    end: int
    num_tokens: int
    gap: float
    """Mean |engine - trainer|, nats."""


@dataclass(frozen=True)
class Fit:
    """How close a variant comes to the engine, over the tokens that it reads."""

    name: str
    gap: float
    """Mean |engine - variant|, nats."""
    gap_before: float
    """Mean |engine - trainer| of the same tokens."""

    @property
    def explained(self) -> float:
        """Share of the gap that goes away; negative for a variant that is further off."""
        return 1.0 - self.gap / self.gap_before if self.gap_before > 0 else 0.0


def gap(engine_L: np.ndarray, trainer_L: np.ndarray) -> float:
    """Mean |engine - trainer| over the tokens that both have read, nats; 0 for none."""
    differences = np.abs(engine_L.astype(np.float64) - trainer_L)
    read = differences[~np.isnan(differences)]
    return float(read.mean()) if len(read) else 0.0


def by_position(
    engine_L: np.ndarray, trainer_L: np.ndarray, positions_L: np.ndarray, edges: Sequence[int]
) -> list[Bucket]:
    """The gap along the responses; buckets without a token are left out.

    Args:
        positions_L: of each token in its response, from 0.
        edges: rising; each pair of neighbours bounds a bucket.
    """
    buckets: list[Bucket] = []
    for start, end in itertools.pairwise(edges):
        inside = (positions_L >= start) & (positions_L < end)
        if inside.any():
            buckets.append(Bucket(start, end, int(inside.sum()), gap(engine_L[inside], trainer_L[inside])))
    return buckets


def shifted(logprobs_L: np.ndarray, sequence_L: np.ndarray, by: int) -> np.ndarray:
    """Each token's reading taken from `by` places later in its sequence, NaN where that lies outside.

    Args:
        sequence_L: of each token; the tokens of a sequence follow each other.
    """
    found_L = np.full(len(logprobs_L), np.nan)
    source = np.arange(len(logprobs_L)) + by
    inside = (source >= 0) & (source < len(logprobs_L))
    inside[inside] = sequence_L[source[inside]] == sequence_L[inside]
    found_L[inside] = logprobs_L[source[inside]]
    return found_L


def rank_correlation(one_L: np.ndarray, other_L: np.ndarray) -> float:
    """Spearman's: +1 where both rise together, 0 where they have nothing in common or one of them never changes."""
    ranks = np.stack([_ranks(one_L), _ranks(other_L)])
    if (ranks.min(axis=1) == ranks.max(axis=1)).any():
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def fits(engine_L: np.ndarray, trainer_L: np.ndarray, variants: Mapping[str, np.ndarray]) -> list[Fit]:
    """Every variant, by the share of the gap that it explains, largest first; of equals the first counts.

    Args:
        engine_L: rollout_logprobs.
        trainer_L: the run's own reading.
        variants: name to reading.
    """
    found = [_fit(name, engine_L, trainer_L, read_L) for name, read_L in variants.items()]
    return sorted(found, key=lambda fit: -fit.explained)


def _ranks(values_L: np.ndarray) -> np.ndarray:
    """The place of each value in rising order; equal ones share the mean of theirs."""
    _, group_L, sizes = np.unique(values_L, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2)[group_L]


def _fit(name: str, engine_L: np.ndarray, trainer_L: np.ndarray, variant_L: np.ndarray) -> Fit:
    read_L = ~np.isnan(variant_L)
    return Fit(name, gap(engine_L[read_L], variant_L[read_L]), gap(engine_L[read_L], trainer_L[read_L]))
