"""Which groups are filtered, and the overlong penalty at its bounds."""

import pytest

from beamline.algorithms.advantages import grpo
from beamline.algorithms.filters import zero_variance
from beamline.algorithms.shaping import overlong


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
    assert zero_variance(rewards) == all(not advantage for advantage in grpo([rewards])[0])


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
