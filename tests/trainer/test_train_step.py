"""Invariants of a train step, on a policy whose arithmetic is a table."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from beamline.algorithms.losses import Clip, PolicyLoss
from beamline.algorithms.off_policy import (
    OffPolicy,
    OutlierDrop,
    ProductMask,
    TokenImportance,
    TokenMask,
)
from beamline.trainer.batch import PADDING, Batch, MicroBatch, MiniBatch, Trajectory
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.policy import ForwardBackward, NotFinite
from beamline.trainer.schedule import learning_rate
from beamline.trainer.step_stats import StepStats
from beamline.trainer.train_step import StepConfig, train_step
from beamline.trainer.weighted_loss import LossSums
from trainer_batches import DATA_SOURCES, batch, trajectory

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
    (gradient,) = torch.autograd.grad(
        total / sum(t.num_loss_tokens for t in step.mini_batches[0].trajectories), expected
    )
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


CORRECTED = PolicyLoss(Clip(), OffPolicy(OutlierDrop(1e-3, 1e3), TokenMask(0.1, 5.0), TokenImportance(), ProductMask()))


def test_corrections_are_the_same_for_any_split_into_micro_batches():
    """With a rollout near the policy's own, so that some sequences are masked and some are not."""
    updates = []
    for max_tokens in (10_000, 60):
        policy = FakePolicy(VOCAB)
        step = near(policy, batch(1, VOCAB))
        stats = train_step(policy, step, StepConfig(CORRECTED, max_tokens, 0.5)).metrics()
        updates.append((policy.table_VV.detach(), {k: v for k, v in stats.items() if k.startswith("off_policy/")}))
    (one, one_stats), (other, other_stats) = updates
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert 0 < one_stats["off_policy/sequence_mask/masked"] < 1
    assert other_stats == pytest.approx(one_stats, rel=1e-6)


def near(policy: FakePolicy, step: Batch) -> Batch:
    """With rollout_logprobs that differ from the policy's log-probabilities by some tenths of a nat."""
    rng = np.random.default_rng(7)

    def moved(t: Trajectory) -> Trajectory:
        whole = replace(t, loss_mask=np.ones_like(t.loss_mask))
        own = policy.logprobs([MicroBatch.pack([whole])])[0].numpy()
        return replace(t, rollout_logprobs=(own + rng.normal(0, 0.2, len(own))).astype(np.float32))

    minis = (MiniBatch(tuple(map(moved, mini.trajectories))) for mini in step.mini_batches)
    return replace(step, mini_batches=tuple(minis))


