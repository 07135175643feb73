"""Advantages, filters and shaping against numbers worked by hand."""

import math

import pytest

from beamline.algorithms.advantages import grpo
from beamline.algorithms.filters import zero_variance
from beamline.algorithms.shaping import overlong


def test_grpo_by_hand():
    # Mean 0; squares sum to 4 over 3 degrees of freedom: std = sqrt(4/3) = 1.154700538.
    expected = 1 / (1.1547005383792515 + 1e-6)
    assert grpo([1.0, -1.0, 1.0, -1.0]) == pytest.approx([expected, -expected, expected, -expected], abs=1e-12)
    # Mean 2; squares sum to 4 + 1 + 0 + 9 = 14 over 3: std = sqrt(14/3) = 2.160246899.
    std = 2.160246899469287 + 1e-6
    assert grpo([0.0, 1.0, 2.0, 5.0]) == pytest.approx([-2 / std, -1 / std, 0, 3 / std], abs=1e-12)


def test_without_std_it_is_r_minus_mean():
    assert grpo([0.0, 1.0, 2.0, 5.0], normalize_std=False) == [-2.0, -1.0, 0.0, 3.0]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_one_keeps_its_reward(normalize_std):
    assert grpo([-0.5], normalize_std=normalize_std) == [-0.5]
    assert grpo([None], normalize_std=normalize_std) == [None]


def test_abstained_rewards_take_no_part():
    with_abstained = grpo([None, 1.0, -1.0, None, 1.0])
    assert [a for a in with_abstained if a is not None] == grpo([1.0, -1.0, 1.0])
    assert [i for i, a in enumerate(with_abstained) if a is None] == [0, 3]


def test_the_only_reward_left_of_a_group_says_nothing():
    assert grpo([None, 1.0, None]) == [None, 0.0, None]
    assert grpo([None, None]) == [None, None]


def test_equal_rewards_give_zero_and_stay_finite():
    assert grpo([1.0] * 8) == [0.0] * 8
    assert all(math.isfinite(a) for a in grpo([0.1] * 7) if a is not None)


def test_advantages_sum_to_zero_and_ignore_a_shift():
    rewards: list[float | None] = [1.0, -1.0, -0.2, 0.4, 1.0]
    shifted = [r + 3.0 for r in rewards if r is not None]
    assert sum(a for a in grpo(rewards) if a is not None) == pytest.approx(0, abs=1e-12)
    assert grpo(shifted) == pytest.approx(grpo(rewards), abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1.0, 1.0], True),
        ([1.0, -1.0], False),
        ([1.0, None, 1.0], True),
        ([1.0, None, -1.0], False),
        ([None, None], True),
        ([None, 1.0], True),
        ([1.0], False),
        ([None], True),
    ],
)
def test_zero_variance(rewards, expected):
    assert zero_variance(rewards) is expected


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [None, 1.0], [1.0, -1.0, None], [0.5], [None, None]])
def test_a_group_is_filtered_exactly_when_it_has_no_gradient(rewards):
    assert zero_variance(rewards) == all(not advantage for advantage in grpo(rewards))


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 1.0),
        (80, 1.0),  # s itself is not punished
        (81, 0.975),  # 1 of 20 buffer tokens x 0.5
        (90, 0.75),
        (100, 0.5),  # the whole factor at the maximum
        (101, 0.0),
    ],
)
def test_overlong_at_its_bounds(num_tokens, expected):
    shaped = overlong(1.0, num_tokens, max_tokens=100, buffer_tokens=20, factor=0.5)
    assert shaped == pytest.approx(expected, abs=1e-12)


def test_overlong_goes_below_a_wrong_answer_and_a_response_over_the_limit_earns_zero():
    assert overlong(-1.0, 90, max_tokens=100, buffer_tokens=20, factor=1.0) == -1.5
    assert overlong(-1.0, 101, max_tokens=100, buffer_tokens=20, factor=1.0) == 0.0
