"""The service as it is started: a process on a real nats-server, with Megatron and weights in shared memory."""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, cumulative, encode_blob, pack_float32, pack_int32
from beamline.protocol.config import (
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RunConfig,
    RunSection,
    TrainerSection,
)
from beamline.protocol.subjects import Subjects
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.run_files import write_config
from beamline.runtime.shm_blobs import ShmBlobStore, shm_root, sweep
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmReader

SUBJECTS = Subjects(prefix="beamline", run="trainer-test")
START_S, STEP_S = 180, 60


class Ring:
    """The coordinator's side of the bus, and the trainer under test."""

    def __init__(self, run_dir: Path, coordinator: NatsBus) -> None:
        self.run_dir, self.bus = run_dir, coordinator
        self.blobs = ShmBlobStore(shm_root(SUBJECTS, run_dir))
        self.processes: list[asyncio.subprocess.Process] = []
        self.updates: asyncio.Queue[m.PolicyUpdate] = asyncio.Queue()
        self.answers: asyncio.Queue[m.Message] = asyncio.Queue()
        loops = (coordinator.follow(m.PolicyUpdate, self.updates.put), coordinator.work("coordinator", self._collect))
        self.loops = [asyncio.create_task(loop) for loop in loops]

    async def _collect(self, message: m.Message) -> None:
        self.answers.put_nowait(message)

    async def start(self, **trainer: object) -> asyncio.subprocess.Process:
        section = msgspec.structs.replace(TrainerSection(threads=1, optimizer=OptimizerSection(lr=1e-3)), **trainer)
        model = ModelSection(path=str(self.run_dir / "model"))
        write_config(self.run_dir, RunConfig(run=RunSection(name=SUBJECTS.run), model=model, trainer=section))
        command = (sys.executable, "-m", "beamline.trainer", "--run-dir", str(self.run_dir), "--worker", "trainer-0")
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        self.processes.append(process)
        return process

    async def update(self, deadline_s: float) -> m.PolicyUpdate:
        async with asyncio.timeout(deadline_s):
            return await self.updates.get()

    async def answer(self) -> m.Message:
        async with asyncio.timeout(STEP_S):
            return await self.answers.get()

    async def batch(self, step: int) -> m.TrainBatch:
        rng = np.random.default_rng(step)
        lengths = [12, 20, 9]
        blob = Trajectories(
            group_id=f"g{step}",
            prompt_tokens=pack_int32(rng.integers(0, 512, 6).tolist()),
            cu_seqlens=cumulative(lengths),
            tokens=pack_int32(rng.integers(0, 512, sum(lengths)).tolist()),
            loss_mask=memoryview(bytes([1] * sum(lengths))),
            rollout_logprobs=pack_float32([-6.0] * sum(lengths)),
            finish_reasons=[m.FinishReason.STOP] * 3,
            version_spans=[[VersionSpan(step - 1, 0, length)] for length in lengths],
            texts=[""] * 3,
        )
        ref = await self.blobs.put(f"g{step}", "trajectories", encode_blob(blob))
        group = m.TrainGroup(group_id=f"g{step}", data_source="sums", trajectories=ref, advantages=[1.0, -1.0, 0.5])
        places = [m.Place(group=0, sample=sample) for sample in range(3)]
        mini_batch = m.MiniBatch(num_loss_tokens=sum(lengths), ranks=[places])
        return m.TrainBatch(step=step, groups=[group], mini_batches=[mini_batch])

    async def weights(self, update: m.PolicyUpdate) -> dict[str, torch.Tensor]:
        reader = ShmReader.open(WeightManifest.decode(await self.blobs.get(update.manifest)))
        reader.verify()
        return {
            entry.name: torch.frombuffer(bytearray(content), dtype=getattr(torch, entry.dtype)).view(entry.shape)
            for entry, content in reader.tensors()
        }


@pytest_asyncio.fixture
async def ring(tmp_path: Path):
    tiny.build(tiny.TINY_BEAM, tmp_path / "model", seed=1)
    server = NatsServer(tmp_path, SUBJECTS)
    await server.start()
    coordinator = await NatsBus.connect(server.credentials("coordinator"), SUBJECTS, name="coordinator", ack_wait_s=5.0)
    await coordinator.ensure_streams()
    ring = Ring(tmp_path, coordinator)
    yield ring
    for process in ring.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for loop in ring.loops:
        loop.cancel()
    await asyncio.gather(*ring.loops, return_exceptions=True)
    await coordinator.close()
    await server.stop()
    sweep(SUBJECTS, tmp_path)


async def test_two_steps_a_lease_and_a_checkpoint(ring: Ring):
    process = await ring.start()
    first = await ring.update(START_S)
    start = load_file(ring.run_dir / "model" / "model.safetensors")
    weights = await ring.weights(first)
    assert weights.keys() == start.keys()
    assert all(torch.equal(weights[name], start[name]) for name in start)

    for step in (1, 2):
        await ring.bus.publish(await ring.batch(step))
        update = await ring.update(STEP_S)
        assert (update.step, update.policy_version) == (step, step)
        assert update.stats["policy/ratio_mean"] == 1.0
        assert update.stats["tokens/loss"] == 41
        assert len(update.canary.logprobs) == len(update.canary.tokens) - 1
    weights = await ring.weights(update)
    assert not torch.equal(weights["lm_head.weight"], start["lm_head.weight"])

    await ring.bus.publish(m.Phase(sequence=1, step=3, phase=m.PhaseName.GENERATE, policy_version=2, granted=False))
    report = await ring.answer()
    assert isinstance(report, m.LeaseReport)
    assert (report.sequence, report.resident_bytes > 0) == (1, True)
    await ring.bus.publish(m.Phase(sequence=2, step=3, phase=m.PhaseName.CHECKPOINT, policy_version=2, granted=True))
    saved = await ring.answer()
    assert isinstance(saved, m.CheckpointSaved)
    stored = load_file(Path(saved.path) / "policy" / "model.safetensors")
    assert all(torch.equal(stored[name], weights[name]) for name in weights)

    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 0, log.decode()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel": ParallelSection(tensor=2)},
            "error: trainer.parallel.tensor=2: the trainer service runs one rank, set it to 1",
        ),
        (
            {"max_tokens_per_micro_batch": 4096},
            "error: trainer.max_tokens_per_micro_batch=4096 is below the longest sequence, data.max_prompt_tokens + "
            "rollout.sampling.max_response_tokens = 10240: raise it",
        ),
    ],
)
async def test_a_setting_that_cannot_work_is_a_plain_message(ring: Ring, settings: dict[str, object], message: str):
    process = await ring.start(**settings)
    _, log = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert log.decode().strip().splitlines()[-1] == message


async def test_a_model_without_a_tokenizer_is_a_plain_message(ring: Ring):
    (ring.run_dir / "model" / "tokenizer.json").unlink()
    process = await ring.start()
    _, log = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert "has no tokenizer.json: point it at a Hugging Face model directory" in log.decode().strip().splitlines()[-1]
    assert "Traceback" not in log.decode()
