"""One step of a run, read from its traces without holding those of the other steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from beamline.coordinator.observe.spans import Span, read_spans
from beamline.coordinator.observe.trace_names import ADMIT, STEP, group_of, linked_groups, step_of
from beamline.coordinator.observe.trace_path import Segment, critical_path
from beamline.coordinator.observe.trace_tree import Node, grow
from beamline.protocol.errors import ConfigError

type Read = Callable[[], Iterable[Span]]
"""Reads all spans of a run from the beginning."""


@dataclass(frozen=True)
class StepTrace:
    """A step that has ended."""

    run: str
    step: int
    root: Node
    path: list[Segment]
    """What the step waited for, in order of time."""

    @property
    def on_path(self) -> set[str]:
        """Span ids of the chain, with those that hold them."""
        on_path = {segment.span.span_id for segment in self.path}
        for node in reversed(list(self.root.walk())):  # children before their parents
            if any(child.span.span_id in on_path for child in node.children):
                on_path.add(node.span.span_id)
        return on_path


def read_step(run_dir: Path, step: int | None) -> StepTrace:
    """The last step of a run that has ended, or the one of that number.

    Raises ConfigError: no such step, with the nearest one; or as `read_spans`.
    """
    return trace_step(run_dir.name, lambda: read_spans(run_dir), step)


def trace_step(run: str, read: Read, step: int | None) -> StepTrace:
    """As `read_step`, from spans. They are read up to three times, so that only the step's are held."""
    root = _choose(run, {number: s for s in read() if s.name == STEP and (number := step_of(s)) is not None}, step)
    top = grow(root, (span for span in read() if span.trace_id == root.trace_id))
    trained = {group_id for node in top.walk() for group_id in linked_groups(node.span)}
    groups = [child for child in top.children if child.span.name == ADMIT and group_of(child.span) in trained]
    missing = trained - {group_of(group.span) for group in groups}
    if missing:
        groups += _groups_of_other_steps(read(), root, missing)
    number = step_of(root)
    assert number is not None, "it was chosen by it"
    return StepTrace(run, number, top, critical_path(top, groups))


def _choose(run: str, roots: dict[int, Span], step: int | None) -> Span:
    if not roots:
        raise ConfigError(f"no step of run {run} has ended yet: its traces hold none")
    if step is None:
        return roots[max(roots)]
    if step not in roots:
        nearest = min(roots, key=lambda number: abs(number - step))
        raise ConfigError(f"run {run} has no trace of a step {step} that has ended: the nearest is {nearest}")
    return roots[step]


def _groups_of_other_steps(spans: Iterable[Span], root: Span, group_ids: set[str]) -> list[Node]:
    """Admissions, in earlier traces, of groups that this step trained."""
    found = [span for span in spans if span.trace_id != root.trace_id and group_of(span) in group_ids]
    admitted = {group_of(span): span for span in found if span.name == ADMIT}
    return [
        grow(admission, [span for span in found if group_of(span) == group_id])
        for group_id, admission in admitted.items()
    ]
