"""Train batches: who is in them, with which advantage, and what the denominator of a mini-batch is."""

import math
import sys
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.batching import Batcher, advantage_of
from beamline.protocol.algorithm_config import AlgorithmSection, DynamicSamplingSection, KLSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import FinishReason, Grade, ScoredGroup
from ring_messages import prompt, scored


def batcher(groups_per_step: int = 4, num_ranks: int = 1, **settings) -> Batcher:
    config = AlgorithmSection(num_mini_batches=2, **settings)
    return Batcher(config, advantage_of(config), groups_per_step, num_ranks)


def groups_of(*rewards: list[float | None]) -> list[ScoredGroup]:
    return [scored(prompt(number), row) for number, row in enumerate(rewards)]


def cut(group: ScoredGroup, *samples: int) -> ScoredGroup:
    """The group with these responses at the length limit."""
    reasons = [
        FinishReason.LENGTH if sample in samples else reason for sample, reason in enumerate(group.finish_reasons)
    ]
    return msgspec.structs.replace(group, finish_reasons=reasons)


def with_raw(group: ScoredGroup, *raw: float) -> ScoredGroup:
    grades = [Grade(reward=g.reward, breakdown={"raw": r}) for g, r in zip(group.grades, raw, strict=True)]
    return msgspec.structs.replace(group, grades=grades)


def places(mini_batch) -> list[tuple[int, int]]:
    return [(place.group, place.sample) for rank in mini_batch.ranks for place in rank]


def test_a_group_of_equal_rewards_is_filtered_unless_configured_otherwise():
    groups = groups_of([1.0, -1.0], [1.0, 1.0], [-1.0, None])
    assert batcher().split(groups) == (["g-000000"], ["g-000001", "g-000002"])
    assert batcher(drop_zero_variance=False).split(groups) == (["g-000000", "g-000001", "g-000002"], [])


def test_a_group_of_which_nothing_is_left_is_always_filtered():
    groups = groups_of([None, None], [1.0, -1.0])
    assert batcher(drop_zero_variance=False).split(groups) == (["g-000001"], ["g-000000"])


def test_reinforce_pp_keeps_groups_of_equal_rewards():
    groups = groups_of([1.0, 1.0], [0.0, 0.0])
    chosen = batcher(advantage="reinforce_pp")
    assert chosen.split(groups) == (["g-000000", "g-000001"], [])
    found = [group.advantages for group in chosen.train_batch(1, groups).groups]
    # Mean 1/2, squares 4 x 1/4 over 3 degrees of freedom.
    expected = 0.5 * (1 / 3 + 1e-8) ** -0.5
    assert found == [pytest.approx([expected] * 2), pytest.approx([-expected] * 2)]


@pytest.mark.parametrize("mode", ["filter", "replace"])
def test_dynamic_sampling_decides_on_raw_rewards(mode: str):
    """All wrong, told apart by the overlong penalty: the zero-variance filter keeps it, dynamic sampling does not."""
    group = with_raw(scored(prompt(0), [-1.0, -1.5]), -1.0, -1.0)
    assert batcher().split([group]) == (["g-000000"], [])
    sampling = DynamicSamplingSection(mode=mode)
    assert batcher(dynamic_sampling=sampling).split([group]) == ([], ["g-000000"])
    alone = scored(prompt(1), [1.0])
    assert batcher(dynamic_sampling=sampling).split([alone]) == (["g-000001"], []), "a group of one keeps its reward"


def test_replace_repeats_the_good_groups_in_order_until_the_batch_is_full():
    groups = groups_of([1.0, -1.0], [0.0, 1.0], [0.5, -1.0])
    batch = batcher(groups_per_step=5, dynamic_sampling=DynamicSamplingSection(mode="replace")).train_batch(1, groups)
    assert len(batch.groups) == 3, "a group is sent once, however often it is trained"
    assert [sorted(places(mini)) for mini in batch.mini_batches] == [
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
    ]


def test_overlong_filtering_leaves_a_cut_response_out_of_the_loss_but_not_of_the_baseline():
    group = cut(scored(prompt(0), [1.0, 0.0, 0.0, 0.0], lengths=[5, 7, 11, 13]), 1)
    batch = batcher(overlong_filtering=True).train_batch(1, [group])
    # mean 1/4; variance with ddof 1: (9/16 + 3/16) / 3 = 1/4, so std 1/2.
    right, left_out, *wrong = batch.groups[0].advantages
    assert right == pytest.approx(0.75 / (0.5 + 1e-6), rel=1e-12) and left_out is None
    assert wrong == pytest.approx([-0.25 / (0.5 + 1e-6)] * 2, rel=1e-12)
    assert sorted(places(batch.mini_batches[0])) == [(0, 0), (0, 2), (0, 3)]
    plain = batcher().train_batch(1, [group])
    assert sorted(places(plain.mini_batches[0])) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_a_group_that_was_cut_altogether_counts_as_filtered():
    group = cut(scored(prompt(0), [1.0, -1.0]), 0, 1)
    assert batcher(overlong_filtering=True).split([group]) == ([], ["g-000000"])
    assert batcher().split([group]) == (["g-000000"], [])


