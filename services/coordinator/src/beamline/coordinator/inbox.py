"""What comes in: answers from the ring, policy updates, heartbeats. Each changes the state and wakes whoever waits."""

import logging
import time

from beamline.coordinator import journal as j
from beamline.coordinator.admission import Admission
from beamline.coordinator.core import Core
from beamline.coordinator.evaluator import Evaluator
from beamline.coordinator.saver import Saver
from beamline.protocol import messages as m

log = logging.getLogger(__name__)


class Inbox:
    """The handlers of the coordinator's queue and subscriptions."""

    def __init__(self, core: Core, admission: Admission, evaluator: Evaluator, saver: Saver) -> None:
        self._core = core
        self._admission = admission
        self._evaluator = evaluator
        self._saver = saver

    async def collect(self, message: m.Message) -> None:
        """One answer from the ring."""
        core = self._core
        match message:
            case m.ScoredGroup(purpose=m.Purpose.EVAL) | m.GroupFailed(purpose=m.Purpose.EVAL):
                await self._evaluator.take(message)
            case m.ScoredGroup() if core.ledger.awaits(message.group_id):
                await core.commit(j.Scored(scored=message))
            case m.ScoredGroup():
                pass  # a second answer: the ledger has the first, or the group's end
            case m.GroupFailed():
                await self._admission.fail(message)
            case m.PolicyPrepared():
                if message.error:
                    log.error("%s: %s", message.worker, message.error)
                core.roster.record_prepared(message)
            case m.PolicyLoaded():
                if message.error:
                    log.error("%s: %s", message.worker, message.error)
                core.roster.record_loaded(message)
            case m.LeaseReport():
                core.roster.record_release(message)
            case m.StateCopied() | m.CheckpointSaved():
                await self._saver.take(message)
            case _:
                raise TypeError(f"{type(message).__name__} does not belong on the coordinator's queue")
        core.pulse.beat()

    async def follow(self, update: m.PolicyUpdate) -> None:
        """The newest policy update."""
        self._core.update = update
        self._core.pulse.beat()

    async def listen(self, message: m.Message) -> None:
        """A worker's heartbeat."""
        if isinstance(message, m.Heartbeat):
            self._core.roster.record_heartbeat(message, time.monotonic())
            self._core.pulse.beat()
