"""Off-policy corrections against values worked by hand.

Three sequences A, B, C of the ratios below, exp(l) each; l = log(ratio).

    A: 1, 4        sum of l: log 4        mean of l: log 2
    B: 0.25, 0.5, 1       log 0.125             log 0.5
    C: 1.01               log 1.01              log 1.01
"""

import math

import pytest
import torch

from beamline.algorithms.losses import Clip, PolicyLoss, clipped_loss
from beamline.algorithms.off_policy import (
    GeometricMask,
    OffPolicy,
    OutlierDrop,
    ProductMask,
    SequenceImportance,
    TokenImportance,
    TokenMask,
)

RATIOS = torch.tensor([1.0, 4.0, 0.25, 0.5, 1.0, 1.01], dtype=torch.float64)
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])


def weights(off_policy: OffPolicy, ratios: torch.Tensor = RATIOS) -> list[float]:
    return off_policy.weights(ratios.log(), SEQUENCES, 3).tolist()


def metrics(off_policy: OffPolicy, ratios: torch.Tensor = RATIOS) -> dict[str, float]:
    return off_policy.metrics(ratios.log(), SEQUENCES, 3)


def test_without_corrections_every_weight_is_one():
    assert weights(OffPolicy()) == [1.0] * 6
    assert metrics(OffPolicy()) == {}


def test_an_outlier_drops_its_sequence():
    """Bounds [0.3, 3]: A has 4, which is over; B has 0.25, which is under."""
    off_policy = OffPolicy(outlier=OutlierDrop(0.3, 3.0))
    assert weights(off_policy) == [0, 0, 0, 0, 0, 1]
    found = metrics(off_policy)
    assert found["outlier/masked"] == pytest.approx(2 / 3)
    assert found["outlier/over"] == found["outlier/under"] == pytest.approx(1 / 3)
    assert found["outlier/ratio_mean"] == pytest.approx((1 + 4 + 0.25 + 0.5 + 1 + 1.01) / 6)
    assert weights(OffPolicy(outlier=OutlierDrop(1e-4, 100.0))) == [1.0] * 6


def test_the_token_mask_drops_tokens_alone():
    """Bounds [0.5, 2]: 4 is over, 0.25 under, and 0.5 is on the bound."""
    off_policy = OffPolicy(token_mask=TokenMask(0.5, 2.0))
    assert weights(off_policy) == [1, 0, 0, 1, 1, 1]
    found = metrics(off_policy)
    assert found["token_mask/masked"] == pytest.approx(2 / 6)
    assert found["token_mask/over"] == found["token_mask/under"] == pytest.approx(1 / 6)
    mean = 7.76 / 6
    variance = (1 + 16 + 0.0625 + 0.25 + 1 + 1.0201) / 6 - mean**2
    assert found["token_mask/ratio_std"] == pytest.approx(math.sqrt(variance))
    assert (found["token_mask/ratio_min"], found["token_mask/ratio_max"]) == pytest.approx((0.25, 4.0))


def test_importance_by_token_is_capped_above_and_not_below():
    """min(ratio, 2)."""
    off_policy = OffPolicy(importance=TokenImportance())
    assert weights(off_policy) == pytest.approx([1, 2, 0.25, 0.5, 1, 1.01])
    found = metrics(off_policy)
    assert (found["importance/over"], found["importance/masked"], found["importance/under"]) == (
        pytest.approx(1 / 6),
        0,
        0,
    )


def test_importance_by_sequence_is_capped_above_and_not_below():
    """min(product of the sequence, cap): A has 4, B 0.125, C 1.01; the cap is 5, then 3."""
    assert weights(OffPolicy(importance=SequenceImportance())) == pytest.approx([4, 4, 0.125, 0.125, 0.125, 1.01])
    capped = OffPolicy(importance=SequenceImportance(3.0))
    assert weights(capped) == pytest.approx([3, 3, 0.125, 0.125, 0.125, 1.01])
    found = metrics(capped)
    assert found["importance/over"] == pytest.approx(1 / 3)
    assert found["importance/ratio_mean"] == pytest.approx((4 + 0.125 + 1.01) / 3)


def test_the_geometric_mask_looks_at_the_mean_of_a_sequence():
    """A: exp(log 2) = 2 is over, B: exp(log 0.5) = 0.5 under 0.99, C: 1.01 within [0.99, 1.011] and over 1.009."""
    off_policy = OffPolicy(sequence_mask=GeometricMask(0.99, 1.011))
    assert weights(off_policy) == [0, 0, 0, 0, 0, 1]
    found = metrics(off_policy)
    assert found["sequence_mask/masked"] == pytest.approx(2 / 3)
    assert found["sequence_mask/over"] == found["sequence_mask/under"] == pytest.approx(1 / 3)
    assert found["sequence_mask/ratio_mean"] == pytest.approx((2 + 0.5 + 1.01) / 3)
    assert weights(OffPolicy(sequence_mask=GeometricMask(0.99, 1.009))) == [0.0] * 6
    assert GeometricMask() == GeometricMask(0.99, 1.01)


def test_the_geometric_mean_is_over_the_tokens_that_are_left():
    """A without its 4: mean of l = log 1 / 1; B without its 0.25: (log 0.5 + log 1) / 2, sqrt(0.5) = 0.707."""
    off_policy = OffPolicy(token_mask=TokenMask(0.5, 2.0), sequence_mask=GeometricMask(0.8, 1.2))
    assert weights(off_policy) == [1, 0, 0, 0, 0, 1]
    found = metrics(off_policy)
    assert found["sequence_mask/ratio_min"] == pytest.approx(math.sqrt(0.5))
    assert found["sequence_mask/ratio_max"] == pytest.approx(1.01)


