"""The run's loss from its configuration."""

from beamline.algorithms.losses import Clip, PolicyLoss
from beamline.algorithms.off_policy import (
    GeometricMask,
    OffPolicy,
    OutlierDrop,
    ProductMask,
    SequenceImportance,
    TokenImportance,
    TokenMask,
)
from beamline.protocol.algorithm_config import AlgorithmSection, OffPolicySection

IMPORTANCE = {"none": None, "token": TokenImportance, "sequence": SequenceImportance}
SEQUENCE_MASKS = {"none": None, "geometric": GeometricMask, "product": ProductMask}


def policy_loss(algorithm: AlgorithmSection) -> PolicyLoss:
    """The clipped loss with the corrections that are on."""
    clip = Clip(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
    return PolicyLoss(clip, _off_policy(algorithm.off_policy))


def _off_policy(section: OffPolicySection) -> OffPolicy:
    importance, sequence_mask = IMPORTANCE[section.importance], SEQUENCE_MASKS[section.sequence_mask]
    cap, bounds = section.importance_cap, section.sequence_mask_bounds
    return OffPolicy(
        outlier=OutlierDrop(*section.outlier_bounds) if section.outlier_bounds else None,
        token_mask=TokenMask(*section.token_mask_bounds) if section.token_mask_bounds else None,
        importance=importance and (importance() if cap is None else importance(cap)),
        sequence_mask=sequence_mask and (sequence_mask() if bounds is None else sequence_mask(*bounds)),
    )
