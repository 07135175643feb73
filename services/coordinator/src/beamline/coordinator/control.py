"""Answers requests from the command line: status, pause, resume, stop."""

import time

import msgspec

from beamline.coordinator.core import Core
from beamline.coordinator.lease import Lease
from beamline.protocol import messages as m


class Control:
    """Every answer is the status after the request took effect."""

    def __init__(self, core: Core, lease: Lease) -> None:
        self._core = core
        self._lease = lease

    async def answer(self, request: m.Message) -> m.Message:
        match request:
            case m.PauseRequest():
                self._core.paused = True
            case m.ResumeRequest():
                self._core.paused = False
            case m.StopRequest():
                self._core.stopping = True
            case _:
                pass
        self._core.pulse.beat()
        return self.status()

    def status(self) -> m.StatusReply:
        core = self._core
        return m.StatusReply(
            run=core.config.run.name,
            step=core.ledger.step,
            num_steps=core.last_step,
            phase=self._lease.phase,
            policy_version=core.ledger.step,
            paused=core.paused,
            waiting_for=core.pulse.waiting_for(),
            ledger=core.ledger.counts(),
            workers=self._workers(),
            metrics=core.metrics,
            left_out=core.roster.left_out(),
            phase_since=self._lease.since,
            silences_s=core.roster.silences_s(time.monotonic()),
        )

    def _workers(self) -> list[m.Heartbeat]:
        """Last heartbeats; a worker that is left out of a policy waits for a later one, and here is why."""
        left_out = self._core.roster.left_out()
        return [
            msgspec.structs.replace(worker, waiting_for=left_out.get(worker.worker, worker.waiting_for))
            for worker in self._core.roster.workers()
        ]
