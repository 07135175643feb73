"""The loss of a run: divergence and entropy beside the surrogate, and a loss of a user's own."""

import numpy as np
import pytest
import torch
from examples.own_loss import penalised

from beamline.algorithms.kl import ESTIMATORS, KLPenalty, k1, k2, k3
from beamline.algorithms.loss_check import LossError, checked_loss
from beamline.algorithms.losses import LOSSES, Clip, PolicyLoss, TokenLoss, cispo_loss
from beamline.algorithms.off_policy import OffPolicy, TokenMask
from beamline.protocol import algorithm_config
from beamline.protocol.algorithm_config import KLSection


def test_the_names_of_the_recipe_are_those_of_the_functions():
    assert set(algorithm_config.LOSSES) == set(LOSSES)
    assert {KLSection(estimator=name).estimator for name in ESTIMATORS} == set(ESTIMATORS)


D = np.array([0.0, 0.5, -0.5, 2.0, 15.0, 60.0, -60.0])
"""reference - logprobs."""


def of(estimator, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The estimate and its gradient by logprobs."""
    logprobs = torch.full((len(d),), -3.0, dtype=torch.float64, requires_grad=True)
    found = estimator(logprobs, torch.from_numpy(d) - 3.0)
    return found.detach().numpy(), torch.autograd.grad(found.sum(), logprobs)[0].numpy()


def test_k1_is_the_log_ratio():
    found, gradient = of(k1, D)
    np.testing.assert_allclose(found, -D, rtol=1e-12)
    np.testing.assert_array_equal(gradient, np.ones_like(D))


def test_k2_is_half_its_square():
    found, gradient = of(k2, D)
    np.testing.assert_allclose(found, D**2 / 2, rtol=1e-12)
    np.testing.assert_allclose(gradient, -D, rtol=1e-12)


def test_k3_is_clamped_twice_and_never_negative():
    found, gradient = of(k3, D)
    # e^0.5 - 1.5, e^-0.5 - 0.5, e^2 - 3; e^15 - 16 and e^20 - 21 are over 10; e^-20 + 20 - 1 is over 10 too.
    expected = [0, 0.14872127070012815, 0.10653065971263342, 4.3890560989306495, 10, 10, 10]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(gradient, [0, 1 - np.exp(0.5), 1 - np.exp(-0.5), 1 - np.exp(2), 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str):
    """Their mean over the tokens that the policy samples is the divergence."""
    policy, reference = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.25, 0.25, 0.1, 0.4])
    estimates = ESTIMATORS[name](torch.from_numpy(policy).log(), torch.from_numpy(reference).log()).numpy()
    assert (policy * estimates).sum() == pytest.approx((policy * np.log(policy / reference)).sum(), rel=1e-12)


def test_in_the_reward_it_is_the_sum_over_a_trajectorys_loss_tokens():
    penalty = KLPenalty(0.1, k1)
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -1.0, -5.0])
    found = penalty.of_trajectories(logprobs, reference, torch.tensor([0, 0, 2, 2]), 4)
    assert found.tolist() == pytest.approx([0.05, 0.0, -0.1, 0.0]) and found.dtype is torch.float64
    assert not found.requires_grad, "it shapes rewards, and no gradient goes through them"


def columns(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """logprobs with gradient, old_logprobs, rollout_logprobs, advantages, sequences, reference and entropy."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(100, generator=generator, dtype=torch.float64) for _ in range(6)]
    rollout = noise[0] - 2
    old = rollout + 0.6 * noise[1]
    logprobs = (old + 0.2 * noise[2]).requires_grad_()
    sequences = torch.arange(10).repeat_interleave(10)
    return logprobs, old, rollout, noise[3], sequences, old + 0.5 * noise[4], noise[5].square() * (1 + 0 * logprobs)


def test_the_terms_add_up():
    logprobs, old, rollout, advantages, sequences, reference, entropy = columns()
    corrections = OffPolicy(token_mask=TokenMask(0.6, 1.6))
    plain = PolicyLoss(Clip(), corrections)(logprobs, old, rollout, advantages, sequences, 10)
    whole = PolicyLoss(Clip(), corrections, kl=KLPenalty(0.3, k2), entropy_coefficient=0.01)
    found = whole(logprobs, old, rollout, advantages, sequences, 10, reference_logprobs_L=reference, entropy_L=entropy)
    divergence = (logprobs - reference).square() / 2
    torch.testing.assert_close(found.loss_L, plain.loss_L + 0.3 * divergence - 0.01 * entropy)
    torch.testing.assert_close(found.kl_L, divergence.detach())
    assert plain.kl_L is None and not found.kl_L.requires_grad  # pyright: ignore[reportOptionalMemberAccess]
    masked = corrections.weights(old - rollout, sequences, 10) == 0
    assert 0.1 < masked.double().mean() < 0.9
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    torch.testing.assert_close(gradient[masked], (0.3 * (logprobs - reference))[masked].detach())


def test_the_entropy_bonus_has_a_gradient():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    rows = logits.log_softmax(-1)
    entropy = -(rows.exp() * rows).sum(-1)
    zeros, sequences = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    loss = PolicyLoss(entropy_coefficient=0.5)
    found = loss(rows[:, 0], rows[:, 0].detach(), rows[:, 0].detach(), zeros, sequences, 1, entropy_L=entropy)
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logits)
    # dH / dlogit = -p (log p + H)
    expected = 0.5 * (rows.exp() * (rows + entropy[:, None])).detach()
    torch.testing.assert_close(gradient, expected)
    assert gradient.abs().max() > 0


