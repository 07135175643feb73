"""A rollout worker as a script over any bus: it follows policies and fences by their rules, with made-up samples."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, cumulative, encode_blob, pack_float32, pack_int32
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.bus import Bus
from scripted_services import Mishaps, Worker

SILENT = "silent"

type Trouble = Callable[[str, int, int], str]
"""By stage ("prepare", "load" or "release"), policy version and attempt: why a worker does not come through. Empty
where it does, SILENT where it never answers. Who does not come through a release keeps memory."""


def no_trouble(stage: str, version: int, attempt: int) -> str:
    """All goes well."""
    return ""


class ScriptedRollout(Worker):
    """Prepares the newest policy, activates it when its fence opens, and answers each fence once."""

    service = "rollout"

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        name: str,
        incarnation: int,
        rng: random.Random,
        mishaps: Mishaps,
        *,
        colocated: bool,
        trouble: Trouble = no_trouble,
    ) -> None:
        super().__init__(bus, name, incarnation)
        self.blobs, self.rng, self.mishaps, self.colocated = blobs, rng, mishaps, colocated
        self.trouble = trouble
        self.open = asyncio.Event()
        self.newest: m.PolicyUpdate | None = None
        self.fence: m.Fence | None = None
        self.due = -1
        """Of the newest open fence: an older policy is not served."""
        self.prepared = -1
        self.error = ""
        """Why the newest policy is not prepared, or was not activated."""
        self.answered: tuple[int, int, bool] = (-1, 0, False)
        """Version, attempt and whether the fence was open."""
        self.working = asyncio.Lock()

    def loops(self) -> list[Awaitable[None]]:
        if not self.colocated:
            self.open.set()
        return [
            self.bus.work("rollout", self.handle, concurrency=4, gate=self.gate),
            self.bus.follow(m.Phase, self.phase),
            self.bus.follow(m.PolicyUpdate, self.hear),
            self.bus.follow(m.Fence, self.obey),
        ]

    async def gate(self) -> None:
        while not (self.open.is_set() and self.version >= max(self.due, 0)):
            await asyncio.sleep(0)

    async def hear(self, update: m.PolicyUpdate) -> None:
        self.newest = update
        await self.advance()

    async def obey(self, fence: m.Fence) -> None:
        self.fence = fence
        if fence.is_open:
            self.due = max(self.due, fence.policy_version)
        await self.advance()

    async def advance(self) -> None:
        """Do what is asked with the newest policy, and has not been done."""
        async with self.working:
            if self.newest is None:
                return
            version, fence = self.newest.policy_version, self.fence
            if fence is None or fence.policy_version < version:
                fence = m.Fence(policy_version=version, attempt=1, is_open=False)
            asked = (version, fence.attempt, fence.is_open)
            if fence.policy_version > version or asked == self.answered:
                return
            if self.answered[:2] != asked[:2]:
                await self.prepare(version, fence.attempt)
            if fence.is_open:
                await self.load(version, fence.attempt)
            self.answered = asked

    async def prepare(self, version: int, attempt: int) -> None:
        if self.prepared < version or self.error:
            self.error = await self.try_to("prepare", version, attempt)
            self.prepared = self.prepared if self.error else version
        prepared = m.PolicyPrepared(
            worker=self.name,
            incarnation=self.incarnation,
            policy_version=version,
            attempt=attempt,
            num_bytes=100,
            prepare_s=0.25,
            error=self.error,
        )
        await self.bus.publish(prepared)

    async def load(self, version: int, attempt: int) -> None:
        if self.version < version and not self.error:
            self.error = await self.try_to("load", version, attempt)
            self.version = self.version if self.error else version
        loaded = m.PolicyLoaded(
            worker=self.name,
            incarnation=self.incarnation,
            policy_version=version,
            attempt=attempt,
            load_s=0.5,
            canary_gap=0.0,
            error=self.error,
        )
        await self.bus.publish(loaded)
        await self.heartbeat()

    async def try_to(self, stage: str, version: int, attempt: int) -> str:
        """Why it does not work, or nothing."""
        await asyncio.sleep(0)
        trouble = self.trouble(stage, version, attempt)
        if trouble == SILENT:
            await asyncio.Event().wait()
        return trouble

    async def phase(self, phase: m.Phase) -> None:
        if not self.colocated:
            return
        if phase.phase in (m.PhaseName.GENERATE, m.PhaseName.EVALUATE):
            if phase.granted:
                self.open.set()
            return
        self.open.clear()
        kept = await self.try_to("release", self.version, 1)
        report = m.LeaseReport(
            service="rollout",
            worker=self.name,
            incarnation=self.incarnation,
            sequence=phase.sequence,
            freed_bytes=1,
            kept_bytes=64 << 20 if kept else 0,
            resident_bytes=1,
        )
        await self.bus.publish(report)

    async def handle(self, group: m.Message) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        first = self.version
        assert first >= group.min_policy_version, "a worker took a group that asks for a newer policy"
        for _ in range(self.rng.randint(0, 30)):
            await asyncio.sleep(0)
        if self.rng.random() < self.mishaps.failed:
            return failure(group, "rollout", self.name, retryable=self.rng.random() >= self.mishaps.unmendable)
        lengths = [self.rng.randint(1, 8) for _ in group.seeds]
        payload = encode_blob(trajectories(group, lengths, first))
        return m.TrajectoryGroup(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            task=group.task,
            worker=self.name,
            trajectories=await self.blobs.put(group.group_id, "trajectories", payload),
            num_prompt_tokens=len(group.prompt_tokens),
            response_lengths=lengths,
            finish_reasons=[m.FinishReason.STOP] * len(lengths),
            min_policy_version=first,
            max_policy_version=self.version,
            generate_s=0.01,
        )


def trajectories(group: m.PromptGroup, lengths: list[int], version: int) -> Trajectories:
    total = sum(lengths)
    return Trajectories(
        group_id=group.group_id,
        prompt_tokens=pack_int32(group.prompt_tokens),
        cu_seqlens=cumulative(lengths),
        tokens=pack_int32([7] * total),
        loss_mask=memoryview(bytes([1]) * total),
        rollout_logprobs=pack_float32([-0.5] * total),
        finish_reasons=[m.FinishReason.STOP] * len(lengths),
        version_spans=[[VersionSpan(version, 0, length)] for length in lengths],
        texts=[f"Answer: {length}" for length in lengths],
    )


def failure(group: m.PromptGroup, service: str, worker: str, *, retryable: bool) -> m.GroupFailed:
    return m.GroupFailed(
        group_id=group.group_id,
        attempt=group.attempt,
        purpose=group.purpose,
        service=service,
        worker=worker,
        kind="engine",
        text="the engine gave up",
        retryable=retryable,
    )
