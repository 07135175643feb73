"""A grader of one's own: the last number counts, and an answer in the form asked for earns a little when it is wrong.
The reward service imports this file.

reward:
  grader: examples.own_grader:grade
"""

import re

from beamline.reward.grader import Verdict

_ANSWER = re.compile(r"Answer:\s*(-?\d+)")


def grade(text: str, ground_truth: str) -> Verdict:
    """1 for the right number after `Answer:`, 0.1 for another number there, 0 for none.

    Args:
        text: the response.
        ground_truth: an integer. Raises ValueError where it is none: the trajectory then has no grade.
    """
    expected = int(ground_truth)
    found = _ANSWER.findall(text)
    if not found:
        return Verdict(reward=0.0, acc=0.0, why="no answer in the form asked for")
    right = int(found[-1]) == expected
    return Verdict(reward=1.0 if right else 0.1, acc=float(right), pred=found[-1])
