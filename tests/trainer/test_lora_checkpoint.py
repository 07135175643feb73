"""Checkpoints of adapters by the real engine: what stops and goes on is what never stopped, in every layout."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapter_checkpoints import adapters_with
from beamline.models import tiny
from beamline.protocol.adapter import adapter_shapes
from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.adapter_files import AdapterFiles
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from lora_ranks import JOBS, LAST, LORA, MODELS, SAVED, TP1, straight

pytest_plugins = ("trainer_engine",)

SUPPORT = Path(__file__).parents[1] / "support"
DEADLINE_S = 120
GATE = "model.layers.2.mlp.experts.5.gate_proj"

type Findings = dict[str, dict]


def run_ranks(into: Path, part: str, world_size: int) -> Findings:
    """Of one part of `lora_ranks`, in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("--into", str(into), "--world-size", str(world_size), "--port", str(port))
    command = [sys.executable, str(SUPPORT / "lora_ranks.py"), part, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(world_size)]
    try:
        codes = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world_size
    return json.loads((into / f"{part}.{world_size}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("adapters")
    for name in MODELS.values():
        tiny.build(tiny.SPECS[name], into / name, seed=7, randomise=True)
    return into


@pytest.fixture(scope="module", params=JOBS)
def both(work: Path, one_rank: None, request: pytest.FixtureRequest) -> tuple[int, Findings, Findings]:
    """Number of ranks; what the run without a stop found, and the run that stopped. One rank alone begins in here."""
    num_ranks: int = request.param
    first = {TP1: straight(work, TP1, Layout())} if num_ranks == 1 else run_ranks(work, "straight", num_ranks)
    return num_ranks, first, run_ranks(work, "resumed", num_ranks)


def test_a_run_that_stops_and_goes_on_is_one_that_never_stopped(both: tuple[int, Findings, Findings], work: Path):
    """To the bit: losses, norms, adapters, and all that the last checkpoint holds."""
    num_ranks, whole, stopped = both
    name = JOBS[num_ranks][0]
    assert stopped[name]["next loss"] == whole[name]["next loss"]
    assert stopped[name]["steps"] == whole[name]["steps"][SAVED:] and len(whole[name]["steps"]) == LAST
    before, after = (load_file(work / f"{part}.{name}.safetensors") for part in ("straight", "resumed"))
    assert before.keys() == after.keys() == adapter_shapes(adapters_with(MODELS[num_ranks], LORA[num_ranks])).keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    assert all(tensor.count_nonzero() for tensor in before.values()), "every adapter has learned something"
    ends = [work / f"end.{part}.{name}" for part in ("straight", "resumed")]
    files = [sorted(path.relative_to(end) for path in end.rglob("*") if path.is_file()) for end in ends]
    assert files[0] == files[1]
    assert all((ends[0] / file).read_bytes() == (ends[1] / file).read_bytes() for file in files[0])


def test_another_layout_goes_on_with_the_same_adapters(both: tuple[int, Findings, Findings], work: Path):
    num_ranks, whole, stopped = both
    source, *others = JOBS[num_ranks]
    for layout in others:
        assert stopped[layout]["next loss"] == pytest.approx(whole[source]["next loss"], abs=1e-6)
        for metric, value in whole[source]["steps"][SAVED].items():
            assert stopped[layout]["steps"][0][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), (layout, metric)


def test_what_lies_in_a_checkpoint_is_what_is_trained(both: tuple[int, Findings, Findings], work: Path):
    """The end of the run, read from its files with numpy alone; the base is not among them."""
    num_ranks, *_ = both
    name = JOBS[num_ranks][0]
    files = AdapterFiles(work / f"end.straight.{name}" / "adapter")
    files.check(adapters_with(MODELS[num_ranks], LORA[num_ranks]))
    for tensor, values in load_file(work / f"straight.{name}.safetensors").items():
        assert torch.equal(torch.from_numpy(files.read(tensor)), values), tensor
    slots = (work / f"end.straight.{name}" / "optimizer" / "rank-00000.slots.json").read_text()
    assert "lora_A" in slots and "embed_tokens" not in slots


def policy_with(model_dir: Path, lora: LoraSection | None, dtype: str = "float32") -> MegatronPolicy:
    return MegatronPolicy(build_model(model_dir, Layout(), dtype, lora=lora), AdamWSettings(), 1.0)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_adapters_is_small_and_refuses_others(model_dir: Path, tmp_path: Path):
    policy = policy_with(model_dir, LORA[2])
    policy.save(tmp_path / "adapters")
    policy_with(model_dir, None).save(tmp_path / "all")
    assert num_bytes(tmp_path / "adapters") < 0.25 * num_bytes(tmp_path / "all")
    before = {name: tensor.clone() for name, tensor in policy.export()}
    for rank, normalized, shapes in (
        (16, True, r"\[8, 128\], expected \[16, 128\]"),
        (8, False, r".*, expected \[8, "),
    ):
        other = policy_with(model_dir, LoraSection(rank=rank, normalize_moe_lora=normalized))
        with pytest.raises(WeightError, match=f"adapter has shape {shapes}"):
            other.load(tmp_path / "adapters")
    with pytest.raises(WeightError, match=r"policy has no tensor"):
        policy_with(model_dir, None).load(tmp_path / "adapters")
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.export())


@pytest.mark.usefixtures("one_rank")
def test_adapters_in_bfloat16_come_back_to_the_bit(model_dir: Path, tmp_path: Path):
    policy, generator = policy_with(model_dir, LORA[2], "bfloat16"), torch.Generator().manual_seed(1)
    for parameter in (p for p in policy._model.module.parameters() if p.requires_grad):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    policy.save_weights(tmp_path)
    expected = {name: tensor.clone() for name, tensor in policy.export()}
    other = policy_with(model_dir, LORA[2], "bfloat16")
    held = [slot for slots in other._trained.slots().values() for slot in slots]
    files = other._trained.folder.open(tmp_path)
    files.check(held)
    files.load(held)
    found = dict(other.export())
    assert found[f"{GATE}.lora_B.weight"].dtype == torch.bfloat16
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
