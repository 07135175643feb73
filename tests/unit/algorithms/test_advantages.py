"""Advantages against numbers worked by hand, and what holds for any batch."""

import math
from functools import partial

import pytest
from examples.own_advantage import median
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.algorithms.advantage_check import AdvantageError, batch_advantages
from beamline.algorithms.advantages import ADVANTAGES, Advantages, Rewards, grpo, maxrl, reinforce_pp, rloo

dr_grpo = partial(grpo, normalize_std=False)
WITHIN_GROUPS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "maxrl": maxrl}
ALL = {**WITHIN_GROUPS, "reinforce_pp": reinforce_pp}

within_groups = pytest.mark.parametrize("advantage", WITHIN_GROUPS.values(), ids=WITHIN_GROUPS)
any_advantage = pytest.mark.parametrize("advantage", ALL.values(), ids=ALL)
finite = st.floats(-4, 4).map(lambda reward: round(reward, 3))
batches = st.lists(st.lists(st.none() | finite, min_size=1, max_size=6), min_size=1, max_size=6)


def test_grpo_by_hand():
    # Mean 0; squares sum to 4 over 3 degrees of freedom: std = sqrt(4/3) = 1.154700538.
    expected = 1 / (1.1547005383792515 + 1e-6)
    # Mean 2; squares sum to 4 + 1 + 0 + 9 = 14 over 3: std = sqrt(14/3) = 2.160246899.
    std = 2.160246899469287 + 1e-6
    first, second = grpo([[1.0, -1.0, 1.0, -1.0], [0.0, 1.0, 2.0, 5.0]])
    assert first == pytest.approx([expected, -expected, expected, -expected], abs=1e-12)
    assert second == pytest.approx([-2 / std, -1 / std, 0, 3 / std], abs=1e-12)


def test_without_std_it_is_r_minus_mean():
    assert dr_grpo([[0.0, 1.0, 2.0, 5.0]]) == [[-2.0, -1.0, 0.0, 3.0]]


def test_rloo_by_hand():
    # Each reward less the mean of the other three: 0 - 8/3, 1 - 7/3, 2 - 6/3, 5 - 3/3.
    (found,) = rloo([[0.0, 1.0, 2.0, 5.0]])
    assert found == pytest.approx([-8 / 3, -4 / 3, 0, 4], abs=1e-12)


def test_maxrl_by_hand():
    # Mean 1/4: the success weighs 3/4 / 1/4 = 3, a failure -1, but for the 1e-6.
    (found,) = maxrl([[1.0, 0.0, 0.0, 0.0]])
    assert found == pytest.approx([0.75 / 0.250001, *[-0.25 / 0.250001] * 3], abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.0, 0.0, 0.0], [1.0, -1.0], [-1.0, -1.0, 1.0], [-1e-6, -1e-6, 1e-6]])
def test_maxrl_learns_nothing_where_the_mean_is_not_above_zero(rewards: list[float | None]):
    assert maxrl([rewards]) == [[0.0] * len(rewards)]


def test_reinforce_pp_by_hand():
    # Four rewards of two groups: mean 2, squares 4 + 1 + 0 + 9 = 14 over 3 degrees of freedom.
    scale = (14 / 3 + 1e-8) ** -0.5
    first, second = reinforce_pp([[0.0, None, 1.0], [2.0, 5.0]])
    assert [first[0], *first[2:], *second] == pytest.approx([-2 * scale, -scale, 0, 3 * scale], abs=1e-12)
    assert first[1] is None


def test_a_group_of_equal_rewards_has_a_baseline_in_reinforce_pp():
    solved, failed = reinforce_pp([[1.0, 1.0], [-1.0, -1.0]])
    assert solved[0] == solved[1] > 0 > failed[0] == failed[1]  # pyright: ignore[reportOptionalOperand]


@within_groups
def test_a_group_of_one_keeps_its_reward(advantage):
    assert advantage([[-0.5], [None], [0.25]]) == [[-0.5], [None], [0.25]]


@any_advantage
def test_the_only_reward_left_says_nothing(advantage):
    assert advantage([[None, 1.0, None], [None, None]]) == [[None, 0.0, None], [None, None]]
    assert reinforce_pp([[0.5]]) == [[0.0]], "its baseline is the batch's, and there is no other reward"


@any_advantage
def test_equal_rewards_give_exactly_zero(advantage):
    assert advantage([[0.1] * 7]) == [[0.0] * 7]
    assert advantage([]) == []


@within_groups
@given(batches)
@settings(deadline=None, max_examples=50)
def test_groups_do_not_touch_each_other(advantage, rewards: Rewards):
    assert advantage(rewards) == [advantage([group])[0] for group in rewards]


