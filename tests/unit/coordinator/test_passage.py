"""Who is waited for, asked again and left out while a policy goes through the workers: without a clock, without I/O."""

from beamline.coordinator.passage import Passage
from beamline.coordinator.roster import HEARTBEAT_DEADLINE_S, Roster, Stage
from beamline.protocol.messages import WorkerState
from ring_messages import heartbeat, policy_loaded, policy_prepared

PREPARED, SERVED = Stage.PREPARED, Stage.SERVED


class Trial:
    """Policy 3 and the workers that serve policy 2, with the clock in the test's hands."""

    def __init__(self, *workers: str, max_tries: int = 2) -> None:
        self.now, self.roster = 0.0, Roster()
        for worker in workers:
            self.beat(worker, version=2)
        self.passage = Passage(self.roster, 3, max_tries=max_tries, attempt=1, now=lambda: self.now)

    def beat(
        self, worker: str, *, version: int = 2, incarnation: str = "a", state: WorkerState = WorkerState.READY
    ) -> None:
        beat = heartbeat("rollout", worker, version=version, incarnation=incarnation, state=state)
        self.roster.record_heartbeat(beat, self.now)

    def prepare(self, worker: str, *, attempt: int = 1, incarnation: str = "a", error: str = "") -> None:
        answer = policy_prepared(worker, 3, attempt=attempt, incarnation=incarnation, error=error)
        self.roster.record_prepared(answer)

    def load(self, worker: str, *, attempt: int = 1, incarnation: str = "a", error: str = "") -> None:
        answer = policy_loaded(worker, 3, attempt=attempt, incarnation=incarnation, error=error)
        self.roster.record_loaded(answer)


def test_all_prepare_then_all_load():
    trial = Trial("a", "b")
    assert trial.passage.awaited(PREPARED) == ["a", "b"] and not trial.passage.reached(PREPARED)
    trial.prepare("a")
    assert trial.passage.awaited(PREPARED) == ["b"], "the fence stays closed until all have answered"
    trial.prepare("b")
    assert trial.passage.awaited(PREPARED) == [] and trial.passage.reached(PREPARED)
    assert not trial.passage.retry() and trial.passage.attempt == 1
    assert trial.passage.awaited(SERVED) == ["a", "b"]
    trial.load("b")
    trial.beat("a", version=3)  # its report is lost: its heartbeat says it too
    assert trial.passage.awaited(SERVED) == [] and trial.passage.left_out() == {}


def test_who_failed_is_asked_again_until_its_tries_are_spent():
    trial = Trial("a", "b")
    trial.prepare("a")
    trial.prepare("b", error="a checksum differs")
    assert trial.passage.awaited(PREPARED) == []
    assert trial.passage.retry() and trial.passage.attempt == 2
    assert trial.passage.awaited(PREPARED) == ["b"], "what it said to the first attempt does not answer the second"
    trial.prepare("b", attempt=2, error="a checksum differs again")
    assert not trial.passage.retry() and trial.passage.attempt == 2
    trial.load("a", attempt=2)
    assert trial.passage.awaited(SERVED) == []
    assert trial.passage.left_out() == {"b": "a checksum differs again"}


def test_a_second_try_that_succeeds_is_as_good_as_a_first():
    trial = Trial("a", "b")
    trial.prepare("a")
    trial.prepare("b", error="a checksum differs")
    assert trial.passage.retry()
    trial.prepare("b", attempt=2)
    trial.prepare("b", error="a checksum differs")  # delivered once more, and late
    assert trial.passage.awaited(PREPARED) == []
    assert trial.passage.awaited(SERVED) == ["a", "b"]


def test_tries_of_preparing_and_loading_count_together():
    trial = Trial("a", max_tries=3)
    trial.prepare("a", error="a checksum differs")
    assert trial.passage.retry()
    trial.prepare("a", attempt=2)
    assert trial.passage.awaited(PREPARED) == [] and not trial.passage.retry()
    trial.load("a", attempt=2, error="the canary")
    assert trial.passage.awaited(SERVED) == [] and trial.passage.retry() and trial.passage.attempt == 3
    trial.prepare("a", attempt=3)
    assert trial.passage.awaited(SERVED) == ["a"]
    trial.load("a", attempt=3, error="the canary once more")
    assert not trial.passage.retry() and not trial.passage.reached(SERVED)
    assert trial.passage.left_out() == {"a": "the canary once more"}


