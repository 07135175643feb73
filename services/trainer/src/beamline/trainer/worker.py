"""The trainer's answers: a train batch becomes a policy update, a save request a copy, a phase a lease report.

All work on the policy runs on one thread, in the order in which it was asked for, which is the order in which rank 0
passes it on to the other ranks; the event loop stays free for heartbeats and acks.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from opentelemetry import trace

from beamline.protocol.config import OptimizerSection
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import (
    Canary,
    LeaseReport,
    Message,
    Metrics,
    Phase,
    PhaseName,
    PolicyUpdate,
    SaveRequest,
    TrainBatch,
    WorkerState,
)
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.service import WorkerStatus, rss_bytes
from beamline.runtime.trace_context import linked_span
from beamline.runtime.waits import waiting
from beamline.trainer.batch import Batch
from beamline.trainer.canary import canary_tokens
from beamline.trainer.keeping import Keeping, KeepingSettings
from beamline.trainer.rank import Rank
from beamline.trainer.saving import Saver
from beamline.trainer.schedule import learning_rate
from beamline.weights.manifest import WeightManifest

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)

OTHERS_PHASES = (PhaseName.GENERATE, PhaseName.EVALUATE)
"""In which rollout holds devices that it shares."""
POLICY_OWNER = "policy"
"""Owner of the manifests' blobs."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What the worker takes from the run's configuration."""

    worker: str
    incarnation: str
    optimizer: OptimizerSection
    num_steps: int
    vocab_size: int
    keeping: KeepingSettings
    colocated: bool
    model_bytes: int = 0
    """Of all weights, where a policy is adapters alone; else 0."""


class TrainerWorker:
    """Owns the policy's version: +1 a trained batch, never twice for one step."""

    def __init__(
        self,
        settings: TrainerSettings,
        rank: Rank,
        thread: Executor,
        blobs: BlobStore,
        publish: Callable[[Message], Awaitable[None]],
        status: WorkerStatus,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._thread = thread
        self._blobs = blobs
        self._publish = publish
        self._status = status
        self.saver = Saver(Keeping(settings.keeping), rank, self._run, blobs, publish)
        self._update: PolicyUpdate | None = None
        self._trained_bytes = 0

    @tracer.start_as_current_span("start")
    async def publish_first(self, step: int = 0) -> None:
        """The policy as it was loaded, so that every engine starts from the trainer's own weights.

        Args:
            step: whose policy it is: 0, or that of the checkpoint from which the run goes on.
        """
        self._update = await self._make_update(step, {}, {})
        await self._publish(self._update)
        self._status.state = WorkerState.READY

    async def handle(self, message: Message) -> Message | None:
        """A batch becomes the next policy; a save request is answered when the policy is copied, and when it is kept.

        Raises as `train` does.
        """
        match message:
            case TrainBatch():
                return await self.train(message)
            case SaveRequest():
                return await self.saver.handle(message, self._status.policy_version)
            case _:
                raise TypeError(f"{type(message).__name__} does not belong on the trainer's queue")

    async def train(self, message: TrainBatch) -> PolicyUpdate:
        """Train a step. A batch that was trained already is answered by the newest update.

        Raises BeamlineError for a batch that skips a step, ProtocolError and BlobError as `assemble` does, NotFinite as
        `train_step` does.
        """
        assert self._update is not None, "publish_first comes before any batch"
        version = self._update.policy_version
        if message.step <= version:
            return self._update
        if message.step > version + 1:
            raise BeamlineError(
                f"batch of step {message.step} on top of policy {version}: the trainer has lost the policies between; "
                "start the run anew"
            )
        log.info("step %d trains %s", message.step, " ".join(group.group_id for group in message.groups))
        self._status.state, self._status.in_flight = WorkerState.BUSY, 1
        started = time.perf_counter()
        issued = {group.group_id: group.traceparent for group in message.groups}
        with linked_span("assemble", issued, _mini_batches(message)):
            share = await self._rank.share(message, self._blobs)
        loaded_s = time.perf_counter() - started
        stats = await self._run(f"step {message.step} to be trained", self._train, message, share)
        self._trained_bytes = rss_bytes()
        stats = {**stats, "timing/train_load": loaded_s}
        self._update = await self._make_update(message.step, stats, share.failed_groups)
        self._status.state, self._status.in_flight = WorkerState.READY, 0
        await self._publish(self._metrics(self._update))
        return self._update

    def gauges(self) -> dict[str, float]:
        """How far the step under way has come."""
        return self._rank.progress.gauges()

    async def on_phase(self, phase: Phase) -> None:
        """Release memory before rollout asks for the devices, and report it then."""
        if phase.phase in OTHERS_PHASES and self._settings.colocated and not phase.granted:
            await self._publish(await self._run("memory to be released", self._release, phase.sequence))
        elif phase.phase is PhaseName.SYNC and self._settings.colocated:
            # While the engines load, so that the next phase need not wait for it.
            await self._run("memory to be trimmed", self._rank.trim)

    def _train(self, message: TrainBatch, share: Batch) -> dict[str, float]:
        o = self._settings.optimizer
        lr = learning_rate(
            message.step,
            peak=o.lr,
            warmup_steps=o.warmup_steps,
            num_steps=self._settings.num_steps,
            decay=o.decay,
            min_ratio=o.min_lr_ratio,
        )
        return self._rank.train(message, share, lr)

    @tracer.start_as_current_span("export")
    async def _make_update(self, step: int, stats: dict[str, float], failed_groups: dict[str, str]) -> PolicyUpdate:
        started = time.perf_counter()
        manifest, canary = await self._run(f"policy {step} to be exported", self._export, step)
        ref = await self._blobs.put(POLICY_OWNER, "manifest", manifest.encode())
        self._status.policy_version = step
        stats = {**stats, **self._adapter_size(manifest), "timing/train_export": time.perf_counter() - started}
        return PolicyUpdate(
            step=step, policy_version=step, manifest=ref, canary=canary, stats=stats, failed_groups=failed_groups
        )

    def _adapter_size(self, manifest: WeightManifest) -> dict[str, float]:
        """What moves in the place of all weights."""
        if not (model_bytes := self._settings.model_bytes):
            return {}
        return {
            "sync/adapter_bytes": float(manifest.num_bytes),
            "sync/adapter_share": manifest.num_bytes / model_bytes,
        }

    def _metrics(self, update: PolicyUpdate) -> Metrics:
        return Metrics(service="trainer", worker=self._settings.worker, step=update.step, values=update.stats)

    def _export(self, step: int) -> tuple[WeightManifest, Canary]:
        manifest = self._rank.export(step)
        assert manifest is not None, "rank 0 has every rank's part"
        tokens = canary_tokens(self._settings.vocab_size)
        return manifest, Canary(tokens=tokens, logprobs=self._rank.score(tokens))

    @tracer.start_as_current_span("release")
    def _release(self, sequence: int) -> LeaseReport:
        """What the last step had needed, and has given back by now."""
        before = max(rss_bytes(), self._trained_bytes)
        kept = self._rank.trim()
        after = rss_bytes()
        return LeaseReport(
            service="trainer",
            worker=self._settings.worker,
            incarnation=self._settings.incarnation,
            sequence=sequence,
            freed_bytes=max(0, before - after),
            kept_bytes=kept,
            resident_bytes=after,
        )

    async def _run[T, **P](self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have the policy's thread, and with it all ranks, do `what`."""
        with waiting(f"the policy's thread, and all ranks: {what}"):
            here = contextvars.copy_context()  # spans and logs of the thread belong to this step
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: here.run(work, *args, **kwargs)
            )


def _mini_batches(message: TrainBatch) -> dict[str, dict[str, str]]:
    """By group, which mini-batches its trajectories are in, counted from 1: what its link tells."""
    numbers: dict[str, list[str]] = {}
    for number, mini_batch in enumerate(message.mini_batches, start=1):
        for group in sorted({place.group for rank in mini_batch.ranks for place in rank}):
            numbers.setdefault(message.groups[group].group_id, []).append(str(number))
    return {group_id: {"beamline.mini_batch": " ".join(found)} for group_id, found in numbers.items()}
