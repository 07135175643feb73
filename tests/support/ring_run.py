"""A whole run in one process on the in-memory bus, with scripted services that can be killed at any moment."""

import asyncio
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from beamline.coordinator.admission import Admission
from beamline.coordinator.coordinator import Coordinator
from beamline.coordinator.core import Core
from beamline.coordinator.cursor import DataCursor, Problems, Prompt
from beamline.coordinator.evaluator import Evaluator
from beamline.coordinator.journal import Issued, decode_record
from beamline.coordinator.parts import make_lease
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.resume import evaluated_here, open_resume, resume
from beamline.coordinator.summary import Summary
from beamline.protocol.config import EvalSet, Placement, RunConfig
from beamline.protocol.subjects import Subjects
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub
from scripted_rollout import ScriptedRollout, Trouble
from scripted_services import Mishaps, ScriptedReward, ScriptedTrainer, Witness

RING_DEADLINE_S = 30.0
NUM_STEPS = 4


def configure(rng: random.Random, algorithm: dict[str, Any]) -> RunConfig:
    """Placement, staleness, replicas and evaluations by the seed."""
    colocated = rng.random() < 0.5
    return msgspec.convert(
        {
            "run": {"name": "ring", "placement": Placement.COLOCATED if colocated else Placement.DISAGGREGATED},
            "coordinator": {
                "max_staleness": 0 if colocated else rng.randint(0, 2),
                "start_deadline_s": RING_DEADLINE_S,
                "step_deadline_s": RING_DEADLINE_S,
            },
            "rollout": {
                "replicas": rng.randint(1, 2),
                "sampling": {"groups_per_step": 4, "samples_per_group": 2, "max_response_tokens": 8},
            },
            "trainer": {
                "num_steps": NUM_STEPS,
                "eval_interval": rng.choice([0, 2]),
                "checkpoint_interval": rng.randint(0, 2),
                "export_interval": rng.randint(0, 3),
            },
            "algorithm": algorithm,
        },
        RunConfig,
    )


class SharedRecorder(Recorder):
    """The thread in which a killed coordinator wrote its summary lives on here, as none does after a process."""

    writing = threading.Lock()

    def finish(self, *args: Any, **kwargs: Any) -> Summary:
        with self.writing:
            return super().finish(*args, **kwargs)


