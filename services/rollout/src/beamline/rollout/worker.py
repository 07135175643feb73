"""The rollout worker: prompt groups in, trajectories out, under the newest policy and only while it holds the devices.

It takes groups while three things are so: it has loaded the newest policy that it heard of, its log-probabilities
agreed with the trainer's, and its memory is not released. Everything else (redelivery, acks) is the bus's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable


from beamline.protocol.blobs import encode_blob
from beamline.protocol.errors import BlobError, Rejected, Retryable, WeightError
from beamline.protocol.messages import (
    Canary,
    GroupFailed,
    LeaseReport,
    Message,
    Phase,
    PhaseName,
    PolicyLoaded,
    PolicyUpdate,
    PromptGroup,
    TrajectoryGroup,
    WorkerState,
)
from beamline.rollout.engine import Engine
from beamline.rollout.pack import pack_routed_experts, pack_trajectories
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.service import WorkerStatus
from beamline.weights.manifest import WeightManifest

OWN_PHASES = (PhaseName.GENERATE, PhaseName.EVALUATE)
"""In which rollout holds devices that it shares."""


class RolloutWorker:
    """One engine on the work queue.

    Args:
        worker: this worker's name.
        incarnation: changes with every start of the process.
        engine: samples; its policy counts as unknown until the first update.
        blobs: where trajectories go and manifests come from.
        publish: sends a message that is no answer to an input.
        status: what the heartbeat tells.
        canary_tolerance: largest |engine - trainer| log-probability of a policy that is served.
        colocated: whether the devices are shared, so that memory is released in the phases of others.
    """

    def __init__(
        self,
        *,
        worker: str,
        incarnation: str,
        engine: Engine,
        blobs: BlobStore,
        publish: Callable[[Message], Awaitable[None]],
        status: WorkerStatus,
        canary_tolerance: float,
        colocated: bool,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._engine = engine
        self._blobs = blobs
        self._publish = publish
        self._status = status
        self._canary_tolerance = canary_tolerance
        self._colocated = colocated
        self._newest: PolicyUpdate | None = None
        self._served: PolicyUpdate | None = None
        self._canary_gap = 0.0
        self._released = False
        self._open = asyncio.Event()
        self._tell_status()

    async def gate(self) -> None:
        """Returns at once while groups may be taken."""
        await self._open.wait()

    async def handle(self, group: PromptGroup) -> TrajectoryGroup | GroupFailed:
        """Sample a group. Raises Rejected for a prompt that does not fit, Retryable under too old a policy."""
        if self._served is None or self._served.policy_version < group.min_policy_version:
            raise Retryable(f"{self._worker} does not serve policy {group.min_policy_version} yet")
        started = time.monotonic()
        self._count(+1)
        try:
            async with asyncio.timeout(group.deadline - time.time()):
                completions = await self._engine.generate(group)
        except TimeoutError:
            return self._failed(group, "deadline", "its deadline passed before all samples ended", retryable=True)
        finally:
            self._count(-1)
        if self._served is None:
            return self._failed(group, "policy", "the policy that it was sampled from was refused", retryable=True)
        spans = [span.policy_version for completion in completions for span in completion.version_spans]
        trajectories = pack_trajectories(group, completions)
        routed = pack_routed_experts(group, completions)
        put = self._blobs.put
        return TrajectoryGroup(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            task=group.task,
            worker=self._worker,
            trajectories=await put(group.group_id, "trajectories", encode_blob(trajectories)),
            routed_experts=await put(group.group_id, "routed_experts", encode_blob(routed)) if routed else None,
            num_prompt_tokens=len(group.prompt_tokens),
            response_lengths=[len(completion.tokens) for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
            min_policy_version=min(spans),
            max_policy_version=max(spans),
            generate_s=time.monotonic() - started,
        )

    def on_rejected(self, group: Message, rejected: Rejected) -> GroupFailed:
        """The failure to publish for a group that will never work."""
        assert isinstance(group, PromptGroup)
        return self._failed(group, rejected.kind, str(rejected), retryable=False)

    async def on_policy(self, update: PolicyUpdate) -> None:
        """Load a new policy, check it against the trainer's canary, and say how it went.

        Weights that are damaged or not this model's leave the old policy served, but no groups are taken. A policy
        whose canary disagrees is not served at all. Either way the next update is the way back.
        """
        self._newest = update
        self._tell_status()
        started, error = time.monotonic(), ""
        try:
            if self._served is None or self._served.manifest != update.manifest:
                manifest = WeightManifest.decode(await self._blobs.get(update.manifest))
                await self._engine.load_weights(manifest, update.policy_version)
                self._canary_gap = await self._measure_gap(update.canary)
            error = self._judge(update)
        except (WeightError, BlobError) as refused:
            error = str(refused)
        self._tell_status()
        await self._publish(
            PolicyLoaded(
                worker=self._worker,
                incarnation=self._incarnation,
                policy_version=update.policy_version,
                load_s=time.monotonic() - started,
                canary_gap=self._canary_gap,
                error=error,
            )
        )

    async def on_phase(self, phase: Phase) -> None:
        """Give memory back for the phases of others, where devices are shared, and take it again for one's own."""
        if phase.phase in OWN_PHASES and phase.granted:
            await self._engine.restore_memory()
            self._released = False
            self._tell_status()
        elif phase.phase not in OWN_PHASES and self._colocated:
            self._released = True
            self._tell_status()
            report = await self._engine.release_memory()
            await self._publish(
                LeaseReport(
                    service="rollout",
                    worker=self._worker,
                    incarnation=self._incarnation,
                    sequence=phase.sequence,
                    freed_bytes=report.freed_bytes,
                    resident_bytes=report.after_bytes,
                )
            )

    async def _measure_gap(self, canary: Canary) -> float:
        logprobs = await self._engine.score(canary.tokens)
        return max((abs(a - b) for a, b in zip(logprobs, canary.logprobs, strict=True)), default=0.0)

    def _judge(self, update: PolicyUpdate) -> str:
        """Serve the loaded policy if its canary agreed; else say why not."""
        if self._canary_gap <= self._canary_tolerance:
            self._served = update
            return ""
        self._served = None
        return (
            f"policy {update.policy_version} is not served: a log-probability of the canary differs from the trainer's "
            f"by {self._canary_gap:.2e}, rollout.canary_tolerance is {self._canary_tolerance:.2e}"
        )

    def _failed(self, group: PromptGroup, kind: str, text: str, *, retryable: bool) -> GroupFailed:
        return GroupFailed(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            service="rollout",
            worker=self._worker,
            kind=kind,
            text=f"group {group.group_id}: {text}",
            retryable=retryable,
        )

    def _count(self, change: int) -> None:
        self._status.in_flight += change
        self._tell_status()

    def _tell_status(self) -> None:
        """Open or close the gate, and tell the heartbeat."""
        status, waiting_for = self._status, self._waiting_for()
        status.policy_version = self._served.policy_version if self._served else -1
        status.waiting_for = waiting_for
        if waiting_for:
            self._open.clear()
        else:
            self._open.set()
        status.state = WorkerState.PAUSED if waiting_for else WorkerState.BUSY if status.in_flight else WorkerState.READY

    def _waiting_for(self) -> str:
        """What keeps this worker from taking groups, in words; empty when nothing does."""
        if self._newest is None:
            return "the trainer's first policy"
        if self._served is None or self._served.policy_version != self._newest.policy_version:
            return f"policy {self._newest.policy_version} to be loaded"
        return "its phase" if self._released else ""
