"""Paired significance against enumeration, against McNemar's formula, and against its promise about false alarms."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from beamline.algorithms.significance import MAX_SUM, paired_difference, sign_flip_p_value


def eighths(*counts: int) -> list[Fraction]:
    return [Fraction(count, 8) for count in counts]


def by_enumeration(differences: list[Fraction]) -> float:
    observed = abs(sum(differences))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in signs_of(len(differences))]
    return sum(abs(total) >= observed for total in sums) / len(sums)


def signs_of(number: int):
    return itertools.product((1, -1), repeat=number)


@pytest.mark.parametrize(
    "differences",
    [
        eighths(3, -1, 2, 2, 0, 5, -2, 1, 1, 4),
        eighths(1, 1, 1, 1, 1, 1),
        eighths(-8, 8, -8, 3),
        eighths(0, 0, 0),
        [Fraction(1, 3), Fraction(-1, 8), Fraction(5, 7), Fraction(1, 2), Fraction(-1, 6), Fraction(1, 3)],
        eighths(-7),
    ],
)
def test_the_p_value_counts_every_toss_of_signs(differences: list[Fraction]):
    assert sign_flip_p_value(differences) == pytest.approx(by_enumeration(differences), abs=1e-12)
    assert sign_flip_p_value([-d for d in differences]) == pytest.approx(by_enumeration(differences), abs=1e-12)


@pytest.mark.parametrize(("gained", "lost", "tied"), [(12, 3, 85), (5, 5, 0), (1, 0, 30), (40, 20, 200), (0, 9, 1)])
def test_one_sample_a_problem_is_mcnemars_exact_test(gained: int, lost: int, tied: int):
    n = gained + lost
    tail = sum(comb(n, i) for i in range(max(gained, lost), n + 1)) / 2**n
    differences = [Fraction(1)] * gained + [Fraction(-1)] * lost + [Fraction(0)] * tied
    assert sign_flip_p_value(differences) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


def test_a_grid_too_fine_is_rounded_and_nearly_the_same():
    generator = np.random.default_rng(2)
    numbers = generator.integers(1, 40, size=(60, 2))
    differences = [Fraction(int(a), 40) - Fraction(int(b), 41) for a, b in numbers]
    finer = [d + Fraction(1, 10**9 + 7 * i) for i, d in enumerate(differences)]
    assert sign_flip_p_value(finer) == pytest.approx(sign_flip_p_value(differences), abs=0.01)
    assert len(finer) * 1000 < MAX_SUM


def test_a_difference_by_hand():
    found = paired_difference(eighths(4, 4, 0, 8), eighths(8, 8, 4, 4), seed=0)
    assert found.mean == pytest.approx((4 + 4 + 4 - 4) / 32)
    assert found.low <= found.mean <= found.high
    # |+4 +4 +4 -4| = 8: only sums of 0 are nearer, 6 of 16.
    assert found.p_value == pytest.approx(10 / 16)


def draw(generator: np.random.Generator, gain: float, num_problems: int = 100, n: int = 8):
    """Two policies on the same problems of unlike difficulty; the second is right more often by `gain`."""
    chances = generator.beta(1.2, 0.8, size=num_problems)
    first = generator.binomial(n, chances)
    second = generator.binomial(n, np.clip(chances + gain, 0, 1))
    return [Fraction(int(c), n) for c in first], [Fraction(int(c), n) for c in second]


def test_equal_policies_are_told_apart_once_in_twenty():
    generator = np.random.default_rng(11)
    alarms = sum(
        sign_flip_p_value([b - a for a, b in zip(*draw(generator, 0.0), strict=True)]) < 0.05 for _ in range(600)
    )
    assert 0.03 <= alarms / 600 <= 0.07  # three standard errors are 0.027


def test_a_better_policy_is_found_and_its_interval_covers_the_gain():
    generator, found, covered = np.random.default_rng(12), 0, 0
    for _ in range(100):
        difference = paired_difference(*draw(generator, 0.05, n=64), seed=0)
        found += difference.p_value < 0.05 and difference.mean > 0
        covered += difference.low <= 0.047 <= difference.high  # 0.05 less what the clip at 1 takes
    assert found >= 95
    assert 0.90 <= covered / 100 <= 0.99


def test_tossing_signs_agrees_on_a_large_set():
    """A thousand problems: the exact p-value against 20,000 tosses."""
    a, b = draw(np.random.default_rng(5), 0.01, num_problems=1000)
    differences = np.array([float(y - x) for x, y in zip(a, b, strict=True)])
    signs = np.random.default_rng(6).choice([-1.0, 1.0], size=(20_000, len(differences)))
    tossed = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert sign_flip_p_value([y - x for x, y in zip(a, b, strict=True)]) == pytest.approx(tossed, abs=0.012)
