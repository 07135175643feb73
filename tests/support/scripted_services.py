"""Reward and trainer as scripts over any bus: they answer by the rules of the ring, with made-up numbers.

They obey what the coordinator relies on (gates, versions, leases, redelivery) and fail as their `Mishaps` say. For
tests of the coordinator alone, with `scripted_rollout`; the services' own tests and the end-to-end tests run the real
ones.
"""

import asyncio
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from opentelemetry import trace

from beamline.protocol import messages as m
from beamline.protocol.saving import CoordinatorFiles
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.bus import Bus

tracer = trace.get_tracer(__name__)


@dataclass
class Mishaps:
    """Shares of inputs that go wrong."""

    failed: float = 0.0
    unmendable: float = 0.0
    equal_rewards: float = 0.0
    abstained: float = 0.0
    spoiled: float = 0.0
    unready: float = 0.0
    """Of first attempts to prepare or to load a policy."""
    useless: float = 0.0
    """Of groups whose rewards do not differ, by their ids."""
    unsaved: frozenset[int] = frozenset()
    """Steps for which the disk is full."""

    def spoils(self, group_id: str) -> bool:
        """Whether the trainer finds the group's blobs damaged; the same for every delivery."""
        return zlib.crc32(group_id.encode()) < self.spoiled * 2**32

    def is_useless(self, group_id: str) -> bool:
        """Whether nothing can be learned from the group; the same in every run."""
        return zlib.crc32(f"useless {group_id}".encode()) < self.useless * 2**32


@dataclass
class Witness:
    """What really happened, as the services saw it."""

    trained_steps: list[int] = field(default_factory=list[int])
    trained_groups: list[str] = field(default_factory=list[str])
    staleness: list[int] = field(default_factory=list[int])
    batches: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Groups of each trained step, in order."""
    saves: list[m.SaveRequest] = field(default_factory=list[m.SaveRequest])
    """What was kept, once for every time."""
    files: dict[int, dict[str, bytes]] = field(default_factory=dict[int, dict[str, bytes]])
    """The coordinator's files in each checkpoint."""


NO_MANIFEST = m.BlobRef(owner="policy", key="manifest", kind="weight_manifest", num_bytes=0, checksum="0" * 16)


