"""The grader `exact`: the answer is the ground truth, letter by letter, but for the amount of white space."""

from beamline.reward.answers import labelled_or_whole
from beamline.reward.grader import Verdict, right_or_wrong


def grade(text: str, ground_truth: str) -> Verdict:
    """+1 where both are the same words, -1 where they are not or the answer is empty.

    Raises:
        ValueError: an empty ground truth.
    """
    if not (expected := " ".join(ground_truth.split())):
        raise ValueError("the ground truth is empty: exact needs the text of the answer")
    answer = " ".join(labelled_or_whole(text).split())
    return right_or_wrong(answer == expected, pred=answer)