@pytest.mark.parametrize(
    ("coefficient", "place", "sent"), [(0.1, "reward", True), (0.1, "loss", False), (0.0, "reward", False)]
)
def test_rewards_go_along_where_the_trainer_takes_a_divergence_off_them(coefficient: float, place: str, sent: bool):
    kl = KLSection(coefficient=coefficient, place=place)
    (group,) = batcher(kl=kl).train_batch(1, groups_of([1.0, None, -1.0])).groups
    assert group.rewards == ([1.0, None, -1.0] if sent else [])


def test_mini_batches_deal_groups_in_order():
    groups = [scored(prompt(i), [1.0, -1.0], lengths=[10 * (i + 1), 1]) for i in range(3)]
    batch = batcher().train_batch(5, groups)
    assert batch.step == 5 and [g.group_id for g in batch.groups] == [g.group_id for g in groups]
    assert [set(places(mini)) for mini in batch.mini_batches] == [{(0, 0), (0, 1)}, {(1, 0), (1, 1), (2, 0), (2, 1)}]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # mean 1/4; variance with ddof 1: (9/16 + 3/16) / 3 = 1/4, so std 1/2.
        ({}, [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
        ({"normalize_std": False}, [0.75, -0.25, -0.25, -0.25]),
        ({"advantage": "rloo"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"advantage": "maxrl"}, [0.75 / 0.250001, *[-0.25 / 0.250001] * 3]),
        ({"advantage": "reinforce_pp"}, [0.75 * (0.25 + 1e-8) ** -0.5, *[-0.25 * (0.25 + 1e-8) ** -0.5] * 3]),
    ],
)
def test_the_advantage_is_the_one_that_the_recipe_names(settings: dict, expected: list[float]):
    (group,) = batcher(**settings).train_batch(1, groups_of([1.0, 0.0, 0.0, 0.0])).groups
    assert group.advantages == pytest.approx(expected, rel=1e-12)


def test_an_abstained_trajectory_is_in_no_mini_batch():
    batch = batcher().train_batch(1, [scored(prompt(0), [1.0, None, -1.0], lengths=[5, 7, 11])])
    assert batch.groups[0].advantages[1] is None
    assert len(batch.mini_batches) == 1, "one group makes one mini-batch"
    assert all(place.sample != 1 for rank in batch.mini_batches[0].ranks for place in rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_all_trajectories_evenly_by_tokens(num_ranks: int):
    groups = [scored(prompt(i), [1.0, -1.0, 0.5], lengths=[3 + 7 * i, 40, 5]) for i in range(8)]
    batch = batcher(num_ranks=num_ranks, groups_per_step=8).train_batch(1, groups)
    for mini in batch.mini_batches:
        assert len(mini.ranks) == num_ranks
        assert len(places(mini)) == len(set(places(mini))) == 12
        loads = [sum(3 + groups[p.group].response_lengths[p.sample] for p in rank) for rank in mini.ranks]
        assert max(loads) <= 1.2 * math.fsum(loads) / num_ranks


OWN = """
calls = []
def centred(rewards):
    calls.append(len(rewards))
    return [[None if r is None else r - 0.5 for r in group] for group in rewards]
def short(rewards):
    return rewards[:-1]
def raises(rewards):
    raise ZeroDivisionError("division by zero")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's own."""
    (tmp_path / "own_advantage.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_advantage"
    sys.modules.pop("own_advantage", None)


def test_an_own_function_sees_the_whole_batch_at_once(own: str):
    batch = batcher(advantage=f"{own}:centred").train_batch(1, groups_of([1.0, None], [0.0, 0.25]))
    assert [group.advantages for group in batch.groups] == [[0.5, None], [-0.5, -0.25]]
    assert sys.modules[own].calls == [2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "own_advantage:short was given 2 groups and returned 1: it must return a list of as many lists"),
        ("raises", "own_advantage:raises raised ZeroDivisionError on groups g-000000 to g-000001: division by zero"),
    ],
)
def test_an_own_function_that_fails_ends_the_run_in_plain_words(own: str, name: str, message: str):
    with pytest.raises(ConfigError, match=f"algorithm.advantage={message}"):
        batcher(advantage=f"{own}:{name}").train_batch(1, groups_of([1.0, 0.0], [0.0, 0.25]))


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        ("own_advantage:missing", "own_advantage has no function or class missing"),
        ("no_such_module:f", "no_such_module cannot be imported"),
    ],
)
def test_an_own_function_that_is_not_there_is_refused(own: str, advantage: str, message: str):
    with pytest.raises(ConfigError, match=f"algorithm.advantage={advantage}: {message}"):
        batcher(advantage=advantage)


def test_a_reward_that_is_no_number_is_refused_by_its_group():
    with pytest.raises(ConfigError, match="group g-000001, sample 0: the reward is nan"):
        batcher().train_batch(1, groups_of([1.0, 0.0], [math.nan, 0.0]))
