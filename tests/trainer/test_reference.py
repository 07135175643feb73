"""Divergence from the frozen reference on the real engine: nothing before the first update, and what it is after it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from beamline.algorithms.advantages import grpo
from beamline.algorithms.kl import KLPenalty, k1, k2, k3
from beamline.algorithms.losses import Clip, PolicyLoss, cispo_loss, clipped_loss, gspo_loss
from beamline.algorithms.reductions import prompt_mean, seq_mean_token_sum_norm, sequence_mean
from beamline.models import tiny
from beamline.runtime.model_description import describe
from beamline.trainer.batch import Batch, Group, MicroBatch, MiniBatch
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.penalty import RewardPenalty
from beamline.trainer.train_step import StepConfig, train_step
from trainer_batches import batch, mini_batch

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB = tiny.TINY_BEAM.vocab_size
ALL = 10_000
"""A budget that holds a whole mini-batch."""


def build(model_dir: Path, with_reference: bool = True) -> MegatronPolicy:
    return MegatronPolicy(build_model(model_dir, Layout()), AdamWSettings(), 1.0, with_reference)


def gradient(policy: MegatronPolicy, micro_batches: list[MicroBatch], loss: PolicyLoss) -> torch.Tensor:
    """Of all parameters, one after the other; old_logprobs differ from the policy's, so that clips have a say."""
    own = policy.logprobs(micro_batches)
    old = [x + 0.3 * torch.from_numpy(m.targets_L).sin() for x, m in zip(own, micro_batches, strict=True)]
    ref = policy.reference_logprobs(micro_batches) if loss.kl else None
    policy.forward_backward(micro_batches, old, loss, ref)
    parts = [p.grad.flatten().clone() for p in policy._model.module.parameters() if p.grad is not None]
    policy._optimizer.clear()
    return torch.cat(parts)


@pytest.fixture(scope="module")
def moved(model_dir: Path) -> MegatronPolicy:
    """A policy that has left its reference behind."""
    policy = build(model_dir)
    train_step(policy, batch(1, VOCAB), StepConfig(PolicyLoss(), ALL, 3e-3))
    return policy


@pytest.mark.parametrize("estimator", [k2, k3])
def test_before_the_first_update_there_is_no_divergence_and_no_gradient_of_it(model_dir: Path, estimator):
    policy, (mini,) = build(model_dir), batch(1, VOCAB, 1).mini_batches
    still = MiniBatch(tuple(replace(t, advantage=0.0) for t in mini.trajectories)).micro_batches(100)
    assert len(still) > 1
    ref = policy.reference_logprobs(still)
    found = policy.forward_backward(still, None, PolicyLoss(kl=KLPenalty(1.0, estimator)), ref)
    assert (found.sums.kl, found.sums.kl_loss, found.sums.loss) == (0, 0, 0)
    assert policy.optimizer_step(1e-3) == 0


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_after_an_update_it_is_that_of_the_first_checkpoint(model_dir: Path, tmp_path: Path, estimator):
    """Against the log-probabilities of another policy, which is made of the checkpoint of step 0."""
    policy, step = build(model_dir), batch(2, VOCAB, 1)
    (tmp_path / "policy").mkdir()
    describe(model_dir, tmp_path / "policy", "float32")
    policy.save_weights(tmp_path)
    train_step(policy, batch(1, VOCAB), StepConfig(PolicyLoss(), ALL, 3e-3))
    micro_batches = step.mini_batches[0].micro_batches(100)
    first = build(tmp_path / "policy", with_reference=False)
    ours, theirs = (torch.cat(one.logprobs(micro_batches)).double() for one in (policy, first))
    metrics = train_step(policy, step, StepConfig(PolicyLoss(kl=KLPenalty(0.5, estimator)), 100, 1e-3)).metrics()
    expected = estimator(ours, theirs).mean().item()
    assert metrics["policy/kl"] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert metrics["loss/kl"] == pytest.approx(0.5 * expected, rel=1e-4, abs=1e-7)
    if estimator is not k1:
        assert metrics["policy/kl"] > 1e-4
    assert "timing/train_reference" in metrics


def test_the_reference_is_seen_by_nobody_else(moved: MegatronPolicy, model_dir: Path):
    micro_batches, tokens = batch(2, VOCAB, 1).mini_batches[0].micro_batches(ALL), list(range(20, 50))
    weights = {name: tensor.clone() for name, tensor in moved.export()}
    scores, logprobs = moved.score(tokens), moved.logprobs(micro_batches)[0]
    ref = moved.reference_logprobs(micro_batches)[0]
    assert torch.equal(ref, build(model_dir, with_reference=False).logprobs(micro_batches)[0])
    assert not torch.equal(ref, logprobs)
    assert moved.score(tokens) == scores
    assert all(torch.equal(tensor, weights[name]) for name, tensor in moved.export())


