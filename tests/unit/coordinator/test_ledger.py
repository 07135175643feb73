"""The ledger: each issued group ends once, whatever comes twice, late or out of order."""

import random

import pytest

from beamline.coordinator.ledger import End, Ledger
from ring_messages import failed, prompt, scored


def make(
    groups_per_step: int = 2, max_staleness: int = 0, num_steps: int = 4, max_attempts: int = 2, max_replaced: int = 0
) -> Ledger:
    ledger = Ledger(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        num_steps=num_steps,
        max_attempts=max_attempts,
        max_replaced=max_replaced,
        is_useless=lambda group: len({grade.reward for grade in group.grades}) == 1,
    )
    ledger.record_loaded(0)
    return ledger


def issue_and_score(ledger: Ledger, numbers: list[int], version: int = 0) -> None:
    for number in numbers:
        ledger.issue(prompt(number))
        assert ledger.record_scored(scored(prompt(number), [1.0, -1.0], version=version))


def score(ledger: Ledger, rewards: dict[int, float]) -> None:
    """Score groups, issued before or now; one of reward 1 is useless, others have a contrast."""
    for number, reward in rewards.items():
        ledger.issue(prompt(number))
        assert ledger.record_scored(scored(prompt(number), [1.0, reward]))


def bind(ledger: Ledger) -> tuple[list[str], list[str]]:
    """Take the plan that is there, as the coordinator does: the useless end, the others are bound to the step."""
    plan = ledger.next_batch()
    assert plan is not None
    filtered = [g.group_id for g in plan.groups if len({grade.reward for grade in g.grades}) == 1]
    kept = [g.group_id for g in plan.groups if g.group_id not in filtered]
    ledger.record_batch(plan.step, kept=kept, filtered=filtered, stale=plan.stale)
    return kept, filtered


def train(ledger: Ledger) -> None:
    plan = ledger.next_batch()
    assert plan is not None
    ids = [group.group_id for group in plan.groups]
    ledger.record_batch(plan.step, kept=ids, filtered=[], stale=plan.stale)
    assert sorted(ledger.record_update(plan.step)) == ids


def closes(ledger: Ledger) -> bool:
    counts = ledger.counts()
    return counts["issued"] == sum(counts[end] for end in End) + counts["in_flight"]


def test_a_synchronous_run_admits_a_step_at_a_time():
    ledger = make()
    assert ledger.room() == 2
    issue_and_score(ledger, [0, 1])
    assert ledger.room() == 0
    train(ledger)
    assert ledger.room() == 0, "the new policy is not loaded everywhere"
    ledger.record_loaded(1)
    assert ledger.room() == 2
    assert ledger.counts() == {"issued": 2, "trained": 2, "filtered": 0, "stale": 0, "failed": 0, "in_flight": 0}


def test_filtered_groups_hold_their_room_until_the_policy_is_loaded():
    ledger = make()
    issue_and_score(ledger, [0, 1])
    ledger.record_batch(1, kept=["g-000000"], filtered=["g-000001"], stale=[])
    assert ledger.room() == 0, "a group admitted now would be sampled from a policy that is about to be replaced"
    ledger.record_update(1)
    ledger.record_loaded(1)
    assert ledger.room() == 2


def test_a_group_that_the_trainer_could_not_read_ends_as_failed_and_the_rest_of_its_batch_as_trained():
    ledger = make()
    issue_and_score(ledger, [0, 1])
    ledger.record_batch(1, kept=["g-000000", "g-000001"], filtered=[], stale=[])
    assert sorted(ledger.record_update(1, failed=["g-000001"])) == ["g-000000", "g-000001"]
    assert [ledger.end_of("g-000000"), ledger.end_of("g-000001")] == [End.TRAINED, End.FAILED]
    assert closes(ledger)
    ledger.record_loaded(1)
    assert ledger.room() == 2


def test_a_batch_without_a_useful_group_is_drawn_again_for_the_same_step():
    ledger = make()
    issue_and_score(ledger, [0, 1])
    ledger.record_batch(1, kept=[], filtered=["g-000000", "g-000001"], stale=[])
    assert ledger.pending_step is None
    assert ledger.room() == 2


def test_useless_groups_make_room_for_others_before_the_batch_is_full():
    ledger = make(groups_per_step=3, max_replaced=3)
    score(ledger, {0: 0.0, 1: 1.0})
    ledger.issue(prompt(2))
    assert bind(ledger) == ([], ["g-000001"]), "nobody waits for the third group"
    assert ledger.room() == 1 and ledger.next_batch() is None
    score(ledger, {2: 0.0, 3: 1.0})
    assert bind(ledger) == ([], ["g-000003"])
    score(ledger, {4: 0.0})
    assert bind(ledger) == (["g-000000", "g-000002", "g-000004"], [])
    assert ledger.num_drawn(1) == (3, 2) and closes(ledger)


def test_a_step_trains_what_it_has_when_it_has_drawn_enough():
    ledger = make(groups_per_step=2, max_replaced=2)
    score(ledger, {0: 1.0, 1: 1.0})
    assert bind(ledger) == ([], ["g-000000", "g-000001"])
    assert ledger.room() == 2
    score(ledger, {2: 1.0})
    assert ledger.next_batch() is None, "two were replaced: the rest of the last batch is waited for"
    score(ledger, {3: 0.0})
    assert bind(ledger) == (["g-000003"], ["g-000002"])
    assert ledger.room() == 0 and ledger.num_drawn(1) == (1, 3)
    assert ledger.record_update(1) == ["g-000003"]
    ledger.record_loaded(1)
    assert ledger.num_drawn(2) == (0, 0) and ledger.room() == 2, "the next step may replace as many again"