@any_advantage
@given(batches, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_groups_and_samples_is_nothing(advantage, rewards: Rewards, rng):
    places = [(g, i) for g, group in enumerate(rewards) for i in range(len(group))]
    order = rng.sample(range(len(rewards)), len(rewards))
    samples = {g: rng.sample(range(len(rewards[g])), len(rewards[g])) for g in order}
    shuffled = advantage([[rewards[g][i] for i in samples[g]] for g in order])
    plain = advantage(rewards)
    for g, i in places:
        moved = shuffled[order.index(g)][samples[g].index(i)]
        assert moved == (None if plain[g][i] is None else pytest.approx(plain[g][i], rel=1e-6, abs=1e-9))


@any_advantage
@given(batches)
@settings(deadline=None, max_examples=50)
def test_abstained_rewards_take_no_part_and_stay(advantage, rewards: Rewards):
    found = advantage(rewards)
    assert [[a is None for a in group] for group in found] == [[r is None for r in group] for group in rewards]
    # A second abstention changes nothing in a group that is larger than one anyway.
    wider = advantage([[*group, None] if len(group) > 1 else group for group in rewards])
    assert [group[: len(plain)] for group, plain in zip(wider, found, strict=True)] == found
    assert all(math.isfinite(a) for group in found for a in group if a is not None)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo, reinforce_pp])
@given(batches, st.sampled_from([-8.0, 0.5, 3.0]))
@settings(deadline=None, max_examples=50)
def test_a_shift_of_all_rewards_changes_nothing_and_advantages_sum_to_zero(advantage, rewards: Rewards, shift: float):
    several = [group for group in rewards if len(group) > 1]
    plain = advantage(several)
    moved = advantage([[None if r is None else r + shift for r in group] for group in several])
    assert flat(moved) == pytest.approx(flat(plain), rel=1e-5, abs=1e-7)
    assert math.fsum(flat(plain)) == pytest.approx(0, abs=1e-6)


def flat(advantages: Advantages) -> list[float]:
    return [a for group in advantages for a in group if a is not None]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_group_and_sample(reward: float):
    with pytest.raises(AdvantageError, match=rf"group g-2, sample 1: the reward is {reward}"):
        batch_advantages("grpo", grpo, [[1.0, 0.0], [0.0, reward]], ["g-1", "g-2"])


def raises(rewards: Rewards) -> Advantages:
    raise KeyError("weight")


WRONG = {
    "one number": (lambda rewards: 1.0, "was given 2 groups and returned a float"),
    "too few groups": (lambda rewards: [[0.0, 0.0]], "was given 2 groups and returned 1"),
    "a flat list": (lambda rewards: [0.0, 0.0], "group g-1 has 2 rewards and was given a float"),
    "too few": (lambda rewards: [[0.0, 0.0], [0.0]], "group g-2 has 3 rewards and was given 1 advantages"),
    "NaN": (lambda rewards: [[0.0, 0.0], [0.0, None, math.nan]], "group g-2, sample 2: the advantage is nan"),
    "a word": (lambda rewards: [["good", 0.0], [0.0, None, 0.0]], "group g-1, sample 0: the advantage is a str"),
    "a filled gap": (lambda rewards: [[0.0, 0.0], [0.0, 0.5, 0.0]], "the reward is None and the advantage 0.5"),
    "a new gap": (lambda rewards: [[None, 0.0], [0.0, None, 0.0]], "the reward is 1.0 and the advantage None"),
    "an error": (raises, "raised KeyError on groups g-1 to g-2: 'weight'"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_an_own_function_that_answers_wrongly_is_named_with_the_group(wrong, message: str):
    with pytest.raises(AdvantageError) as error:
        batch_advantages("mine:centred", wrong, [[1.0, 0.0], [1.0, None, 0.0]], ["g-1", "g-2"])
    assert "algorithm.advantage=mine:centred" in str(error.value) and message in str(error.value)


def test_the_advantage_of_the_examples_is_its_formula():
    rewards = [[1.0, None, 0.0, 0.0], [0.5], [None], [0.0, 1.0]]
    found = batch_advantages("examples.own_advantage:median", median, rewards, ["g-1", "g-2", "g-3", "g-4"])
    assert found == [[1.0, None, 0.0, 0.0], [0.0], [None], [-0.5, 0.5]]


def test_what_comes_through_the_check_is_what_the_function_said():
    rewards = [[1.0, None, 0.0], [0.25]]
    for name, advantage in ADVANTAGES.items():
        assert batch_advantages(name, advantage, rewards, ["g-1", "g-2"]) == advantage(rewards)