def test_the_reference_routes_live(moved: MegatronPolicy):
    """The engine's routes of a policy's tokens change what the policy reads, and not what the reference does."""
    (plain,) = batch(2, VOCAB, 1).mini_batches[0].micro_batches(ALL)
    everyone = np.tile(np.arange(16, dtype=np.uint8), (len(plain.tokens_T), 4, 1))
    ids_TLK = np.random.default_rng(0).permuted(everyone, axis=-1)
    routed = replace(plain, routes_TLK=ids_TLK[..., :4].copy(), routed_T=np.ones_like(plain.routed_T))
    assert not torch.equal(moved.logprobs([routed])[0], moved.logprobs([plain])[0])
    assert torch.equal(moved.reference_logprobs([routed])[0], moved.reference_logprobs([plain])[0])


def test_a_divergence_in_the_reward_makes_the_advantages(moved: MegatronPolicy):
    """Against a step whose advantages were made by hand of rewards less the divergence, and which has no penalty."""
    (mini,) = batch(3, VOCAB, 1).mini_batches
    placed = [replace(t, place=(i // 3, i % 3)) for i, t in enumerate(mini.trajectories)]
    rewards = [[1.0, 0.0, 0.5], [0.2, 0.1, 1.0]]
    (packed,) = mini_batch(placed).micro_batches(ALL)
    kl = k2(moved.logprobs([packed])[0].double(), moved.reference_logprobs([packed])[0].double()).split(
        [t.num_loss_tokens for t in placed]
    )
    less = [[r - 0.7 * kl[3 * g + i].sum().item() for i, r in enumerate(row)] for g, row in enumerate(rewards)]
    advantages = [a for row in grpo(less) for a in row]
    expected = mini_batch([replace(t, advantage=a) for t, a in zip(placed, advantages, strict=True) if a is not None])

    step = Batch(3, (mini_batch(placed),), ("sums", "words"), tuple(Group("g", tuple(row)) for row in rewards))
    penalty = RewardPenalty(KLPenalty(0.7, k2), grpo, "grpo")
    found = train_step(moved, step, StepConfig(PolicyLoss(), 100, 0.0, penalty)).metrics()
    wanted = train_step(moved, replace(step, mini_batches=(expected,)), StepConfig(PolicyLoss(), 100, 0.0)).metrics()
    assert found["policy/kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-6)
    assert "loss/kl" not in found and "policy/kl" not in wanted
    for name in ("policy/loss", "policy/grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    plain = [a for row in grpo(rewards) for a in row]
    unpunished = mini_batch([replace(t, advantage=a) for t, a in zip(placed, plain, strict=True) if a is not None])
    other = train_step(moved, replace(step, mini_batches=(unpunished,)), StepConfig(PolicyLoss(), 100, 0.0)).metrics()
    assert found["policy/loss"] != pytest.approx(other["policy/loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (PolicyLoss(Clip(0.01, 0.02), surrogate=gspo_loss, kl=KLPenalty(0.1, k3)), sequence_mean),
        (PolicyLoss(surrogate=cispo_loss, entropy_coefficient=0.05), prompt_mean),
        (PolicyLoss(Clip(dual=1.2), surrogate=clipped_loss), seq_mean_token_sum_norm),
    ],
)
def test_a_gradient_is_the_same_for_any_split_and_order(moved: MegatronPolicy, loss: PolicyLoss, reduction):
    trajectories = [
        replace(t, place=(i // 2, i % 2)) for i, t in enumerate(batch(4, VOCAB, 1).mini_batches[0].trajectories)
    ]
    mini = mini_batch(trajectories, reduction)
    whole = gradient_of(moved, mini, ALL, loss, range(len(trajectories)))
    for max_tokens, order in ((50, range(len(trajectories))), (ALL, (3, 1, 5, 0, 2, 4)), (90, (5, 4, 3, 2, 1, 0))):
        parts = gradient_of(moved, mini, max_tokens, loss, order)
        assert (parts - whole).norm() <= 1e-4 * whole.norm()
    assert whole.norm() > 0


def gradient_of(policy: MegatronPolicy, mini: MiniBatch, max_tokens: int, loss: PolicyLoss, order) -> torch.Tensor:
    micro_batches = MiniBatch(tuple(mini.trajectories[i] for i in order)).micro_batches(max_tokens)
    return gradient(policy, micro_batches, loss)
