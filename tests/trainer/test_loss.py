"""What a step learns from follows from the configuration; a loss of the user's own is loaded once, and looked at."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from beamline.algorithms.advantages import grpo, reinforce_pp
from beamline.algorithms.kl import KLPenalty, k2, k3
from beamline.algorithms.loss_check import LossError
from beamline.algorithms.losses import Clip, PolicyLoss, TokenLoss, cispo_loss, clipped_loss, gspo_loss
from beamline.algorithms.off_policy import (
    GeometricMask,
    OffPolicy,
    OutlierDrop,
    ProductMask,
    SequenceImportance,
    TokenImportance,
    TokenMask,
)
from beamline.algorithms.reductions import prompt_mean, token_mean
from beamline.models import tiny
from beamline.protocol.algorithm_config import AlgorithmSection, KLSection, OffPolicySection
from beamline.protocol.config import ModelSection, RolloutSection, RunConfig, SamplingSection
from beamline.protocol.errors import ConfigError
from beamline.trainer.assemble import Reading
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.loss import policy_loss, reading, reward_penalty
from beamline.trainer.train_step import StepConfig, train_step
from trainer_batches import batch

VOCAB = 11


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, OffPolicy()),
        ({"outlier_bounds": (1e-4, 100.0)}, OffPolicy(outlier=OutlierDrop())),
        ({"token_mask_bounds": (0.5, 2.0)}, OffPolicy(token_mask=TokenMask())),
        ({"importance": "token"}, OffPolicy(importance=TokenImportance(2.0))),
        ({"importance": "sequence"}, OffPolicy(importance=SequenceImportance(5.0))),
        ({"importance": "sequence", "importance_cap": 3.0}, OffPolicy(importance=SequenceImportance(3.0))),
        ({"sequence_mask": "geometric"}, OffPolicy(sequence_mask=GeometricMask(0.99, 1.01))),
        ({"sequence_mask": "product"}, OffPolicy(sequence_mask=ProductMask(0.5, 2.0))),
        (
            {"sequence_mask": "product", "sequence_mask_bounds": (0.1, 9.0)},
            OffPolicy(sequence_mask=ProductMask(0.1, 9.0)),
        ),
    ],
)
def test_corrections_are_what_the_configuration_says(section: dict[str, Any], expected: OffPolicy):
    algorithm = AlgorithmSection(clip_low=0.1, clip_high=0.3, dual_clip=3.0, off_policy=OffPolicySection(**section))
    assert policy_loss(algorithm) == PolicyLoss(Clip(0.1, 0.3, 3.0), expected)


@pytest.mark.parametrize("surrogate", [clipped_loss, gspo_loss, cispo_loss])
def test_losses_have_names(surrogate: Any):
    assert policy_loss(AlgorithmSection(loss=surrogate.__name__.removesuffix("_loss"))).surrogate is surrogate


def test_a_divergence_is_in_the_loss_or_in_the_reward_and_never_in_both():
    off, loss, reward = (
        AlgorithmSection(kl=section, entropy_coefficient=0.01, advantage="reinforce_pp")
        for section in (
            KLSection(),
            KLSection(coefficient=0.1),
            KLSection(coefficient=0.2, place="reward", estimator="k2"),
        )
    )
    assert [policy_loss(section).kl for section in (off, loss, reward)] == [None, KLPenalty(0.1, k3), None]
    assert reward_penalty(off) is None and reward_penalty(loss) is None
    found = reward_penalty(reward)
    assert found is not None
    assert (found.kl, found.advantage, found.name) == (KLPenalty(0.2, k2), reinforce_pp, "reinforce_pp")
    assert policy_loss(off).entropy_coefficient == 0.01


def test_dr_grpo_stays_what_it_is_when_advantages_are_made_again():
    found = reward_penalty(AlgorithmSection(kl=KLSection(coefficient=1.0, place="reward"), normalize_std=False))
    assert found is not None
    assert found.advantage([[1.0, 0.0]]) == partial(grpo, normalize_std=False)([[1.0, 0.0]]) == [[0.5, -0.5]]


def test_how_a_batch_is_read_is_what_the_configuration_says(tmp_path: Path):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=1)
    config = RunConfig(
        model=ModelSection(path=str(tmp_path)),
        rollout=RolloutSection(sampling=SamplingSection(max_response_tokens=96)),
        algorithm=AlgorithmSection(reduction="prompt_mean", kl=KLSection(coefficient=1.0, place="reward")),
    )
    found = reading(config)
    assert (found.reduction, found.max_response_tokens, found.rewards) == (prompt_mean, 96, True)
    assert found.routing is not None
    plain = reading(RunConfig(algorithm=AlgorithmSection(routing_replay=False)))
    assert plain == Reading(reduction=token_mean, max_response_tokens=plain.max_response_tokens)


def plain_gradient(
    logprobs_L: Tensor, old_logprobs_L: Tensor, advantages_L: Tensor, sequence_L: Tensor, num: int, clip: Clip
) -> TokenLoss:
    """REINFORCE, which no clip bounds."""
    ratio_L = (logprobs_L - old_logprobs_L).exp().detach()
    return TokenLoss(-advantages_L * logprobs_L, ratio_L, torch.zeros_like(ratio_L, dtype=torch.bool))


def too_short(logprobs_L: Tensor, *rest: Any) -> TokenLoss:
    found = plain_gradient(logprobs_L, *rest)
    return TokenLoss(found.loss_L[1:], found.ratio_L, found.clipped_L)


def root_of_negatives(logprobs_L: Tensor, *rest: Any) -> TokenLoss:
    found = plain_gradient(logprobs_L, *rest)
    return TokenLoss(logprobs_L.sqrt(), found.ratio_L, found.clipped_L)


def a_number(logprobs_L: Tensor, *rest: Any) -> float:
    return 1.0


def of_another_signature(logprobs_L: Tensor) -> TokenLoss:
    raise AssertionError("never called")


def train(loss: PolicyLoss) -> FakePolicy:
    policy = FakePolicy(VOCAB)
    train_step(policy, batch(1, VOCAB, num_mini_batches=1), StepConfig(loss, 10_000, 0.5))
    return policy


def test_a_loss_of_the_user_s_own_is_trained_with():
    own, ours = (train(policy_loss(AlgorithmSection(loss=name))) for name in (f"{__name__}:plain_gradient", "cispo"))
    torch.testing.assert_close(own.table_VV, ours.table_VV)  # the ratio is 1, so no clip has a say


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_short", r"loss_L is \(\d+,\), expected a tensor of one entry a token, \(\d+,\)"),
        ("root_of_negatives", r"loss_L is NaN or infinite at (\d+) of \1 tokens"),
        ("a_number", "returned a float, expected a TokenLoss"),
        ("of_another_signature", "raised TypeError: of_another_signature.. takes 1 positional argument"),
    ],
)
def test_a_loss_that_cannot_be_used_is_named(name: str, words: str):
    path = f"{__name__}:{name}"
    with pytest.raises(LossError, match=f"algorithm.loss={path}:? {words}"):
        train(policy_loss(AlgorithmSection(loss=path)))


@pytest.mark.parametrize(
    ("path", "words"), [("nowhere:loss", "nowhere cannot be imported"), (f"{__name__}:nothing", "has no function")]
)
def test_a_loss_that_is_not_there_is_refused(path: str, words: str):
    with pytest.raises(ConfigError, match=f"algorithm.loss={path}: .*{words}"):
        policy_loss(AlgorithmSection(loss=path))
    with pytest.raises(ConfigError, match=f"algorithm.advantage={path}: .*{words}"):
        reward_penalty(AlgorithmSection(advantage=path, kl=KLSection(coefficient=1.0, place="reward")))