def test_the_chosen_surrogate_is_the_one_that_counts():
    logprobs, old, rollout, advantages, sequences, _, _ = columns(1)
    found = PolicyLoss(surrogate=cispo_loss)(logprobs, old, rollout, advantages, sequences, 10)
    expected = cispo_loss(logprobs, old, advantages, sequences, 10, Clip())
    assert torch.equal(found.loss_L, expected.loss_L) and torch.equal(found.clipped_L, expected.clipped_L)


def plain(logprobs_L, old_logprobs_L, advantages_L, sequence_L, num_sequences, clip):
    """REINFORCE."""
    ones = torch.ones_like(logprobs_L)
    return TokenLoss(-advantages_L * logprobs_L, ones.detach(), ones < 0)


def test_an_own_loss_is_passed_through():
    logprobs, old, rollout, advantages, sequences, _, _ = columns(2)
    found = PolicyLoss(surrogate=checked_loss("mine:plain", plain))(logprobs, old, rollout, advantages, sequences, 10)
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    assert torch.equal(gradient, -advantages)


def test_the_loss_of_the_examples_is_its_formula():
    logprobs, old, rollout, advantages, sequences, _, _ = columns(3)
    loss = PolicyLoss(surrogate=checked_loss("examples.own_loss:penalised", penalised))
    found = loss(logprobs, old, rollout, advantages, sequences, 10)
    d = (logprobs - old).detach().numpy()
    np.testing.assert_allclose(found.loss_L.detach().numpy(), -np.exp(d) * advantages.numpy() + d**2, rtol=1e-12)
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), logprobs)
    np.testing.assert_allclose(gradient.numpy(), -np.exp(d) * advantages.numpy() + 2 * d, rtol=1e-12)


def short(*arguments) -> TokenLoss:
    found = plain(*arguments)
    return TokenLoss(found.loss_L.sum(), found.ratio_L, found.clipped_L)


WRONG = {
    "raises": (lambda *arguments: arguments[0].missing, "raised AttributeError"),
    "a number": (lambda *arguments: 0.0, "returned a float, expected a TokenLoss"),
    "summed": (short, r"loss_L is \(\), expected a tensor of one entry a token, \(100,\)"),
    "no tensor": (lambda *arguments: TokenLoss(arguments[0], 1.0, arguments[0] > 0), "ratio_L is a float"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_an_own_loss_that_answers_wrongly_is_named(wrong, message: str):
    logprobs, old, _, advantages, sequences, _, _ = columns()
    with pytest.raises(LossError, match=f"algorithm.loss=mine:loss.*{message}"):
        checked_loss("mine:loss", wrong)(logprobs, old, advantages, sequences, 10, Clip())
