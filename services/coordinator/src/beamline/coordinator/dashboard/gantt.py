"""What each worker did in the newest steps, as a chart with time from left to right."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from beamline.coordinator.observe.spans import Span
from beamline.coordinator.observe.trace_names import step_of
from beamline.coordinator.report.vega import Chart, Row, Spec, colour, tip

KINDS = ("generate", "score", "train", "sync", "evaluate", "checkpoint", "other")
_KIND_OF = {
    **dict.fromkeys(("generate", "generate group"), "generate"),
    "score group": "score",
    **dict.fromkeys(
        ("train", "train step", "assemble", "old_logprobs", "reference", "mini_batch", "optimizer"), "train"
    ),
    **dict.fromkeys(("sync", "export", "transfer", "activate", "canary"), "sync"),
    "evaluate": "evaluate",
    **dict.fromkeys(("checkpoint", "save", "seal"), "checkpoint"),
}
_TOO_SMALL = ("admit",)
"""Work of the coordinator that takes no time beside a phase."""
LANE_PIXELS = 26
NO_STEP = "–"
"""Of what is done before the first step and after the last."""
ORDER = ("coordinator", "rollout", "reward", "trainer")


@dataclass(frozen=True)
class Work:
    """Spans of one name that lie over one another, as one piece. Times are Unix nanoseconds."""

    worker: str
    name: str
    kind: str
    step: int | None
    start_ns: int
    end_ns: int
    number: int
    depth: int
    failed: bool


def gantt_chart(traces: Sequence[Sequence[Span]]) -> Chart | None:
    """The traces side by side on one axis, seconds since the first of them began; None where there is no span.

    Groups that a worker has at the same time are one bar. A bar within another is a part of its work.
    """
    works = sorted((work for spans in traces for work in _works(spans)), key=lambda work: (work.depth, work.start_ns))
    if not works:
        return None
    zero = min(work.start_ns for work in works)
    lanes = sorted({work.worker: None for work in works}, key=lambda worker: (_rank(worker), worker))
    rows = [_row(work, zero) for work in works]
    return Chart(
        key="gantt",
        title="The last steps, by worker",
        caption="Seconds since the first of these steps began. Groups that a worker has at the same time are one bar; "
        "a bar that lies in another is a part of its work.",
        spec=_spec(rows, lanes),
    )


def _works(spans: Sequence[Span]) -> Iterator[Work]:
    """What is drawn of a trace: everything but its root and what is too small, groups laid together."""
    step = next((number for span in spans if (number := step_of(span)) is not None), None)
    by_id = {span.span_id: span for span in spans}
    alike: dict[tuple[str, str, int], list[Span]] = {}
    for span in spans:
        if span.parent_id and span.name not in _TOO_SMALL:
            alike.setdefault((span.worker, span.name, _depth(span, by_id)), []).append(span)
    for (worker, name, depth), found in alike.items():
        for together in _overlapping(found):
            yield Work(
                worker=worker,
                name=name,
                kind=_KIND_OF.get(name, "other"),
                step=step,
                start_ns=together[0].start_ns,
                end_ns=max(span.end_ns for span in together),
                number=len(together),
                depth=depth,
                failed=any(span.error for span in together),
            )


def _depth(span: Span, by_id: dict[str, Span]) -> int:
    """How many spans of the same worker hold this one."""
    depth, parent = 0, by_id.get(span.parent_id)
    while parent is not None and parent.worker == span.worker and depth < len(by_id):
        depth, parent = depth + 1, by_id.get(parent.parent_id)
    return depth


def _overlapping(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans in order of their start, those that lie over one another in one list."""
    together: list[Span] = []
    end_ns = 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        if together and span.start_ns >= end_ns:
            yield together
            together = []
        together.append(span)
        end_ns = max(end_ns, span.end_ns) if len(together) > 1 else span.end_ns
    if together:
        yield together


def _row(work: Work, zero: int) -> Row:
    return {
        "worker": work.worker,
        "work": work.name if work.number == 1 else f"{work.name} × {work.number}",
        "kind": work.kind,
        "step": NO_STEP if work.step is None else work.step,
        "from": (work.start_ns - zero) / 1e9,
        "to": (work.end_ns - zero) / 1e9,
        "seconds": (work.end_ns - work.start_ns) / 1e9,
        "result": "failed" if work.failed else "done",
    }


def _rank(worker: str) -> int:
    return next((rank for rank, service in enumerate(ORDER) if worker.startswith(service)), len(ORDER))


def _spec(rows: list[Row], lanes: list[str]) -> Spec:
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    x = {"field": "from", "type": "quantitative", "title": "seconds", "scale": {"nice": False, "zero": True}}
    lane = {
        "field": "worker",
        "type": "nominal",
        "title": None,
        "scale": {"domain": lanes},
        "axis": {"labelLimit": 110},
    }
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--card)", "strokeWidth": 0.4, "minBandSize": 1},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": lane,
            "color": colour("kind", kinds, [f"var(--phase-{kind})" for kind in kinds], columns=4),
            "tooltip": [
                tip("worker"), tip("work"), tip("step"), tip("seconds", ".3f"), tip("from", ".3f"), tip("result"),
            ],
        },
    }  # fmt: skip
    rules = {
        "transform": [
            {"filter": "isNumber(datum.step)"},
            {"aggregate": [{"op": "min", "field": "from", "as": "begin"}], "groupby": ["step"]},
            {"calculate": "'step ' + datum.step", "as": "label"},
        ],
        "encoding": {"x": {**x, "field": "begin"}},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [4, 4], "color": "var(--muted)", "strokeWidth": 1}},
            {
                "mark": {"type": "text", "align": "left", "dx": 3, "y": -6, "color": "var(--muted)", "fontSize": 11},
                "encoding": {"text": {"field": "label"}},
            },
        ],
    }
    layers = [bars, rules] if any(row["step"] != NO_STEP for row in rows) else [bars]
    return {"data": {"values": rows}, "layer": layers, "height": LANE_PIXELS * len(lanes)}
