"""Evaluation statistics against numbers worked by hand."""

import itertools

import pytest

from beamline.algorithms.evaluation import bootstrap_interval, pass_at_k, summarise


def test_pass_at_k_by_hand():
    assert pass_at_k(8, 0, 4) == 0.0
    assert pass_at_k(8, 8, 4) == 1.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)  # 1 - C(2,2)/C(4,2)
    assert pass_at_k(4, 2, 3) == 1.0  # any three of four hold a correct one


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, c, k in [(6, 2, 3), (7, 1, 4), (5, 4, 2)]:
        samples = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


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
