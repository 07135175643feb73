"""What the benchmark computes of a rank's memory: what real ranks hold to the byte; for Beam, what its shapes say."""

import json
from math import prod
from pathlib import Path

import pytest
from benchmarks.lora_memory import BEAM_CASES, TINY_CASES, compute, main, measure, recipe_cases
from benchmarks.memory_figures import BEAM, CaseMemory, figures_of
from benchmarks.model_shapes import shapes_of

from beamline.models import tiny
from beamline.protocol.adapter import adapters_of, shares_a

LEARNT_BYTES = 12
"""Of a bfloat16 parameter: float32 main weight and both moments."""
OWN_MAIN_BYTES = 8
"""Of a float32 one, which is its own main weight."""


@pytest.fixture(scope="module")
def beam() -> list[CaseMemory]:
    """Two nodes with adapters, and all weights on two nodes and on eight."""
    return compute([case for case in BEAM_CASES if case.parallel.data == 2 or not case.lora.is_on])


def test_real_ranks_hold_what_was_computed(beam: list[CaseMemory], tmp_path: Path):
    """Parameters, gradients after a backward pass, and optimizer state; one rank, TP2, EP2 and PP2, adapters or all."""
    tiny_ones = compute(TINY_CASES)
    measured = measure(TINY_CASES, tmp_path)
    assert [len(found.ranks) for found in measured] == [case.parallel.world_size for case in TINY_CASES]
    assert tiny_ones == measured
    figures = figures_of([*beam, *tiny_ones], measured)
    assert figures.lora_state_share < 0.05
    frozen, full = measured[:2]
    assert 0 < frozen.ranks[0].state_bytes < 0.3 * full.ranks[0].state_bytes


def test_a_rank_that_holds_something_else_is_told(beam: list[CaseMemory]):
    one = CaseMemory(case=TINY_CASES[0], ranks=beam[0].ranks[:1])
    other = CaseMemory(case=TINY_CASES[0], ranks=beam[0].ranks[1:2])
    with pytest.raises(ValueError, match="ranks hold"):
        figures_of([*beam, one], [other])


def is_replicated(name: str) -> bool:
    """Whether every tensor-parallel rank holds all of it, and keeps its state."""
    return "norm" in name or ".mlp.gate." in name


def test_all_ranks_of_beam_hold_its_shapes_between_them(beam: list[CaseMemory]):
    """Full fine-tuning: every weight's state once, but for norms and routers, of which TP4 has four."""
    shapes = {name: s for name, s in shapes_of(BEAM).tensors.items() if "e_score_correction_bias" not in name}
    assert sum(prod(shape) for shape in shapes.values()) == pytest.approx(501e9, rel=0.01)
    expected = sum(
        prod(shape) * (OWN_MAIN_BYTES if ".mlp.gate." in name else LEARNT_BYTES) * (4 if is_replicated(name) else 1)
        for name, shape in shapes.items()
    )
    for found in beam:
        if not found.case.lora.is_on:
            assert sum(rank.optimizer_bytes for rank in found.ranks) == expected
    eight_nodes = beam[-1].ranks
    assert len(eight_nodes) == 64 and {rank.stage for rank in eight_nodes} == {0, 1, 2, 3}


def test_adapters_of_beam_are_all_that_is_trained(beam: list[CaseMemory]):
    """And they are held once: neither tensor nor expert parallelism replicates one."""
    two_nodes, full, _ = beam
    adapters = adapters_of(shapes_of(BEAM).tensors, two_nodes.case.lora, top_k=8)
    assert {adapter.rank for adapter in adapters} == {64, 8}
    shared = {(a.module.rpartition(".")[0], a.target): a.rank * a.in_features for a in adapters if shares_a(a)}
    num_values = sum(shared.values()) + sum(
        a.rank * (a.out_features + (0 if shares_a(a) else a.in_features)) for a in adapters
    )
    assert sum(rank.optimizer_bytes for rank in two_nodes.ranks) == LEARNT_BYTES * num_values
    for frozen, learnt in zip(two_nodes.ranks, full.ranks, strict=True):
        assert frozen.gradient_bytes < 0.01 * learnt.gradient_bytes
        assert 0 < frozen.parameter_bytes - learnt.parameter_bytes == frozen.gradient_bytes / 2  # in bfloat16


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["model.path=reflection/Bean"], ["model.path='reflection/Bean'", BEAM, "asset:tiny-beam"]),
        (["trainer.parallel.tensor=3"], ["trainer.parallel.tensor=3", "num_attention_heads", "4"]),
        (["trainer.parallel.expert=32"], ["trainer.parallel.expert=32", "16"]),
        (["trainer.parallel.tensr=2"], ["trainer.parallel.tensr", "trainer.parallel.tensor"]),
        (["model.lora.rank=6", "model.lora.normalize_moe_lora=true"], ["model.lora.rank=6", "num_experts_per_tok=4"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(capsys: pytest.CaptureFixture[str], overrides: list[str], texts: list[str]):
    assert main(["--recipe", "tiny-beam", *overrides]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in texts), said


def test_a_recipe_is_shown_beside_full_fine_tuning(capsys: pytest.CaptureFixture[str]):
    overrides = ["trainer.parallel.pipeline=2", "model.lora.rank=8"]
    assert main(["--recipe", "tiny-qwen3-moe", *overrides]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["model", "trained", "layout", "ranks", "stage"]
    assert [line.split("  ")[1] for line in lines] == ["LoRA 8", "LoRA 8", "all weights", "all weights"]
    assert main(["--recipe", "tiny-qwen3-moe", *overrides, "--json"]) == 0
    assert [len(case["ranks"]) for case in json.loads(capsys.readouterr().out)] == [2, 2]


def test_a_model_of_the_users_own_needs_its_config_alone(tmp_path: Path):
    tiny.write_description(tiny.TINY_BEAM, tmp_path, "bfloat16")
    (case,) = recipe_cases(
        "tiny-beam", [f"model.path={tmp_path}", "trainer.parallel.expert=2", "trainer.parallel.data=2"]
    )
    (own,), (asset,) = compute([case]), compute([TINY_CASES[-1]])
    assert (own.case.layout, asset.case.layout) == ("EP2", "whole")
    assert own.heaviest.gradient_bytes < asset.heaviest.gradient_bytes
