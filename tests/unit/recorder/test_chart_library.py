"""The chart library is bundled once an environment, and pages are made where nothing can be kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from beamline.coordinator.report.chart_library import KEPT_IN, chart_library, kept


@pytest.fixture
def make() -> Callable[[], str]:
    """Another text at each call."""
    made = map("bundle {}".format, range(9))
    return lambda: next(made)


def test_it_is_made_once(tmp_path: Path, make: Callable[[], str]) -> None:
    path = tmp_path / "share" / "charts-1.js"
    assert [kept(path, make), kept(path, make)] == ["bundle 0", "bundle 0"]
    assert [file.name for file in path.parent.iterdir()] == ["charts-1.js"], "nothing half-made is left"


def test_another_version_is_made_anew(tmp_path: Path, make: Callable[[], str]) -> None:
    assert kept(tmp_path / "charts-1.js", make) != kept(tmp_path / "charts-2.js", make)


def test_where_it_cannot_be_kept_it_is_made_each_time(tmp_path: Path, make: Callable[[], str]) -> None:
    (tmp_path / "share").touch()  # not a folder: no file can be written there, not even by root
    path = tmp_path / "share" / "charts-1.js"
    assert [kept(path, make), kept(path, make)] == ["bundle 0", "bundle 1"]


def test_what_is_kept_is_the_library() -> None:
    library = chart_library()
    assert "vegaEmbed" in library
    assert [path.read_text(encoding="utf-8") for path in KEPT_IN.glob("charts-*.js")].count(library) == 1
