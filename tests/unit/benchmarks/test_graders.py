"""The arithmetic of the graders' benchmark; nothing is timed here."""

import pytest
from benchmarks.graders import GradeSpeeds, compare, rows


def test_the_overhead_is_that_of_the_median_round():
    speeds = GradeSpeeds(
        math_dapo=[900.0, 1000.0, 3000.0], math_verify=[90.0, 45.0, 70.0], math_verify_bare=[100.0, 50.0, 200.0]
    )
    figures = compare(speeds)
    assert figures.grader_overhead == pytest.approx(0.1)
    assert figures.math_dapo_per_minute == 60_000
    assert figures.math_verify_per_minute == pytest.approx(60 * 70)
    assert figures.math_verify_bare_per_minute == pytest.approx(60 * 100)
    assert ("grader_overhead", "10.0%", "goal: at most 20.0%") in rows(figures)
