"""From facts about a run to the cause of its standing still."""

import re

import msgspec

from beamline.coordinator.doctor.stuck import Diagnosis, diagnose
from beamline.coordinator.doctor.stuck_facts import Facts, StoreFacts, WorkerFacts
from beamline.coordinator.doctor.stuck_show import lines
from beamline.protocol.messages import Heartbeat, PhaseName, ServiceFailed, StatusReply, Wait, WorkerState
from beamline.runtime.process_state import ProcessState

NOW = 1_764_000_000.0
RUNNING, STOPPED = "S", "T"


def process(pid: int, state: str = RUNNING, age_s: float = 600.0) -> ProcessState:
    return ProcessState(pid=pid, state=state, name="python", command="python -m beamline", age_s=age_s)


def wait(what: str, for_s: float, *on: str, within_s: float = 0.0) -> Wait:
    since = NOW - for_s
    return Wait(what=what, since=since, until=since + within_s if within_s else 0.0, on=list(on))


def worker(
    name: str, pid: int, *waits: Wait, state: str = RUNNING, silence_s: float | None = 1.0, age_s: float = 600.0
) -> WorkerFacts:
    """One whose process has ended has no state."""
    beat = Heartbeat(
        service=re.sub(r"-\d+$", "", name), worker=name, incarnation="a", pid=pid, state=WorkerState.READY,
        policy_version=13, in_flight=0, rss_bytes=1, waits=list(waits),
    )  # fmt: skip
    here = process(pid, state, age_s) if state else None
    return WorkerFacts(
        name=name,
        pid=pid,
        process=here,
        stopped=[here] if here and here.is_stopped else [],
        heartbeat=beat,
        silence_s=silence_s,
        log=f"runs/demo/logs/{name}.log",
        last_lines=[f"{name} wrote this last"],
    )


MISSING = "3 of 64 groups of step 14 (g-000812, g-000813) from rollout and reward"
COORDINATOR = worker("coordinator", 1, wait(MISSING, 42, "rollout", "reward", within_s=1800))
ROLLOUT_0 = worker("rollout-0", 2, wait("a prompt group", 40, "coordinator"))
ROLLOUT_1 = worker("rollout-1", 3, wait("the engine to sample 8 responses of group g-000812", 41, within_s=600))
REWARD = worker("reward", 4, wait("a trajectory group to grade", 41, "rollout"))
TRAINER = worker("trainer", 5, wait("a train batch", 45, "coordinator"))
STATUS = StatusReply(
    run="demo", step=13, num_steps=40, phase=PhaseName.GENERATE, policy_version=13, paused=False, waiting_for=MISSING,
    ledger={"issued": 900}, workers=[], metrics={}, phase_since=NOW - 42,
)  # fmt: skip
HEALTHY = Facts(
    run="demo",
    now=NOW,
    listened_s=5.0,
    status=STATUS,
    workers=[COORDINATOR, REWARD, ROLLOUT_0, ROLLOUT_1, TRAINER],
    broker=WorkerFacts(name="nats-server", pid=6, process=process(6)),
    launcher=WorkerFacts(name="launcher", pid=7, process=process(7)),
    stores=[StoreFacts(holds="blobs", path="/dev/shm/beamline-demo", num_bytes=1 << 30, free_bytes=1 << 29)],
)


def with_workers(*changed: WorkerFacts, facts: Facts = HEALTHY) -> Facts:
    by_name = {one.name: one for one in [*facts.workers, *changed]}
    return msgspec.structs.replace(facts, workers=list(by_name.values()))


def causes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.cause, finding.about) for finding in diagnosis.findings]


def test_a_run_that_moves_has_no_cause() -> None:
    diagnosis = diagnose(HEALTHY)
    assert not diagnosis.is_stuck
    shown = list(lines(diagnosis))
    assert shown[0] == (
        "run demo moves: step 14 of 40, phase generate for 42 s, waits for 3 of 64 groups of step 14 "
        "(g-000812 in rollout-1, g-000813) from rollout and reward"
    )
    assert shown[3] == (
        "  coordinator has waited 42 of at most 1800 s for 3 of 64 groups of step 14 (g-000812 in rollout-1, g-000813) "
        "from rollout and reward"
    )
    assert "  trainer has waited 45 s for a train batch, from coordinator" in shown


