"""Waits end by a change or by a deadline that says what was awaited; phases wait for measured releases."""

import asyncio

import pytest

from beamline.coordinator.lease import ColocatedLease, GrantedLease
from beamline.coordinator.roster import HEARTBEAT_DEADLINE_S, Roster
from beamline.coordinator.waiting import Pulse
from beamline.protocol import messages as m
from beamline.protocol.errors import DeadlineExceeded


def heartbeat(service: str, worker: str, incarnation: str = "a", version: int = -1) -> m.Heartbeat:
    return m.Heartbeat(
        service=service,
        worker=worker,
        incarnation=incarnation,
        pid=1,
        state=m.WorkerState.READY,
        policy_version=version,
        in_flight=0,
        rss_bytes=1,
    )


def release(worker: str, sequence: int, incarnation: str = "a") -> m.LeaseReport:
    return m.LeaseReport(
        service="rollout", worker=worker, incarnation=incarnation, sequence=sequence, freed_bytes=7, resident_bytes=1
    )


async def test_a_wait_ends_by_the_change_it_waits_for():
    pulse, box = Pulse(), list[int]()
    wait = asyncio.create_task(pulse.when(lambda: box[0] if box else None, lambda: "a number", 5))
    await asyncio.sleep(0)
    pulse.beat()
    await asyncio.sleep(0)
    assert not wait.done() and pulse.waiting_for() == "a number"
    box.append(4)
    pulse.beat()
    assert await wait == 4 and pulse.waiting_for() == ""


async def test_a_wait_that_runs_out_says_what_is_missing_now():
    missing = ["rollout-0", "rollout-1"]
    wait = asyncio.create_task(Pulse().when(lambda: None, lambda: ", ".join(missing), 0.01))
    missing.pop()
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for rollout-0$"):
        await wait


async def test_colocated_phases_wait_for_every_live_worker_of_the_last_holder():
    now, pulse, roster, sent = [0.0], Pulse(), Roster(), list[m.Phase]()

    async def publish(phase: m.Phase) -> None:
        sent.append(phase)

    lease = ColocatedLease(publish, lambda c, w: pulse.when(c, w, 5), roster, lambda: now[0], 0)
    for worker in ("rollout-0", "rollout-1"):
        roster.record_heartbeat(heartbeat("rollout", worker), now[0])
    await lease.acquire(m.PhaseName.GENERATE, 1, 0)
    assert [(p.phase, p.granted) for p in sent] == [(m.PhaseName.GENERATE, True)] and lease.admits

    train = asyncio.create_task(lease.acquire(m.PhaseName.TRAIN, 1, 0))
    await asyncio.sleep(0)
    asked = sent[-1]
    assert (asked.phase, asked.granted) == (m.PhaseName.TRAIN, False)
    roster.record_release(release("rollout-0", asked.sequence))
    roster.record_release(release("rollout-1", asked.sequence, incarnation="before the restart"))
    pulse.beat()
    await asyncio.sleep(0)
    assert not train.done(), "rollout-1 of this incarnation has not released"
    roster.record_release(release("rollout-1", asked.sequence))
    pulse.beat()
    await train
    assert (sent[-1].phase, sent[-1].granted) == (m.PhaseName.TRAIN, True) and not lease.admits
    assert [phase.sequence for phase in sent] == [0, 1, 2]


async def test_a_worker_that_fell_silent_is_not_waited_for():
    roster = Roster()
    roster.record_heartbeat(heartbeat("rollout", "rollout-0", version=3), 0.0)
    roster.record_heartbeat(heartbeat("rollout", "rollout-1", version=2), HEARTBEAT_DEADLINE_S)
    assert not roster.loaded_everywhere(3, HEARTBEAT_DEADLINE_S)
    assert not roster.loaded_everywhere(3, HEARTBEAT_DEADLINE_S + 1), "the one that is left is behind"
    roster.record_heartbeat(heartbeat("rollout", "rollout-1", version=3), HEARTBEAT_DEADLINE_S)
    assert roster.loaded_everywhere(3, HEARTBEAT_DEADLINE_S + 1)
    assert not roster.loaded_everywhere(3, HEARTBEAT_DEADLINE_S + 1, at_least=2)
    assert not roster.loaded_everywhere(3, 99 * HEARTBEAT_DEADLINE_S), "nobody is left"


async def test_a_worker_that_refused_the_policy_is_not_waited_for_while_another_serves_it():
    roster = Roster()
    roster.record_heartbeat(heartbeat("rollout", "rollout-0", version=3), 0.0)
    roster.record_heartbeat(heartbeat("rollout", "rollout-1", version=2), 0.0)
    for incarnation in ("before the restart", "a"):
        assert not roster.loaded_everywhere(3, 0.0) and not roster.refusals(3)
        refused = m.PolicyLoaded(
            worker="rollout-1", incarnation=incarnation, policy_version=3, load_s=0.1, canary_gap=2.0, error="refused"
        )
        roster.record_loaded(refused)
    assert roster.loaded_everywhere(3, 0.0) and roster.refusals(3) == {"rollout-1": "refused"}
    assert not roster.loaded_everywhere(4, 0.0) and not roster.refusals(4)


async def test_disaggregated_phases_are_granted_at_once():
    sent = list[m.Phase]()

    async def publish(phase: m.Phase) -> None:
        sent.append(phase)

    lease = GrantedLease(publish, 7)
    for phase in (m.PhaseName.GENERATE, m.PhaseName.TRAIN):
        await lease.acquire(phase, 1, 0)
    assert [(p.sequence, p.granted) for p in sent] == [(7, True), (8, True)] and lease.admits
