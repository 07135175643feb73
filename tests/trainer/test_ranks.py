"""A trainer of several ranks: the numbers of one rank in every layout, and a rank's end that is the trainer's."""

import asyncio
import os
import resource
import select
import signal
import time
from asyncio.subprocess import Process
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from beamline.models import tiny
from beamline.protocol.algorithm_config import AlgorithmSection, KLSection
from beamline.protocol.config import (
    DataSection,
    OptimizerSection,
    ParallelSection,
    RolloutSection,
    RunConfig,
    SamplingSection,
    TrainerSection,
)
from beamline.protocol.messages import Heartbeat, WorkerState
from beamline.protocol.weights_config import WeightsSection
from beamline.runtime.export import export
from beamline.runtime.json_log import LogLine
from beamline.weights.staging import Stage
from trainer_ring import START_S, STEP_S, Ring, open_ring

CONFIG = RunConfig(
    data=DataSection(max_prompt_tokens=64), rollout=RolloutSection(sampling=SamplingSection(max_response_tokens=64))
)
EVERYTHING = AlgorithmSection(
    loss="gspo",
    reduction="sequence_mean",
    entropy_coefficient=0.05,
    kl=KLSection(coefficient=0.01, estimator="k2", place="reward"),
)
"""What ranks have to agree on: a reference of their own shards, rewards, weights, and a second gradient of the head."""
# Adam divides by a gradient's own size: with a small eps it makes much of rounding where gradients are nearly zero.
OPTIMIZER = OptimizerSection(lr=1e-2, eps=1e-2)
LENGTHS = (60, 40, 33, 35, 38, 30, 50, 20, 45, 12)
SHARES = (((0,), (1, 2, 3, 4, 5)), ((6,), (7, 8, 9)))
"""Two mini-batches for two ranks, of which the second needs more micro-batches than the first."""
LAYOUTS = {
    "alone": ParallelSection(),
    "dp2": ParallelSection(data=2),
    "tp2": ParallelSection(tensor=2),
    "pp2": ParallelSection(pipeline=2),
    "ep2": ParallelSection(expert=2, data=2),
    "tp2ep2": ParallelSection(tensor=2, expert=2),
}
TRANSPORTS = {"ep2": "nixl", "pp2": "checkpoint"}
"""How the layout's weights travel; those of the others by what `auto` takes on one host."""
SPECS = {"tiny-beam": tiny.TINY_BEAM, "tiny-qwen3-moe": tiny.TINY_QWEN3_MOE}
MAX_SHARE_OF_THE_WAY = 1e-4
"""How far apart two trained policies may lie, of the way that they have come."""
FAILED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Trained:
    """What two steps have made."""

    stats: list[dict[str, float]]
    canary: list[float]
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    stored: dict[str, torch.Tensor]
    """Of the checkpoint, as it was exported."""


def trainer(layout: str) -> TrainerSection:
    return TrainerSection(threads=1, max_tokens_per_micro_batch=128, optimizer=OPTIMIZER, parallel=LAYOUTS[layout])


