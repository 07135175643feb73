"""Adapters in the trainer against transformers' own models with the adapters merged, in float32, in every layout that
two ranks allow: every kind of adapter, what is exported, what an update does, and what must not pass.

The references come from `tests/reference/make_lora_references.py`. Every matrix differs from every other, and none is
zero, so that nothing passes by being in another's place.
"""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from beamline.models import tiny
from beamline.protocol.adapter import Adapter, adapters_of, shares_a
from lora_variants import ALL
from made_adapters import made

HERE = Path(__file__).parent
WORLD_SIZE = 2
SEED = 7
DEADLINE_S = 300
STATE_BYTES = 12
MODELS = ("tiny-beam", "tiny-qwen3-moe")
LAYOUTS = ("dp2", "tp2", "ep2", "pp2", "tp2ep2")
"""Each rank of the first has the whole model."""
SOME = ("norm-alpha2", "split-norm-alpha2")
VARIANTS = {
    **{f"tiny-beam:{layout}": tuple(ALL) for layout in LAYOUTS},
    **{f"tiny-qwen3-moe:{layout}:some": SOME for layout in LAYOUTS[:-1]},
    "tiny-qwen3-moe:tp2ep2": tuple(ALL),
}
"""Of each job."""
WHOLE = tuple(VARIANTS)
RECOMPUTED = ("tiny-beam:tp2ep2:recompute", "tiny-qwen3-moe:pp2:recompute")
REGATHERED, FAULTY = "tiny-beam:tp2:regather", "tiny-beam:ep2:faults"
ONE = "norm-alpha2"
FAULTS = {
    "scale-off-by-top-k": ONE,
    "experts-by-local-number": ONE,
    "one-a-for-q-k-v": "split-norm-alpha2",
    "gate-left-out": ONE,
}
"""What `lora_rank.py` plants, and in which variant."""
CASES = [(job, variant) for job in WHOLE for variant in VARIANTS[job]] + [(job, ONE) for job in RECOMPUTED]
Tensors = dict[str, torch.Tensor]


def adapters_for(model: str, variant: str) -> list[Adapter]:
    spec = tiny.SPECS[model]
    return adapters_of(dict(spec.shapes()), ALL[variant], spec.num_experts_per_tok)


def owner_of(adapter: Adapter) -> tuple[str, str] | str:
    """What has an A: a matrix of a layer or of an expert, or a module by itself."""
    layer = adapter.module.rpartition(".")[0]
    return (layer, adapter.target) if shares_a(adapter) else adapter.module


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensors]]:
    """What every rank has found, by job."""
    directory = tmp_path_factory.mktemp("lora")
    for model in MODELS:
        tiny.build(tiny.SPECS[model], directory / model, seed=SEED, randomise=True)
        for variant in ALL:
            folder = directory / f"{model}-{variant}"
            folder.mkdir()
            save_file(made(adapters_for(model, variant)), folder / "adapters.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = (*WHOLE, *RECOMPUTED, REGATHERED, FAULTY)
    command = [sys.executable, str(HERE / "lora_rank.py"), "--references", str(HERE / "references")]
    command += ["--into", str(directory), "--world-size", str(WORLD_SIZE), "--port", str(port), *jobs, "--rank"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "support")}
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORLD_SIZE)]
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * WORLD_SIZE
    files = {job: [directory / f"{job}.{rank}.safetensors" for rank in range(WORLD_SIZE)] for job in jobs}
    return {job: [load_file(path) for path in paths] for job, paths in files.items()}


def reference_of(model: str, variant: str) -> Tensors:
    """Without the variant's name."""
    stored = load_file(HERE / "references" / f"{model}-lora.safetensors")
    return {name.removeprefix(f"{variant}."): found for name, found in stored.items() if name.startswith(f"{variant}.")}


def rows_of(parts: list[Tensors], name: str) -> torch.Tensor:
    """Of all ranks, put together."""
    found = torch.full((1 + max(int(part["rows"].max()) for part in parts), parts[0][name].shape[1]), torch.nan)
    for part in parts:
        found[part["rows"]] = part[name]
    return found


def check_logprobs(found: torch.Tensor, reference: Tensors) -> None:
    torch.testing.assert_close(found, reference["logprobs"], rtol=0, atol=1e-4)
    assert (found - reference["logprobs"]).abs().mean() < 1e-5
    torch.testing.assert_close(-found.mean(), reference["loss"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("job", "variant"), CASES)
def test_it_is_the_model_with_the_adapters_merged(ranks: dict[str, list[Tensors]], job: str, variant: str) -> None:
    model, reference = job.split(":", maxsplit=1)[0], reference_of(job.split(":", maxsplit=1)[0], variant)
    parts = ranks[job]
    check_logprobs(rows_of(parts, f"{variant}.logprobs"), reference)
    adapters, found = adapters_for(model, variant), parts[0]
    expected: dict[object, torch.Tensor] = {}
    for adapter in adapters:
        if f"grad.{adapter.b}" in reference:
            expected[adapter.b] = reference[f"grad.{adapter.b}"]
            expected[owner_of(adapter)] = expected.get(owner_of(adapter), 0) + reference[f"grad.{adapter.a}"]
    assert len(expected) >= 10
    squares: dict[object, float] = {}
    for adapter in adapters:
        for key, name in ((owner_of(adapter), adapter.a), (adapter.b, adapter.b)):
            gradient = found[f"{variant}.grad.{name}"]
            squares[key] = gradient.double().square().sum().item()
            if key in expected:
                gap = (gradient - expected[key]).norm() / expected[key].norm()
                assert gap < 1e-4, f"{name}: relative gradient gap {gap:.2e}"
    assert found[f"{variant}.grad_norm"].item() == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)