def test_a_stopped_worker_is_the_cause_and_who_waits_for_it_is_not() -> None:
    frozen = worker("rollout-1", 4711, *ROLLOUT_1.heartbeat.waits, state=STOPPED, silence_s=42.0)
    diagnosis = diagnose(with_workers(frozen))
    assert causes(diagnosis) == [("stopped", "rollout-1")]
    shown = "\n".join(lines(diagnosis))
    assert (
        "1. rollout-1 has not sent a heartbeat for 42 s: its process 4711 is stopped by a signal, as SIGSTOP does "
        "(state T): `kill -CONT 4711` lets it go on" in shown
    )
    assert "its last log lines (runs/demo/logs/rollout-1.log):\n     rollout-1 wrote this last" in shown


def test_a_stopped_child_is_named_as_one() -> None:
    core = ProcessState(pid=99, state=STOPPED, name="EngineCore", command="")
    frozen = msgspec.structs.replace(ROLLOUT_1, stopped=[core])
    (finding,) = diagnose(with_workers(frozen)).findings
    assert finding.text.startswith("rollout-1: EngineCore, which it started, process 99 is stopped")


def test_a_broker_that_is_away_explains_every_silence() -> None:
    silent = [msgspec.structs.replace(one, silence_s=None, heartbeat=None) for one in HEALTHY.workers]
    stopped = WorkerFacts(name="nats-server", pid=6, process=process(6, STOPPED), stopped=[process(6, STOPPED)])
    facts = msgspec.structs.replace(HEALTHY, workers=silent, broker=stopped, status=None, bus_error="it does not run")
    assert causes(diagnose(facts)) == [("bus", "nats-server")]
    ended = msgspec.structs.replace(facts, broker=WorkerFacts(name="nats-server", pid=6))
    assert "has ended; the launcher starts it again after a moment" in diagnose(ended).findings[0].text
    mute = msgspec.structs.replace(facts, broker=HEALTHY.broker, bus_error="no nats-server at nats://127.0.0.1:1")
    assert diagnose(mute).findings[0].text.startswith("nats-server does not answer: no nats-server at")
    of_the_user = msgspec.structs.replace(mute, broker=None)
    assert causes(diagnose(of_the_user)) == [("bus", "nats-server")]


def test_a_launcher_that_cannot_start_anything_again_is_told() -> None:
    gone = worker("reward", 4, state="", silence_s=30.0)
    launcher = WorkerFacts(name="launcher", pid=7, process=process(7, STOPPED), stopped=[process(7, STOPPED)])
    facts = msgspec.structs.replace(with_workers(gone), launcher=launcher)
    assert causes(diagnose(facts)) == [("ended", "reward")]
    assert "but its process 7 is stopped" in diagnose(facts).findings[0].text
    without = msgspec.structs.replace(facts, launcher=WorkerFacts(name="launcher", pid=7))
    assert "nobody starts it again: the launcher has ended too" in diagnose(without).findings[0].text


def test_a_full_store_comes_before_the_workers_that_die_of_it() -> None:
    error = "shared memory is full: blob g-000812/x needs 4194304 bytes, /dev/shm has 1048576 free: lower ..."
    dying = worker("rollout-1", 3, state="", silence_s=9.0)
    failed = ServiceFailed(service="rollout", worker="rollout-1", error=error, traceback="")
    small = StoreFacts(holds="blobs", path="/dev/shm/beamline-demo", num_bytes=64 << 20, free_bytes=1 << 20)
    facts = msgspec.structs.replace(with_workers(dying), stores=[small], failures=[failed])
    diagnosis = diagnose(facts)
    assert causes(diagnosis) == [("store", "/dev/shm/beamline-demo"), ("ended", "rollout-1")]
    assert "1.0 of 64.0 MiB are free" in diagnosis.findings[0].text
    assert "rollout-1 could not write a blob of 4,194,304 bytes" in diagnosis.findings[0].text
    roomy = msgspec.structs.replace(small, free_bytes=32 << 20)
    assert causes(diagnose(msgspec.structs.replace(facts, stores=[roomy]))) == [("ended", "rollout-1")], "that is over"


def test_a_broker_that_stores_nothing_says_so_in_its_log() -> None:
    refusing = WorkerFacts(name="nats-server", pid=6, process=process(6), last_lines=["JetStream: no space left on X"])
    assert causes(diagnose(msgspec.structs.replace(HEALTHY, broker=refusing))) == [("store", "nats-server")]