def test_the_product_mask_looks_at_the_whole_sequence():
    """A: 4 is over 2, B: 0.125 under 0.5, C: 1.01 within."""
    off_policy = OffPolicy(sequence_mask=ProductMask())
    assert weights(off_policy) == [0, 0, 0, 0, 0, 1]
    assert metrics(off_policy)["sequence_mask/ratio_min"] == pytest.approx(0.125)
    assert weights(OffPolicy(sequence_mask=ProductMask(0.1, 5.0))) == [1.0] * 6


def test_a_sequence_that_was_masked_earlier_counts_as_kept_later():
    """The outlier drop takes A (4 > 3); the product mask [0.5, 2] then finds B alone outside, 1 of 3 sequences."""
    off_policy = OffPolicy(outlier=OutlierDrop(0.01, 3.0), sequence_mask=ProductMask())
    assert weights(off_policy) == [0, 0, 0, 0, 0, 1]
    found = metrics(off_policy)
    assert found["outlier/masked"] == found["sequence_mask/masked"] == pytest.approx(1 / 3)
    assert found["sequence_mask/over"] == 0
    assert found["sequence_mask/ratio_max"] == pytest.approx(1.01)  # of what is left


def test_the_order_is_outlier_token_mask_importance_sequence_mask():
    """A is dropped for its 4; of B the token mask takes 0.25, so the sequence weighs 0.5 x 1 instead of 0.125, and its
    geometric mean sqrt(0.5) = 0.707 is within [0.7, 2], where 0.5 would not be. The weight does not enter that mean.
    """
    off_policy = OffPolicy(
        outlier=OutlierDrop(0.01, 3.0),
        token_mask=TokenMask(0.5, 2.0),
        importance=SequenceImportance(),
        sequence_mask=GeometricMask(0.7, 2.0),
    )
    assert weights(off_policy) == pytest.approx([0, 0, 0, 0.5, 0.5, 1.01])
    assert [name.split("/")[0] for name in metrics(off_policy)][::7] == [
        "outlier",
        "token_mask",
        "importance",
        "sequence_mask",
    ]


def test_ratios_beyond_all_bounds_stay_finite():
    """l of +-500 and infinite: the weight is the cap or exp(-20), and statistics are numbers."""
    mismatch = torch.tensor([500.0, -500.0, math.inf, 0.0])
    sequences = torch.tensor([0, 1, 2, 2])
    tokens = OffPolicy(importance=TokenImportance(2.0))
    assert tokens.weights(mismatch, sequences, 3).tolist() == pytest.approx([2, math.exp(-20), 2, 1])
    both = OffPolicy(outlier=OutlierDrop(), importance=SequenceImportance(), sequence_mask=GeometricMask())
    assert both.weights(mismatch, sequences, 3).tolist() == [0.0] * 4
    assert all(math.isfinite(value) for value in both.metrics(mismatch, sequences, 3).values())


def test_a_sequence_without_tokens_counts_as_kept():
    off_policy = OffPolicy(sequence_mask=ProductMask())
    assert off_policy.metrics(RATIOS.log(), SEQUENCES, 4)["sequence_mask/masked"] == pytest.approx(2 / 4)


ALL = OffPolicy(OutlierDrop(1e-3, 50.0), TokenMask(0.3, 3.0), TokenImportance(1.2), GeometricMask(0.92, 1.08))


def losses(off_policy: OffPolicy, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """logprobs with gradient, old_logprobs, rollout_logprobs, advantages and sequences of 40 sequences of 25 tokens."""
    rollout = torch.randn(1000, generator=generator, dtype=torch.float64) - 2
    old = rollout + 0.5 * torch.randn(1000, generator=generator, dtype=torch.float64)
    logprobs = (old + 0.1 * torch.randn(1000, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(1000, generator=generator, dtype=torch.float64)
    return logprobs, old, rollout, advantages, torch.arange(40).repeat_interleave(25)


def test_the_gradient_is_the_weight_times_the_plain_one():
    logprobs, old, rollout, advantages, sequences = losses(ALL, torch.Generator().manual_seed(0))
    (plain,) = torch.autograd.grad(
        clipped_loss(logprobs, old, advantages, sequences, 40, Clip()).loss_L.sum(), logprobs
    )
    found = PolicyLoss(Clip(), ALL)(logprobs, old, rollout, advantages, sequences, 40)
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    factor = ALL.weights(old - rollout, sequences, 40)
    assert 0.2 < (factor == 0).double().mean() < 0.8
    torch.testing.assert_close(gradient, factor * plain, rtol=1e-14, atol=0)
    assert torch.equal(gradient[factor == 0], torch.zeros_like(gradient[factor == 0]))


def test_weights_are_detached_from_logprobs_that_are_their_own_old_ones():
    """In the first mini-batch old_logprobs are logprobs: the gradient must still be the weight times -A."""
    logprobs, _, rollout, advantages, sequences = losses(ALL, torch.Generator().manual_seed(1))
    found = PolicyLoss(Clip(), ALL)(logprobs, logprobs.detach(), rollout, advantages, sequences, 40)
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    torch.testing.assert_close(gradient, -ALL.weights(logprobs - rollout, sequences, 40) * advantages)
    assert not ALL.weights(logprobs - rollout, sequences, 40).requires_grad


def test_any_split_by_whole_sequences_gives_the_same_weights():
    _, old, rollout, _, sequences = losses(ALL, torch.Generator().manual_seed(2))
    whole = ALL.weights(old - rollout, sequences, 40)
    parts = [ALL.weights((old - rollout)[i : i + 125], sequences[:125], 5) for i in range(0, 1000, 125)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (2.0, 2.0), (-1.0, 2.0)])
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ValueError, match="must be positive"):
        TokenMask(*bounds)
