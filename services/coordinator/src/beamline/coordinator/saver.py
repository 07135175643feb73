"""Has the trainer keep policies while the run goes on: checkpoints, and exports for others.

Consumes steps that are over, produces SaveRequests; waits for the trainer's copy alone, and at the run's end for what
is still being written.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from beamline.coordinator import journal as j
from beamline.coordinator.core import Core
from beamline.coordinator.cursor import DataCursor
from beamline.coordinator.ledger import End
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.resume_files import DataCursorFile, DataIdentity, Ends, LedgerFile, encode_files
from beamline.coordinator.step_report import PhaseClock, saved_metrics
from beamline.protocol.messages import CheckpointSaved, Metrics, PhaseName, SaveRequest, StateCopied
from beamline.protocol.saving import CoordinatorFiles

log = logging.getLogger(__name__)

BLOB_KIND = "coordinator_files"


class When(Protocol):
    """As `Coordinator.when`."""

    async def __call__[T](self, condition: Callable[[], T | None], waiting_for: Callable[[], str], *on: str) -> T: ...


class Saver:
    """Asks once for each step that is to be kept, whatever dies in between.

    Args:
        core: the run's state.
        recorder: takes what saving cost.
        cursor: over the training data.
        enter: enters a phase.
        when: waits for services to change the state.
    """

    def __init__(
        self,
        core: Core,
        recorder: Recorder,
        cursor: DataCursor,
        enter: Callable[[PhaseName], Awaitable[None]],
        when: When,
    ) -> None:
        self._core, self._saves = core, core.state.saves
        self._recorder = recorder
        self._cursor = cursor
        self._enter = enter
        self._when = when
        self._clock = PhaseClock()
        self._taking = asyncio.Lock()
        """An answer that is delivered twice may come twice at once."""
        self._copies: dict[int, dict[str, float]] = {}
        """What the copies have cost of saves that are not complete, by step."""

    async def save_if_due(self) -> None:
        """Have the newest policy kept if it is time; returns when it is copied, and may change again.

        Every `checkpoint_interval` and `export_interval` steps, and at the run's last.
        """
        step = self._core.ledger.step
        checkpoint, export = self._due(step)
        is_copying = self._saves.request(step) is not None and self._saves.copied_step < step
        if step == 0 or not (is_copying or checkpoint or export):
            return
        self._clock.start()
        with self._clock.phase("checkpoint"):
            await self._enter(PhaseName.CHECKPOINT)
            if not is_copying:
                await self._answered()
                await self._ask(step, checkpoint=checkpoint, export=export)
            await self._when(
                lambda: self._saves.copied_step >= step, lambda: f"the trainer's copy of policy {step}", "trainer"
            )
        self._recorder.record_step(step, self._clock.spent())

    async def republish(self) -> None:
        """After a restart: ask again for what is not answered; broker and trainer know what they have."""
        for step in self._saves.open_steps():
            if (request := self._saves.request(step)) is not None:
                await self._core.bus.publish(request)

    async def take(self, message: StateCopied | CheckpointSaved) -> None:
        """An answer of the trainer's; one that was taken before changes nothing."""
        async with self._taking:
            await self._take(message)

    async def _take(self, message: StateCopied | CheckpointSaved) -> None:
        match message:
            case StateCopied():
                self._copies[message.step] = {"checkpoint/copy_s": message.copy_s}
                self._recorder.record_step(message.step, self._copies[message.step])
                await self._core.commit(j.Copied(step=message.step))
            case CheckpointSaved() if self._saves.awaits(message):
                if message.error:
                    log.error("policy %d was to be saved, and the run goes on without: %s", message.step, message.error)
                # Before the journal ends the save: a coordinator that dies in between must not lose its figures.
                await self._tell(message)
                await self._core.commit(j.Saved(saved=message))
            case CheckpointSaved():
                pass
        if isinstance(message, CheckpointSaved):
            await self._core.release([_owner(message.step)])

    async def finish(self) -> str:
        """Wait until nothing is being written any more. Returns why not all of the last policy is kept."""
        step = self._core.ledger.step
        if self._saves.open_steps():
            with self._clock.phase("checkpoint"):
                await self._enter(PhaseName.CHECKPOINT)
                await self._answered()
            self._recorder.record_step(step, self._clock.spent())
        return self._saves.error(step)

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether a checkpoint, and whether an export is due and was not asked for."""
        trainer, is_last = self._core.config.trainer, step >= self._core.last_step

        def at(interval: int) -> bool:
            return interval > 0 and step % interval == 0

        checkpoint = trainer.saves and (is_last or at(trainer.checkpoint_interval))
        return self._saves.missing(step, checkpoint=checkpoint, export=is_last or at(trainer.export_interval))

    async def _ask(self, step: int, *, checkpoint: bool, export: bool) -> None:
        """Journal what is asked for, then ask."""
        files = None
        if checkpoint:
            rows = await asyncio.to_thread(lambda: self._cursor.identity)
            files = await self._core.blobs.put(_owner(step), BLOB_KIND, self._files(rows).encode())
        request = SaveRequest(step=step, checkpoint=checkpoint, export=export, coordinator_files=files)
        await self._core.commit(j.SaveAsked(request=request))
        await self._core.bus.publish(request)

    async def _answered(self) -> None:
        """Wait for what was asked for before: one save is written at a time, so that slow ones do not pile up."""
        await self._when(
            lambda: not self._saves.open_steps(),
            lambda: f"the trainer to write what it keeps of policy {', '.join(map(str, self._saves.open_steps()))}",
            "trainer",
        )

    def _files(self, rows: DataIdentity) -> CoordinatorFiles:
        """What a run needs of the coordinator to go on after the newest step, all of one moment."""
        ledger, state = self._core.ledger, self._core.state
        counts = ledger.counts()
        cursor = DataCursorFile(position=state.position, rows=rows)
        kept = LedgerFile(
            step=ledger.step,
            started=state.started,
            ends=Ends(**{end.value: counts[end] for end in End}),
            open=ledger.open_prompts(),
            evaluated=sorted(state.evaluated),
        )
        return CoordinatorFiles(files=encode_files(cursor, kept))

    async def _tell(self, message: CheckpointSaved) -> None:
        """What a save has cost, in one message; what of it was recorded before stays as it is."""
        values = self._copies.pop(message.step, {}) | saved_metrics(message)
        self._recorder.record_step(message.step, values)
        await self._core.bus.publish(
            Metrics(service="coordinator", worker="coordinator", step=message.step, values=values)
        )


def _owner(step: int) -> str:
    return f"save-{step}"
