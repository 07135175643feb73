"""An advantage of one's own: each reward against the median of its group. The coordinator imports this file.

algorithm:
  advantage: examples.own_advantage:median
"""

from collections.abc import Sequence
from statistics import median as middle


def median(rewards: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """r - median of the group's rewards; a single lucky sample does not drag the others below zero, as a mean does.

    Args:
        rewards: of a step's groups, one a trajectory; None is one without a grade, and stays None.
    """
    return [_of_group(group) for group in rewards]


def _of_group(group: Sequence[float | None]) -> list[float | None]:
    graded = [reward for reward in group if reward is not None]
    baseline = middle(graded) if graded else 0.0
    return [None if reward is None else reward - baseline for reward in group]
