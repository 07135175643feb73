"""The door through which every advantage goes, Beamline's and a user's own: rewards and answers are checked."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from beamline.algorithms.advantages import Advantage, Advantages, Rewards


class AdvantageError(ValueError):
    """Rewards that no advantages can be made of, or advantages that nothing can be trained with."""


def batch_advantages(name: str, advantage: Advantage, rewards: Rewards, group_ids: Sequence[str]) -> Advantages:
    """The advantages of a batch, checked on both sides: the rewards that go in and what comes out.

    Args:
        name: of the setting's value, for messages.
        group_ids: one a group, for messages.

    Raises:
        AdvantageError: a reward is NaN or infinite, or the function raised, or its answer is of another shape, no
            finite number, or None elsewhere than the reward.
    """
    for group_id, group in zip(group_ids, rewards, strict=True):
        for sample, reward in enumerate(group):
            if reward is not None and not np.isfinite(reward):
                raise AdvantageError(
                    f"group {group_id}, sample {sample}: the reward is {reward}; a grader gives a finite number, or "
                    "abstains"
                )
    try:
        found = advantage(rewards)
    except Exception as error:  # a function of the user's own may raise anything
        span = f"groups {group_ids[0]} to {group_ids[-1]}" if len(group_ids) > 1 else f"group {group_ids[0]}"
        raise AdvantageError(f"algorithm.advantage={name} raised {type(error).__name__} on {span}: {error}") from error
    return _checked(name, found, rewards, group_ids)


def _checked(name: str, found: object, rewards: Rewards, group_ids: Sequence[str]) -> Advantages:
    groups = _rows(found)
    if groups is None or len(groups) != len(rewards):
        raise AdvantageError(
            f"algorithm.advantage={name} was given {len(rewards)} groups and returned "
            f"{_kind(found) if groups is None else f'{len(groups)}'}: it must return a list of as many lists"
        )
    checked: Advantages = []
    for group_id, row, given in zip(group_ids, groups, rewards, strict=True):
        values = _rows(row)
        if values is None or len(values) != len(given):
            raise AdvantageError(
                f"algorithm.advantage={name}: group {group_id} has {len(given)} rewards and was given "
                f"{_kind(row) if values is None else f'{len(values)} advantages'}: return one for each reward"
            )
        checked.append(
            [_number(name, group_id, i, value, r) for i, (value, r) in enumerate(zip(values, given, strict=True))]
        )
    return checked


def _number(name: str, group_id: str, sample: int, value: object, reward: float | None) -> float | None:
    where = f"algorithm.advantage={name}: group {group_id}, sample {sample}"
    if (value is None) != (reward is None):
        raise AdvantageError(f"{where}: the reward is {reward} and the advantage {value}; None stays None")
    if value is None:
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]  what it is, is asked here
    except (TypeError, ValueError):
        raise AdvantageError(f"{where}: the advantage is {_kind(value)}, expected a number") from None
    if not np.isfinite(number):
        raise AdvantageError(f"{where}: the advantage is {number}, expected a finite number")
    return number


def _rows(found: object) -> list[object] | None:
    """The entries of a list, a tuple or an array; None for anything else."""
    values = cast(object, found.tolist()) if isinstance(found, np.ndarray) else found
    return list(cast(Sequence[object], values)) if isinstance(values, (list, tuple)) else None


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
