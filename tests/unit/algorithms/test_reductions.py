"""The four reductions: numbers worked by hand, and what holds for any mini-batch."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from beamline.algorithms.reductions import REDUCTIONS

MAX_TOKENS = 100

# Two prompts; the second has a trajectory without loss tokens, and a third prompt has nothing else.
TOKENS = [10, 30, 5, 0, 0]
PROMPTS = [7, 7, 3, 3, 9]

BY_HAND = {
    "token_mean": [1 / 45, 1 / 45, 1 / 45, 0, 0],
    "sequence_mean": [1 / 30, 1 / 90, 1 / 15, 0, 0],  # three sequences have tokens
    "seq_mean_token_sum_norm": [1 / 300, 1 / 300, 1 / 300, 0, 0],
    "prompt_mean": [1 / 80, 1 / 80, 1 / 10, 0, 0],  # two prompts have tokens: 40 and 5
}

reductions = pytest.mark.parametrize("name", REDUCTIONS)
mini_batches = st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.integers(0, 3)), min_size=1, max_size=12)


@reductions
def test_weights_by_hand(name: str):
    weights = REDUCTIONS[name](TOKENS, PROMPTS, MAX_TOKENS)
    assert weights.dtype == np.float64
    np.testing.assert_allclose(weights, BY_HAND[name], rtol=1e-15)


@reductions
def test_a_mini_batch_without_loss_tokens_weighs_nothing(name: str):
    assert REDUCTIONS[name]([0, 0], [0, 1], MAX_TOKENS).tolist() == [0.0, 0.0]
    assert REDUCTIONS[name]([], [], MAX_TOKENS).tolist() == []


def nested_means(name: str, losses: list[np.ndarray], prompts: list[int]) -> float:
    """The loss of a mini-batch as each reduction is defined, mean by mean."""
    losses_of = {p: np.concatenate([x for x, q in zip(losses, prompts, strict=True) if p == q]) for p in prompts}
    present = [x for x in losses if len(x)]
    match name:
        case "token_mean":
            return float(np.concatenate(losses).mean())
        case "sequence_mean":
            return float(np.mean([x.mean() for x in present]))
        case "seq_mean_token_sum_norm":
            return float(np.mean([x.sum() / MAX_TOKENS for x in present]))
        case _:
            return float(np.mean([x.mean() for x in losses_of.values() if len(x)]))


@reductions
@given(mini_batches, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_the_weighted_sum_is_the_mean_of_means(name: str, mini_batch: list[tuple[int, int]], seed: int):
    tokens, prompts = [list(column) for column in zip(*mini_batch, strict=True)]
    assume(sum(tokens))
    losses = [np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate(tokens)]
    weights = REDUCTIONS[name](tokens, prompts, MAX_TOKENS)
    found = sum(weight * loss.sum() for weight, loss in zip(weights, losses, strict=True))
    assert found == pytest.approx(nested_means(name, losses, prompts), rel=1e-9, abs=1e-12)


@reductions
@given(mini_batches, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_trajectories_is_nothing(name: str, mini_batch: list[tuple[int, int]], rng):
    order = rng.sample(range(len(mini_batch)), len(mini_batch))
    tokens, prompts = [list(column) for column in zip(*mini_batch, strict=True)]
    plain = REDUCTIONS[name](tokens, prompts, MAX_TOKENS)
    shuffled = REDUCTIONS[name]([tokens[i] for i in order], [prompts[i] for i in order], MAX_TOKENS)
    np.testing.assert_array_equal(shuffled, plain[order])


@reductions
@given(mini_batches)
@settings(deadline=None, max_examples=50)
def test_a_fully_masked_trajectory_changes_no_weight(name: str, mini_batch: list[tuple[int, int]]):
    tokens, prompts = [list(column) for column in zip(*mini_batch, strict=True)]
    with_masked = REDUCTIONS[name]([*tokens, 0], [*prompts, 99], MAX_TOKENS)
    np.testing.assert_array_equal(with_masked[:-1], REDUCTIONS[name](tokens, prompts, MAX_TOKENS))
    assert with_masked[-1] == 0
