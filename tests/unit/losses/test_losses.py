"""The losses against float64 numpy, written from their formulas, and their gradients against finite differences."""

import numpy as np
import pytest
import torch

from beamline.algorithms.losses import LOSSES, Clip, TokenLoss, cispo_loss, clipped_loss, gspo_loss

NUM_TOKENS, NUM_SEQUENCES = 4000, 40


def tokens(seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """logprobs, old_logprobs, advantages and sequences; one advantage a sequence, and sequence 5 without a token."""
    rng = np.random.default_rng(seed)
    sequences = np.sort(rng.choice(np.delete(np.arange(NUM_SEQUENCES), 5), NUM_TOKENS))
    old = rng.normal(-2, 1, NUM_TOKENS)
    return old + spread * rng.normal(0, 1, NUM_TOKENS), old, rng.normal(0, 1, NUM_SEQUENCES)[sequences], sequences


def apply(loss, columns: tuple[np.ndarray, ...], clip: Clip) -> tuple[TokenLoss, np.ndarray]:
    """What the loss finds, and the gradient of its sum."""
    logprobs, *rest = (torch.from_numpy(column) for column in columns)
    logprobs.requires_grad_()
    found = loss(logprobs, *rest, NUM_SEQUENCES, clip)
    return found, torch.autograd.grad(found.loss_L.sum(), logprobs)[0].numpy()


def ppo(ratio: np.ndarray, advantages: np.ndarray, clip: Clip) -> np.ndarray:
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 1 - clip.low, 1 + clip.high) * advantages)
    return loss if clip.dual is None else np.where(advantages < 0, np.minimum(loss, -clip.dual * advantages), loss)


def sequence_ratio(logprobs: np.ndarray, old: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    found = np.empty_like(old)
    for sequence in np.unique(sequences):
        rows = sequences == sequence
        found[rows] = np.exp(np.clip((logprobs - old)[rows].mean(), -20, 20))
    return found


CLIPS = {"grpo": Clip(0.2, 0.2), "dapo": Clip(0.2, 0.28), "dual": Clip(0.2, 0.28, 3.0)}
clips = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)


@clips
def test_clipped_loss_and_ratio_are_the_formulas(clip: Clip):
    logprobs, old, advantages, sequences = tokens(0, spread=1.5)
    found, _ = apply(clipped_loss, (logprobs, old, advantages, sequences), clip)
    ratio = np.exp(np.clip(logprobs - old, -20, 20))
    np.testing.assert_allclose(found.loss_L.detach().numpy(), ppo(ratio, advantages, clip), rtol=1e-12)
    np.testing.assert_allclose(found.ratio_L.numpy(), ratio, rtol=1e-12)


BY_HAND = [
    # log ratio, A, dual, loss, gradient by logprobs
    (0.0, 2.0, None, -2.0, -2.0),
    (np.log(1.5), 2.0, None, -2.56, 0.0),  # clipped to 1.28
    (np.log(0.5), 2.0, None, -1.0, -1.0),  # too low, but to raise it is what A asks for
    (np.log(0.5), -2.0, None, 1.6, 0.0),  # clipped to 0.8
    (np.log(5.0), -2.0, None, 10.0, 10.0),
    (np.log(5.0), -2.0, 3.0, 6.0, 0.0),  # dual clip: at most 3 x 2
    (np.log(2.5), -2.0, 3.0, 5.0, 5.0),  # under the dual clip's bound
    (np.log(5.0), 2.0, 3.0, -2.56, 0.0),  # dual clip is for A < 0
    (60.0, -1.0, None, float(np.exp(20)), 0.0),  # overflow: the clamp decides
    (-60.0, 1.0, None, -float(np.exp(-20)), 0.0),
    (60.0, 0.0, None, 0.0, 0.0),
]


@pytest.mark.parametrize(("log_ratio", "advantage", "dual", "loss", "gradient"), BY_HAND)
def test_clipped_by_hand(log_ratio: float, advantage: float, dual: float | None, loss: float, gradient: float):
    columns = (np.array([-1.0 + log_ratio]), np.array([-1.0]), np.array([advantage]), np.array([0]))
    found, grad = apply(clipped_loss, columns, Clip(0.2, 0.28, dual))
    assert found.loss_L.item() == pytest.approx(loss, rel=1e-12)
    assert grad.item() == pytest.approx(gradient, rel=1e-12)
    assert found.clipped_L.item() == (gradient == 0 and abs(log_ratio) < 20), "the clamp is no clip"


@pytest.mark.parametrize("dual", [None, 3.0])
def test_a_token_has_no_gradient_exactly_where_it_counts_as_clipped(dual: float | None):
    columns = tokens(1)
    found, gradient = apply(clipped_loss, columns, Clip(0.2, 0.28, dual))
    clipped = found.clipped_L.numpy()
    np.testing.assert_array_equal(gradient == 0, clipped)
    assert 0 < clipped.mean() < 1
    np.testing.assert_allclose(gradient[~clipped], (-found.ratio_L.numpy() * columns[2])[~clipped], rtol=1e-12)


@clips
def test_gspo_is_the_clipped_loss_of_the_sequences_mean_ratio(clip: Clip):
    logprobs, old, advantages, sequences = tokens(2, spread=3.0)
    found, _ = apply(gspo_loss, (logprobs, old, advantages, sequences), clip)
    ratio = sequence_ratio(logprobs, old, sequences)
    np.testing.assert_allclose(found.ratio_L.numpy(), ratio, rtol=1e-12)
    np.testing.assert_allclose(found.loss_L.detach().numpy(), ppo(ratio, advantages, clip), rtol=1e-12)
    assert 0 < found.clipped_L.float().mean() < 1


