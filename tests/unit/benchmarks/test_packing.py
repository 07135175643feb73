"""The packing benchmark's arithmetic, by hand."""

import json
from pathlib import Path

import pytest
from benchmarks.packing import figures_of, packed, padded_waste, step_metric


def test_padding_is_what_fills_rows_up_and_what_an_idle_rank_computes():
    # Two ranks get 7 + 6 and 8 + 5 tokens: one micro-batch each, filled up to 16.
    cut = packed([8, 7, 6, 5], num_ranks=2, max_tokens=20)
    assert (cut.num_tokens, cut.num_padding, cut.heaviest_rank) == (26, 6, 1.0)
    # The second rank has nothing: it computes one token, filled up to 4, while the first computes 8.
    cut = packed([8], num_ranks=2, max_tokens=20)
    assert (cut.num_tokens, cut.num_padding, cut.heaviest_rank) == (8, 4, 2.0)
    assert cut.waste == pytest.approx(4 / 12)


def test_a_rank_with_fewer_sequences_splits_what_it_has():
    """Six sequences for the second rank, in three micro-batches: the first splits its one long one from nothing."""
    cut = packed([12, 2, 2, 2, 2, 2, 2], num_ranks=2, max_tokens=12)
    assert cut.heaviest_rank == 1.0
    assert (cut.num_tokens, cut.num_padding) == (24, 0)


def test_the_alternative_is_padded_to_its_longest():
    # Budget 10: rows of 2 and 5 make 10; a third of 1 would make 15, so it comes with the 3, 2 x 3.
    assert padded_waste([2, 5, 1, 3], 10) == pytest.approx(1 - 11 / (10 + 6))


def test_the_figures_are_the_worst_of_all_layouts():
    even = figures_of({"even": [64] * 256}, step_waste=0.0)
    assert (even.packing_waste, even.packing_waste_padded, even.packing_heaviest_rank) == (0.0, 0.0, 1.0)
    assert even.packing_lengths == {"even": [256, 64, 64, 64]}
    # Of 65 sequences one rank of two has 33, in two micro-batches, so the other splits its 32; filled up by 2 and more.
    mixed = figures_of({"even": [64] * 256, "few": [63] * 65}, step_waste=0.0)
    assert 0 < mixed.packing_waste < 0.05
    assert mixed.packing_heaviest_rank == 9 * 8 / 65


def test_a_step_s_own_figure_is_read_from_its_metrics(tmp_path: Path):
    lines = [{"step": 1, "values": {"packing/waste": 0.25, "other": 1}}, {"step": 2, "values": {"other": 1}}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert step_metric(tmp_path / "metrics.jsonl", "packing/waste") == [0.25]
