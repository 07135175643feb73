"""Which groups carry no gradient. Legend: G trajectories of a group; None is an abstained reward."""

from collections.abc import Sequence


def zero_variance(rewards_G: Sequence[float | None]) -> bool:
    """Whether all advantages of the group are zero by lack of contrast: its rewards are equal, or too few are left.

    A group of one is kept, since it keeps its reward as its advantage; a group in which every grade abstained is not.

    Args:
        rewards_G: the rewards that the advantages are made of; for dynamic sampling (DAPO, arXiv 2503.14476) the raw
            ones, before the overlong penalty.
    """
    graded = {reward for reward in rewards_G if reward is not None}
    if len(rewards_G) == 1:
        return not graded
    return len(graded) < 2
