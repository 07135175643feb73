"""A row of the metric schema, and what a name becomes for Prometheus, which knows labels instead of paths."""

import re
from enum import StrEnum

import msgspec

_PLACEHOLDER = re.compile(r"<(\w+)>")


class Kind(StrEnum):
    STEP = "step"
    """One value a step; the step is the message's."""
    GAUGE = "gauge"
    """The present value, a few seconds apart in messages of step -1; in a step's record the one at the step's end."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the schema. `<k>` in a name stands for a number, every other `<word>` for any text."""

    name: str
    unit: str
    owner: str
    """The service that measures it."""
    meaning: str
    kind: Kind = Kind.STEP

    @property
    def section(self) -> str:
        """What its name begins with."""
        return self.name.partition("/")[0]

    @property
    def labels(self) -> list[str]:
        """The words that its name has in angle brackets."""
        return _PLACEHOLDER.findall(self.name)

    @property
    def plain(self) -> str:
        """Its name in Prometheus' letters, without what is a label there."""
        parts = _PLACEHOLDER.sub("", self.name).split("/")
        return "_".join(part.strip("_") for part in parts if part.strip("_"))

    def match(self, name: str) -> dict[str, str] | None:
        """What stands in `name` for the words in angle brackets; None if this row does not describe it."""
        found = _pattern(self.name).fullmatch(name)
        return None if found is None else found.groupdict()


def step(name: str, unit: str, owner: str, meaning: str) -> Metric:
    """A row with one value a step."""
    return Metric(name=name, unit=unit, owner=owner, meaning=meaning)


def gauge(name: str, unit: str, owner: str, meaning: str) -> Metric:
    """A row with a present value."""
    return Metric(name=name, unit=unit, owner=owner, meaning=meaning, kind=Kind.GAUGE)


def _pattern(name: str) -> re.Pattern[str]:
    numbers = re.escape(name).replace("<k>", r"(?P<k>[0-9]+)")
    return re.compile(re.sub(r"(?<!\?P)<(\w+)>", r"(?P<\1>.+)", numbers))
