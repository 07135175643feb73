"""The arithmetic of the benchmark of optimizer state on disk; nothing is timed here."""

import pytest
from benchmarks.disk_figures import DiskStep, figures_of, rows


def step(num_params: int, vs_limit: float, buckets: float) -> DiskStep:
    return DiskStep(
        num_params=num_params,
        bucket_bytes=1000,
        step_s=num_params * 10e-9,
        disk_s=0.4,
        memory_s=0.1,
        vs_limit=vs_limit,
        first_peak_bytes=2500,
        peak_bytes=int(buckets * 1000),
    )


def test_the_key_is_that_of_200_million_and_memory_of_the_worst() -> None:
    figures = figures_of([step(50_000_000, 1.5, 2.9), step(200_000_000, 1.1, 2.7)])
    assert (figures.disk_adam_vs_limit, figures.disk_adam_buckets) == (1.1, 2.9)
    assert rows(figures)[0] == ("disk_adam_vs_limit", "1.10 x", "goal: at most 1.2 x")
    assert "step 2.00 s (10.0 ns a parameter, 2.40 GB/s)" in rows(figures)[3][2]
    assert "2.70 buckets resident, 0.20 more than at first" in rows(figures)[3][2]


def test_without_200_million_there_is_no_figure() -> None:
    with pytest.raises(ValueError, match="200000000 parameters were left out"):
        figures_of([step(50_000_000, 1.0, 3.0)])
