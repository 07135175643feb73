"""The ledger that is restored from its file answers as the one that was saved."""

import random

import msgspec
import pytest

from beamline.coordinator.ledger import BatchPlan, End, Ledger
from beamline.coordinator.resume_files import DataCursorFile, DataIdentity, Ends, LedgerFile, encode_files, read_files
from beamline.protocol.messages import PromptGroup
from ring_messages import failed, prompt, scored

GROUPS_PER_STEP, NUM_STEPS, MAX_STALENESS = 3, 9, 2


def make() -> Ledger:
    return Ledger(
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=MAX_STALENESS,
        num_steps=NUM_STEPS,
        max_attempts=2,
        max_replaced=2,
        is_useless=lambda group: len({grade.reward for grade in group.grades}) == 1,
    )


def answer(ledgers: list[Ledger], group: PromptGroup, rng: random.Random) -> None:
    """One answer of the ring, to all of them alike."""
    if rng.random() < 0.2:
        retries = [ledger.record_failed(failed(group, retryable=rng.random() < 0.5)) for ledger in ledgers[:1]]
        for ledger in ledgers[1:]:
            ledger.record_failed(failed(group, retryable=retries[0] is not None))
        for ledger in ledgers:
            if retries[0] is not None:
                ledger.issue(retries[0])
        return
    rewards: list[float | None] = [1.0, rng.choice([-1.0, -1.0, 1.0])]
    for ledger in ledgers:
        ledger.record_scored(scored(group, rewards, version=max(0, ledger.loaded_version)))


def take(ledgers: list[Ledger], plan: BatchPlan, rng: random.Random) -> None:
    """Bind the plan and, where it is a batch, train it."""
    filtered = [g.group_id for g in plan.groups if len({grade.reward for grade in g.grades}) == 1]
    kept = [g.group_id for g in plan.groups if g.group_id not in filtered]
    lost = rng.sample(kept, k=len(kept) // 3)
    for ledger in ledgers:
        ledger.record_batch(plan.step, kept=kept, filtered=filtered, stale=plan.stale)
        if kept:
            ledger.record_update(plan.step, lost)
            ledger.record_loaded(plan.step)


def go_on(ledgers: list[Ledger], rng: random.Random, last_step: int) -> None:
    """The same events to all of them until a step; they answer alike at every moment."""
    while ledgers[0].step < last_step:
        one = ledgers[0]
        for number in range(one.counts()["issued"], one.counts()["issued"] + one.room()):
            for ledger in ledgers:
                ledger.issue(prompt(number))
        if one.unanswered():
            answer(ledgers, rng.choice(one.unanswered()), rng)
        if (plan := one.next_batch()) is not None:
            take(ledgers, plan, rng)
        alike(ledgers)


def alike(ledgers: list[Ledger]) -> None:
    one = ledgers[0]
    for other in ledgers[1:]:
        for question in (
            Ledger.counts,
            Ledger.room,
            Ledger.open_groups,
            Ledger.open_prompts,
            Ledger.unanswered,
            Ledger.num_fresh,
            Ledger.next_batch,
        ):
            assert question(other) == question(one), question.__name__
        assert (other.step, other.pending_step) == (one.step, one.pending_step)
        counts = other.counts()
        assert counts["issued"] == sum(counts[end] for end in End) + counts["in_flight"]


@pytest.mark.parametrize("seed", range(30))
def test_a_restored_ledger_answers_as_the_original(seed: int, tmp_path) -> None:
    rng = random.Random(seed)
    original = make()
    original.record_loaded(0)
    go_on([original], rng, rng.randint(1, 6))
    counts = original.counts()
    kept = LedgerFile(
        step=original.step,
        started=1.5,
        ends=Ends(**{end.value: counts[end] for end in End}),
        open=original.open_prompts(),
        evaluated=[0, 3],
    )
    identity = DataIdentity(source="prompts", num_rows=10, rows_hash="0" * 32, seed=None)
    for name, content in encode_files(DataCursorFile(position=counts["issued"], rows=identity), kept).items():
        (tmp_path / name).write_bytes(content)
    found = read_files(tmp_path).ledger
    assert found == kept

    restored = make()
    ends = {End(name): count for name, count in msgspec.structs.asdict(found.ends).items()}
    for _ in range(2):  # a repeat changes nothing
        restored.restore(found.step, ends, found.open)
    assert restored.counts() == counts
    restored.record_loaded(found.step)
    for group in original.open_prompts():
        if not original.awaits(group.group_id):  # what was answered is sampled anew, by the newest policy
            for ledger in (restored, original):
                ledger.record_scored(scored(group, [1.0, -1.0], version=found.step))
    reference = make()
    reference.restore(found.step, ends, original.open_prompts())
    reference.record_loaded(found.step)
    for group in reference.open_prompts():
        if not restored.awaits(group.group_id):
            reference.record_scored(scored(group, [1.0, -1.0], version=found.step))
    go_on([restored, reference], rng, NUM_STEPS)


def test_counts_of_a_restored_ledger_cover_the_whole_run() -> None:
    ledger = make()
    ledger.restore(4, {End.TRAINED: 9, End.FAILED: 2, End.STALE: 1}, [prompt(12), prompt(14)])
    assert ledger.counts() == {"issued": 14, "trained": 9, "filtered": 0, "stale": 1, "failed": 2, "in_flight": 2}
    assert [group.group_id for group in ledger.unanswered()] == ["g-000012", "g-000014"]
    assert ledger.end_of("g-000003") is None
