"""The value of an arithmetic expression, exactly and without evaluating anything but arithmetic."""

import re
from fractions import Fraction

MAX_CHARS = 100
"""Bounds nesting and the size of every number in between."""

_PART = re.compile(r"\s*(\d+|[-+*/()])")


def evaluate(expression: str) -> Fraction:
    """Whole numbers, + - * /, signs and parentheses, such as `-(7 - 2) * 3 / 4`.

    Raises ValueError for anything else, a division by zero, or more than `MAX_CHARS` characters.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"{len(expression)} characters, at most {MAX_CHARS}")
    reader = _Reader(expression.strip())
    value = reader.sum()
    if reader.part is not None:
        raise ValueError(f"unexpected {reader.part}")
    return value


class _Reader:
    """Recursive descent; `part` is the next one, None at the end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.part: str | None = None
        self._next()

    def sum(self) -> Fraction:
        value = self._product()
        while (sign := self._take("+-")) is not None:
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while (sign := self._take("*/")) is not None:
            factor = self._factor()
            if sign == "/" and factor == 0:
                raise ValueError("division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        if (sign := self._take("+-")) is not None:
            value = self._factor()
            return -value if sign == "-" else value
        if self._take("(") is not None:
            value = self.sum()
            if self._take(")") is None:
                raise ValueError("a parenthesis is not closed")
            return value
        part = self.part
        if part is None or not part.isdigit():
            raise ValueError(f"expected a number, found {'the end' if part is None else part}")
        self._next()
        return Fraction(int(part))

    def _take(self, signs: str) -> str | None:
        """The next part, read, where it is one of these."""
        part = self.part
        if part is None or part not in signs:
            return None
        self._next()
        return part

    def _next(self) -> None:
        if self._at == len(self._text):
            self.part = None
            return
        found = _PART.match(self._text, self._at)
        if found is None:
            raise ValueError(f"{self._text[self._at]!r} is no arithmetic")
        self.part, self._at = found[1], found.end()
