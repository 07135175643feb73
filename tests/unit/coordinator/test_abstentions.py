"""Samples without a grade are counted by kind."""

from collections.abc import Callable

import msgspec

from beamline.coordinator.step_report import group_metrics
from beamline.protocol.messages import Grade, ScoredGroup
from ring_messages import prompt, scored


def abstained(number: int, *kinds: str) -> ScoredGroup:
    group = scored(prompt(number), [1.0, -1.0])
    grades = [Grade(reward=None, breakdown={}, abstention=kind) for kind in kinds]
    return msgspec.structs.replace(group, grades=grades)


def test_abstentions_are_counted_by_kind(is_documented: Callable[[str], bool]) -> None:
    groups = [abstained(0, "timeout", "crash"), abstained(1, "timeout", "error"), scored(prompt(2), [1.0, -1.0])]
    values = group_metrics(1, groups)
    assert values["reward/abstained"] == 4.0
    assert {name: value for name, value in values.items() if name.startswith("reward/abstained/")} == {
        "reward/abstained/timeout": 2.0,
        "reward/abstained/crash": 1.0,
        "reward/abstained/error": 1.0,
    }
    assert values["reward/mean"] == 0.0, "of the two that have a reward"
    assert [name for name in values if not is_documented(name)] == []


def test_a_step_without_abstentions_has_no_kinds() -> None:
    values = group_metrics(1, [scored(prompt(0), [1.0, -1.0])])
    assert values["reward/abstained"] == 0.0
    assert [name for name in values if name.startswith("reward/abstained/")] == []
