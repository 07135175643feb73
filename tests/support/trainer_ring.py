"""The trainer service as it is started, on a real nats-server, with the coordinator's side of the bus."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.blobs import (
    RoutedExperts,
    Trajectories,
    VersionSpan,
    cumulative,
    encode_blob,
    pack_float32,
    pack_int32,
)
from beamline.protocol.config import RunConfig, TrainerSection
from beamline.protocol.subjects import Subjects
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.run_files import write_config
from beamline.runtime.shm_blobs import ShmBlobStore, shm_root, sweep
from beamline.weights.manifest import WeightManifest
from trainer_weights import staged_weights

SUBJECTS = Subjects(prefix="beamline", run="trainer-test")
START_S, STEP_S = 180, 60
SERVICE = ("-m", "beamline.trainer")
VOCAB, NUM_PROMPT, NUM_LAYERS, NUM_EXPERTS, TOP_K = 512, 6, 4, 16, 4
"""Of both tiny models."""


class Ring:
    """The coordinator's side of the bus, and the trainer under test."""

    def __init__(self, run_dir: Path, coordinator: NatsBus) -> None:
        self.run_dir, self.bus = run_dir, coordinator
        self.blobs = ShmBlobStore(shm_root(SUBJECTS, run_dir))
        self.processes: list[asyncio.subprocess.Process] = []
        self.updates: asyncio.Queue[m.PolicyUpdate] = asyncio.Queue()
        self.answers: asyncio.Queue[m.Message] = asyncio.Queue()
        self.failures: asyncio.Queue[m.Message] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[m.Message] = asyncio.Queue()
        loops = (
            coordinator.follow(m.PolicyUpdate, self.updates.put),
            coordinator.work("coordinator", self.answers.put),
            coordinator.subscribe(SUBJECTS.error(), self.failures.put),
            coordinator.subscribe(SUBJECTS.heartbeat(), self.heartbeats.put),
        )
        self.loops = [asyncio.create_task(loop) for loop in loops]

    @property
    def sockets(self) -> list[str]:
        """What the ranks' owners have in the run's folder in shared memory."""
        folder = shm_root(SUBJECTS, self.run_dir) / "weights"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    async def start(
        self, trainer: TrainerSection, config: RunConfig | None = None, program: Sequence[str] = SERVICE
    ) -> asyncio.subprocess.Process:
        """Start the service on the folder's model; `config` is for what other sections say, `program` for a service
        that fails as it is told to.
        """
        config = config or RunConfig()
        placed = msgspec.structs.replace(
            config,
            run=msgspec.structs.replace(config.run, name=SUBJECTS.run),
            model=msgspec.structs.replace(config.model, path=str(self.run_dir / "model")),
            trainer=trainer,
        )
        write_config(self.run_dir, placed)
        command = (sys.executable, *program, "--run-dir", str(self.run_dir), "--worker", "trainer-0")
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        self.processes.append(process)
        return process

    async def update(self, deadline_s: float = STEP_S) -> m.PolicyUpdate:
        async with asyncio.timeout(deadline_s):
            return await self.updates.get()

    async def answer(self) -> m.Message:
        async with asyncio.timeout(STEP_S):
            return await self.answers.get()

    async def failure(self) -> m.ServiceFailed:
        async with asyncio.timeout(STEP_S):
            failed = await self.failures.get()
        assert isinstance(failed, m.ServiceFailed)
        return failed

    async def until(self, condition: Callable[[m.Heartbeat], bool]) -> None:
        """A heartbeat of the trainer tells what the condition looks for."""
        async with asyncio.timeout(STEP_S):
            while True:
                heartbeat = await self.heartbeats.get()
                if isinstance(heartbeat, m.Heartbeat) and condition(heartbeat):
                    return

    async def batch(
        self,
        step: int,
        lengths: Sequence[int] = (12, 20, 9),
        deals: Sequence[Sequence[Sequence[int]]] = (((0, 1, 2),),),
        spoiled: int | None = None,
    ) -> m.TrainBatch:
        """One group of random trajectories with random routes.

        Args:
            lengths: response tokens of each trajectory.
            deals: by mini-batch, by data-parallel rank, the trajectories.
            spoiled: a trajectory whose advantage is NaN.
        """
        name, rng = f"g{step}", np.random.default_rng(step)
        blob = Trajectories(
            group_id=name,
            prompt_tokens=pack_int32(rng.integers(0, VOCAB, NUM_PROMPT).tolist()),
            cu_seqlens=cumulative(lengths),
            tokens=pack_int32(rng.integers(0, VOCAB, sum(lengths)).tolist()),
            loss_mask=memoryview(bytes([1] * sum(lengths))),
            rollout_logprobs=pack_float32(rng.normal(-6.0, 0.1, sum(lengths)).tolist()),
            finish_reasons=[m.FinishReason.STOP] * len(lengths),
            version_spans=[[VersionSpan(step - 1, 0, length)] for length in lengths],
            texts=[""] * len(lengths),
        )
        advantages = rng.normal(0, 1, len(lengths)).tolist()
        rewards = rng.normal(0, 1, len(lengths)).tolist()
        if spoiled is not None:
            advantages[spoiled] = float("nan")
        group = m.TrainGroup(
            group_id=name,
            data_source="sums",
            trajectories=await self.blobs.put(name, "trajectories", encode_blob(blob)),
            routed_experts=await self.blobs.put(name, "routed_experts", encode_blob(_routes(name, lengths, rng))),
            advantages=advantages,
            rewards=rewards,
        )
        mini_batches = [
            m.MiniBatch(
                ranks=[[m.Place(group=0, sample=sample) for sample in rank] for rank in deal],
            )
            for deal in deals
        ]
        return m.TrainBatch(step=step, groups=[group], mini_batches=mini_batches)

    async def weights(self, update: m.PolicyUpdate) -> dict[str, torch.Tensor]:
        """A policy as an engine fetches it: from every rank's owner."""
        return staged_weights(await self.manifest(update))

    async def manifest(self, update: m.PolicyUpdate) -> WeightManifest:
        return WeightManifest.decode(await self.blobs.get(update.manifest))

    async def ask(self, step: int, *, checkpoint: bool = True, export: bool = False) -> m.StateCopied:
        """Ask for the policy of that step to be kept; the answer when it is copied."""
        await self.bus.publish(m.SaveRequest(step=step, checkpoint=checkpoint, export=export))
        copied = await self.answer()
        assert isinstance(copied, m.StateCopied), copied
        return copied

    async def saved(self) -> m.CheckpointSaved:
        """The answer when all is on disk."""
        saved = await self.answer()
        assert isinstance(saved, m.CheckpointSaved), saved
        return saved

    async def checkpoint(self, step: int) -> Path:
        """A whole checkpoint of the policy of that step."""
        await self.ask(step)
        saved = await self.saved()
        assert not saved.error
        return Path(saved.path)


