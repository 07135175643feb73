"""What a grader is, and the graders that can be named.

A grader is a function of a response's text and the ground truth that returns a `Verdict`. A recipe names one of
`GRADERS`, or any function of the same form as `package.module:function`; it then has to be importable where the reward
service runs. Graders run in processes of their own (`beamline.reward.grading_process`): one may raise, hang, crash or
eat memory, and the trajectory abstains.
"""

import difflib
import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from beamline.protocol.errors import ConfigError


class Verdict(msgspec.Struct, frozen=True, tag="Verdict"):
    """A grade before shaping.

    Raises:
        ValueError: a reward or accuracy that is not a finite number.
    """

    reward: float
    acc: float
    """1.0 where the answer is right, 0.0 where it is not."""
    pred: str = ""
    """What was read as the answer."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reward) and math.isfinite(self.acc)):
            raise ValueError(f"reward={self.reward} and acc={self.acc} must be finite")


type Grader = Callable[[str, str], Verdict]
"""(text of the response, ground truth) -> verdict; the same arguments always give the same one."""

GRADERS: Mapping[str, str] = {
    "math_dapo": "beamline.reward.math_dapo:grade",
    "math_verify": "beamline.reward.math_verify_grader:grade",
}

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def import_path(name: str) -> str:
    """Where a grader is imported from.

    Raises:
        ConfigError: neither a known name nor an import path; says which known name is nearest.
    """
    if name in GRADERS:
        return GRADERS[name]
    if _IMPORT_PATH.fullmatch(name):
        return name
    nearest = difflib.get_close_matches(name, GRADERS, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"reward.grader={name!r} is not a grader: did you mean {nearest!r}? Known are {', '.join(GRADERS)}; "
        "one of your own is given as package.module:function"
    )


def load_grader(path: str) -> Grader:
    """Import a grader. Raises ImportError or AttributeError when there is none."""
    module, _, function = path.partition(":")
    return cast(Grader, getattr(importlib.import_module(module), function))
