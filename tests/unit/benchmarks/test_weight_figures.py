"""The arithmetic of the benchmark of weights; nothing is timed here."""

import pytest
from benchmarks.weight_figures import SIZES, Moved, figures_of, rows


def moved(transport: str, size: str, fetch_vs_memcpy: float | None = None) -> Moved:
    return Moved(
        transport=transport,
        size=size,
        export_s=0.2,
        export_memcpy_s=0.1,
        export_vs_memcpy=0.5,
        fetch_s=0.4,
        verify_s=0.1,
        fetch_memcpy_s=0.1,
        fetch_vs_memcpy=fetch_vs_memcpy,
        owner_base_bytes=SIZES[size] + 1000,
        owner_peak_bytes=3 * SIZES[size] + 1000,
    )


def test_the_keys_are_those_of_one_gibibyte() -> None:
    figures = figures_of([moved("shm", "4 MB"), moved("shm", "1 GiB"), moved("nixl", "1 GiB", 0.7)])
    assert (figures.weights_shm_vs_memcpy, figures.weights_nixl_vs_memcpy) == (0.5, 0.7)
    assert figures.weights[1].grown == pytest.approx(2.0)
    assert rows(figures)[0] == ("weights_shm_vs_memcpy", "0.50 x", "goal: at least 0.8 x")
    assert "10.74 GB/s (0.50 of memcpy)" in rows(figures)[3][2]


def test_without_one_gibibyte_there_is_no_figure() -> None:
    with pytest.raises(ValueError, match="1 GiB by shm and nixl was left out"):
        figures_of([moved("shm", "1 GiB")])
