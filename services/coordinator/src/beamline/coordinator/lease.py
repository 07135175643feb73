"""Phases as a lease on device memory: colocated services take turns, disaggregated ones never wait."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from beamline.coordinator.roster import Roster
from beamline.protocol.messages import Phase, PhaseName

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

type Publish = Callable[[Phase], Awaitable[None]]
type When = Callable[[Callable[[], bool], Callable[[], str]], Awaitable[object]]
"""Wait until a condition over the coordinator's state holds; the text says what is awaited."""


class Lease(Protocol):
    """Chosen when the run is built, by `run.placement`."""

    phase: PhaseName

    async def acquire(self, phase: PhaseName, step: int, policy_version: int) -> None:
        """Enter a phase: returns when its holder may start."""
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
        self.phase = PhaseName.START

    async def acquire(self, phase: PhaseName, step: int, policy_version: int) -> None:
        self.phase = phase
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
        when: waits on the coordinator's state.
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
        self.phase = PhaseName.START

    async def acquire(self, phase: PhaseName, step: int, policy_version: int) -> None:
        holder = HOLDERS[phase]
        if holder and self._holder not in ("", holder):
            await self._send(phase, step, policy_version, granted=False)
            await self._released(self._holder, self._sequence - 1, phase)
        self._holder = holder
        self.phase = phase
        await self._send(phase, step, policy_version, granted=True)

    @property
    def admits(self) -> bool:
        return self.phase is PhaseName.GENERATE

    async def _send(self, phase: PhaseName, step: int, policy_version: int, *, granted: bool) -> None:
        message = Phase(sequence=self._sequence, step=step, phase=phase, policy_version=policy_version, granted=granted)
        self._sequence += 1
        await self._publish(message)

    async def _released(self, service: str, sequence: int, phase: PhaseName) -> None:
        await self._when(
            lambda: self._roster.released(service, sequence, self._now()),
            lambda: f"every {service} worker to release its device memory before phase {phase}",
        )
