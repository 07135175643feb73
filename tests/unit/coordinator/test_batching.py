"""Train batches: who is in them, with which advantage, and what the denominator of a mini-batch is."""

import math

import msgspec
import pytest

from beamline.coordinator.batching import split_useless, train_batch
from beamline.protocol.algorithm_config import AlgorithmSection
from ring_messages import prompt, scored

CONFIG = AlgorithmSection(num_mini_batches=2)


def test_a_group_of_equal_rewards_is_filtered_unless_configured_otherwise():
    groups = [scored(prompt(0), [1.0, -1.0]), scored(prompt(1), [1.0, 1.0]), scored(prompt(2), [-1.0, None])]
    assert split_useless(groups, CONFIG) == (["g-000000"], ["g-000001", "g-000002"])
    keep_all = msgspec.structs.replace(CONFIG, drop_zero_variance=False)
    assert split_useless(groups, keep_all) == (["g-000000", "g-000001", "g-000002"], [])


def test_mini_batches_deal_groups_in_order_and_count_loss_tokens():
    groups = [scored(prompt(i), [1.0, -1.0], lengths=[10 * (i + 1), 1]) for i in range(3)]
    batch = train_batch(5, groups, CONFIG, num_ranks=1)
    assert batch.step == 5 and [g.group_id for g in batch.groups] == [g.group_id for g in groups]
    assert [mini.num_loss_tokens for mini in batch.mini_batches] == [11, 21 + 31]
    places = [{(p.group, p.sample) for rank in mini.ranks for p in rank} for mini in batch.mini_batches]
    assert places == [{(0, 0), (0, 1)}, {(1, 0), (1, 1), (2, 0), (2, 1)}]


def test_advantages_are_grpo_by_hand():
    (group,) = train_batch(1, [scored(prompt(0), [1.0, 0.0, 0.0, 0.0])], CONFIG, num_ranks=1).groups
    # mean 1/4; variance with ddof 1: (9/16 + 3/16) / 3 = 1/4, so std 1/2.
    expected = [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]
    assert group.advantages == pytest.approx(expected, rel=1e-12)


def test_an_abstained_trajectory_is_in_no_mini_batch_and_no_denominator():
    batch = train_batch(1, [scored(prompt(0), [1.0, None, -1.0], lengths=[5, 7, 11])], CONFIG, num_ranks=1)
    assert batch.groups[0].advantages[1] is None
    assert [mini.num_loss_tokens for mini in batch.mini_batches] == [16], "one group makes one mini-batch"
    assert all(place.sample != 1 for rank in batch.mini_batches[0].ranks for place in rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_all_trajectories_evenly_by_tokens(num_ranks: int):
    groups = [scored(prompt(i), [1.0, -1.0, 0.5], lengths=[3 + 7 * i, 40, 5]) for i in range(8)]
    batch = train_batch(1, groups, CONFIG, num_ranks)
    for mini in batch.mini_batches:
        assert len(mini.ranks) == num_ranks
        places = [(p.group, p.sample) for rank in mini.ranks for p in rank]
        assert len(places) == len(set(places)) == 12
        loads = [sum(3 + groups[p.group].response_lengths[p.sample] for p in rank) for rank in mini.ranks]
        assert max(loads) <= 1.2 * math.fsum(loads) / num_ranks
