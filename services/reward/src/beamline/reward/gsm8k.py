r"""The grader `gsm8k`: the number at the end of a worked answer, by value.

The answer is what follows the last `####`, `A:` or `Answer:`, or is in the last `\boxed{...}`, whichever comes last;
of it the first number after the last "=" counts. Thousands commas, signs of currencies, percent and units are no part
of a number.
"""

import re
from fractions import Fraction

from beamline.reward.answers import last_boxed
from beamline.reward.grader import Verdict, right_or_wrong

_MARK = re.compile(r"####|(?-i:(?<![A-Za-z])A\s*:)|answer\s*:|\\f?box(?:ed)?\s*(?=\{)", re.IGNORECASE)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_MAX_ANSWER_CHARS = 300
_MAX_NUMBER_CHARS = 100
_NUMBER = re.compile(rf"(?P<sign>-\s?)?\$?\s?(?P<whole>{_DIGITS}(?:\.\d+)?|\.\d+)(?:\s?/\s?(?P<below>\d+))?")


def grade(text: str, ground_truth: str) -> Verdict:
    """+1 where both are the same number, -1 where they are not or the response has no marked number.

    Raises:
        ValueError: a ground truth without a number; it may be the whole worked answer.
    """
    expected = _number(_marked(ground_truth) or ground_truth)
    if expected is None:
        raise ValueError(f"ground truth {ground_truth!r} has no number: gsm8k needs one, or an answer that ends in one")
    found = _number(_marked(text))
    return right_or_wrong(found == expected, pred="" if found is None else _spell(found))


def _marked(text: str) -> str:
    """What follows the last mark on its line, or is in the box that it opens."""
    marks = list(_MARK.finditer(text))
    if not marks:
        return ""
    rest = text[marks[-1].start() :]
    boxed = last_boxed(rest)
    return boxed if boxed is not None else text[marks[-1].end() :].lstrip(" \t\n*").partition("\n")[0]


def _number(answer: str) -> Fraction | None:
    answer = (
        answer[:_MAX_ANSWER_CHARS].rpartition("=")[2].replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$")
    )
    number = _NUMBER.search(answer)
    if number is None or len(number[0]) > _MAX_NUMBER_CHARS or (number["below"] and not int(number["below"])):
        return None
    value = Fraction(number["whole"].replace(",", "")) / int(number["below"] or 1)
    return -value if number["sign"] else value


def _spell(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.10g}"
