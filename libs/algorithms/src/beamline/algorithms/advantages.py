"""Advantages of a whole step's batch; pure functions of one signature, which a function of a user's own has too.

Rewards come group by group, one a trajectory; None is an abstained reward, takes no part, and stays None. What has a
baseline of its own group shares three rules: a group that was sampled once keeps its reward, for there is nothing to
compare it with; the only reward that is left of a larger group says nothing, and its advantage is 0; equal rewards give
exactly 0.

Legend: g a group, R its rewards that did not abstain, n of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

type Rewards = Sequence[Sequence[float | None]]
type Advantages = list[list[float | None]]

EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


class Advantage(Protocol):
    """One way to turn a batch's rewards into advantages; pure.

    Returns as many groups of as many advantages as there are rewards, None exactly where the reward is None.
    """

    def __call__(self, rewards: Rewards, /) -> Advantages: ...


def grpo(rewards: Rewards, *, normalize_std: bool = True) -> Advantages:
    """(r - mean) / (std + 1e-6) within the group, std with one degree of freedom (GRPO, arXiv 2402.03300).

    Args:
        normalize_std: False gives r - mean (Dr.GRPO, arXiv 2503.20783, section 3.2).
    """

    def formula(rewards_R: np.ndarray) -> np.ndarray:
        scale = float(rewards_R.std(ddof=1)) + EPSILON if normalize_std else 1.0
        return (rewards_R - rewards_R.mean()) / scale

    return _within_groups(rewards, formula)


def rloo(rewards: Rewards) -> Advantages:
    """(r - mean) n / (n - 1): the reward less the mean of the group's other rewards (RLOO, arXiv 2402.14740)."""

    def formula(rewards_R: np.ndarray) -> np.ndarray:
        return (rewards_R - rewards_R.mean()) * (len(rewards_R) / (len(rewards_R) - 1))

    return _within_groups(rewards, formula)


def maxrl(rewards: Rewards) -> Advantages:
    """(r - mean) / (mean + 1e-6), for rewards that are shares of success, 0 to 1 (MaxRL, arXiv 2602.02710).

    A group whose mean is not above 0 has no success to learn from, and all its advantages are 0: dividing by a negative
    mean would turn them round.
    """

    def formula(rewards_R: np.ndarray) -> np.ndarray:
        mean = rewards_R.mean()
        return (rewards_R - mean) / (mean + EPSILON) if mean > 0 else np.zeros_like(rewards_R)

    return _within_groups(rewards, formula)


def reinforce_pp(rewards: Rewards) -> Advantages:
    """(r - mean) rsqrt(var + 1e-8) over the batch, var with one degree of freedom (REINFORCE++, arXiv 2501.03262).

    The baseline is the batch's, so a group of equal rewards has advantages too. Each trajectory counts once, whatever
    its length. Rewards that are all equal, or the only one of a batch, give 0.
    """
    graded = np.array([reward for group in rewards for reward in group if reward is not None], dtype=np.float64)
    if len(graded) < 2 or graded.min() == graded.max():
        return [[None if reward is None else 0.0 for reward in group] for group in rewards]
    mean, scale = float(graded.mean()), float(graded.var(ddof=1) + VARIANCE_EPSILON) ** -0.5
    return [[None if reward is None else (reward - mean) * scale for reward in group] for group in rewards]


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "rloo": rloo, "reinforce_pp": reinforce_pp, "maxrl": maxrl}
"""By the names that a recipe gives."""


def _within_groups(rewards: Rewards, formula: Callable[[np.ndarray], np.ndarray]) -> Advantages:
    """The formula on each group's rewards that did not abstain, at least two of which differ."""
    return [_within(group, formula) for group in rewards]


def _within(group: Sequence[float | None], formula: Callable[[np.ndarray], np.ndarray]) -> list[float | None]:
    if len(group) == 1:
        return list(group)
    rewards_R = np.array([reward for reward in group if reward is not None], dtype=np.float64)
    if len(rewards_R) < 2 or rewards_R.min() == rewards_R.max():
        return [None if reward is None else 0.0 for reward in group]
    advantages = iter(formula(rewards_R).tolist())
    return [None if reward is None else next(advantages) for reward in group]
