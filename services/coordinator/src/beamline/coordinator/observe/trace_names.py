"""What the views of a trace read of its spans: names and attributes."""

from collections.abc import Iterator

from beamline.coordinator.observe.spans import Span
from beamline.runtime.trace_context import GROUP_ID
from beamline.runtime.trace_context import STEP as STEP_NUMBER

STEP = "step"
GENERATE = "generate"
EVALUATE = "evaluate"
ADMIT = "admit"
GENERATE_GROUP = "generate group"
SCORE_GROUP = "score group"
TRAIN_STEP = "train step"
ASSEMBLE = "assemble"
MINI_BATCH = "mini_batch"
OPTIMIZER = "optimizer"
EXPORT = "export"
BIND = "bind"
GROUP_FAILED = "group failed"
UPDATE = "update"
FINISH = "finish"

ATTEMPT = "beamline.attempt"
MINI_BATCH_NUMBER = "beamline.mini_batch"
"""Of a mini-batch, counted from 1; of a link to a group, those that the group is in, with spaces between them."""
IS_FINAL = "beamline.is_final"
"""Of a failed attempt: there is no further one."""
GROUP_IDS, FILTERED, STALE, FAILED = (f"beamline.{which}" for which in ("group_ids", "filtered", "stale", "failed"))
"""Several groups, with spaces between them: those bound to a step, and those that ended otherwise."""


def step_of(span: Span) -> int | None:
    """The step that a span says it belongs to."""
    number = span.attributes.get(STEP_NUMBER)
    return int(number) if isinstance(number, int | float) else None


def group_of(span: Span) -> str:
    """The one group that a span is about; empty where there is none."""
    return str(span.attributes.get(GROUP_ID, ""))


def groups_in(span: Span, attribute: str) -> list[str]:
    """The groups of an attribute that names several."""
    return str(span.attributes.get(attribute, "")).split()


def linked_groups(span: Span) -> Iterator[str]:
    """Groups that a span took up from elsewhere: by links, as a step's assembly does."""
    yield from (str(link.attributes[GROUP_ID]) for link in span.links if GROUP_ID in link.attributes)


def named_groups(span: Span) -> Iterator[str]:
    """All groups that a span names, whatever became of them."""
    yield from (group_id for which in (GROUP_IDS, FILTERED, STALE, FAILED) for group_id in groups_in(span, which))
    yield from linked_groups(span)
    yield from filter(None, [group_of(span)])


def where(span: Span) -> str:
    """Service and worker, said once where they are called alike."""
    return span.service if span.worker == span.service else f"{span.service}/{span.worker}"
