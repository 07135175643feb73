"""What a step learns from, as the run's configuration says; code of the user's own is loaded here."""

from functools import partial
from pathlib import Path

from beamline.algorithms.advantages import ADVANTAGES, grpo
from beamline.algorithms.kl import ESTIMATORS, KLPenalty
from beamline.algorithms.loss_check import checked_loss
from beamline.algorithms.losses import LOSSES, Clip, PolicyLoss, Surrogate
from beamline.algorithms.off_policy import (
    GeometricMask,
    OffPolicy,
    OutlierDrop,
    ProductMask,
    SequenceImportance,
    TokenImportance,
    TokenMask,
)
from beamline.algorithms.reductions import REDUCTIONS
from beamline.models.routing import RoutingShape
from beamline.protocol.algorithm_config import AlgorithmSection, KLSection, OffPolicySection
from beamline.protocol.config import RunConfig
from beamline.runtime.plugins import load_plugin
from beamline.trainer.assemble import Reading
from beamline.trainer.penalty import RewardPenalty

IMPORTANCE = {"none": None, "token": TokenImportance, "sequence": SequenceImportance}
SEQUENCE_MASKS = {"none": None, "geometric": GeometricMask, "product": ProductMask}


def policy_loss(algorithm: AlgorithmSection) -> PolicyLoss:
    """The surrogate by its name, with the corrections and terms that are on. Raises ConfigError as `load_plugin`."""
    kl = algorithm.kl
    return PolicyLoss(
        clip=Clip(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip),
        off_policy=_off_policy(algorithm.off_policy),
        surrogate=_surrogate(algorithm.loss),
        kl=_kl(kl) if kl.coefficient and kl.place == "loss" else None,
        entropy_coefficient=algorithm.entropy_coefficient,
    )


def reward_penalty(algorithm: AlgorithmSection) -> RewardPenalty | None:
    """Where the divergence is a part of the reward. Raises ConfigError as `load_plugin`."""
    kl, name = algorithm.kl, algorithm.advantage
    if not kl.coefficient or kl.place != "reward":
        return None
    advantage = ADVANTAGES.get(name) or load_plugin("algorithm.advantage", name)
    if name == "grpo":
        advantage = partial(grpo, normalize_std=algorithm.normalize_std)
    return RewardPenalty(_kl(kl), advantage, name)


def reading(config: RunConfig) -> Reading:
    """How the run reads its batches."""
    algorithm = config.algorithm
    return Reading(
        reduction=REDUCTIONS[algorithm.reduction],
        max_response_tokens=config.rollout.sampling.max_response_tokens,
        routing=RoutingShape.of(Path(config.model.path)) if algorithm.routing_replay else None,
        rewards=algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward",
    )


def _surrogate(name: str) -> Surrogate:
    return LOSSES.get(name) or checked_loss(name, load_plugin("algorithm.loss", name))


def _kl(section: KLSection) -> KLPenalty:
    return KLPenalty(section.coefficient, ESTIMATORS[section.estimator])


def _off_policy(section: OffPolicySection) -> OffPolicy:
    importance, sequence_mask = IMPORTANCE[section.importance], SEQUENCE_MASKS[section.sequence_mask]
    cap, bounds = section.importance_cap, section.sequence_mask_bounds
    return OffPolicy(
        outlier=OutlierDrop(*section.outlier_bounds) if section.outlier_bounds else None,
        token_mask=TokenMask(*section.token_mask_bounds) if section.token_mask_bounds else None,
        importance=importance and (importance() if cap is None else importance(cap)),
        sequence_mask=sequence_mask and (sequence_mask() if bounds is None else sequence_mask(*bounds)),
    )
