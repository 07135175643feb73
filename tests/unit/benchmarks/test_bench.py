"""The benchmark's parts: each can be named alone, and what each writes is described."""

import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.bench import PARTS, main
from benchmarks.disk_figures import DiskFigures
from benchmarks.figures import Figures
from benchmarks.fused_logprob import FusedFigures
from benchmarks.memory_figures import MemoryFigures
from benchmarks.slot_figures import SlotFigures
from benchmarks.swap_figures import SwapFigures

DOCS = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_named_in_the_docs(part: str):
    assert f"`{part}`" in DOCS


@pytest.mark.parametrize("figures", [Figures, FusedFigures, DiskFigures, MemoryFigures, SlotFigures, SwapFigures])
def test_every_key_of_the_summary_is_described(figures: type[msgspec.Struct]):
    assert [name for name in figures.__struct_fields__ if f"`{name}`" not in DOCS] == []


def test_a_part_that_is_none_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["bench", "wieghts"])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert "no part is called 'wieghts'" in said and "weights" in said
