"""What a grader is, and the graders that can be named.

A grader is a function of a response's text and the ground truth that returns a `Verdict`. A recipe names one that
Beamline has, or any function of the same form as `package.module:function`; it then has to be importable where the
reward service runs. Graders run in processes of their own (`beamline.reward.grading_process`): one may raise, hang,
crash or eat memory, and the trajectory abstains.
"""

import math
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from beamline.protocol.reward_config import RewardSection
from beamline.runtime.plugins import load_plugin


class Verdict(msgspec.Struct, frozen=True, tag="Verdict"):
    """A grade before shaping.

    Raises:
        ValueError: a reward that is not a finite number, or an accuracy outside [0, 1].
    """

    reward: float
    acc: float
    """1.0 where the answer is right, 0.0 where it is not."""
    pred: str = ""
    """What was read as the answer."""
    why: str = ""
    """Reason of the grade, where it needs one."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward={self.reward} must be finite")
        if not 0 <= self.acc <= 1:
            raise ValueError(f"acc={self.acc} must be in [0, 1]")


type Grader = Callable[[str, str], Verdict]
"""(text of the response, ground truth) -> verdict; the same arguments always give the same one.

Raises ValueError where it cannot read the ground truth.
"""

_FUNCTIONS: Mapping[str, str] = {
    "math_dapo": "beamline.reward.math_dapo:grade",
    "math_verify": "beamline.reward.math_verify_grader:grade",
    "gsm8k": "beamline.reward.gsm8k:grade",
    "exact": "beamline.reward.exact:grade",
    "regex": "beamline.reward.regex:grade",
}
_MAKERS: Mapping[str, str] = {
    "code": "beamline.reward.code_grader:make_grader",
    "http": "beamline.reward.http_grader:make_grader",
}
"""Functions from the section of `RewardSection` of the same name to a grader."""


def load_grader(name: str, settings: RewardSection) -> Grader:
    """Import a grader, or make the one of these settings.

    Raises:
        ConfigError: it cannot be imported, or cannot work here.
    """
    if name in _MAKERS:
        return cast(Grader, load_plugin("grader", _MAKERS[name])(getattr(settings, name)))
    return cast(Grader, load_plugin("grader", _FUNCTIONS.get(name, name)))


def right_or_wrong(correct: bool, *, pred: str = "", why: str = "") -> Verdict:
    """+1 or -1."""
    return Verdict(reward=1.0 if correct else -1.0, acc=float(correct), pred=pred, why=why)
