"""The grader `math_dapo`: the last `Answer: ...` of a response against the ground truth, as normalised text.

The rules are those of DAPO's grader (arXiv 2503.14476): only the last 300 characters are read, both sides are brought
to one spelling, and a response earns +1 or -1.
"""

import re

from beamline.reward.answers import last_boxed, last_labelled
from beamline.reward.grader import Verdict, right_or_wrong

TAIL_CHARS = 300

_WRAPPER = re.compile(r"\\(?:text|textbf|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[!,;: ]|\\quad|\\left|\\right|\\displaystyle|~")
_ARTICLE = re.compile(r"\b(?:an?|the)\s+(?=[A-Za-z]{2})", re.IGNORECASE)
_UNIT = re.compile(
    r"\b(?:dollars?|cents?|euros?|percent|degrees?|units?|square|cubic|"
    r"(?:kilo|centi|milli)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|km|cm|mm|kg|gm|ft|mph|inch(?:es)?|foot|feet|"
    r"yards?|miles?|pounds?|ounces?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|"
    r"points?|digits?|integers?|ways?|multiples?|edges?|students?|meals?)\b(?:\s*\^\s*\{?[23]\}?)?",
    re.IGNORECASE,
)
_FRACTION_SIZE = re.compile(r"\\[dt]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[^\s{}\\])\s*(\{[^{}]*\}|[^\s{}\\])")
_ROOT = re.compile(r"\\sqrt\s*([^\s{}\[\\])")
_SLASHED = re.compile(r"([+-]?\d+)/(\d+)")
_THOUSANDS = re.compile(r"([+-]?\d{1,3})((?:,\d{3})+)(\.\d+)?")


def grade(text: str, ground_truth: str) -> Verdict:
    """+1 where the response's last answer equals the ground truth, -1 where it does not or there is none."""
    pred = normalise(last_answer(text))
    return right_or_wrong(bool(pred) and pred == normalise(ground_truth), pred=pred)


def last_answer(text: str) -> str:
    """What follows the last `Answer:` (in any case) on its line; empty when there is none near the end."""
    return last_labelled(text[-TAIL_CHARS:])


def normalise(answer: str) -> str:
    """One spelling for an answer: what is after the last "=", no boxes, articles, units or spaces, plain fractions.

    Numbers lose thousands commas. They stay text: 033 is not 33, and 18.00 is not 18.
    """
    boxed = last_boxed(answer)
    answer = answer if boxed is None else boxed
    answer = answer.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "").replace("$", "")
    answer = _SPACING.sub(" ", answer)
    answer = _WRAPPER.sub(r"\1", answer).rpartition("=")[2]
    answer = answer.strip(" \t*`\"'").rstrip(".;,").strip(" \t*`")
    answer = _ARTICLE.sub("", answer)
    # An answer that is nothing but a unit is an answer.
    answer = _UNIT.sub("", answer).strip() or answer
    answer = re.sub(r"\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree|\u00b0", "", answer)
    answer = _FRACTION.sub(_spell_fraction, _FRACTION_SIZE.sub(r"\\frac", answer))
    answer = _ROOT.sub(r"\\sqrt{\1}", answer)
    return _spell_number("".join(answer.split()))


def _spell_fraction(fraction: re.Match[str]) -> str:
    above, below = (part.strip("{}") for part in fraction.groups())
    return f"\\frac{{{above}}}{{{below}}}"


def _spell_number(answer: str) -> str:
    if slashed := _SLASHED.fullmatch(answer):
        return f"\\frac{{{slashed[1]}}}{{{slashed[2]}}}"
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