def test_a_worker_that_fell_silent_is_not_waited_for():
    trial = Trial("a", "b")
    trial.prepare("a")
    trial.now = HEARTBEAT_DEADLINE_S
    trial.beat("a")
    assert trial.passage.awaited(PREPARED) == ["b"]
    trial.now += 1
    assert trial.passage.awaited(PREPARED) == []
    assert "nothing was heard of it" in trial.passage.left_out()["b"]


def test_a_process_that_starts_meanwhile_is_waited_for_only_where_nobody_else_comes_through():
    trial = Trial("a", "b")
    trial.prepare("a")
    trial.beat("b", incarnation="b", version=-1, state=WorkerState.STARTING)
    assert trial.passage.awaited(PREPARED) == [], "a has prepared it: b joins later"
    assert "started meanwhile" in trial.passage.left_out()["b"]
    trial.beat("a", incarnation="b", version=-1, state=WorkerState.STARTING)
    assert trial.passage.awaited(PREPARED) == ["a", "b"] and not trial.passage.reached(PREPARED)
    trial.prepare("b", incarnation="b")
    assert trial.passage.awaited(PREPARED) == []


def test_a_failure_is_tried_again_before_a_newcomer_is_waited_for():
    trial = Trial("a")
    trial.beat("b", state=WorkerState.STARTING, version=-1)
    trial.prepare("a", error="a checksum differs")
    assert trial.passage.awaited(PREPARED) == [] and trial.passage.retry()
    trial.prepare("a", attempt=2, error="a checksum differs")
    assert not trial.passage.retry() and trial.passage.awaited(PREPARED) == ["b"]


def test_without_a_live_worker_it_is_waited_for_one():
    trial = Trial("a")
    trial.now = HEARTBEAT_DEADLINE_S + 1
    assert trial.passage.awaited(PREPARED) == ["a rollout worker that is alive"]


def test_who_is_late_is_left_out_until_it_answers():
    trial = Trial("a", "b")
    trial.prepare("a")
    trial.passage.give_up(PREPARED, 7.0)
    assert trial.passage.awaited(PREPARED) == []
    assert trial.passage.left_out()["b"] == "it did not prepare it within weights.deadline_s=7"
    assert trial.passage.awaited(SERVED) == ["a"]
    trial.prepare("b")
    assert trial.passage.awaited(SERVED) == ["a", "b"], "it answered before the fence had done with the others"
    trial.passage.give_up(SERVED, 7.0)
    assert trial.passage.left_out()["b"] == "it did not load it within weights.deadline_s=7"
    trial.load("b")
    assert "b" not in trial.passage.left_out()


def test_what_another_process_or_another_policy_was_answered_does_not_count():
    trial = Trial("a")
    trial.prepare("a", incarnation="before the restart")
    trial.roster.record_prepared(policy_prepared("a", 2))
    assert trial.passage.awaited(PREPARED) == ["a"]


def test_a_worker_that_is_left_out_comes_back_with_a_later_policy():
    trial = Trial("a")
    trial.roster.leave_out("a", 3, "the canary")
    assert trial.roster.left_out() == {"a": "left out of policy 3: the canary"}
    trial.roster.record_loaded(policy_loaded("a", 4, error="the canary"))
    assert trial.roster.left_out()
    trial.roster.record_loaded(policy_loaded("a", 4, attempt=2))
    assert trial.roster.left_out() == {}


def test_the_values_of_a_sync_are_those_of_its_policy():
    trial = Trial("a", "b")
    trial.roster.record_prepared(policy_prepared("a", 3))
    trial.roster.record_loaded(policy_loaded("a", 3))
    trial.roster.record_prepared(policy_prepared("b", 3, error="a checksum differs"))
    trial.roster.leave_out("b", 3, "a checksum differs")
    assert trial.roster.sync_values(3) == {
        "sync/canary_gap/a": 1e-6,
        "sync/prepare_s/a": 0.25,
        "sync/load_s/a": 0.5,
        "sync/num_bytes": 100.0,
        "sync/left_out": 1.0,
    }
    assert trial.roster.sync_values(4)["sync/num_bytes"] == 0.0
