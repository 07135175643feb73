"""Fixtures of more than one area."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

METRICS_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


@pytest.fixture
def is_documented() -> Callable[[str], bool]:
    """Whether docs/metrics.md describes a metric; `<name>` in a row stands for anything, `<k>` for a number."""
    rows = re.findall(r"^\| `([^`]+)` \|", METRICS_PAGE.read_text(), flags=re.MULTILINE)
    patterns = [re.escape(row).replace("<name>", ".+").replace("<k>", "[0-9]+") for row in rows]
    return re.compile("|".join(patterns)).fullmatch
