"""Invariants of a train step, on a policy whose arithmetic is a table."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import MicroBatch, MiniBatch
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.policy import NotFinite
from beamline.trainer.schedule import learning_rate
from beamline.trainer.train_step import StepConfig, train_step
from trainer_batches import batch, trajectory

VOCAB = 11


def run(max_tokens: int, num_mini_batches: int = 2, lr: float = 0.5) -> tuple[FakePolicy, dict[str, float]]:
    policy = FakePolicy(VOCAB)
    stats = train_step(policy, batch(1, VOCAB, num_mini_batches), StepConfig(PolicyLoss(), max_tokens, lr))
    return policy, stats.metrics()


def test_any_split_into_micro_batches_gives_the_same_update():
    whole, whole_stats = run(10_000)
    parts, parts_stats = run(60)
    assert parts_stats["policy/num_micro_batches"] > whole_stats["policy/num_micro_batches"] == 2
    torch.testing.assert_close(parts.table_VV, whole.table_VV, rtol=1e-12, atol=1e-12)
    for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/mismatch_abs_mean", "policy/ratio_mean"):
        assert parts_stats[name] == pytest.approx(whole_stats[name], rel=1e-9)


def test_the_gradient_is_the_mean_over_the_loss_tokens_of_the_mini_batch():
    policy, step = FakePolicy(VOCAB), batch(1, VOCAB, num_mini_batches=1)
    expected = policy.table_VV.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in step.mini_batches[0].trajectories:
        for index in np.flatnonzero(t.loss_mask):
            at = t.num_prompt_tokens + index
            total = total - t.advantage * expected[t.tokens[at - 1]].log_softmax(-1)[t.tokens[at]]
    (gradient,) = torch.autograd.grad(total / step.mini_batches[0].num_loss_tokens, expected)
    train_step(policy, step, StepConfig(PolicyLoss(), 10_000, 1.0))
    torch.testing.assert_close(policy.table_VV.detach(), expected.detach() - gradient, rtol=1e-6, atol=1e-9)


def test_old_logprobs_are_those_of_the_step_s_start():
    """With one huge update between them, the second mini-batch's ratios move and the mismatch does not."""
    _, gentle_stats = run(10_000, lr=1e-9)
    _, rough_stats = run(10_000, lr=50.0)
    assert gentle_stats["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert gentle_stats["policy/clip_ratio"] == 0
    assert rough_stats["policy/clip_ratio"] > 0.03
    assert rough_stats["policy/mismatch_mean"] == pytest.approx(gentle_stats["policy/mismatch_mean"], rel=1e-6)


def test_the_ratio_is_exactly_one_in_the_first_mini_batch():
    _, stats = run(10_000, num_mini_batches=1)
    assert stats["policy/ratio_mean"] == 1.0
    assert stats["policy/clip_ratio"] == 0.0


def test_mismatch_is_the_trainer_minus_the_engine():
    policy, step = FakePolicy(VOCAB), batch(1, VOCAB, num_mini_batches=1)
    ours = np.concatenate([x.numpy() for x in policy.logprobs(step.mini_batches[0].micro_batches(10_000))])
    theirs = np.concatenate([t.rollout_logprobs[t.loss_mask] for t in step.mini_batches[0].trajectories])
    stats = train_step(policy, step, StepConfig(PolicyLoss(), 10_000, 0.1)).metrics()
    assert stats["policy/mismatch_mean"] == pytest.approx((ours - theirs).mean())
    assert stats["policy/mismatch_abs_mean"] == pytest.approx(np.abs(ours - theirs).mean())
    assert stats["policy/mismatch_abs_max"] == pytest.approx(np.abs(ours - theirs).max())
    assert stats["tokens/loss"] == len(theirs)
    assert stats["tokens/trained"] == sum(len(t.tokens) for t in step.mini_batches[0].trajectories)


def test_a_loss_that_is_not_a_number_stops_before_the_update():
    policy, step = FakePolicy(VOCAB), batch(3, VOCAB)
    bad = step.mini_batches[1].trajectories
    poisoned = replace(bad[0], advantage=float("nan"))
    second = MiniBatch((poisoned, *bad[1:]), step.mini_batches[1].num_loss_tokens)
    with pytest.raises(
        NotFinite, match=r"step 3, mini-batch 2 of 2: loss is nan.*not applied.*lower trainer.optimizer.lr"
    ):
        train_step(
            policy, replace(step, mini_batches=(step.mini_batches[0], second)), StepConfig(PolicyLoss(), 10_000, 0.1)
        )
    assert policy.num_updates == 1
    assert policy.table_VV.isfinite().all()


def test_a_mini_batch_without_loss_tokens_is_refused():
    with pytest.raises(ValueError, match="no loss tokens"):
        MiniBatch((), 0)


def test_packing_points_every_loss_token_at_the_row_before_it():
    rng = np.random.default_rng(5)
    parts = [trajectory(rng, VOCAB, 4, 9), trajectory(rng, VOCAB, 2, 5)]
    packed = MicroBatch.pack(parts)
    assert packed.lengths == (13, 7)
    expected = [(4 - 1 + i, parts[0].tokens[4 + i]) for i in np.flatnonzero(parts[0].loss_mask)]
    expected += [(13 + 2 - 1 + i, parts[1].tokens[2 + i]) for i in np.flatnonzero(parts[1].loss_mask)]
    assert list(zip(packed.rows_L.tolist(), packed.targets_L.tolist(), strict=True)) == expected
    assert packed.advantages_L.tolist() == pytest.approx(
        [p.advantage for p in parts for _ in range(p.num_loss_tokens)], rel=1e-6
    )


def test_learning_rate_warms_up_and_decays():
    def at(step: int, decay: str) -> float:
        return learning_rate(step, peak=1.0, warmup_steps=4, num_steps=12, decay=decay, min_ratio=0.1)

    assert [at(step, "constant") for step in (1, 2, 4, 5, 12)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [at(step, "linear") for step in (4, 8, 12, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert [at(step, "cosine") for step in (4, 8, 12, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert at(6, "cosine") > at(6, "linear")
