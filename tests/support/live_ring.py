"""A live run whose coordinator is the real one and whose services are scripted, over a real broker."""

import asyncio
import random
from pathlib import Path

import msgspec

from beamline.coordinator.admission import Admission
from beamline.coordinator.coordinator import Coordinator
from beamline.coordinator.core import Core
from beamline.coordinator.cursor import DataCursor, Prompt
from beamline.coordinator.evaluator import Evaluator
from beamline.coordinator.parts import make_lease
from beamline.coordinator.recorder import Recorder
from beamline.protocol import messages as m
from beamline.protocol.config import Placement, RunConfig
from beamline.runtime.bus import Bus
from beamline.runtime.memory_blobs import MemoryBlobStore
from live_run import LiveRun
from scripted_rollout import ScriptedRollout
from scripted_services import Mishaps, ScriptedReward, ScriptedTrainer, Witness

CONFIG = msgspec.convert(
    {
        "run": {"name": "ring", "placement": Placement.DISAGGREGATED},
        "rollout": {
            "replicas": 2,
            "sampling": {"groups_per_step": 4, "samples_per_group": 2, "max_response_tokens": 8},
        },
        "trainer": {"num_steps": 4, "eval_interval": 0},
    },
    RunConfig,
)


class HeldTrainer(ScriptedTrainer):
    """Trains as many steps as it is allowed to."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, "trainer", Witness(), lambda group_id: 0, Mishaps())
        self._allowed = asyncio.Semaphore(0)

    def allow(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._allowed.release()

    async def train(self, batch: m.TrainBatch) -> m.Message:
        await self._allowed.acquire()
        return await super().train(batch)


class LiveRing:
    """Made by `start`. `finish` lets it go to its end."""

    def __init__(self, run: LiveRun, trainer: HeldTrainer, others: list[ScriptedReward | ScriptedRollout]) -> None:
        self.run = run
        self.trainer = trainer
        self._workers = [trainer, *others]
        for worker in self._workers:
            worker.start()
        self._coordinating = asyncio.create_task(self._coordinate())

    @classmethod
    async def start(cls, run: LiveRun) -> "LiveRing":
        """Start all services of a run with `CONFIG`; the trainer trains nothing yet."""
        rng, blobs = random.Random(0), MemoryBlobStore()
        reward = ScriptedReward(await run.bus("reward"), "reward", 0, rng, Mishaps())
        rollouts = [
            ScriptedRollout(await run.bus("rollout"), blobs, f"rollout-{i}", 0, rng, Mishaps(), colocated=False)
            for i in range(CONFIG.rollout.replicas)
        ]
        return cls(run, HeldTrainer(await run.bus("trainer")), [reward, *rollouts])

    async def finish(self) -> Path:
        """Train the rest and end the run, its lock included. Returns its summary's path."""
        self.trainer.allow(CONFIG.trainer.num_steps)
        await self._coordinating
        self.run.end()
        return self.run.run_dir / "summary.json"

    async def stop(self) -> None:
        self._coordinating.cancel()
        await asyncio.gather(self._coordinating, return_exceptions=True)
        for worker in self._workers:
            await worker.kill()

    async def _coordinate(self) -> None:
        core = Core(self.run.config, await self.run.bus("coordinator"), MemoryBlobStore())
        await core.replay()
        prompts = [Prompt(str(i), "sums", "4", [1, 2, 3]) for i in range(10)]
        cursor = DataCursor(prompts, lambda p: p, max_prompt_tokens=9, seed=0, source="prompts")
        lease = await make_lease(core)
        recorder = Recorder(self.run.run_dir, self.run.config)
        evaluator = Evaluator(core, [], recorder.record_eval)
        await Coordinator(core, Admission(core, cursor, lease), evaluator, lease, recorder).serve()
