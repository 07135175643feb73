"""A calculator that the policy calls by writing `=`: the text stops there, and the value is written behind it.

The policy writes `7-2=`, reads `5` and the end of the line, and goes on. A result is its own, not the policy's: only
what the policy wrote is learned from.
"""

import re

from beamline.environments.arithmetic import evaluate
from beamline.environments.environment import EpisodeTask, Start, Step

CALL = "="
_EXPRESSION = re.compile(r"[\d+\-*/() ]*")


class Calculator:
    """Has no state: every turn is answered by itself. It rewards nothing."""

    def reset(self, task: EpisodeTask) -> Start:
        return Start(stop=[CALL])

    def step(self, text: str) -> Step:
        """The value of what stands before the `=` on its line; done when the policy ended without a call."""
        before, call, after = text.rpartition(CALL)
        if not call or after.strip():
            return Step(done=True)
        return Step(observation=f"{answer(before)}\n")


def answer(line: str) -> str:
    """The value of the expression at the end of a text: whole, or as a fraction such as 7/2; or why there is none."""
    reversed_expression = _EXPRESSION.match(line[::-1])
    assert reversed_expression is not None, "it matches nothing at all too"
    try:
        return str(evaluate(reversed_expression[0][::-1]))
    except ValueError as error:
        return f"error: {error}"
