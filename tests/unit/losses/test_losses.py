"""The clipped loss against float64 numpy, written from the formula."""

import numpy as np
import pytest
import torch

from beamline.algorithms.losses import Clip, clipped_loss


def by_hand(logprobs, old, advantages, low, high, dual):
    ratio = np.exp(np.clip(logprobs - old, -20, 20))
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    if dual is not None:
        loss = np.where(advantages < 0, np.minimum(loss, -dual * advantages), loss)
    return loss, ratio


@pytest.mark.parametrize("clip", [Clip(0.2, 0.2), Clip(0.2, 0.28), Clip(0.2, 0.28, 3.0)], ids=["grpo", "dapo", "dual"])
def test_loss_and_ratio_are_the_formulas(clip):
    rng = np.random.default_rng(0)
    logprobs, old, advantages = rng.normal(-2, 1.5, 4000), rng.normal(-2, 1.5, 4000), rng.normal(0, 1, 4000)
    logprobs[:3] = (-60, 0, -1)
    old[:3] = (0, -60, -1)
    found = clipped_loss(*(torch.from_numpy(x) for x in (logprobs, old, advantages)), clip)
    loss, ratio = by_hand(logprobs, old, advantages, clip.low, clip.high, clip.dual)
    np.testing.assert_allclose(found.loss_L.numpy(), loss, rtol=1e-12)
    np.testing.assert_allclose(found.ratio_L.numpy(), ratio, rtol=1e-12)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_a_token_has_no_gradient_exactly_where_it_counts_as_clipped(dual):
    rng = np.random.default_rng(1)
    logprobs = torch.from_numpy(rng.normal(-2, 1, 2000)).requires_grad_()
    old, advantages = torch.from_numpy(rng.normal(-2, 1, 2000)), torch.from_numpy(rng.normal(0, 1, 2000))
    found = clipped_loss(logprobs, old, advantages, Clip(0.2, 0.28, dual))
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    assert torch.equal(gradient == 0, found.clipped_L)
    assert 0 < found.clipped_L.float().mean() < 1
    free = ~found.clipped_L
    torch.testing.assert_close(gradient[free], (-found.ratio_L * advantages)[free])


def test_equal_policies_have_ratio_one_and_the_policy_gradient():
    logprobs = torch.full((5,), -1.5, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    found = clipped_loss(logprobs, logprobs.detach(), advantages, Clip())
    assert found.ratio_L.tolist() == [1.0] * 5
    assert not found.clipped_L.any()
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    assert torch.equal(gradient, -advantages)


@pytest.mark.parametrize("bounds", [{"low": 0.0}, {"high": -0.1}, {"dual": 1.0}])
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ValueError, match="must be"):
        Clip(**bounds)
