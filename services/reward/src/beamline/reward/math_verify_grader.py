"""The grader `math_verify`: symbolic equivalence by the math-verify library.

The library's own time limits are off: they use signals and count a timeout as a wrong answer. Here the process that
grades is killed instead, and the trajectory abstains.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from beamline.reward.grader import Verdict, right_or_wrong
from beamline.reward.math_dapo import last_answer

NO_LIMIT = 0
_FORMULA = re.compile(r"\$[^$]*\$")

# The library warns once that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def grade(text: str, ground_truth: str) -> Verdict:
    """+1 where the response's answer is equivalent to the ground truth, -1 where it is not or there is none.

    The answer is what follows the last `Answer:`; without one, what the library finds in the whole text (a box, a
    formula, a number).

    Raises:
        ValueError: a ground truth in which the library finds nothing to compare with.
    """
    expected = _read(ground_truth)
    answer = last_answer(text).strip()
    found = parse(_as_math(answer) if answer else text, parsing_timeout=NO_LIMIT)
    correct = bool(found) and verify(expected, found, timeout_seconds=NO_LIMIT)
    return right_or_wrong(correct, pred=answer or str(found[-1] if found else ""))


@lru_cache(maxsize=1)
def _read(ground_truth: str) -> list[Any]:
    """Once for all responses of a group. Raises ValueError where there is nothing to compare with."""
    if not (expected := parse(_as_math(ground_truth), parsing_timeout=NO_LIMIT)):
        raise ValueError(f"ground truth {ground_truth!r} is no formula: math_verify needs a number or LaTeX")
    return expected


def _as_math(answer: str) -> str:
    """As a formula; the sign of a currency would end it, and a space at its end would hide a unit."""
    answer = answer.replace("\\$", "")
    if _FORMULA.fullmatch(answer):
        answer = f"${answer[1:-1].strip()}$"
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
