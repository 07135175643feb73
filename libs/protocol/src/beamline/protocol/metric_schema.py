"""Every metric of a run: name, unit, owner, kind and meaning. docs/metrics.md and deploy/ are made from it.

A name is a pattern: `<name>` stands for a data source, a worker or a part, `<k>` for a number.
"""

import re
from enum import StrEnum
from functools import cache

import msgspec


class Kind(StrEnum):
    STEP = "step"
    """One value a step; the step is the message's."""
    GAUGE = "gauge"
    """The present value, a few seconds apart; the message's step is -1."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the schema."""

    name: str
    unit: str
    owner: str
    """The service that measures it."""
    meaning: str
    kind: Kind = Kind.STEP


METRICS: tuple[Metric, ...] = ()


def find(name: str) -> Metric | None:
    """The row that describes a metric's name, if one does."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace("<name>", ".+").replace("<k>", "[0-9]+"))