def test_a_worker_that_runs_and_is_not_heard_is_told_from_one_that_starts() -> None:
    blocked = worker("trainer", 5, state="R", silence_s=42.0)
    (finding,) = diagnose(with_workers(blocked)).findings
    assert (finding.cause, finding.about) == ("silent", "trainer")
    assert "its process 5 runs on a CPU (state R)" in finding.text and "`kill -USR1 5`" in finding.text
    young = msgspec.structs.replace(worker("trainer", 5, age_s=3.0), heartbeat=None, silence_s=None)
    assert not diagnose(with_workers(young)).is_stuck
    old = msgspec.structs.replace(young, process=process(5))
    assert "trainer has never been heard" in diagnose(with_workers(old)).findings[0].text


def test_an_overdue_release_is_the_fault_of_whoever_holds() -> None:
    release = wait("rollout-0 to release device memory before phase train", 70, "rollout-0", within_s=120)
    diagnosis = diagnose(with_workers(worker("coordinator", 1, release)))
    assert causes(diagnosis) == [("overdue", "rollout-0")]
    assert (
        "coordinator has waited 70 of at most 120 s for rollout-0 to release device memory before phase train; "
        "rollout-0 is ready and waits for a prompt group" in diagnosis.findings[0].text
    )


def test_a_worker_s_own_overdue_wait_comes_before_those_on_it() -> None:
    grading = worker("reward", 4, wait("grader math_verify (process 77) to grade a text", 8, within_s=10))
    late = worker("coordinator", 1, wait(MISSING, 1000, "rollout", "reward", within_s=1800))
    assert causes(diagnose(with_workers(grading, late)))[0] == ("overdue", "reward")
    moving = msgspec.structs.replace(with_workers(late), moved=True)
    assert not diagnose(moving).is_stuck, "groups still come in: it is slow, not stuck"
    assert causes(diagnose(with_workers(late))) == [("overdue", "rollout-1")], "it has the group that is missing"
    unheld = worker("coordinator", 1, wait("3 of 64 groups of step 14", 1000, "rollout", "reward", within_s=1800))
    assert causes(diagnose(with_workers(unheld))) == [("overdue", "coordinator")]


def test_an_overdue_wait_on_a_stopped_worker_is_explained_by_it() -> None:
    late = worker("coordinator", 1, wait(MISSING, 1000, "rollout", "reward", within_s=1800))
    frozen = worker("rollout-1", 3, state=STOPPED, silence_s=42.0)
    assert causes(diagnose(with_workers(late, frozen))) == [("stopped", "rollout-1")]


def test_those_that_the_coordinator_waits_for_come_first() -> None:
    both = [worker(name, pid, state=STOPPED, silence_s=9.0) for name, pid in (("rollout-0", 2), ("trainer", 5))]
    training = worker("coordinator", 1, wait("PolicyUpdate for step 14 from the trainer", 9, "trainer", within_s=1800))
    assert [about for _, about in causes(diagnose(with_workers(*both, training)))] == ["trainer", "rollout-0"]


def test_a_coordinator_that_does_not_answer_is_said() -> None:
    frozen = worker("coordinator", 1, state=STOPPED, silence_s=9.0)
    facts = msgspec.structs.replace(
        with_workers(frozen), status=None, coordinator_error="the coordinator does not answer: waited 3 s"
    )
    shown = list(lines(diagnose(facts)))
    assert shown[0] == "run demo is stuck: the coordinator does not answer: waited 3 s"
    starting = msgspec.structs.replace(facts, workers=HEALTHY.workers)
    assert next(lines(diagnose(starting))).startswith("run demo: nothing is found that holds it up, but the coord")


def test_a_policy_on_its_way_belongs_to_the_step_that_made_it() -> None:
    syncing = msgspec.structs.replace(STATUS, phase=PhaseName.SYNC, paused=True)
    facts = msgspec.structs.replace(HEALTHY, status=syncing)
    assert diagnose(facts).where.startswith("step 13 of 40, phase sync for 42 s, paused, waits for ")


def test_files_that_are_gone_are_named_last() -> None:
    facts = msgspec.structs.replace(with_workers(worker("reward", 4, state=STOPPED)), missing=["logs"])
    assert causes(diagnose(facts)) == [("stopped", "reward"), ("folder", "logs")]
