"""The grader `regex`: the ground truth is a regular expression of Python, and the whole answer has to match it.

An expression may take for ever on some text. Then the process that grades is killed, and the trajectory abstains.
"""

import re

from beamline.reward.answers import labelled_or_whole
from beamline.reward.grader import Verdict, right_or_wrong


def grade(text: str, ground_truth: str) -> Verdict:
    """+1 where all of the answer matches, -1 where it does not.

    Raises:
        ValueError: a ground truth that is not a regular expression, or an empty one.
    """
    if not ground_truth:
        raise ValueError("the ground truth is empty: regex needs a regular expression")
    try:
        expected = re.compile(ground_truth)
    except re.error as error:
        raise ValueError(f"ground truth {ground_truth!r} is not a regular expression: {error}") from None
    answer = labelled_or_whole(text)
    return right_or_wrong(expected.fullmatch(answer) is not None, pred=answer)
