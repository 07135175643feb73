"""How a policy is kept while training goes on: copied on the policy's thread, completed behind it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace
from opentelemetry import trace

from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import CheckpointSaved, Message, SaveRequest, StateCopied
from beamline.protocol.saving import CoordinatorFiles
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.waits import waiting
from beamline.trainer.keeping import CHECKPOINT, EXPORT, Keeping
from beamline.trainer.rank import Rank

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)

DRAIN_S = 25.0
"""How long the end of the trainer waits for a checkpoint under way; a service may take 30 s to drain."""

FAILURES = (OSError, BeamlineError)
"""After which training goes on, without a checkpoint."""

type Key = tuple[int, bool, bool]


class OnPolicyThread(Protocol):
    """Has the policy's thread do what is described; returns what it returns."""

    async def __call__[**P, T](self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class Saver:
    """Answers save requests: `StateCopied` when the policy may change, `CheckpointSaved` when all is on disk.

    One policy at a time is completed; the next request waits for it.
    """

    def __init__(
        self,
        keeping: Keeping,
        rank: Rank,
        on_policy_thread: OnPolicyThread,
        blobs: BlobStore,
        publish: Callable[[Message], Awaitable[None]],
    ) -> None:
        self._keeping = keeping
        self._rank = rank
        self._on_policy_thread = on_policy_thread
        self._blobs = blobs
        self._publish = publish
        self._copied: dict[Key, StateCopied] = {}
        self._saved: dict[Key, CheckpointSaved] = {}
        self._completing: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._broken = asyncio.Event()

    async def start(self) -> None:
        """Remove what an earlier trainer has left unfinished."""
        await asyncio.to_thread(self._keeping.clean_up)

    async def handle(self, request: SaveRequest, policy_version: int) -> None:
        """Copy what is asked for, say so, and begin to complete it; a request that comes again is answered again."""
        key = (request.step, request.checkpoint, request.export)
        if key in self._copied:
            await self._publish(self._copied[key])
            if key in self._saved:
                await self._publish(self._saved[key])
            return
        if self._completing is not None:
            with waiting(f"the files of an earlier policy, before those of policy {request.step}"):
                await asyncio.wait({self._completing})
        started, files, error = time.perf_counter(), CoordinatorFiles(files={}), ""
        try:
            files = await self._files(request)
            await self._copy(request, policy_version)
        except FAILURES as failure:
            what = CHECKPOINT if request.checkpoint else EXPORT
            error = await asyncio.to_thread(self._give_up, request.step, what, failure)
        self._copied[key] = StateCopied(step=request.step, copy_s=time.perf_counter() - started)
        await self._publish(self._copied[key])
        self._completing = asyncio.create_task(self._complete(request, files, started, error))
        self._completing.add_done_callback(self._pass_on)

    async def watch(self) -> None:
        """Raises what ended the completion of a policy, other than a failing disk; returns never."""
        await self._broken.wait()
        assert self._error is not None, "it broke by an error"
        raise self._error

    async def finish(self) -> None:
        """Wait for what is under way, but not for good: a run's end has waited for it already."""
        if self._completing is None or self._completing.done():
            return
        log.info("the trainer ends when the policy that it is writing is on disk, in %g s at the latest", DRAIN_S)
        with waiting("the policy that is being written", within_s=DRAIN_S):
            await asyncio.wait({self._completing}, timeout=DRAIN_S)
        if not self._completing.done():
            log.warning("what was being written is given up after %g s; older checkpoints are as they were", DRAIN_S)
            self._keeping.abandoned.set()
            await asyncio.wait({self._completing}, timeout=DRAIN_S / 10)

    async def _files(self, request: SaveRequest) -> CoordinatorFiles:
        if not request.checkpoint or request.coordinator_files is None:
            return CoordinatorFiles(files={})
        return CoordinatorFiles.decode(await self._blobs.get(request.coordinator_files))

    @tracer.start_as_current_span("save")
    async def _copy(self, request: SaveRequest, policy_version: int) -> None:
        if request.step != policy_version:
            raise BeamlineError(f"the policy is that of step {policy_version} by now")
        await self._on_policy_thread(f"policy {request.step} to be copied", self._keeping.copy, request, self._rank)

    async def _complete(self, request: SaveRequest, files: CoordinatorFiles, started: float, error: str) -> None:
        """In the background: hash, seal, take the names; then tell."""
        saved = CheckpointSaved(step=request.step, error=error)
        if not error:
            saved = await asyncio.to_thread(self._write, request, files)
        saved = replace(saved, save_s=time.perf_counter() - started)
        self._saved[request.step, request.checkpoint, request.export] = saved
        await self._publish(saved)

    @tracer.start_as_current_span("seal")
    def _write(self, request: SaveRequest, files: CoordinatorFiles) -> CheckpointSaved:
        """What came of it; a checkpoint is there though its export has failed."""
        saved, what = CheckpointSaved(step=request.step), CHECKPOINT
        try:
            if request.checkpoint:
                folder, num_bytes = self._keeping.seal(request.step, files.files)
                saved = replace(saved, path=str(folder), num_bytes=num_bytes)
            if request.export:
                what = EXPORT
                saved = replace(saved, export_path=str(self._keeping.export(request.step)))
        except FAILURES as failure:
            saved = replace(saved, error=self._give_up(request.step, what, failure))
        return saved

    def _give_up(self, step: int, what: str, failure: Exception) -> str:
        self._keeping.discard(step)
        error = self._keeping.explain(step, what, failure)
        log.error("%s; training goes on", error)
        return error

    def _pass_on(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._error = error
            self._broken.set()