class Ring:
    """A run in one process. Every service can be killed and started again on the same hub.

    Args:
        seed: of everything random.
        run_dir: takes the summary.
        config: None takes one by the seed.
        mishaps: what goes wrong inside the services.
        troubles: of the rollout workers by number; the others' policies fail at a first attempt by `mishaps.unready`.
        num_kills: how many services are killed at random moments.
        duplicate: share of deliveries that come twice.
        first_version: the policy that the trainer begins with.
    """

    def __init__(
        self,
        seed: int,
        run_dir: Path,
        *,
        config: RunConfig | None = None,
        equal_rewards: float = 0.2,
        algorithm: dict[str, Any] | None = None,
        mishaps: Mishaps | None = None,
        troubles: Mapping[int, Trouble] | None = None,
        num_kills: int = 6,
        duplicate: float = 0.1,
        first_version: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config or configure(self.rng, algorithm or {})
        self.troubles = troubles or {}
        self.run_dir = run_dir
        self.hub = MemoryHub(Subjects("beamline", "ring"), seed=seed, duplicate=duplicate)
        self.bus = self.coordinator_bus = MemoryBus(self.hub)
        self.blobs = MemoryBlobStore()
        self.witness = Witness()
        self.mishaps = mishaps or Mishaps(
            failed=0.1, unmendable=0.2, equal_rewards=equal_rewards, abstained=0.05, spoiled=0.1, unready=0.1
        )
        self.trainer = ScriptedTrainer(
            self.bus,
            "trainer-0",
            self.witness,
            self.min_version,
            self.mishaps,
            blobs=self.blobs,
            first_version=first_version,
        )
        self.reward = ScriptedReward(self.bus, "reward-0", 0, self.rng, self.mishaps)
        self.rollouts = [self.make_rollout(i, 0) for i in range(self.config.rollout.replicas)]
        self.num_kills, self.max_kills = 0, num_kills

    def make_rollout(self, number: int, incarnation: int) -> ScriptedRollout:
        colocated = self.config.run.placement is Placement.COLOCATED
        return ScriptedRollout(
            self.bus,
            self.blobs,
            f"rollout-{number}",
            incarnation,
            self.rng,
            self.mishaps,
            colocated=colocated,
            trouble=self.troubles.get(number, self.unready),
        )

    def unready(self, stage: str, version: int, attempt: int) -> str:
        is_unready = stage != "release" and attempt == 1 and self.rng.random() < self.mishaps.unready
        return "a checksum differs" if is_unready else ""

    def min_version(self, group_id: str) -> int:
        taken = {group.group_id: group for group in self.core.ledger.batch(self.core.ledger.step + 1)}
        return taken[group_id].min_policy_version

    async def coordinate(self) -> None:
        core = self.core = Core(self.config, self.coordinator_bus, self.blobs)
        await core.replay()
        prompts = [Prompt(str(i), "sums", "4", [1] * (3 + i % 3 if i != 7 else 10)) for i in range(10)]
        cursor = self.cursor = DataCursor(prompts, lambda p: p, max_prompt_tokens=9, seed=0, source="prompts")
        found = open_resume(core, cursor, self.run_dir)
        recorder = SharedRecorder(self.run_dir, self.config)
        sets = [(EvalSet(path="eval.parquet", num_samples=2), {"sums": Problems(prompts[:3])})]
        evaluator = self.evaluator = Evaluator(core, sets, recorder.record_eval)
        if found is not None:
            await resume(core, found, evaluated_here(self.run_dir, found.ledger.step, evaluator.names))
        lease = self.lease = await make_lease(core)
        await Coordinator(core, Admission(core, cursor, lease), evaluator, lease, recorder).serve()

    async def issued(self) -> list[str]:
        """Prompts of the journal, each with the first attempt."""
        records = [decode_record(payload) async for payload in self.bus.replay()]
        prompts = [record.prompt for record in records if isinstance(record, Issued)]
        return [prompt.task.prompt_id for prompt in prompts if prompt.attempt == 0]

    async def run(self) -> None:
        for worker in (self.trainer, self.reward, *self.rollouts):
            worker.start()
        try:
            async with asyncio.timeout(RING_DEADLINE_S):
                await self.until_done()
        finally:
            for worker in (self.trainer, self.reward, *self.rollouts):
                await worker.kill()

    async def until_done(self) -> None:
        """Run the coordinator, killing something at random moments, until it has ended by itself."""
        coordinator = asyncio.create_task(self.coordinate())
        while not coordinator.done():
            for _ in range(self.rng.randint(50, 600)):
                await asyncio.sleep(0)
            if self.num_kills < self.max_kills and not coordinator.done():
                coordinator = await self.kill_one(coordinator)
        await coordinator

    async def kill_one(self, coordinator: asyncio.Task[None]) -> asyncio.Task[None]:
        self.num_kills += 1
        match self.rng.randint(0, 2):
            case 0:
                coordinator.cancel()
                await asyncio.gather(coordinator, return_exceptions=True)
                return asyncio.create_task(self.coordinate())
            case 1:
                await self.reward.kill()
                self.reward = ScriptedReward(self.bus, "reward-0", self.num_kills, self.rng, self.mishaps)
                self.reward.start()
            case _:
                await self.restart_rollout(self.rng.randrange(len(self.rollouts)))
        return coordinator

    async def restart_rollout(self, number: int) -> None:
        """Kill it, and start another process of its name."""
        await self.rollouts[number].kill()
        self.rollouts[number] = self.make_rollout(number, int(self.rollouts[number].incarnation) + 1)
        self.rollouts[number].start()


def drawn_undisturbed(cursor: DataCursor, number: int) -> tuple[list[str], int]:
    """The prompts that a coordinator issues that nothing happens to, and where its cursor then stands."""
    issued, position = list[str](), 0
    for _ in range(number):
        prompt, position = cursor.draw(position)
        issued.append(prompt.prompt_id)
    return issued, position


def check(ring: Ring) -> list[dict[str, float]]:
    """Whatever happened, the ring has kept its promises. Returns the values of the steps."""
    witness, counts = ring.witness, ring.core.ledger.counts()
    num_steps = ring.config.trainer.num_steps
    assert witness.trained_steps == list(range(1, num_steps + 1))
    assert len(witness.trained_groups) == len(set(witness.trained_groups)) == counts["trained"]
    assert min(witness.staleness) >= 0 and max(witness.staleness) <= ring.config.coordinator.max_staleness
    assert counts["issued"] == counts["trained"] + counts["filtered"] + counts["stale"] + counts["failed"]
    assert counts["in_flight"] == 0
    check_saves(ring)
    prompts, position = drawn_undisturbed(ring.cursor, counts["issued"])
    assert asyncio.run(ring.issued()) == prompts
    assert ring.core.state.position == position
    assert ring.core.state.num_dropped == position - len(prompts)
    summary = msgspec.json.decode((ring.run_dir / "summary.json").read_bytes(), type=Summary)
    trained = [step for step in summary.steps if "reward/mean" in step.values]
    assert [step.step for step in trained] == list(range(1, num_steps + 1))
    expected = {0, 2, 4} if ring.config.trainer.eval_interval else set()
    assert {evaluation.step for evaluation in summary.evaluations} == expected
    return [step.values for step in trained]


def check_saves(ring: Ring) -> None:
    """Each policy that was to be kept was kept once, and no blob of it is left."""
    trainer = ring.config.trainer
    last = trainer.num_steps
    expected: dict[int, tuple[bool, bool]] = {}
    for step in range(1, last + 1):
        checkpoint = trainer.saves and (step % trainer.checkpoint_interval == 0 or step == last)
        export = step == last or (trainer.export_interval > 0 and step % trainer.export_interval == 0)
        if checkpoint or export:
            expected[step] = (checkpoint, export)
    assert {save.step: (save.checkpoint, save.export) for save in ring.witness.saves} == expected
    assert len(ring.witness.saves) == len(expected)
    assert not [owner for owner in ring.blobs.blobs if owner.startswith("save")]
