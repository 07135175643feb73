"""The rollout worker: prompt groups in, trajectories out, under the served policy and only while it holds the devices.

`readiness` says when it takes groups, `policy_sync` which policy is served; redelivery and acks are the bus's.
"""

import time
from collections.abc import Awaitable, Callable

from beamline.models.routing import RoutingShape
from beamline.protocol import messages as m
from beamline.protocol.blobs import encode_blob
from beamline.protocol.errors import Rejected, Retryable
from beamline.rollout.deadline import CutShort, sample
from beamline.rollout.engine import Engine, Sampler
from beamline.rollout.pack import pack_trajectories
from beamline.rollout.readiness import Readiness
from beamline.rollout.routes import routes_to_send
from beamline.runtime.blob_store import BlobStore

OWN_PHASES = (m.PhaseName.GENERATE, m.PhaseName.EVALUATE)
"""In which rollout holds devices that it shares."""


class RolloutWorker:
    """One engine on the work queue.

    Args:
        worker: this worker's name.
        incarnation: changes with every start of the process.
        engine: whose memory is given back.
        sampler: makes trajectories with it.
        blobs: where trajectories go.
        publish: sends a message that is no answer to an input.
        readiness: what is served, and whether groups may be taken.
        colocated: whether the devices are shared, so that memory is released in the phases of others.
        shape: of the routed experts that go with what is trained on; None without routing replay.
        answer_s: how long before a group's deadline its sampling ends.
    """

    def __init__(
        self,
        *,
        worker: str,
        incarnation: str,
        engine: Engine,
        sampler: Sampler,
        blobs: BlobStore,
        publish: Callable[[m.Message], Awaitable[None]],
        readiness: Readiness,
        colocated: bool,
        shape: RoutingShape | None,
        answer_s: float,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._engine = engine
        self._sampler = sampler
        self._blobs = blobs
        self._publish = publish
        self._readiness = readiness
        self._colocated = colocated
        self._shape = shape
        self._answer_s = answer_s

    async def handle(self, group: m.Message) -> m.TrajectoryGroup | m.GroupFailed:
        """Sample a group.

        Raises Rejected for a prompt that does not fit and for a routed trace that cannot be replayed, Retryable under
        too old a policy.
        """
        assert isinstance(group, m.PromptGroup)
        if self._readiness.policy_version < group.min_policy_version:
            raise Retryable(f"{self._worker} does not serve policy {group.min_policy_version} yet")
        started = time.monotonic()
        begun = self._readiness.begin_group()
        try:
            completions = await sample(self._sampler, group, self._answer_s)
        except CutShort as cut:
            return self._failed(group, cut.kind, str(cut), retryable=True)
        finally:
            self._readiness.end_group()
        generate_s = time.monotonic() - started
        versions = [span.policy_version for completion in completions for span in completion.version_spans]
        if await self._readiness.are_void(versions, begun):
            return self._failed(group, "policy", "a policy that it was sampled from was refused", retryable=True)
        trajectories = pack_trajectories(group, completions)
        routed = await routes_to_send(group, completions, self._shape, self._engine)
        put = self._blobs.put
        return m.TrajectoryGroup(
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
            min_policy_version=min(versions),
            max_policy_version=max(versions),
            generate_s=generate_s,
        )

    def on_rejected(self, group: m.Message, rejected: Rejected) -> m.GroupFailed:
        """The failure to publish for a group that will never work."""
        assert isinstance(group, m.PromptGroup)
        return self._failed(group, rejected.kind, str(rejected), retryable=False)

    async def on_phase(self, phase: m.Phase) -> None:
        """Give memory back for the phases of others, where devices are shared, and take it again for one's own."""
        if phase.phase in OWN_PHASES:
            if phase.granted:
                await self._engine.restore_memory()
                self._readiness.restore()
        elif self._colocated:
            self._readiness.release()
            report = await self._engine.release_memory()
            if phase.granted:
                return  # nobody waits: it was released when it was asked for
            await self._publish(
                m.LeaseReport(
                    service="rollout",
                    worker=self._worker,
                    incarnation=self._incarnation,
                    sequence=phase.sequence,
                    freed_bytes=report.freed_bytes,
                    kept_bytes=report.kept_bytes,
                    resident_bytes=report.after_bytes,
                )
            )

    def _failed(self, group: m.PromptGroup, kind: str, text: str, *, retryable: bool) -> m.GroupFailed:
        return m.GroupFailed(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            service="rollout",
            worker=self._worker,
            kind=kind,
            text=f"group {group.group_id}: {text}",
            retryable=retryable,
        )
