"""Importing an engine: no collection meanwhile, none of what came later, and the collector as it was."""

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.runtime.heavy_import import import_heavy

NUM_OBJECTS = 200_000


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that brings enough objects for many collections."""
    (tmp_path / "brings_much.py").write_text(f"OBJECTS = [[] for _ in range({NUM_OBJECTS})]\n")
    (tmp_path / "broken.py").write_text("raise ImportError('planted')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "brings_much"
    gc.unfreeze()
    sys.modules.pop("brings_much", None)


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The collections that begin from now on."""
    begun: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(note)
    yield begun
    gc.callbacks.remove(note)


def test_an_ordinary_import_of_the_module_is_collected(name: str, collections: list[str]) -> None:
    importlib.import_module(name)
    assert collections


def test_no_collection_looks_at_it(name: str, collections: list[str]) -> None:
    gc.unfreeze()
    module = import_heavy(name)
    assert not collections
    assert gc.isenabled()
    assert gc.get_freeze_count() >= NUM_OBJECTS and len(module.OBJECTS) == NUM_OBJECTS


def test_the_collector_comes_back_after_an_error(name: str) -> None:
    assert name
    with pytest.raises(ImportError, match="planted"):
        import_heavy("broken")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(name: str) -> None:
    gc.disable()
    try:
        import_heavy(name)
        assert not gc.isenabled()
    finally:
        gc.enable()
