"""A trainer's worker on a table policy, with what is around it."""

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from beamline.algorithms.losses import PolicyLoss
from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, cumulative, encode_blob, pack_float32, pack_int32
from beamline.protocol.config import OptimizerSection
from beamline.protocol.lora_config import LoraSection
from beamline.protocol.saving import CoordinatorFiles
from beamline.runtime.adapter_merge import adapters_in
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.service import WorkerStatus
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.keeping import KeepingSettings
from beamline.trainer.kept import AdaptersAlone, WholePolicy
from beamline.trainer.outlet import Outlet
from beamline.trainer.peers import Alone
from beamline.trainer.rank import Rank, StepSettings
from beamline.trainer.retention import Retention
from beamline.trainer.worker import TrainerSettings, TrainerWorker
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmOwner
from fake_adapters import FakeAdapters
from trainer_weights import staged_weights

SAVED_S = 20.0
VOCAB = 13


class Bench:
    """A worker with what is around it."""

    def __init__(
        self,
        tmp_path: Path,
        thread: ThreadPoolExecutor,
        root: Path | None = None,
        keep: int = 0,
        lora: LoraSection | None = None,
    ) -> None:
        self.model_dir, self.root = tmp_path / "model", (root or tmp_path) / "ckpt"
        tiny.build(tiny.TINY_BEAM, self.model_dir, seed=0)
        self.policy = FakePolicy(VOCAB)
        if lora is not None:
            self.policy = FakeAdapters(VOCAB, adapters_in(self.model_dir, lora), self.model_dir)
        self.blobs, self.status = MemoryBlobStore(), WorkerStatus()
        self.sent: list[m.Message] = []
        self._heard = asyncio.Event()
        settings = TrainerSettings(
            worker="trainer-0",
            incarnation="abc",
            optimizer=OptimizerSection(lr=0.5),
            num_steps=10,
            vocab_size=VOCAB,
            keeping=KeepingSettings(
                model_dir=self.model_dir,
                dtype="float32",
                kept=AdaptersAlone.of(self.model_dir, lora) if lora else WholePolicy(self.model_dir, "float32"),
                checkpoints=self.root,
                exports=(root or tmp_path) / "exports",
                retention=Retention(num_newest=keep, every=0),
                layout={"tensor": 1, "expert": 1, "pipeline": 1, "data": 1},
                optimizer={"state": "device"},
                checkpoint_bytes=VOCAB * VOCAB * 8,
                export_bytes=VOCAB * VOCAB * 8,
            ),
            colocated=True,
        )
        outlet = Outlet(owner=ShmOwner(tmp_path / "weights" / "rank-0.sock"), cuts=1)
        self.rank = Rank(self.policy, Alone(), StepSettings(loss=PolicyLoss(), max_tokens=64), outlet)
        self.worker = TrainerWorker(settings, self.rank, thread, self.blobs, self._publish, self.status)

    async def _publish(self, message: m.Message) -> None:
        self.sent.append(message)
        self._heard.set()

    async def ask(
        self, step: int, *, checkpoint: bool = True, export: bool = False, files: dict[str, bytes] | None = None
    ) -> m.StateCopied:
        """Have the policy kept; the answer of its copy."""
        blob = await self.blobs.put("save", f"{step}", CoordinatorFiles(files=files or {}).encode())
        request = m.SaveRequest(step=step, checkpoint=checkpoint, export=export, coordinator_files=blob)
        assert await self.worker.handle(request) is None
        return [message for message in self.sent if isinstance(message, m.StateCopied)][-1]

    async def saved(self, number: int = 0) -> m.CheckpointSaved:
        """The answer that comes when all is on disk, of all that come the one of this number."""
        async with asyncio.timeout(SAVED_S):
            while len(found := [message for message in self.sent if isinstance(message, m.CheckpointSaved)]) <= number:
                self._heard.clear()
                await self._heard.wait()
        return found[number]

    async def keep(self, step: int, **asked: object) -> m.CheckpointSaved:
        """Ask, and wait for the end of it."""
        number = sum(isinstance(message, m.CheckpointSaved) for message in self.sent)
        await self.ask(step, **asked)
        return await self.saved(number)

    async def train(self, step: int) -> m.PolicyUpdate:
        """The next step."""
        update = await self.worker.handle(await self.batch(step))
        assert isinstance(update, m.PolicyUpdate)
        return update

    async def group(self, name: str, lengths: list[int], seed: int) -> m.BlobRef:
        rng = np.random.default_rng(seed)
        blob = Trajectories(
            group_id=name,
            prompt_tokens=pack_int32(rng.integers(0, VOCAB, 4).tolist()),
            cu_seqlens=cumulative(lengths),
            tokens=pack_int32(rng.integers(0, VOCAB, sum(lengths)).tolist()),
            loss_mask=memoryview(array("B", [1] * sum(lengths))),
            rollout_logprobs=pack_float32(rng.normal(-2, 0.1, sum(lengths)).tolist()),
            finish_reasons=[m.FinishReason.STOP] * len(lengths),
            version_spans=[[VersionSpan(0, 0, length)] for length in lengths],
            texts=[""] * len(lengths),
        )
        return await self.blobs.put(name, "trajectories", encode_blob(blob))

    async def batch(self, step: int) -> m.TrainBatch:
        lengths = [[5, 7], [6, 3]]
        groups = [
            m.TrainGroup(
                group_id=f"g{i}",
                data_source="sums",
                trajectories=await self.group(f"g{i}", part, i),
                advantages=[1.0, -1.0],
            )
            for i, part in enumerate(lengths)
        ]
        minis = [
            m.MiniBatch(ranks=[[m.Place(group=i, sample=1), m.Place(group=i, sample=0)]])
            for i, part in enumerate(lengths)
        ]
        return m.TrainBatch(step=step, groups=groups, mini_batches=minis)


async def exported(bench: Bench, update: m.PolicyUpdate) -> torch.Tensor:
    """The table that an engine fetches."""
    (table,) = staged_weights(WeightManifest.decode(await bench.blobs.get(update.manifest))).values()
    return table


async def lease(bench: Bench, sequence: int = 5) -> m.LeaseReport:
    """What the trainer says when rollout is to have the devices."""
    name = m.PhaseName.GENERATE
    await bench.worker.on_phase(m.Phase(sequence=sequence, step=1, phase=name, policy_version=0, granted=False))
    report = bench.sent[-1]
    assert isinstance(report, m.LeaseReport)
    return report