@pytest.mark.parametrize("job", WHOLE)
def test_all_ranks_shards_are_what_was_loaded(ranks: dict[str, list[Tensors]], job: str) -> None:
    """Under every name, bit for bit, gathered and as an engine reads them."""
    for variant in VARIANTS[job]:
        assert [int(part[f"{variant}.wrong.export"]) for part in ranks[job]] == [0] * WORLD_SIZE
        assert int(ranks[job][0][f"{variant}.wrong.shards"]) == 0


@pytest.mark.parametrize("job", WHOLE)
def test_the_base_does_not_change_and_is_the_reference(ranks: dict[str, list[Tensors]], job: str) -> None:
    """After updates too; and the reference policy is the model without adapters, which its own reference file holds."""
    stored = load_file(HERE / "references" / f"{job.split(':', maxsplit=1)[0]}.safetensors")["logprobs"]
    assert [int(part["wrong.base"]) for part in ranks[job]] == [0] * WORLD_SIZE
    torch.testing.assert_close(rows_of(ranks[job], f"{ONE}.reference"), stored, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_adapters_begin_alike_in_every_layout(ranks: dict[str, list[Tensors]], model: str) -> None:
    jobs = [job for job in WHOLE if job.startswith(model)]
    first = {name: found for name, found in ranks[jobs[0]][0].items() if name.startswith("start.")}
    for job in jobs:
        for part in ranks[job]:
            assert all(torch.equal(part[name], found) for name, found in first.items())
    owners: dict[object, torch.Tensor] = {}
    for adapter in adapters_for(model, ONE):
        a, b = first[f"start.{adapter.a}"], first[f"start.{adapter.b}"]
        assert torch.equal(owners.setdefault(owner_of(adapter), a), a) and not b.any()
        bound = adapter.in_features**-0.5
        assert 0.9 * bound < a.abs().max() <= bound and a.abs().mean() == pytest.approx(bound / 2, rel=0.2)
    assert len({tuple(a.flatten()[:4].tolist()) for a in owners.values()}) == len(owners)


@pytest.mark.parametrize("model", MODELS)
def test_updates_are_alike_in_every_layout(ranks: dict[str, list[Tensors]], model: str) -> None:
    """And some rank keeps the state of every element, and none does twice."""
    adapters = adapters_for(model, ONE)
    loaded = {name: torch.from_numpy(values) for name, values in made(adapters).items()}
    sizes = {owner_of(adapter): loaded[adapter.a].numel() for adapter in adapters}
    num_elements = sum(sizes.values()) + sum(loaded[adapter.b].numel() for adapter in adapters)
    jobs = [job for job in WHOLE if job.startswith(model)]
    alone = ranks[jobs[0]][0]
    for job in jobs:
        parts = ranks[job]
        for name, values in loaded.items():
            expected, found = (
                alone[f"{ONE}.stepped.{name}"] - values,
                parts[0][f"{ONE}.stepped.{name}"] - values,
            )
            assert (found - expected).norm() < 1e-3 * expected.norm(), (job, name)
        assert sum(int(part[f"{ONE}.state_bytes"]) for part in parts) == STATE_BYTES * num_elements


def test_regathered_inputs_give_the_same_gradients_and_are_not_kept(ranks: dict[str, list[Tensors]]) -> None:
    """Of the layers that Megatron-Bridge regathers for, query-key-value and dense first ones: half of the rows each."""
    spec = tiny.TINY_BEAM
    num_tokens = load_file(HERE / "references/tiny-beam-lora.safetensors")["tokens"].shape[1]
    saved = (spec.num_layers + spec.num_dense_layers) * num_tokens // 2 * spec.hidden_size * 4
    for part in ranks[REGATHERED]:
        names = [name.removeprefix("off.") for name in part if name.startswith("off.grad.")]
        assert len(names) > 100
        assert all(torch.equal(part[f"off.{name}"], part[f"on.{name}"]) for name in names)
        assert int(part["off.bytes"]) - int(part["on.bytes"]) == saved


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(ranks: dict[str, list[Tensors]], fault: str) -> None:
    reference = reference_of("tiny-beam", FAULTS[fault])
    with pytest.raises(AssertionError):
        check_logprobs(rows_of(ranks[FAULTY], f"{fault}.logprobs"), reference)
