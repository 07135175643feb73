"""A run's traces, small enough to count by hand: two steps of two groups each, times to the millisecond.

Step n begins at second n. Group g-000003 is admitted in step 1 and trained in step 2.
"""

from collections import defaultdict
from pathlib import Path

import msgspec

from beamline.runtime.otlp_json import (
    AnyValue,
    Batch,
    KeyValue,
    LinkLine,
    ResourceLine,
    ResourceSpans,
    ScopeSpans,
    SpanLine,
)

PHASES = (("generate", 0, 500), ("train", 500, 900), ("sync", 900, 980), ("report", 980, 1000))
ADMITTED = {1: ("g-000000", "g-000001", "g-000003"), 2: ("g-000002",)}
TRAINED = {1: ("g-000000", "g-000001"), 2: ("g-000002", "g-000003")}
TRAIN_PARTS = (
    ("assemble", 510, 530),
    ("old_logprobs", 530, 600),
    ("mini_batch", 600, 800),
    ("optimizer", 780, 800),
    ("export", 800, 880),
)


def write_example_traces(run_dir: Path) -> None:
    """Write `traces/<worker>.jsonl` of coordinator, rollout-0, reward and trainer."""
    spans: dict[tuple[str, str], list[SpanLine]] = defaultdict(list)
    for step in (1, 2):
        root = _id("step", step)
        phases = [_span(step, name, root, start, end) for name, start, end in PHASES]
        root_span = _span(step, "step", "", 0, 1000, {"beamline.run": "example", "beamline.step": step}, own_id=root)
        groups = [(group_id, _span(step, "admit", root, 5, 8, _group(group_id))) for group_id in ADMITTED[step]]
        spans["coordinator", "coordinator"] += [*phases, *(admit for _, admit in groups), root_span]
        for group_id, admit in groups:
            generated = _span(step, "generate group", admit.span_id, 10, 400, _group(group_id))
            scored = _span(step, "score group", generated.span_id, 400, 450, _group(group_id))
            spans["rollout", "rollout-0"].append(generated)
            spans["reward", "reward"].append(scored)
        spans["trainer", "trainer"] += _trained(step, phases[1].span_id)
        spans["rollout", "rollout-0"] += [_span(step, "activate", phases[2].span_id, 910, 970)]
    folder = run_dir / "traces"
    folder.mkdir(parents=True)
    for (service, worker), own in spans.items():
        (folder / f"{worker}.jsonl").write_bytes(_line(service, worker, own))


def _trained(step: int, parent: str) -> list[SpanLine]:
    whole = _span(step, "train step", parent, 505, 890, {"beamline.step": step})
    parts = [_span(step, name, whole.span_id, start, end) for name, start, end in TRAIN_PARTS]
    admitted_in = {group_id: of for of, group_ids in ADMITTED.items() for group_id in group_ids}
    links = [
        LinkLine(
            trace_id=_id("trace", admitted_in[group_id]) * 2,
            span_id=_id("admit", group_id),
            attributes=_attributes(_group(group_id)),
        )
        for group_id in TRAINED[step]
    ]
    return [msgspec.structs.replace(parts[0], links=links), *parts[1:], whole]


def _span(
    step: int,
    name: str,
    parent: str,
    start_ms: int,
    end_ms: int,
    attributes: dict[str, str | int] | None = None,
    own_id: str = "",
) -> SpanLine:
    attributes = attributes or {}
    return SpanLine(
        trace_id=_id("trace", step) * 2,
        span_id=own_id or _id(name, attributes.get("beamline.group_id", step)),
        parent_span_id=parent,
        name=name,
        kind=1,
        start_time_unix_nano=str(_ns(step, start_ms)),
        end_time_unix_nano=str(_ns(step, end_ms)),
        attributes=_attributes(attributes),
    )


def _line(service: str, worker: str, spans: list[SpanLine]) -> bytes:
    resource = ResourceLine(
        attributes=_attributes({"service.name": f"beamline-{service}", "service.instance.id": worker})
    )
    of_resource = ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans)])
    return msgspec.json.encode(Batch(resource_spans=[of_resource])) + b"\n"


def _group(group_id: str) -> dict[str, str | int]:
    return {"beamline.group_id": group_id}


def _attributes(attributes: dict[str, str | int]) -> list[KeyValue]:
    return [
        KeyValue(
            key=key, value=AnyValue(int_value=str(value)) if isinstance(value, int) else AnyValue(string_value=value)
        )
        for key, value in attributes.items()
    ]


def _ns(step: int, ms: int) -> int:
    return step * 1_000_000_000 + ms * 1_000_000


def _id(*of: object) -> str:
    return f"{sum(ord(letter) * 257**place for place, letter in enumerate(str(of))) % 2**64:016x}"
