"""The grader `math_dapo`: the last `Answer: ...` of a response against the ground truth, as normalised text.

The rules are those of DAPO's grader (arXiv 2503.14476): only the last 300 characters are read, both sides are brought
to one spelling, and a response earns +1 or -1.
"""

import re

from beamline.reward.grader import Verdict

TAIL_CHARS = 300

_LABEL = re.compile(r"answer\s*:[\s*]*(?=\S)", re.IGNORECASE)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
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
_FRACTION = re.compile(r"\\[dt]?frac\s*(\{[^{}]*\}|[^\s{}\\])\s*(\{[^{}]*\}|[^\s{}\\])")
_ROOT = re.compile(r"\\sqrt\s*([^\s{}\[\\])")
_SLASHED = re.compile(r"([+-]?\d+)/(\d+)")
_THOUSANDS = re.compile(r"([+-]?\d{1,3})((?:,\d{3})+)(\.\d+)?")
_NUMBER = re.compile(r"([+-]?)0*(\d+)(?:\.(\d*?)0*)?")


def grade(text: str, ground_truth: str) -> Verdict:
    """+1 where the response's last answer equals the ground truth, -1 where it does not or there is none."""
    pred = normalise(last_answer(text))
    correct = bool(pred) and pred == normalise(ground_truth)
    return Verdict(reward=1.0 if correct else -1.0, acc=float(correct), pred=pred)


def last_answer(text: str) -> str:
    """What follows the last `Answer:` (in any case) on its line; empty when there is none near the end."""
    tail = text[-TAIL_CHARS:]
    ends = [label.end() for label in _LABEL.finditer(tail)]
    return tail[ends[-1] :].partition("\n")[0] if ends else ""


def normalise(answer: str) -> str:
    """One spelling for an answer: what is after the last "=", no boxes, articles, units or spaces, plain fractions.

    Numbers lose thousands commas, leading zeros and an empty fraction part.
    """
    answer = _unbox(answer).replace("\u2212", "-").replace("{,}", ",").replace("\\$", "").replace("$", "")
    answer = _SPACING.sub(" ", answer)
    answer = _WRAPPER.sub(r"\1", answer).rpartition("=")[2]
    answer = answer.strip(" \t*`\"'").rstrip(".;,").strip(" \t*`")
    answer = _ARTICLE.sub("", answer)
    # An answer that is nothing but a unit is an answer.
    answer = _UNIT.sub("", answer).strip() or answer
    answer = re.sub(r"\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree|\u00b0", "", answer)
    answer = _FRACTION.sub(_spell_fraction, answer)
    answer = _ROOT.sub(r"\\sqrt{\1}", answer)
    return _spell_number("".join(answer.split()))


def _unbox(answer: str) -> str:
    """The content of the last box; an unclosed box reaches to the end."""
    boxes = list(_BOX.finditer(answer))
    if not boxes:
        return answer
    depth, start = 1, boxes[-1].end()
    for position in range(start, len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[position], 0)
        if depth == 0:
            return answer[start:position]
    return answer[start:]


def _spell_fraction(fraction: re.Match[str]) -> str:
    above, below = (part.strip("{}") for part in fraction.groups())
    return f"\\frac{{{above}}}{{{below}}}"


def _spell_number(answer: str) -> str:
    if slashed := _SLASHED.fullmatch(answer):
        return f"\\frac{{{slashed[1]}}}{{{slashed[2]}}}"
    if _THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "")
    if number := _NUMBER.fullmatch(answer):
        sign, whole, decimals = number.groups()
        answer = ("-" if sign == "-" else "") + whole + (f".{decimals}" if decimals else "")
    return answer