def test_gspo_by_hand():
    # Sequence 0: D = 0.1, 0.3, mean 0.2, s = e^0.2 = 1.2214. Sequence 2: one token, D = -1, s = e^-1. 1 has none.
    columns = (np.array([-0.9, -1.7, -4.0]), np.array([-1.0, -2.0, -3.0]), np.array([1.0, 1.0, -2.0]))
    found, gradient = apply(gspo_loss, (*columns, np.array([0, 0, 2])), Clip(0.2, 0.28))
    s = np.exp(0.2)
    np.testing.assert_allclose(found.loss_L.detach().numpy(), [-s, -s, 1.6], rtol=1e-12)
    assert found.clipped_L.tolist() == [False, False, True]
    np.testing.assert_allclose(gradient, [-s, -s, 0], rtol=1e-12)


def test_gspo_has_the_gradient_of_the_papers_objective():
    """Mean over a sequence's tokens of the loss by tokens is -min(s A, clip(s) A), by finite differences."""
    logprobs, old, advantages, sequences = tokens(3, spread=2.0)
    _, gradient = apply(gspo_loss, (logprobs, old, advantages, sequences), Clip(0.2, 0.28))
    lengths = np.bincount(sequences, minlength=NUM_SEQUENCES)[sequences]
    first = np.unique(sequences, return_index=True)[1]

    def objective(moved: np.ndarray) -> float:
        """The sum over sequences of the paper's term."""
        return ppo(sequence_ratio(moved, old, sequences), advantages, Clip(0.2, 0.28))[first].sum()

    for index in np.random.default_rng(0).choice(NUM_TOKENS, 20, replace=False):
        step = np.zeros(NUM_TOKENS)
        step[index] = 1e-6
        slope = (objective(logprobs + step) - objective(logprobs - step)) / 2e-6
        assert gradient[index] / lengths[index] == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_gspo_gives_no_gradient_to_a_token_that_is_weighted_away():
    columns = tokens(4, spread=0.1)
    logprobs, old, advantages, sequences = (torch.from_numpy(column) for column in columns)
    logprobs.requires_grad_()
    weights = torch.from_numpy((np.arange(NUM_TOKENS) % 3 > 0).astype(float))
    found = gspo_loss(logprobs, old, advantages, sequences, NUM_SEQUENCES, Clip())
    (gradient,) = torch.autograd.grad((found.loss_L * weights).sum(), logprobs)
    assert not gradient[weights == 0].any() and gradient[weights > 0].count_nonzero() > 2000


def test_cispo_is_the_detached_clipped_ratio_times_the_logprob():
    logprobs, old, advantages, sequences = tokens(5, spread=1.5)
    found, gradient = apply(cispo_loss, (logprobs, old, advantages, sequences), Clip(0.2, 0.28))
    ratio = np.exp(np.clip(logprobs - old, -20, 20))
    weight = np.clip(ratio, 0.8, 1.28)
    np.testing.assert_allclose(found.loss_L.detach().numpy(), -weight * advantages * logprobs, rtol=1e-12)
    np.testing.assert_allclose(gradient, -weight * advantages, rtol=1e-12)
    np.testing.assert_allclose(found.ratio_L.numpy(), ratio, rtol=1e-12)
    np.testing.assert_array_equal(found.clipped_L.numpy(), (ratio < 0.8) | (ratio > 1.28))


def test_cispo_by_hand():
    columns = (np.array([-1.0, 59.0, -61.0]), np.array([-1.0, -1.0, -1.0]), np.array([2.0, 1.0, 1.0]))
    found, gradient = apply(cispo_loss, (*columns, np.zeros(3, int)), Clip(1.0, 0.28))
    floor = np.exp(-20)  # a low of 1 bounds from above alone; what is left is the clamp
    np.testing.assert_allclose(found.loss_L.detach().numpy(), [2.0, -1.28 * 59, floor * 61], rtol=1e-12)
    np.testing.assert_allclose(gradient, [-2.0, -1.28, -floor], rtol=1e-12)


any_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@any_loss
def test_equal_policies_have_ratio_one_and_the_policy_gradient(loss):
    logprobs = np.full(5, -1.5)
    advantages = np.array([1.0, 1.0, 0.0, 0.5, 3.0])
    found, gradient = apply(loss, (logprobs, logprobs.copy(), advantages, np.array([0, 0, 1, 2, 4])), Clip())
    assert found.ratio_L.tolist() == [1.0] * 5
    assert not found.clipped_L.any()
    np.testing.assert_array_equal(gradient, -advantages)


@any_loss
def test_any_split_by_whole_sequences_gives_the_same_loss_and_gradient(loss):
    columns = tokens(6, spread=0.5)
    whole, gradient = apply(loss, columns, Clip())
    parts = [apply(loss, tuple(c[rows] for c in columns), Clip()) for rows in np.split(np.arange(NUM_TOKENS), cuts())]
    np.testing.assert_allclose(torch.cat([f.loss_L for f, _ in parts]).detach(), whole.loss_L.detach(), rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient, rtol=1e-12, atol=1e-15)


def cuts() -> np.ndarray:
    """Where every seventh sequence begins."""
    sequences = tokens(6, spread=0.5)[3]
    return np.unique(sequences, return_index=True)[1][7::7]


@any_loss
def test_no_tokens_have_no_loss(loss):
    found, gradient = apply(loss, (np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, int)), Clip())
    assert found.loss_L.shape == found.ratio_L.shape == found.clipped_L.shape == gradient.shape == (0,)


@pytest.mark.parametrize("bounds", [{"low": 0.0}, {"high": -0.1}, {"dual": 1.0}])
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ValueError, match="must be"):
        Clip(**bounds)
