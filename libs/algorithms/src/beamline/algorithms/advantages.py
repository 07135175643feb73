"""Advantages of one prompt group. Legend: G trajectories of a group. None is an abstained reward and stays None."""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def grpo(rewards_G: Sequence[float | None], *, normalize_std: bool = True) -> list[float | None]:
    """Group-relative advantages: (r - mean) / (std + 1e-6), std with one degree of freedom (GRPO, arXiv 2402.03300).

    Args:
        rewards_G: one reward a trajectory; abstained ones take no part in mean and std.
        normalize_std: False gives r - mean (Dr.GRPO, arXiv 2503.20783).

    Returns:
        One advantage a trajectory, None where the reward is. A group of one keeps its reward; the only reward that
        is left of a larger group has nothing to compare with, and its advantage is 0.
    """
    graded = np.array([reward for reward in rewards_G if reward is not None], dtype=np.float64)
    if len(rewards_G) == 1:
        return list(rewards_G)
    if graded.size < 2:
        return [None if reward is None else 0.0 for reward in rewards_G]
    mean = float(graded.mean())
    scale = float(graded.std(ddof=1)) + EPSILON if normalize_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards_G]