def test_without_replacement_useless_groups_wait_for_the_batch():
    ledger = make()
    score(ledger, {0: 1.0})
    assert ledger.next_batch() is None


def test_a_batch_that_is_recorded_twice_counts_once():
    ledger = make(groups_per_step=2)
    score(ledger, {0: 0.0, 1: 1.0})
    for _ in range(2):
        ledger.record_batch(1, kept=["g-000000"], filtered=["g-000001"], stale=[])
        assert ledger.num_drawn(1) == (1, 1)


def test_staleness_bounds_admission_and_drops_at_batching():
    ledger = make(max_staleness=1, num_steps=9)
    assert ledger.room() == 4
    issue_and_score(ledger, [0, 1, 2, 3])
    train(ledger)
    ledger.record_loaded(1)
    train(ledger)
    ledger.record_loaded(2)
    issue_and_score(ledger, [4], version=0)
    plan = ledger.next_batch()
    assert plan is not None and plan.stale == ["g-000004"] and plan.groups == []
    ledger.record_batch(plan.step, kept=[], filtered=[], stale=plan.stale)
    assert ledger.end_of("g-000004") is End.STALE


def test_nothing_is_admitted_that_no_step_will_train():
    ledger = make(max_staleness=3, num_steps=2)
    assert ledger.room() == 4, "two steps of two groups are left, whatever the staleness allows"


def test_answers_that_come_twice_or_late_change_nothing():
    ledger = make()
    issue_and_score(ledger, [0, 1])
    assert not ledger.record_scored(scored(prompt(0), [0.0, 0.0]))
    assert ledger.record_failed(failed(prompt(0), retryable=True)) is None
    train(ledger)
    assert ledger.record_update(1) == []
    assert not ledger.record_scored(scored(prompt(0), [1.0, 1.0]))
    ledger.issue(prompt(0))
    assert ledger.counts()["trained"] == 2 and closes(ledger)


def test_a_failed_attempt_is_tried_again_until_the_last():
    ledger = make(max_attempts=2)
    ledger.issue(prompt(0))
    retry = ledger.record_failed(failed(prompt(0), retryable=True))
    assert retry is not None and retry.attempt == 1
    ledger.issue(retry)
    assert ledger.record_failed(failed(prompt(0), retryable=True)) is None, "the old attempt's failure came twice"
    assert ledger.end_of("g-000000") is None
    assert ledger.record_failed(failed(retry, retryable=True)) is None
    assert ledger.end_of("g-000000") is End.FAILED


def test_a_failure_that_cannot_be_mended_ends_the_group():
    ledger = make(max_attempts=5)
    ledger.issue(prompt(0))
    assert ledger.record_failed(failed(prompt(0), retryable=False)) is None
    assert ledger.counts()["failed"] == 1 and ledger.room() == 2


def test_batches_are_in_order_of_issue_not_of_arrival():
    ledger = make(groups_per_step=3)
    for number in range(3):
        ledger.issue(prompt(number))
    for number in (2, 0, 1):
        ledger.record_scored(scored(prompt(number), [1.0, -1.0]))
    plan = ledger.next_batch()
    assert plan is not None
    assert [group.group_id for group in plan.groups] == ["g-000000", "g-000001", "g-000002"]


def test_closing_ends_what_is_in_flight():
    ledger = make()
    ledger.issue(prompt(0))
    assert ledger.close() == ["g-000000"]
    assert ledger.end_of("g-000000") is End.STALE and closes(ledger)


@pytest.mark.parametrize("seed", range(50))
def test_the_ledger_closes_under_any_order_of_events(seed: int):
    rng = random.Random(seed)
    ledger = make(
        groups_per_step=3,
        max_staleness=rng.randint(0, 2),
        num_steps=6,
        max_attempts=3,
        max_replaced=rng.choice([0, 3, 9]),
    )
    issued: list[int] = []
    trained: list[str] = []
    for _ in range(400):
        match rng.randint(0, 5):
            case 0 if ledger.room() > 0:
                ledger.issue(prompt(len(issued)))
                issued.append(len(issued))
            case 1 if issued:
                group = prompt(rng.choice(issued))
                rewards = [1.0, rng.choice([1.0, -1.0, -1.0])]
                ledger.record_scored(scored(group, rewards, version=max(0, ledger.step - rng.randint(0, 2))))
            case 2 if issued:
                group = prompt(rng.choice(issued), attempt=rng.randint(0, 2))
                retry = ledger.record_failed(failed(group, retryable=rng.random() < 0.8))
                if retry is not None:
                    ledger.issue(retry)
            case 3 if (plan := ledger.next_batch()) is not None:
                ids = [group.group_id for group in plan.groups]
                filtered = [i for i in ids if rng.random() < 0.2]
                ledger.record_batch(
                    plan.step, kept=[i for i in ids if i not in filtered], filtered=filtered, stale=plan.stale
                )
            case 4:
                trained += ledger.record_update(ledger.pending_step or rng.randint(0, ledger.step))
            case _:
                ledger.record_loaded(rng.randint(0, ledger.step))
        assert closes(ledger)
    ledger.close()
    assert len(trained) == len(set(trained)) == ledger.counts()["trained"]
    assert ledger.counts()["in_flight"] == 0 and closes(ledger)
