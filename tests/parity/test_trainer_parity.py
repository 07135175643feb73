"""The trainer's models against transformers' own, in float32, in every layout that two ranks allow: with its own
routes, with the reference's replayed, and recomputing every layer.

The references come from `tests/reference/make_references.py`. Norms, biases and expert biases are random, so
nothing passes by being one or zero.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from beamline.models import tiny

HERE = Path(__file__).parent
SEED = 7
DEADLINE_S = 300
MODELS = ("tiny-beam", "tiny-qwen3-moe")
ALONE = tuple(f"{model}:alone" for model in MODELS)
TWO_RANKS = tuple(f"tiny-beam:{layout}" for layout in ("dp2", "tp2", "ep2", "pp2", "tp2ep2")) + tuple(
    f"tiny-qwen3-moe:{layout}" for layout in ("tp2ep2", "pp2")
)
EXPORTS = (*(f"tiny-qwen3-moe:{layout}:exports" for layout in ("dp2", "tp2", "ep2")), "tiny-beam:tp2ep2:bfloat16")
RECOMPUTED = ("tiny-beam:tp2ep2:recompute", "tiny-beam:pp2:recompute", "tiny-qwen3-moe:pp2:recompute")
Tensors = dict[str, torch.Tensor]


def run_ranks(jobs: tuple[str, ...], world_size: int, directory: Path) -> dict[str, Tensors]:
    """Outputs by job; log-probabilities of all ranks' rows put together, the rest as rank 0 has it."""
    for model in MODELS:
        tiny.build(tiny.SPECS[model], directory / model, seed=SEED, randomise=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [sys.executable, str(HERE / "trainer_rank.py"), "--references", str(HERE / "references")]
    common += ["--into", str(directory), "--world-size", str(world_size), "--port", str(port), *jobs, "--rank"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "support")}
    processes = [subprocess.Popen([*common, str(rank)], env=environment) for rank in range(world_size)]
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size
    return {job: _merge(directory, job, world_size) for job in jobs}


def _merge(directory: Path, job: str, world_size: int) -> Tensors:
    parts = [load_file(directory / f"{job}.{rank}.safetensors") for rank in range(world_size)]
    if job in EXPORTS:
        return parts[0]
    num_rows = 1 + max(int(part["rows"].max()) for part in parts)
    merged = dict(parts[0])
    for name in ("logprobs", "replayed.logprobs", "shifted.logprobs"):
        merged[name] = torch.full((num_rows, parts[0][name].shape[1]), torch.nan)
        for part in parts:
            merged[name][part["rows"]] = part[name]
    return merged


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    return run_ranks(ALONE, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    return run_ranks(TWO_RANKS + RECOMPUTED + EXPORTS, 2, tmp_path_factory.mktemp("together"))


def check(job: str, found: Tensors, directory: Path) -> None:
    model = job.split(":", maxsplit=1)[0]
    reference = load_file(HERE / "references" / f"{model}.safetensors")
    names = [name for name in reference if name.startswith("grad.")]
    assert len(names) >= 10
    for routes in ("", "replayed."):
        torch.testing.assert_close(found[f"{routes}logprobs"], reference["logprobs"], rtol=0, atol=1e-4)
        for name in names:
            gap = (found[f"{routes}{name}"] - reference[name]).norm() / reference[name].norm()
            assert gap < 1e-4, f"{routes}{name}: relative gradient gap {gap:.2e}"
    check_export(model, found, directory)
    check_norm(found)


def check_export(model: str, found: Tensors, directory: Path) -> None:
    """What was loaded comes out again, bit by bit, under every name."""
    tiny.build(tiny.SPECS[model], directory, seed=SEED, randomise=True)
    stored = load_file(directory / "model.safetensors")
    exported = {name.removeprefix("export."): tensor for name, tensor in found.items() if name.startswith("export.")}
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name


def check_norm(found: Tensors) -> None:
    """Every parameter is counted once: the norm over the ranks is that of the whole gradient."""
    squares = [t.double().square().sum() for name, t in found.items() if _is_parameter_gradient(name)]
    assert found["grad_norm"].item() == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-5)


def _is_parameter_gradient(name: str) -> bool:
    return name.startswith("grad.") and not name.endswith("e_score_correction_bias")


@pytest.mark.parametrize("job", ALONE)
def test_on_one_rank(alone: dict[str, Tensors], job: str, tmp_path: Path) -> None:
    check(job, alone[job], tmp_path)


@pytest.mark.parametrize("job", TWO_RANKS + RECOMPUTED)
def test_on_two_ranks(together: dict[str, Tensors], job: str, tmp_path: Path) -> None:
    check(job, together[job], tmp_path)


@pytest.mark.parametrize("job", TWO_RANKS + RECOMPUTED)
def test_other_routes_are_replayed_alike(alone: dict[str, Tensors], together: dict[str, Tensors], job: str) -> None:
    """Shifted by one expert they give other log-probabilities, the same ones in every layout."""
    expected = alone[f"{job.split(':', maxsplit=1)[0]}:alone"]
    torch.testing.assert_close(together[job]["shifted.logprobs"], expected["shifted.logprobs"], rtol=0, atol=1e-4)
    assert (expected["shifted.logprobs"] - expected["logprobs"]).abs().mean() > 0.05


@pytest.mark.parametrize("job", ALONE + TWO_RANKS + EXPORTS)
def test_what_readers_find_in_all_ranks_shards_is_what_the_bridge_gathers(
    alone: dict[str, Tensors], together: dict[str, Tensors], job: str
) -> None:
    """Bit for bit, under every name, of two policies, for engines on one and on two ranks."""
    found = (alone | together)[job]
    expected = len(
        [name for name in alone[ALONE[MODELS.index(job.split(":", maxsplit=1)[0])]] if name.startswith("export.")]
    )
    for policy in ("moved", "loaded"):
        for cuts in (1, 2):
            assert found[f"exports.{policy}.{cuts}"].tolist() == [expected, 0], (policy, cuts)
