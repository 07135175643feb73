"""Phases as a lease on device memory: colocated services take turns, disaggregated ones never wait."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import starmap
from typing import Protocol

from beamline.coordinator.roster import Roster
from beamline.protocol.errors import BeamlineError, DeadlineExceeded
from beamline.protocol.messages import Heartbeat, LeaseReport, Phase, PhaseName
from beamline.runtime.waits import Names

log = logging.getLogger(__name__)

HOLDERS = {
    PhaseName.START: "",
    PhaseName.GENERATE: "rollout",
    PhaseName.EVALUATE: "rollout",
    PhaseName.TRAIN: "trainer",
    PhaseName.SYNC: "trainer",
    PhaseName.CHECKPOINT: "trainer",
    PhaseName.DONE: "",
}
"""Who has the device memory in which phase."""

MENDS = {
    "rollout": "Give the services devices of their own (run.placement=disaggregated), a smaller cache "
    "(rollout.engine.kv_cache_mib), or more time (coordinator.lease_deadline_s)",
    "trainer": "Give the services devices of their own (run.placement=disaggregated), smaller micro-batches "
    "(trainer.max_tokens_per_micro_batch), or more time (coordinator.lease_deadline_s)",
}
"""By the service that did not release."""

MIB = 1 << 20
TOLERANCE_BYTES, TOLERANCE_SHARE = MIB, 0.01
"""Of what was freed, so much may stay: memory is given back in whole pages, and an allocator keeps an arena's last
ones. The next holder loses no more by it than by the noise of its own allocations."""

type Publish = Callable[[Phase], Awaitable[None]]
type When = Callable[[Callable[[], bool], Callable[[], str], Names], Awaitable[object]]
"""Wait until a condition over the coordinator's state holds; the text says what is awaited, the names of whom."""


class Lease(Protocol):
    """Chosen when the run is built, by `run.placement`."""

    phase: PhaseName
    since: float
    """When the present phase was entered, in Unix seconds."""

    async def acquire(self, phase: PhaseName, step: int, policy_version: int) -> None:
        """Enter a phase: returns when its holder may start. Raises BeamlineError where devices are not released."""
        ...

    @property
    def admits(self) -> bool:
        """Whether training groups may be admitted in the present phase."""
        ...


class GrantedLease:
    """Services have devices of their own: every phase is granted at once, and phases overlap."""

    def __init__(self, publish: Publish, first_sequence: int) -> None:
        self._publish = publish
        self._sequence = first_sequence
        self.phase, self.since = PhaseName.START, time.time()

    async def acquire(self, phase: PhaseName, step: int, policy_version: int) -> None:
        self.phase, self.since = phase, time.time()
        log.info("%s of policy %d", phase, policy_version)
        await self._publish(
            Phase(sequence=self._sequence, step=step, phase=phase, policy_version=policy_version, granted=True)
        )
        self._sequence += 1

    @property
    def admits(self) -> bool:
        return self.phase not in (PhaseName.START, PhaseName.DONE)


class ColocatedLease:
    """Services share devices: the former holder reports what it freed before the next one is granted.

    Args:
        publish: sends a Phase to all.
        when: waits on the coordinator's state, at most `coordinator.lease_deadline_s`.
        roster: collects the reports.
        now: monotonic clock in seconds.
        holder: who held the devices before this process ("" for nobody).
    """

    def __init__(
        self,
        publish: Publish,
        when: When,
        roster: Roster,
        now: Callable[[], float],
        first_sequence: int,
        holder: str = "",
    ) -> None:
        self._publish = publish
        self._when = when
        self._roster = roster
        self._now = now
        self._sequence = first_sequence
        self._holder = holder
        self.phase, self.since = PhaseName.START, time.time()

    async def acquire(self, phase: PhaseName, step: int, policy_version: int) -> None:
        holder = HOLDERS[phase]
        if holder and self._holder not in ("", holder):
            await self._send(phase, step, policy_version, granted=False)
            await self._released(self._holder, holder, self._sequence - 1, phase)
        self._holder = holder
        self.phase, self.since = phase, time.time()
        log.info("%s of policy %d", phase, policy_version)
        await self._send(phase, step, policy_version, granted=True)

    @property
    def admits(self) -> bool:
        return self.phase is PhaseName.GENERATE

    async def _send(self, phase: PhaseName, step: int, policy_version: int, *, granted: bool) -> None:
        message = Phase(sequence=self._sequence, step=step, phase=phase, policy_version=policy_version, granted=granted)
        self._sequence += 1
        await self._publish(message)

    async def _released(self, former: str, holder: str, sequence: int, phase: PhaseName) -> None:
        """Wait until the former holder's live workers have reported, and check what they did.

        Raises BeamlineError with both sides' numbers.
        """

        def silent() -> list[Heartbeat]:
            return [w for w in self._alive(former) if self._roster.release_of(w, sequence) is None]

        late = ""
        try:
            await self._when(
                lambda: not silent(),
                lambda: f"{_names(silent())} to release device memory before phase {phase}",
                lambda: [worker.worker for worker in silent()],
            )
        except DeadlineExceeded as waited:
            late = f"{waited} (coordinator.lease_deadline_s)"
        reports = [(worker, self._roster.release_of(worker, sequence)) for worker in self._alive(former)]
        keeping = [worker for worker, report in reports if report is not None and not is_honoured(report)]
        if late or keeping:
            broken = late or f"{_names(keeping)} kept device memory that {holder} needs in phase {phase}"
            sides = [*starmap(_former_side, reports), *map(_waiting_side, self._alive(holder))]
            raise BeamlineError(f"the lease was not honoured: {broken}. {'; '.join(sides)}. {MENDS[former]}")

    def _alive(self, service: str) -> list[Heartbeat]:
        return self._roster.alive(service, self._now())


def is_honoured(report: LeaseReport) -> bool:
    """Whether a worker gave back what it had to, up to the tolerance."""
    return report.kept_bytes <= max(TOLERANCE_BYTES, TOLERANCE_SHARE * report.freed_bytes)


def _names(workers: Iterable[Heartbeat]) -> str:
    return ", ".join(worker.worker for worker in workers)


def _former_side(worker: Heartbeat, report: LeaseReport | None) -> str:
    if report is None:
        return f"{worker.worker}: no report, {_mib(worker.rss_bytes)} resident at its last heartbeat"
    figures = f"freed {_mib(report.freed_bytes)}, kept {_mib(report.kept_bytes)}"
    return f"{worker.worker}: {figures}, {_mib(report.resident_bytes)} resident"


def _waiting_side(worker: Heartbeat) -> str:
    return f"{worker.worker} waits: {_mib(worker.rss_bytes)} resident at its last heartbeat"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
