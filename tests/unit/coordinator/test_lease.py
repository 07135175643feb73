"""Phases wait for measured releases; one that is late or not honoured stops the step with both sides' numbers."""

import asyncio

import pytest

from beamline.coordinator.lease import MIB, ColocatedLease, GrantedLease, is_honoured
from beamline.coordinator.roster import HEARTBEAT_DEADLINE_S, Roster
from beamline.coordinator.waiting import Pulse
from beamline.protocol import messages as m
from beamline.protocol.errors import BeamlineError
from ring_messages import heartbeat, lease_report


class Shared:
    """A colocated lease with the clock, the pulse and the phases that it sent in the test's hands."""

    def __init__(self, *workers: tuple[str, str], deadline_s: float = 5.0) -> None:
        self.now, self.pulse, self.roster, self.sent = 0.0, Pulse(), Roster(), list[m.Phase]()
        for service, worker in workers:
            self.roster.record_heartbeat(heartbeat(service, worker, rss_bytes=50 * MIB), self.now)
        self.lease = ColocatedLease(
            self.publish, lambda c, w, on: self.pulse.when(c, w, deadline_s, on), self.roster, lambda: self.now, 0
        )

    async def publish(self, phase: m.Phase) -> None:
        self.sent.append(phase)

    async def ask(self, holder: m.PhaseName, phase: m.PhaseName) -> "asyncio.Task[None]":
        """A phase is held, another one is asked for; nobody has released yet."""
        await self.lease.acquire(holder, 1, 0)
        acquiring = asyncio.create_task(self.lease.acquire(phase, 1, 0))
        await asyncio.sleep(0)
        assert (self.sent[-1].phase, self.sent[-1].granted) == (phase, False)
        return acquiring

    async def report(self, report: m.LeaseReport) -> None:
        self.roster.record_release(report)
        self.pulse.beat()
        await asyncio.sleep(0)

    @property
    def sequence(self) -> int:
        return self.sent[-1].sequence


TWO_ROLLOUTS = (("rollout", "rollout-0"), ("rollout", "rollout-1"), ("trainer", "trainer"))


async def test_a_phase_waits_for_every_live_worker_of_the_last_holder():
    shared = Shared(*TWO_ROLLOUTS)
    train = await shared.ask(m.PhaseName.GENERATE, m.PhaseName.TRAIN)
    assert [(p.phase, p.granted) for p in shared.sent[:1]] == [(m.PhaseName.GENERATE, True)]
    await shared.report(lease_report("rollout-0", shared.sequence))
    await shared.report(lease_report("rollout-1", shared.sequence, incarnation="before the restart"))
    assert not train.done(), "rollout-1 of this incarnation has not released"
    await shared.report(lease_report("rollout-1", shared.sequence))
    await train
    assert (shared.sent[-1].phase, shared.sent[-1].granted) == (m.PhaseName.TRAIN, True) and not shared.lease.admits
    assert [phase.sequence for phase in shared.sent] == [0, 1, 2]


async def test_the_trainer_releases_before_rollout_generates():
    shared = Shared(*TWO_ROLLOUTS)
    generate = await shared.ask(m.PhaseName.SYNC, m.PhaseName.GENERATE)
    await shared.report(lease_report("rollout-0", shared.sequence))
    assert not generate.done(), "rollout has nothing to release"
    await shared.report(lease_report("trainer", shared.sequence, service="trainer"))
    await generate
    assert shared.lease.admits


async def test_a_late_release_stops_the_step_with_the_numbers_of_both_sides():
    shared = Shared(*TWO_ROLLOUTS, deadline_s=0.01)
    train = await shared.ask(m.PhaseName.GENERATE, m.PhaseName.TRAIN)
    await shared.report(lease_report("rollout-0", shared.sequence))
    with pytest.raises(BeamlineError) as stopped:
        await train
    text = str(stopped.value)
    assert "waited 0.01 s for rollout-1 to release" in text and "coordinator.lease_deadline_s" in text
    assert "rollout-0: freed 7.0 MiB, kept 0.0 MiB, 3.0 MiB resident" in text
    assert "rollout-1: no report, 50.0 MiB resident" in text
    assert "trainer waits: 50.0 MiB resident" in text
    assert "run.placement=disaggregated" in text and "rollout.engine.kv_cache_mib" in text
    assert not any(phase.granted for phase in shared.sent[1:]), "the trainer must not start"


async def test_memory_that_is_kept_stops_the_step_without_waiting_for_the_deadline():
    shared = Shared(*TWO_ROLLOUTS)
    train = await shared.ask(m.PhaseName.GENERATE, m.PhaseName.TRAIN)
    await shared.report(lease_report("rollout-0", shared.sequence, freed_bytes=MIB, kept_bytes=6 * MIB))
    await shared.report(lease_report("rollout-1", shared.sequence))
    with pytest.raises(
        BeamlineError, match=r"rollout-0 kept device memory that trainer needs in phase train"
    ) as stopped:
        await train
    assert "rollout-0: freed 1.0 MiB, kept 6.0 MiB" in str(stopped.value) and "trainer waits" in str(stopped.value)


async def test_a_trainer_that_keeps_memory_is_named_with_its_own_mend():
    shared = Shared(*TWO_ROLLOUTS)
    generate = await shared.ask(m.PhaseName.SYNC, m.PhaseName.GENERATE)
    await shared.report(lease_report("trainer", shared.sequence, service="trainer", kept_bytes=2 * MIB))
    with pytest.raises(BeamlineError, match=r"trainer kept .* rollout needs .*trainer\.max_tokens_per_micro_batch"):
        await generate


async def test_a_dead_worker_is_not_waited_for():
    shared = Shared(*TWO_ROLLOUTS)
    train = await shared.ask(m.PhaseName.GENERATE, m.PhaseName.TRAIN)
    shared.now = HEARTBEAT_DEADLINE_S + 1
    shared.roster.record_heartbeat(heartbeat("rollout", "rollout-0"), shared.now)
    await shared.report(lease_report("rollout-0", shared.sequence))
    await train
    assert shared.sent[-1].granted


@pytest.mark.parametrize(
    ("freed_bytes", "kept_bytes", "honoured"),
    [(0, 0, True), (0, MIB, True), (0, MIB + 1, False), (1000 * MIB, 10 * MIB, True), (1000 * MIB, 11 * MIB, False)],
)
def test_a_share_of_what_was_freed_may_stay(freed_bytes: int, kept_bytes: int, honoured: bool):
    report = lease_report("rollout-0", 1, freed_bytes=freed_bytes, kept_bytes=kept_bytes)
    assert is_honoured(report) is honoured


async def test_disaggregated_phases_are_granted_at_once():
    sent = list[m.Phase]()

    async def publish(phase: m.Phase) -> None:
        sent.append(phase)

    lease = GrantedLease(publish, 7)
    for phase in (m.PhaseName.GENERATE, m.PhaseName.TRAIN):
        await lease.acquire(phase, 1, 0)
    assert [(p.sequence, p.granted) for p in sent] == [(7, True), (8, True)] and lease.admits
