"""Evaluation statistics against numbers worked by hand, against all subsets, and against the truth in simulations."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from beamline.algorithms.evaluation import bootstrap_interval, pass_at_k, summarise


def test_pass_at_k_by_hand():
    assert pass_at_k(8, 0, 4) == 0.0
    assert pass_at_k(8, 8, 4) == 1.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)  # 1 - C(2,2)/C(4,2)
    assert pass_at_k(4, 2, 3) == 1.0  # any three of four hold a correct one


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == sum(any(s) for s in subsets) / len(subsets)


def test_pass_at_k_is_unbiased():
    """Over everything that n samples of a policy with chance p may show, its mean is 1 - (1 - p)^k."""
    n, p, coins = 10, 0.15, np.random.default_rng(0)
    counts = coins.binomial(n, p, size=200_000)
    estimates = np.array([pass_at_k(n, c, 4) for c in range(n + 1)])[counts]
    error = estimates.std() / np.sqrt(len(estimates))
    assert abs(estimates.mean() - (1 - (1 - p) ** 4)) < 4 * error
    # What one would write first, 1 - (1 - c/n)^k, is too low, and is told apart by the same test.
    naive = (1 - (1 - np.arange(n + 1) / n) ** 4)[counts]
    assert abs(naive.mean() - (1 - (1 - p) ** 4)) > 10 * error


def test_pass_at_k_of_very_many_samples():
    n, c, k = 20_000, 7, 5_000
    missed = Fraction(1)
    for i in range(c):  # none of the c correct ones is among the k: C(n - c, k) / C(n, k) as a product
        missed *= Fraction(n - k - i, n - i)
    assert pass_at_k(n, c, k) == float(1 - missed)
    assert pass_at_k(10**6, 1, 1) == 1e-6, "nothing cancels"
    assert pass_at_k(10**5, 10**5 - 10, 10) == 1.0


@pytest.mark.parametrize(
    ("n", "c", "k", "text"),
    [(4, 2, 5, "k=5"), (4, 2, 0, "k=0"), (4, 5, 1, "num_correct=5"), (4, -1, 1, "num_correct=-1"), (0, 0, 1, "k=1")],
)
def test_pass_at_k_refuses_what_it_cannot_estimate(n: int, c: int, k: int, text: str):
    with pytest.raises(ValueError, match=text):
        pass_at_k(n, c, k)


def test_a_summary_by_hand():
    values = summarise([[True, True, False, False], [True, True, True]], seed=0)
    assert values["accuracy"] == pytest.approx((0.5 + 1.0) / 2)
    assert values["pass_at_1"] == values["accuracy"]
    assert values["pass_at_2"] == pytest.approx((5 / 6 + 1) / 2)
    assert "pass_at_4" not in values  # the second problem has three graded samples
    assert values["accuracy_low"] <= values["accuracy"] <= values["accuracy_high"]


def test_pass_at_k_covers_the_powers_of_two():
    values = summarise([[True] * 8], seed=0)
    assert [name for name in values if name.startswith("pass_at_")] == [f"pass_at_{k}" for k in (1, 2, 4, 8)]


def test_nothing_graded_has_no_accuracy():
    assert summarise([], seed=0) == {}


def test_the_interval_is_seeded_and_shrinks_with_the_problems():
    few, many = [0.0, 1.0] * 8, [0.0, 1.0] * 128
    assert bootstrap_interval(few, seed=1) == bootstrap_interval(few, seed=1)
    low, high = bootstrap_interval(few, seed=1)
    # The mean of 16 fair coins has a standard error of 0.125: 95 % is about 0.5 -+ 0.245.
    assert (low, high) == pytest.approx((0.255, 0.745), abs=0.04)
    low, high = bootstrap_interval(many, seed=1)
    assert (low, high) == pytest.approx((0.439, 0.561), abs=0.01)
    assert bootstrap_interval([0.25] * 5, seed=0) == (0.25, 0.25)


def test_the_interval_is_that_of_drawing_the_problems_themselves():
    """The same resampling written out: rows of problems with replacement, and the quantiles of their means."""
    values = np.random.default_rng(3).binomial(8, 0.6, size=40) / 8
    rows = np.random.default_rng(4).integers(0, len(values), size=(40_000, len(values)))
    expected = np.quantile(values[rows].mean(axis=1), [0.025, 0.975])
    assert bootstrap_interval(values.tolist(), seed=0) == pytest.approx(tuple(expected), abs=0.003)


@pytest.mark.parametrize("num_problems", [30, 256])
def test_the_interval_covers_the_truth_19_times_in_20(num_problems: int):
    """Problems of unlike difficulty, 8 samples each, drawn anew 300 times from a population of known accuracy."""
    generator, covered = np.random.default_rng(7), 0
    for _ in range(300):
        difficulty = generator.beta(1.2, 0.8, size=num_problems)  # mean 0.6
        low, high = bootstrap_interval((generator.binomial(8, difficulty) / 8).tolist(), seed=0)
        covered += low <= 0.6 <= high
    assert 0.90 <= covered / 300 <= 0.98
