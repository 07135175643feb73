"""The arithmetic of the fused log-probabilities' benchmark; nothing is computed here."""

import msgspec
import pytest
from benchmarks.fused_logprob import Measured, compare, rows

PLAIN = Measured(
    forward_s=10.0,
    backward_s=20.0,
    processor_s=58.0,
    peak_bytes=10 << 30,
    mean_logprob=-12.0,
    hidden_gradient_norm=60.0,
    weight_gradient_norm=30.0,
)


def rounds(**fused: float) -> dict[str, list[Measured]]:
    one = msgspec.structs.replace(PLAIN, peak_bytes=1 << 29, **fused)
    return {"plain": [PLAIN, PLAIN], "fused": [one, msgspec.structs.replace(one, backward_s=32.0, peak_bytes=1 << 30)]}


def test_memory_is_the_worst_of_all_rounds_and_time_the_median_of_each_round_s_ratio():
    figures = compare(rounds(backward_s=26.0))
    assert figures.fused_logprob_memory == pytest.approx(0.1)
    assert figures.fused_logprob_time == pytest.approx(1.3)
    assert rows(figures)[1] == ("fused_logprob_time", "1.30 x", "of plain; goal: at most 1.3 x")


def test_sides_that_find_different_numbers_are_no_comparison():
    with pytest.raises(ValueError, match="differ"):
        compare(rounds(weight_gradient_norm=30.01))
