"""Parts cover every sequence once, are balanced, and keep to the budget."""

import random

import pytest

from beamline.algorithms.packing import balance, micro_batches


def tokens(lengths, parts):
    return [sum(lengths[i] for i in part) for part in parts]


def draws():
    generator = random.Random(0)
    for _ in range(200):
        yield [generator.randint(1, 200) for _ in range(generator.randint(1, 40))], generator.randint(1, 8)


def test_balance_by_hand():
    # 8, 7, 6, 5, 4: 8-7 -> 1, 6-5 -> 1, 4-1 -> 3, 3-1 -> 2: sums 16 and 14.
    lengths = [8, 7, 6, 5, 4]
    assert sorted(tokens(lengths, balance(lengths, 2))) == [14, 16]
    assert balance([5, 5, 5, 5], 2) == balance([5, 5, 5, 5], 2)
    assert balance([], 3) == [[], [], []]
    assert balance([3], 1) == [[0]]


def test_every_sequence_has_one_place_and_no_part_is_empty():
    for lengths, num_parts in draws():
        parts = balance(lengths, num_parts)
        assert len(parts) == num_parts
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        if len(lengths) >= num_parts:
            assert all(parts)


def test_parts_differ_by_no_more_than_the_longest_sequence():
    for lengths, num_parts in draws():
        sums = tokens(lengths, balance(lengths, num_parts))
        assert max(sums) - min(sums) <= max(lengths)


def test_many_sequences_balance_within_a_percent():
    generator = random.Random(1)
    lengths = [generator.randint(100, 8192) for _ in range(512)]
    sums = tokens(lengths, balance(lengths, 8))
    assert max(sums) / min(sums) < 1.01


def test_micro_batches_keep_to_the_budget_and_are_few():
    for lengths, _ in draws():
        parts = micro_batches(lengths, 256)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert max(tokens(lengths, parts)) <= 256
        # First fit leaves at most one part half empty.
        assert len(parts) <= 2 * -(-sum(lengths) // 256)


def test_micro_batches_by_hand():
    assert tokens([60, 60, 40, 40], micro_batches([60, 60, 40, 40], 100)) == [100, 100]
    assert micro_batches([10, 10, 10], 100) == [[0, 1, 2]]
    assert micro_batches([], 100) == []


def test_ranks_can_ask_for_the_same_number():
    assert [len(part) for part in micro_batches([10, 10, 10, 10], 100, num_at_least=2)] == [2, 2]
    assert sorted(map(len, micro_batches([10], 100, num_at_least=3))) == [0, 0, 1]
    assert micro_batches([], 100, num_at_least=2) == [[], []]


def test_a_sequence_over_the_budget_is_refused_by_name():
    with pytest.raises(ValueError, match="sequence 1 has 300 tokens, over the micro-batch budget of 256"):
        micro_batches([1, 300], 256)