def deals(layout: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    if LAYOUTS[layout].data == 2:
        return SHARES
    return tuple((tuple(sample for share in deal for sample in share),) for deal in SHARES)


def ranks_of(process: Process) -> list[int]:
    """Its ranks; a library may have a program of its own running for a moment."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if b"beamline.trainer.rank_process" in command_of(pid)]


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def train(model: str, layout: str, folder: Path) -> Trained:
    async with open_ring(folder, SPECS[model]) as ring:
        weights_section = WeightsSection(transport=TRANSPORTS.get(layout, "auto"))
        config = msgspec.structs.replace(CONFIG, algorithm=EVERYTHING, weights=weights_section)
        process = await ring.start(trainer(layout), config)
        update = await ring.update(START_S)
        stats: list[dict[str, float]] = []
        for step in (1, 2):
            await ring.bus.publish(await ring.batch(step, LENGTHS, deals(layout)))
            update = await ring.update()
            stats.append(update.stats)
        weights = await ring.weights(update)
        exported = export(await ring.checkpoint(2), folder / "exported")
        ranks = ranks_of(process)
        assert len(ranks) == LAYOUTS[layout].world_size - 1
        if layout not in TRANSPORTS:
            assert ring.sockets == [f"rank-{rank:05d}.sock" for rank in range(len(ranks) + 1)]
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), STEP_S)
        assert process.returncode == 0, log.decode()
        assert alive(ranks) == []
        assert ring.sockets == []
        assert list(folder.glob("weights/**/*.safetensors")) == []
    start = load_file(folder / "model" / "model.safetensors")
    return Trained(stats, update.canary.logprobs, start, weights, load_file(exported / "model.safetensors"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {model: asyncio.run(train(model, "alone", tmp_path_factory.mktemp(model))) for model in SPECS}


@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("tiny-beam", layout) for layout in LAYOUTS if layout != "alone"), ("tiny-qwen3-moe", "tp2ep2")],
)
def test_every_layout_trains_the_policy_of_one_rank(alone: dict[str, Trained], model: str, layout: str, tmp_path: Path):
    ours, one = asyncio.run(train(model, layout, tmp_path)), alone[model]
    for mine, expected in zip(ours.stats, one.stats, strict=True):
        assert mine["policy/grad_norm"] > 0 and mine["routing/fallback_share"] == 0
        assert mine["policy/kl"] > 0 > mine["loss/entropy"]
        assert mine["packing/waste"] < 0.05
        for name in expected.keys() - {"policy/num_micro_batches"}:
            if not name.startswith(("timing/", "packing/")):
                assert mine[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert ours.canary == pytest.approx(one.canary, abs=1e-5)
    assert ours.weights.keys() == one.weights.keys() == ours.stored.keys()
    for name, weight in one.weights.items():
        gap, way = (ours.weights[name] - weight).norm(), (weight - one.start[name]).norm()
        assert gap <= 1e-5 * weight.norm() and gap <= MAX_SHARE_OF_THE_WAY * way, name
        assert torch.equal(ours.stored[name], ours.weights[name]), name


def is_starting(heartbeat: Heartbeat) -> bool:
    return heartbeat.waiting_for == "Megatron to start"


async def failure(ring: Ring, process: Process, since: float) -> str:
    """What the trainer said last, on the bus and in its log, and that it went at once with all its ranks."""
    _, log = await asyncio.wait_for(process.communicate(), STEP_S)
    assert time.monotonic() - since < FAILED_WITHIN_S
    assert process.returncode == 1
    failed = await ring.failure()
    logged = [msgspec.json.decode(line, type=LogLine) for line in log.splitlines() if line.startswith(b"{")]
    assert any(failed.error in line.exception for line in logged)
    return failed.error


async def test_a_rank_that_is_killed_while_the_others_wait_for_it(tmp_path: Path):
    async with open_ring(tmp_path) as ring:
        process = await ring.start(trainer("dp2"), CONFIG)
        await ring.update(START_S)
        (rank,) = ranks_of(process)
        os.kill(rank, signal.SIGSTOP)  # rank 0 goes on, into the step's first collective
        await ring.bus.publish(await ring.batch(1, LENGTHS, deals("dp2")))
        await ring.until(lambda heartbeat: heartbeat.state is WorkerState.BUSY)
        since = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        assert await failure(ring, process, since) == f"rank 1 of the trainer (process {rank}) was killed by SIGKILL"
        assert ring.sockets == ["rank-00001.sock"]  # the folder goes with the run; memory has no name, and is gone


async def test_a_rank_without_memory_for_its_weights_ends_the_run_and_no_reader(tmp_path: Path):
    """The ranks that have room do not wait for it; what an engine had before, it keeps."""
    async with open_ring(tmp_path) as ring:
        process = await ring.start(trainer("tp2"), CONFIG)
        stage = Stage()
        staged = stage.fetch(await ring.manifest(await ring.update(START_S)))
        (rank,) = ranks_of(process)
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (0, 0))  # the system refuses memory to be mapped too
        await ring.bus.publish(await ring.batch(1, LENGTHS, deals("tp2")))
        error = await failure(ring, process, time.monotonic())
        assert "rank 1 of the trainer cannot export its weights: cannot set aside shared memory" in error
        assert alive([rank]) == []
        assert ring.sockets == []
        staged.verify()
        start = load_file(tmp_path / "model" / "model.safetensors")
        assert {entry.name: entry.shape for entry, _ in staged.tensors()} == {n: t.shape for n, t in start.items()}
        staged.fence()
        stage.close()


async def test_a_rank_that_is_killed_before_the_ranks_have_met(tmp_path: Path):
    async with open_ring(tmp_path) as ring:
        process = await ring.start(trainer("dp2"), CONFIG)
        await ring.until(is_starting)
        (rank,) = ranks_of(process)
        since = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        assert await failure(ring, process, since) == f"rank 1 of the trainer (process {rank}) was killed by SIGKILL"


async def test_ranks_end_with_rank_0(tmp_path: Path):
    async with open_ring(tmp_path) as ring:
        process = await ring.start(trainer("tp2"), CONFIG)
        await ring.until(is_starting)
        (rank,) = ranks_of(process)
        end = os.pidfd_open(rank)
        process.kill()
        await process.wait()
        gone, _, _ = select.select([end], [], [], FAILED_WITHIN_S)
        os.close(end)
        assert gone


async def test_a_rank_whose_loss_is_not_finite(tmp_path: Path):
    async with open_ring(tmp_path) as ring:
        process = await ring.start(trainer("dp2"), CONFIG)
        await ring.update(START_S)
        (rank,) = ranks_of(process)
        await ring.bus.publish(await ring.batch(1, LENGTHS, deals("dp2"), spoiled=2))
        error = await failure(ring, process, time.monotonic())
        assert error.startswith(f"rank 1 of the trainer (process {rank}) ended by an error:\nTraceback")
        assert "NotFinite: step 1, mini-batch 1 of 2: loss is nan" in error
        assert error.endswith(f"This was rank 1 of the trainer (process {rank}).")
        assert alive([rank]) == []