def test_masked_tokens_stay_in_the_denominator():
    """Of two sequences the outlier drop takes one: what is left is still divided by the tokens of both."""
    policy = FakePolicy(VOCAB)
    step = near(policy, batch(1, VOCAB, 1, num_trajectories=2))
    first, second = step.mini_batches[0].trajectories
    far = replace(second, rollout_logprobs=second.rollout_logprobs - 50)
    loss = PolicyLoss(Clip(), OffPolicy(outlier=OutlierDrop()))
    norms = []
    for mini in (MiniBatch((first, far)), MiniBatch((first,))):
        policy.forward_backward(mini.micro_batches(10_000), None, loss)
        norms.append(policy.optimizer_step(0.0))
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_the_gap_is_told_by_data_source_and_staleness():
    """Ten tokens with mismatches that are known: old_logprobs are given, rollout_logprobs are zero."""
    mismatch = np.array([0.05, -0.15, 0.2, 0.0, -0.4, 0.09, 0.3, -0.02, 0.6, 0.08], np.float32)
    stats = stats_of(mismatch[:4], versions=[3, 3, 3, 3], source=0, step=4)
    other = stats_of(mismatch[4:], versions=[2, 2, 2, 3, 3, 3], source=1, step=4)
    found = stats.metrics_of([stats.parts(), other.parts()])
    gap = np.abs(mismatch)
    expected = {
        "policy/mismatch_mean": mismatch.mean(),
        "policy/mismatch_abs_mean": gap.mean(),
        "policy/mismatch_abs_p50": 0.12,  # sorted 0 .02 .05 .08 .09 | .15 .2 .3 .4 .6
        "policy/mismatch_abs_p99": 0.4 + 0.91 * 0.2,  # place 0.99 x 9 = 8.91
        "policy/mismatch_abs_max": 0.6,
        "policy/mismatch_large": 0.5,  # .15 .2 .3 .4 .6
        "policy/mismatch_abs_mean/sums": 0.4 / 4,
        "policy/mismatch_abs_mean/words": 1.49 / 6,
        "policy/mismatch_abs_mean_at_staleness/0": (0.4 + 0.7) / 7,
        "policy/mismatch_abs_mean_at_staleness/1": 0.79 / 3,
        "tokens/loss": 10,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def stats_of(mismatch_L: np.ndarray, versions: list[int], source: int, step: int) -> StepStats:
    """Of one update with one trajectory of one prompt token."""
    num = len(mismatch_L)
    ones, zeros = np.ones(num, bool), np.zeros(num, np.float32)
    packed = MicroBatch.pack([Trajectory(np.arange(num + 1), 1, ones, zeros, 1.0, np.array(versions), source)])
    stats = StepStats(step, DATA_SOURCES, PolicyLoss(), lr=1.0)
    old = torch.from_numpy(mismatch_L)
    stats.add_update(
        [packed], [old], ForwardBackward([old], LossSums(0.25, 0.0, 0.0, 0.0, 1.0, 2.0, 1.0)), grad_norm=3.0
    )
    return stats


def test_packing_tells_padding_and_the_heaviest_rank():
    """Of one rank's 5 tokens beside another's 4; then beside one that has only a padding token, filled up by 3."""
    zeros = np.zeros(0, np.float32)
    padding = MicroBatch.pack([PADDING])
    first, second = (stats_of(np.zeros(num, np.float32), versions=[0] * num, source=0, step=1) for num in (4, 3))
    filled = StepStats(1, DATA_SOURCES, PolicyLoss(), lr=1.0)
    nothing = LossSums(*[0.0] * len(LossSums._fields))
    filled.add_update([padding], [torch.from_numpy(zeros)], ForwardBackward([], nothing, num_filler_tokens=3), 1.0)
    found = first.metrics_of([first.parts(), second.parts()])
    assert (found["packing/waste"], found["packing/heaviest_rank"]) == (0, 5 / 4.5)
    found = first.metrics_of([first.parts(), filled.parts()])
    assert found["packing/waste"] == 4 / 9 and found["tokens/trained"] == 5
    assert found["packing/heaviest_rank"] == 5 / 4.5


def test_a_step_of_several_ranks_has_the_metrics_of_one():
    """Trajectories dealt to two ranks, one of which has none in the second mini-batch."""
    policy = FakePolicy(VOCAB)
    step = near(policy, batch(1, VOCAB))
    config = StepConfig(CORRECTED, 10_000, 0.0)
    whole = train_step(policy, step, config)
    shares = [(slice(0, 2), slice(0, 6)), (slice(2, 6), slice(6, 6))]
    stats = [train_step(policy, share(step, parts), config) for parts in shares]
    found = stats[0].metrics_of([one.parts() for one in stats])
    expected = whole.metrics()
    compared = [
        name
        for name in expected
        if not name.startswith(("timing/", "policy/grad_norm", "policy/num_micro", "packing/"))
    ]
    assert "off_policy/sequence_mask/masked" in compared
    assert {n: found[n] for n in compared} == pytest.approx({n: expected[n] for n in compared}, rel=1e-6)


def share(step: Batch, parts: tuple[slice, slice]) -> Batch:
    minis = (MiniBatch(mini.trajectories[part]) for mini, part in zip(step.mini_batches, parts, strict=True))
    return replace(step, mini_batches=tuple(minis))


def test_every_metric_of_a_step_is_documented(is_documented):
    policy = FakePolicy(VOCAB)
    stats = train_step(policy, near(policy, batch(1, VOCAB)), StepConfig(CORRECTED, 10_000, 0.1)).metrics()
    assert [name for name in stats if not is_documented(name)] == []


def test_a_loss_that_is_not_a_number_stops_before_the_update():
    policy, step = FakePolicy(VOCAB), batch(3, VOCAB)
    bad = step.mini_batches[1].trajectories
    poisoned = replace(bad[0], advantage=float("nan"))
    second = MiniBatch((poisoned, *bad[1:]))
    with pytest.raises(
        NotFinite, match=r"step 3, mini-batch 2 of 2: loss is nan.*not applied.*lower trainer.optimizer.lr"
    ):
        train_step(
            policy, replace(step, mini_batches=(step.mini_batches[0], second)), StepConfig(PolicyLoss(), 10_000, 0.1)
        )
    assert policy.num_updates == 1
    assert policy.table_VV.isfinite().all()


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
