"""The trainer's models against transformers' own, in float32, in every layout that two ranks allow.

The references come from `tests/reference/make_references.py`. Norms, biases and expert biases are random, so
nothing passes by being one or zero.
"""

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
DEADLINE_S = 240
TWO_RANKS = ("tp2", "ep2", "pp2", "tp2ep2")
Outputs = dict[str, dict[str, torch.Tensor]]


def run_ranks(model: str, layouts: tuple[str, ...], world_size: int, directory: Path) -> Outputs:
    """Outputs by layout; logprobs of all ranks' rows put together, the rest as rank 0 has it."""
    tiny.build(tiny.SPECS[model], directory / "model", seed=SEED, randomise=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [
        sys.executable,
        str(HERE / "trainer_rank.py"),
        "--model",
        str(directory / "model"),
        "--into",
        str(directory),
    ]
    common += ["--reference", str(HERE / "references" / f"{model}.safetensors"), "--layouts", ",".join(layouts)]
    common += ["--world-size", str(world_size), "--port", str(port), "--rank"]
    processes = [subprocess.Popen([*common, str(rank)]) for rank in range(world_size)]
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size
    return {layout: _merge(directory, layout, world_size) for layout in layouts}


def _merge(directory: Path, layout: str, world_size: int) -> dict[str, torch.Tensor]:
    parts = [load_file(directory / f"{layout}.{rank}.safetensors") for rank in range(world_size)]
    num_rows = 1 + max(int(part["rows"].max()) for part in parts)
    logprobs = torch.full((num_rows, parts[0]["logprobs"].shape[1]), torch.nan)
    for part in parts:
        logprobs[part["rows"]] = part["logprobs"]
    return {**parts[0], "logprobs": logprobs}


@pytest.fixture(scope="module")
def beam(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return run_ranks("tiny-beam", TWO_RANKS, 2, tmp_path_factory.mktemp("beam"))


@pytest.fixture(scope="module")
def beam_alone(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return run_ranks("tiny-beam", ("one",), 1, tmp_path_factory.mktemp("beam_alone"))


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return run_ranks("tiny-qwen3-moe", ("tp2ep2", "pp2"), 2, tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def qwen3_moe_alone(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return run_ranks("tiny-qwen3-moe", ("one",), 1, tmp_path_factory.mktemp("qwen3_moe_alone"))


def check(model: str, found: dict[str, torch.Tensor], directory_seed: int = SEED) -> None:
    reference = load_file(HERE / "references" / f"{model}.safetensors")
    torch.testing.assert_close(found["logprobs"], reference["logprobs"], rtol=0, atol=1e-4)
    names = [name for name in reference if name.startswith("grad.")]
    assert len(names) >= 10
    for name in names:
        gap = (found[name] - reference[name]).norm() / reference[name].norm()
        assert gap < 1e-4, f"{name}: relative gradient gap {gap:.2e}"


def check_export(model: str, found: dict[str, torch.Tensor], directory: Path) -> None:
    tiny.build(tiny.SPECS[model], directory, seed=SEED, randomise=True)
    stored = load_file(directory / "model.safetensors")
    exported = {name.removeprefix("export."): tensor for name, tensor in found.items() if name.startswith("export.")}
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name


def check_norm(found: dict[str, torch.Tensor]) -> None:
    """Every parameter counted once: the norm over ranks is that of the whole gradient."""
    whole = torch.stack([t.double().square().sum() for name, t in found.items() if _is_parameter_gradient(name)]).sum()
    assert found["grad_norm"].item() == pytest.approx(whole.sqrt().item(), rel=1e-5)


def _is_parameter_gradient(name: str) -> bool:
    return name.startswith("grad.") and not name.endswith("e_score_correction_bias")


def test_beam_on_one_rank(beam_alone: Outputs, tmp_path: Path) -> None:
    check("tiny-beam", beam_alone["one"])
    check_export("tiny-beam", beam_alone["one"], tmp_path)
    check_norm(beam_alone["one"])


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_beam_on_two_ranks(beam: Outputs, layout: str, tmp_path: Path) -> None:
    check("tiny-beam", beam[layout])
    check_export("tiny-beam", beam[layout], tmp_path)
    check_norm(beam[layout])


def test_qwen3_moe_on_one_rank(qwen3_moe_alone: Outputs, tmp_path: Path) -> None:
    check("tiny-qwen3-moe", qwen3_moe_alone["one"])
    check_export("tiny-qwen3-moe", qwen3_moe_alone["one"], tmp_path)
    check_norm(qwen3_moe_alone["one"])


@pytest.mark.parametrize("layout", ["tp2ep2", "pp2"])
def test_qwen3_moe_on_two_ranks(qwen3_moe: Outputs, layout: str, tmp_path: Path) -> None:
    check("tiny-qwen3-moe", qwen3_moe[layout])
    check_export("tiny-qwen3-moe", qwen3_moe[layout], tmp_path)
    check_norm(qwen3_moe[layout])