def _routes(name: str, lengths: Sequence[int], rng: np.random.Generator) -> RoutedExperts:
    rows = [NUM_PROMPT + length - 1 for length in lengths]
    everyone = np.tile(np.arange(NUM_EXPERTS, dtype=np.uint8), (sum(rows), NUM_LAYERS, 1))
    ids = np.ascontiguousarray(rng.permuted(everyone, axis=-1)[..., :TOP_K])
    return RoutedExperts(
        group_id=name,
        num_layers=NUM_LAYERS,
        top_k=TOP_K,
        dtype="uint8",
        cu_seqlens=cumulative(rows),
        ids=memoryview(ids).cast("B"),
    )


@asynccontextmanager
async def open_ring(run_dir: Path, spec: tiny.Spec = tiny.TINY_BEAM) -> AsyncIterator[Ring]:
    """A broker and the model; what is still running at the end is killed."""
    tiny.build(spec, run_dir / "model", seed=1)
    server = NatsServer(run_dir, SUBJECTS)
    await server.start()
    coordinator = await NatsBus.connect(server.credentials("coordinator"), SUBJECTS, name="coordinator", ack_wait_s=5.0)
    await coordinator.ensure_streams()
    ring = Ring(run_dir, coordinator)
    try:
        yield ring
    finally:
        for process in ring.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for loop in ring.loops:
            loop.cancel()
        await asyncio.gather(*ring.loops, return_exceptions=True)
        await coordinator.close()
        await server.stop()
        sweep(SUBJECTS, run_dir)
