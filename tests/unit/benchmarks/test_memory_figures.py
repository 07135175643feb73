"""What a rank's bytes say: the share of the adapters, and a table a user reads."""

import msgspec
import pytest
from benchmarks.memory_figures import (
    BEAM,
    KEY_LAYOUT,
    Case,
    CaseMemory,
    MemoryFigures,
    RankMemory,
    figures_of,
    rows,
    table,
)

from beamline.protocol.config import ParallelSection
from beamline.protocol.lora_config import LoraSection

LORA = LoraSection(rank=64, normalize_moe_lora=True)
GIB = 2**30


def memory(case: Case, *ranks: tuple[int, int, int, int]) -> CaseMemory:
    """Stage, then GiB of parameters, gradients and optimizer of each rank."""
    return CaseMemory(
        case=case,
        ranks=[
            RankMemory(
                rank=number,
                stage=stage,
                parameter_bytes=parameters * GIB,
                gradient_bytes=gradients * GIB,
                optimizer_bytes=optimizer * GIB,
            )
            for number, (stage, parameters, gradients, optimizer) in enumerate(ranks)
        ],
    )


FROZEN = memory(Case(model=BEAM, parallel=KEY_LAYOUT, lora=LORA), (0, 60, 1, 2), (0, 60, 1, 1), (1, 64, 1, 3))
FULL = memory(Case(model=BEAM, parallel=KEY_LAYOUT), (0, 60, 120, 360), (1, 62, 100, 300))
TINY = memory(Case(model="asset:tiny-beam"), (0, 1, 1, 1))


def test_the_share_is_that_of_the_rank_that_holds_most():
    figures = figures_of([FROZEN, FULL, TINY], [TINY])
    assert figures.lora_state_share == pytest.approx((1 + 3) / (120 + 360))
    assert msgspec.convert(msgspec.to_builtins(figures), MemoryFigures) == figures


def test_what_real_ranks_do_not_hold_is_an_error():
    heavier = memory(TINY.case, (0, 1, 1, 2))
    with pytest.raises(ValueError, match=r"ranks hold .*2147483648.*computed were .*1073741824"):
        figures_of([FROZEN, FULL, TINY], [heavier])


@pytest.mark.parametrize("left", [[FROZEN], [FULL], []])
def test_without_beam_there_is_no_figure(left: list[CaseMemory]):
    with pytest.raises(ValueError, match="is needed with adapters and without"):
        figures_of([*left, TINY], [TINY])


def test_the_table_has_a_line_for_every_stage():
    assert table([FROZEN, FULL])[1:] == [
        (BEAM, "LoRA 64, experts normalised", "TP4 EP8 PP2", "3", "0", "60.0 GiB", "1.0 GiB", "2.0 GiB", "63.0 GiB"),
        (BEAM, "LoRA 64, experts normalised", "TP4 EP8 PP2", "3", "1", "64.0 GiB", "1.0 GiB", "3.0 GiB", "68.0 GiB"),
        (BEAM, "all weights", "TP4 EP8 PP2", "2", "0", "60.0 GiB", "120.0 GiB", "360.0 GiB", "540.0 GiB"),
        (BEAM, "all weights", "TP4 EP8 PP2", "2", "1", "62.0 GiB", "100.0 GiB", "300.0 GiB", "462.0 GiB"),
    ]


def test_the_summary_shows_beam_and_the_heaviest_rank():
    (name, share, goal), *lines = rows(figures_of([FROZEN, FULL, TINY], [TINY]))
    assert (name, share) == ("lora_state_share", "0.8%") and "goal: at most 5%" in goal
    assert [line[:2] for line in lines] == [
        ("  LoRA 64, experts normalised, 3 ranks", "68.0 GiB"),
        ("  all weights, 2 ranks", "540.0 GiB"),
    ]
    assert lines[1][2] == (
        "rank 0 at TP4 EP8 PP2: parameters 60.0 GiB, gradients 120.0 GiB, optimizer 360.0 GiB; 1,002.0 GiB in all"
    )


@pytest.mark.parametrize(
    ("parallel", "name"),
    [(ParallelSection(data=4), "whole"), (ParallelSection(tensor=2, data=2), "TP2"), (KEY_LAYOUT, "TP4 EP8 PP2")],
)
def test_a_layout_is_called_by_how_the_model_is_cut(parallel: ParallelSection, name: str):
    assert Case(model=BEAM, parallel=parallel).layout == name
