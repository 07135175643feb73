"""What a listener knows of a run after any messages, in whatever order they come."""

import pytest

from beamline.coordinator.observe.view import NUM_KEPT_FAILURES, NUM_KEPT_STEPS, RunView
from beamline.protocol import messages as m


def phase(name: m.PhaseName, version: int, *, granted: bool = True) -> m.Phase:
    return m.Phase(sequence=1, step=version + 1, phase=name, policy_version=version, granted=granted)


def heartbeat(worker: str, state: m.WorkerState = m.WorkerState.READY, version: int = 0) -> m.Heartbeat:
    return m.Heartbeat(
        service=worker.partition("-")[0], worker=worker, incarnation="a", pid=7, state=state, policy_version=version,
        in_flight=2, rss_bytes=2**30,
    )  # fmt: skip


def metrics(step: int, values: dict[str, float], worker: str = "coordinator") -> m.Metrics:
    return m.Metrics(service=worker.partition("-")[0], worker=worker, step=step, values=values)


def test_phases_say_where_the_run_is() -> None:
    view = RunView(num_steps=4)
    assert (view.step, view.phase, view.phase_since) == (1, m.PhaseName.START, None)
    view.apply(phase(m.PhaseName.GENERATE, 0, granted=False), 10.0)
    view.apply(phase(m.PhaseName.GENERATE, 0), 12.0)
    assert (view.step, view.phase, view.phase_since) == (1, m.PhaseName.GENERATE, 10.0)
    view.apply(phase(m.PhaseName.EVALUATE, 4), 90.0)
    assert (view.step, view.policy_version, view.is_done) == (4, 4, False)
    view.apply(phase(m.PhaseName.DONE, 4), 91.0)
    assert view.is_done


def test_workers_grow_old_between_heartbeats() -> None:
    view = RunView()
    view.apply(heartbeat("rollout-0", m.WorkerState.STARTING), 100.0)
    assert not view.workers["rollout-0"].has_started
    view.apply(heartbeat("rollout-0", version=3), 102.0)
    assert view.workers["rollout-0"].has_started
    assert view.workers["rollout-0"].heartbeat.policy_version == 3
    assert view.age_s("rollout-0", 105.5) == 3.5
    assert view.age_s("rollout-0", 101.0) == 0.0


def test_live_values_stay_apart_from_those_of_steps() -> None:
    view = RunView(num_steps=9)
    view.apply(metrics(-1, {"queue/a": 3.0, "queue/b": 1.0}, "rollout-0"), 1.0)
    view.apply(metrics(-1, {"queue/a": 5.0}, "rollout-0"), 2.0)
    view.apply(metrics(-1, {"queue/a": 7.0}, "rollout-1"), 2.0)
    assert view.gauge("queue/a") == {"rollout-0": 5.0, "rollout-1": 7.0}
    assert view.gauge("queue/b") == {"rollout-0": 1.0}
    assert view.last_values() == {}
    view.apply(metrics(1, {"timing/step": 2.0}), 3.0)
    view.apply(metrics(1, {"policy/loss": 0.5}, "trainer"), 3.0)
    view.apply(metrics(2, {"policy/loss": 0.4}, "trainer"), 4.0)
    assert view.last_values() == {"timing/step": 2.0, "policy/loss": 0.5}
    assert view.policy_version == 1


def test_what_is_left_is_what_the_newest_steps_took() -> None:
    view = RunView(num_steps=10)
    assert view.left_s(0.0) is None
    view.apply(metrics(1, {"timing/step": 100.0}), 100.0)
    for step in range(2, 7):
        view.apply(metrics(step, {"timing/step": 8.0, "timing/evaluate": 2.0}), 100.0 + 10 * step)
    assert view.left_s(160.0) == pytest.approx(40.0)
    assert view.left_s(163.0) == pytest.approx(37.0)
    assert view.left_s(900.0) == pytest.approx(30.0), "a step that takes longer than expected is expected to end"


def test_only_the_newest_is_kept() -> None:
    view = RunView()
    for step in range(1, NUM_KEPT_STEPS + 5):
        view.apply(metrics(step, {"reward/mean": float(step)}), 0.0)
    assert sorted(view.steps) == list(range(5, NUM_KEPT_STEPS + 5))
    for number in range(NUM_KEPT_FAILURES + 3):
        failed = m.ServiceFailed(service="trainer", worker="trainer", error=str(number), traceback="")
        view.apply(failed, float(number))
    assert view.failures[0].failed.error == "3"
    for step in (2, 0):
        result = m.EvalResult(
            step=step, policy_version=step, name="sums", num_problems=4, num_samples=1, values={"accuracy": step / 4}
        )
        view.apply(result, 0.0)
    assert view.evaluations["sums"].step == 2


def test_a_status_tells_what_no_message_does() -> None:
    view = RunView(num_steps=40)
    view.apply(heartbeat("rollout-0"), 50.0)
    status = m.StatusReply(
        run="demo", step=3, num_steps=4, phase=m.PhaseName.TRAIN, policy_version=3, paused=True, waiting_for="a wait",
        ledger={"issued": 8, "trained": 6}, workers=[heartbeat("rollout-0"), heartbeat("rollout-1")], metrics={},
        left_out={"rollout-1": "a checksum differs"},
    )  # fmt: skip
    view.apply(status, 60.0)
    assert (view.num_steps, view.paused, view.phase, view.step) == (4, True, m.PhaseName.TRAIN, 4)
    assert (view.waiting_for, view.ledger["trained"]) == ("a wait", 6)
    assert view.left_out == {"rollout-1": "a checksum differs"}
    assert view.age_s("rollout-0", 60.0) == 10.0, "an answer is no sign of life of another worker"
    assert view.age_s("rollout-1", 60.0) == 0.0


def test_messages_of_the_ring_tell_nothing() -> None:
    view = RunView(num_steps=4)
    before = vars(RunView(num_steps=4))
    view.apply(m.StopRequest(), 1.0)
    assert vars(view) == before
