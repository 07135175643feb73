"""Planted gaps: the variant that does what the engine did is named."""

import numpy as np
import pytest

from beamline.algorithms.diagnostics import by_position, fits, gap, rank_correlation, shifted

RNG = np.random.default_rng(0)
NUM = 600
SEQUENCE = np.repeat(np.arange(6), 100)
TRAINER = RNG.normal(-2, 1, NUM)
SMALL = 1e-4


def noise(scale: float) -> np.ndarray:
    return RNG.normal(0, scale, NUM)


def variants() -> dict[str, np.ndarray]:
    """What a trainer might read by doing one thing differently each."""
    return {
        "the engine's routes replayed": TRAINER + noise(0.05),
        "float32 arithmetic": TRAINER + noise(0.01),
        "the softcap dropped": TRAINER * 1.2,
        "the temperature folded into the weights": TRAINER * 0.9 - 0.1,
        "weights one version older": TRAINER + noise(0.3),
        "every token shifted by one place": shifted(TRAINER, SEQUENCE, 1),
    }


@pytest.mark.parametrize("cause", variants())
def test_the_variant_that_does_as_the_engine_did_is_named(cause: str) -> None:
    known = variants()
    engine = np.nan_to_num(known[cause], nan=-2.0) + noise(SMALL)
    best, *_ = fits(engine, TRAINER, known)
    assert best.name == cause
    assert best.explained > 0.9


def test_two_causes_are_told_apart_by_size() -> None:
    known = variants()
    large, small = known["weights one version older"] - TRAINER, known["float32 arithmetic"] - TRAINER
    best, *_ = fits(TRAINER + large + small, TRAINER, known)
    assert best.name == "weights one version older"
    assert 0.9 < best.explained < 1


def test_a_gap_that_nothing_explains_leaves_every_variant_with_little() -> None:
    found = fits(TRAINER + noise(0.5), TRAINER, variants())
    assert max(fit.explained for fit in found) < 0.1
    assert fits(TRAINER + 1, TRAINER, {}) == []
    assert fits(TRAINER, TRAINER, variants())[0].explained == 0


def test_a_variant_is_compared_on_the_tokens_that_it_reads() -> None:
    """|0 - 1| and |0 - 3| average 2; the variant reads the first token alone, where 0.5 is left of 1."""
    engine, trainer = np.zeros(2), np.array([1.0, 3.0])
    (fit,) = fits(engine, trainer, {"half": np.array([0.5, np.nan])})
    assert (gap(engine, trainer), fit.gap_before, fit.gap, fit.explained) == (2.0, 1.0, 0.5, 0.5)


def test_gap_by_position() -> None:
    engine, trainer = np.zeros(5), np.array([1.0, 2.0, 3.0, 5.0, np.nan])
    buckets = by_position(engine, trainer, np.array([0, 1, 2, 3, 9]), (0, 1, 4, 8, 16))
    assert [(b.start, b.end, b.num_tokens) for b in buckets] == [(0, 1, 1), (1, 4, 3), (8, 16, 1)]
    assert [b.gap for b in buckets] == pytest.approx([1.0, 10 / 3, 0.0])


def test_a_shift_stays_inside_its_sequence() -> None:
    found = shifted(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 1, 1]), 1)
    assert found.tolist() == pytest.approx([2.0, np.nan, 4.0, np.nan], nan_ok=True)
    back = shifted(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 1, 1]), -1)
    assert back.tolist() == pytest.approx([np.nan, 1.0, np.nan, 3.0], nan_ok=True)


def test_rank_correlation() -> None:
    values = noise(1.0)
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    assert abs(rank_correlation(values, noise(1.0))) < 0.15
    assert rank_correlation(values, np.zeros(NUM)) == 0
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: the covariance is 4.5, the sums of squares are 4.5 and 5.
    assert rank_correlation(np.array([1, 2, 2, 9]), np.arange(4)) == pytest.approx((4.5 / 5) ** 0.5)
