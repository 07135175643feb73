"""A prompt group's way from prompt to gradient, through services and traces."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from beamline.coordinator.observe import trace_names as names
from beamline.coordinator.observe.spans import Span, read_spans

REDELIVERED = "messaging.redelivered"
"""Attribute of a link to the sender's span, where the message had been delivered before."""
TRAINING = (names.TRAIN_STEP, names.ASSEMBLE, names.MINI_BATCH, names.OPTIMIZER, names.EXPORT)
"""Spans in which a trained group's way goes on with those of its batch."""


class Outcome(StrEnum):
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    EVALUATED = "evaluated"
    OPEN = "on its way"


ENDS = {names.FAILED: Outcome.FAILED, names.FILTERED: Outcome.FILTERED, names.STALE: Outcome.STALE}
"""By the attribute that names such groups; a group that failed may have been bound before."""


@dataclass(frozen=True)
class Stop:
    """One span of the way."""

    span: Span
    step: int | None
    """Of the trace in which it stands."""

    @property
    def is_redelivered(self) -> bool:
        return any(link.attributes.get(REDELIVERED) for link in self.span.links)


@dataclass(frozen=True)
class GroupTrace:
    """All that a run's traces tell of a group, in order of time."""

    run: str
    group_id: str
    stops: list[Stop]
    outcome: Outcome
    step: int | None
    """The step that trained it, or for which it was drawn in vain."""


class GroupSearch:
    """Looks for groups in the spans of a run, which are read from the beginning each time."""

    def __init__(self, run: str, read: Callable[[], Iterable[Span]]) -> None:
        self._run = run
        self._read = read
        self.group_ids: set[str] = set()
        """Groups that the run has."""

    def find(self, group_id: str) -> GroupTrace | None:
        """The group's way; None where the traces do not name it."""
        found: list[Span] = []
        steps: dict[str, int] = {}
        updated: set[int] = set()
        has_finished = False
        for span in self._read():
            if (step := names.step_of(span)) is not None and not span.parent_id:
                steps[span.trace_id] = step
            if step is not None and span.name == names.UPDATE:
                updated.add(step)
            has_finished |= span.name == names.FINISH
            self.group_ids |= {own} if (own := names.group_of(span)) else set()
            if group_id in names.named_groups(span):
                found.append(span)
        if not found:
            return None
        outcome, step = _outcome(group_id, found, steps, updated, has_finished)
        if outcome is Outcome.TRAINED:
            found += self._training(group_id, found)
        stops = [Stop(span, steps.get(span.trace_id)) for span in sorted(found, key=_key)]
        return GroupTrace(self._run, group_id, stops, outcome, step)

    def _training(self, group_id: str, found: list[Span]) -> list[Span]:
        """The spans of the batch that the group was part of, less those of mini-batches of others."""
        known = {span.span_id for span in found}
        traces = {span.trace_id for span in found if span.name in TRAINING}
        numbers = set(_mini_batches(group_id, found))
        batch = [s for s in self._read() if s.trace_id in traces and s.name in TRAINING and s.span_id not in known]
        others = [s for s in batch if s.name == names.MINI_BATCH and not numbers & {_number(s), ""}]
        apart = {span.span_id for span in others}
        return [span for span in batch if not apart & {span.span_id, span.parent_id}]


def read_group(run_dir: Path, group_id: str) -> tuple[GroupTrace | None, set[str]]:
    """A group's way, None where the run has none of that name; and the groups that it has. Raises as `read_spans`."""
    search = GroupSearch(run_dir.name, lambda: read_spans(run_dir))
    return search.find(group_id), search.group_ids


def _mini_batches(group_id: str, found: list[Span]) -> Iterator[str]:
    """Numbers of the mini-batches that its group's links tell; an empty one where they tell none."""
    for span in found:
        for link in span.links:
            if link.attributes.get(names.GROUP_ID) == group_id and span.name == names.ASSEMBLE:
                yield from str(link.attributes.get(names.MINI_BATCH_NUMBER, "")).split() or [""]


def _number(span: Span) -> str:
    return str(span.attributes.get(names.MINI_BATCH_NUMBER, ""))


def _key(span: Span) -> tuple[int, int]:
    return span.start_ns, -span.end_ns


def _outcome(
    group_id: str, found: list[Span], steps: dict[str, int], updated: set[int], has_finished: bool
) -> tuple[Outcome, int | None]:
    """How the group ended, and the step of that.

    Args:
        found: spans that name the group.
        steps: number by trace.
        updated: steps whose update was taken.
        has_finished: whether the run came to its end.
    """
    for which, outcome in ENDS.items():
        for span in found:
            if group_id in names.groups_in(span, which):
                return outcome, names.step_of(span)
    if any(span.name == names.GROUP_FAILED and span.attributes.get(names.IS_FINAL) for span in found):
        return Outcome.FAILED, None
    bound = [names.step_of(span) for span in found if group_id in names.groups_in(span, names.GROUP_IDS)]
    taken = [step for step in bound if step in updated]
    trained = [steps.get(span.trace_id) for span in found if span.name in TRAINING and not span.error]
    if trained or taken:
        return Outcome.TRAINED, (trained or taken)[-1]
    if not any(span.name == names.ADMIT for span in found) and any(span.name == names.SCORE_GROUP for span in found):
        return Outcome.EVALUATED, None
    return (Outcome.STALE, None) if has_finished else (Outcome.OPEN, None)
