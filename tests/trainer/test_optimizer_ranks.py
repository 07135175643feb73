"""The real engine on two ranks: the optimizer's state wherever it lies; a run that stops and goes on in any layout."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from beamline.models import tiny
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.policy import MegatronPolicy
from optimizer_ranks import SAVED, SETTINGS, WORLD_SIZE, Found, likelihood_loss, steps

pytest_plugins = ("trainer_engine",)

SUPPORT = Path(__file__).parents[1] / "support"
DEADLINE_S = 150
WHOLE = tuple(job for job in SAVED if "bfloat16" not in job)
"""Jobs in float32, whose numbers hardly depend on the layout."""
STATE_BYTES = 12


def run_ranks(into: Path, *parts: str) -> dict[str, Found]:
    """What each part has found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SUPPORT / "optimizer_ranks.py"), *parts, "--into", str(into), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(WORLD_SIZE)]
    try:
        codes = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * WORLD_SIZE
    return {part: json.loads((into / f"{part}.json").read_text(encoding="utf-8")) for part in parts}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("optimizer")
    for model in ("tiny-beam", "tiny-qwen3-moe"):
        tiny.build(tiny.SPECS[model], into / model, seed=7, randomise=True)
    return into


@pytest.fixture(scope="module")
def first(work: Path) -> dict[str, Found]:
    """Of the processes that train without a stop and save, and compare states."""
    return run_ranks(work, "straight", "states")


@pytest.fixture(scope="module")
def second(work: Path, first: dict[str, Found]) -> Found:
    """Of the processes that go on."""
    return run_ranks(work, "resumed")["resumed"]


@pytest.mark.parametrize("job", SAVED)
def test_a_run_that_stops_goes_on_bit_for_bit(work: Path, first: dict[str, Found], second: Found, job: str):
    """On recorded trajectories, in other processes: tiny Beam 6 + 6 steps against 12."""
    saved, last = SAVED[job]
    straight, resumed = first["straight"][job], second[f"{job}.tp2ep2"]
    assert len(resumed["steps"]) == last - saved
    assert resumed["steps"] == straight["steps"][saved:]
    expected = load_file(work / f"straight.{job}.safetensors")
    found = load_file(work / f"resumed.{job}.tp2ep2.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def check_next(straight: Found, found: Found, job: str) -> None:
    """The same next loss, and the same next step, whose second mini-batch sees what the optimizer made of the first."""
    assert found["next loss"] == pytest.approx(straight["next loss"], abs=1e-6)
    expected = straight["steps"][SAVED[job][0]]
    assert found["steps"][0]["policy/loss"] == pytest.approx(expected["policy/loss"], abs=1e-6)
    assert found["steps"][0]["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
@pytest.mark.parametrize("job", WHOLE)
def test_what_tp2_ep2_saved_goes_on_in_other_layouts(first: dict[str, Found], second: Found, job: str, layout: str):
    check_next(first["straight"][job], second[f"{job}.{layout}"], job)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("job", WHOLE)
def test_and_on_one_rank(work: Path, first: dict[str, Found], job: str):
    model = build_model(work / job, Layout())
    policy = MegatronPolicy(model, SETTINGS, 1.0)
    policy.load(work / f"saved.{job}")
    following = SAVED[job][0] + 1
    found: Found = {
        "next loss": likelihood_loss(policy, following),
        "steps": steps(policy, model, following, following),
    }
    check_next(first["straight"][job], found, job)


def test_state_comes_through_other_layouts_and_places_unchanged(second: Found):
    """bfloat16, whose main weights are in the state alone: TP2 x EP2, PP2 in host memory, DP2 on a disk, and back."""
    journey = second["journey"]
    assert journey["compared"] > 100
    assert journey["differing"] == 0


LAYOUTS = ("dp2", "tp2", "ep2", "pp2")


@pytest.mark.parametrize("job", [*(f"tiny-beam.{layout}" for layout in LAYOUTS), "tiny-beam:bfloat16.dp2"])
def test_wherever_the_state_lies_every_bit_is_the_same(first: dict[str, Found], job: str):
    """Weights, main weights and moments, with weight decay and clipping; and it is torch's fused AdamW."""
    found = first["states"][job]
    assert found["differing"].keys() >= {"device", "disk"}
    assert set(found["differing"].values()) == {0}
    assert found["steps"]["disk"] == found["steps"]["device"]
    assert found["differing from torch"] == 0
    assert found["steps"]["device"][0]["policy/grad_norm"] > SETTINGS.max_grad_norm


def test_replicas_share_the_state_out(first: dict[str, Found]):
    """Twelve bytes a parameter over all ranks, whatever is replicated."""
    found = {layout: first["states"][f"tiny-beam.{layout}"] for layout in LAYOUTS}
    num_parameters = found["dp2"]["parameters"]
    for layout in ("dp2", "ep2", "pp2"):
        assert sum(found[layout]["state_bytes"]) == STATE_BYTES * num_parameters
    for layout in ("dp2", "ep2"):
        assert max(found[layout]["state_bytes"]) < 0.51 * STATE_BYTES * num_parameters
    # Norms and routers are whole on each tensor-parallel rank, and so is their state.
    assert sum(found["tp2"]["state_bytes"]) >= STATE_BYTES * num_parameters