class Worker(ABC):
    """What all scripted services have: a name, an incarnation, heartbeats, and tasks that can be killed."""

    service = ""

    def __init__(self, bus: Bus, name: str, incarnation: int = 0) -> None:
        self.bus = bus
        self.name = name
        self.incarnation = str(incarnation)
        self.version = -1
        self._tasks: list[asyncio.Task[None]] = []

    @abstractmethod
    def loops(self) -> list[Awaitable[None]]: ...

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(loop) for loop in [*self.loops(), self.beat()]]

    async def kill(self) -> None:
        """End without a word, as SIGKILL does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def beat(self) -> None:
        while True:
            await self.heartbeat()
            await asyncio.sleep(0.05)

    async def heartbeat(self) -> None:
        await self.bus.publish(
            m.Heartbeat(
                service=self.service,
                worker=self.name,
                incarnation=self.incarnation,
                pid=1,
                state=m.WorkerState.READY,
                policy_version=self.version,
                in_flight=0,
                rss_bytes=1,
            )
        )


class ScriptedReward(Worker):
    service = "reward"

    def __init__(self, bus: Bus, name: str, incarnation: int, rng: random.Random, mishaps: Mishaps) -> None:
        super().__init__(bus, name, incarnation)
        self.rng, self.mishaps = rng, mishaps

    def loops(self) -> list[Awaitable[None]]:
        return [self.bus.work("reward", self.handle, concurrency=4)]

    async def handle(self, group: m.Message) -> m.Message:
        assert isinstance(group, m.TrajectoryGroup)
        rewards = [1.0, -1.0] * len(group.response_lengths)
        if self.rng.random() < self.mishaps.equal_rewards or self.mishaps.is_useless(group.group_id):
            rewards = [1.0] * len(rewards)
        grades = [
            m.Grade(reward=None, breakdown={}, why="the grader hung")
            if self.rng.random() < self.mishaps.abstained
            else m.Grade(reward=reward, breakdown={"acc": float(reward > 0)})
            for reward in rewards[: len(group.response_lengths)]
        ]
        return m.ScoredGroup(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            task=group.task,
            worker=self.name,
            trajectories=group.trajectories,
            num_prompt_tokens=group.num_prompt_tokens,
            response_lengths=group.response_lengths,
            finish_reasons=group.finish_reasons,
            min_policy_version=group.min_policy_version,
            max_policy_version=group.max_policy_version,
            grades=grades,
            generate_s=group.generate_s,
            score_s=0.01,
        )


class ScriptedTrainer(Worker):
    service = "trainer"

    def __init__(
        self,
        bus: Bus,
        name: str,
        witness: Witness,
        min_versions: Callable[[str], int],
        mishaps: Mishaps,
        *,
        blobs: BlobStore | None = None,
        first_version: int = 0,
    ) -> None:
        super().__init__(bus, name)
        self.witness, self.min_versions, self.mishaps = witness, min_versions, mishaps
        self.blobs = blobs
        self.first_version = first_version
        self.failed: dict[str, str] = {}
        self.begun = set[tuple[int, bool, bool]]()
        self.saved: dict[tuple[int, bool, bool], m.CheckpointSaved] = {}
        self.writing = asyncio.Semaphore(1)
        """A save is written beside the training, one at a time; a test may hold it up."""
        self.writes: set[asyncio.Task[None]] = set()

    def loops(self) -> list[Awaitable[None]]:
        return [
            self.announce(),
            self.bus.work("trainer", self.handle),
            self.bus.follow(m.Phase, self.phase),
        ]

    @tracer.start_as_current_span("start")
    async def announce(self) -> None:
        self.version = self.first_version
        await self.bus.publish(self.update(self.version))

    async def kill(self) -> None:
        for write in self.writes:
            write.cancel()
        await asyncio.gather(*self.writes, return_exceptions=True)
        await super().kill()

    async def phase(self, phase: m.Phase) -> None:
        if phase.phase in (m.PhaseName.GENERATE, m.PhaseName.EVALUATE) and not phase.granted:
            report = m.LeaseReport(
                service="trainer",
                worker=self.name,
                incarnation=self.incarnation,
                sequence=phase.sequence,
                freed_bytes=1,
                kept_bytes=0,
                resident_bytes=1,
            )
            await self.bus.publish(report)

    async def handle(self, message: m.Message) -> m.Message:
        match message:
            case m.TrainBatch():
                return await self.train(message)
            case m.SaveRequest():
                return await self.keep(message)
            case _:
                raise TypeError(type(message).__name__)

    async def keep(self, request: m.SaveRequest) -> m.Message:
        """Copy at once, write later; a request that was answered is answered the same way again."""
        key = (request.step, request.checkpoint, request.export)
        if key in self.saved:
            await self.bus.publish(self.saved[key])
        elif key not in self.begun:
            self.begun.add(key)
            assert request.step == self.version, "the policy has changed before it was copied"
            self.witness.saves.append(request)
            if request.coordinator_files is not None and self.blobs is not None:
                payload = await self.blobs.get(request.coordinator_files)
                self.witness.files[request.step] = CoordinatorFiles.decode(payload).files
            self.writes.add(asyncio.create_task(self.write(key, self.answer(request))))
        return m.StateCopied(step=request.step, copy_s=0.01 * len(self.witness.saves))

    async def write(self, key: tuple[int, bool, bool], saved: m.CheckpointSaved) -> None:
        async with self.writing:
            self.saved[key] = saved
            await self.bus.publish(saved)

    def answer(self, request: m.SaveRequest) -> m.CheckpointSaved:
        saved = m.CheckpointSaved(step=request.step, save_s=0.1 * len(self.witness.saves))
        if request.step in self.mishaps.unsaved:
            return msgspec.structs.replace(saved, error="no space left on device")
        if request.checkpoint:
            saved = msgspec.structs.replace(saved, path=f"checkpoints/global_step_{request.step}", num_bytes=1)
        if request.export:
            saved = msgspec.structs.replace(saved, export_path=f"exports/global_step_{request.step}/policy")
        return saved

    async def train(self, batch: m.TrainBatch) -> m.Message:
        if batch.step > self.version:
            self.witness.trained_steps.append(batch.step)
            ids = [group.group_id for group in batch.groups]
            self.failed = {name: "a blob is cut short" for name in ids if self.mishaps.spoils(name)}
            self.witness.batches[batch.step] = ids
            self.witness.trained_groups += [name for name in ids if name not in self.failed]
            oldest = [self.min_versions(group.group_id) for group in batch.groups]
            self.witness.staleness += [batch.step - 1 - version for version in oldest]
            await asyncio.sleep(0)
            self.version = batch.step
        return self.update(self.version)

    def update(self, version: int) -> m.PolicyUpdate:
        return m.PolicyUpdate(
            step=version,
            policy_version=version,
            manifest=NO_MANIFEST,
            canary=m.Canary(tokens=[1, 2], logprobs=[-1.0]),
            stats={"policy/loss": 0.0},
            failed_groups=self.failed,
        )
