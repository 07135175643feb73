"""The report's charts of a run."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from beamline.coordinator.report.vega import (
    SERIES_COLOURS,
    Chart,
    Row,
    Spec,
    bars,
    category,
    colour,
    quantity,
    share,
    tip,
)
from beamline.coordinator.summary import StepValues, Summary

PHASES = ("generate", "train", "sync", "evaluate", "checkpoint")
OTHER = "other"
LEAST = 1e-9
"""Of a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric that is drawn as a line over the steps."""

    metric: str
    title: str
    unit: str
    format: str
    """d3 format of the axis and the tooltip."""
    meaning: str
    from_zero: bool = False
    logarithmic: bool = False
    """Values below LEAST are drawn as that."""


REWARD = Figure(
    metric="reward/mean",
    title="Reward",
    unit="mean reward",
    format=".3~f",
    meaning="Mean over all samples of a step",
)
LENGTH = Figure(
    metric="tokens/response_mean",
    title="Response length",
    unit="tokens",
    format=".3~s",
    meaning="Mean over all samples of a step",
)
MISMATCH = Figure(
    metric="policy/mismatch_abs_mean",
    title="Trainer–engine mismatch",
    unit="mean |old − rollout| log-probability",
    format=".2~g",
    meaning="Distance of the trainer's log-probabilities from the engine's, before the first update",
    from_zero=True,
)
MISMATCH_LOG = replace(MISMATCH, from_zero=False, logarithmic=True)
THROUGHPUT = Figure(
    metric="throughput/tokens_per_s",
    title="Throughput",
    unit="tokens/s",
    format=".3~s",
    meaning="Prompt and response tokens by seconds of step",
)
ENTROPY = Figure(
    metric="policy/entropy",
    title="Entropy",
    unit="nats a token",
    format=".3~f",
    meaning="Of the policy at the sampled tokens",
)
GRAD_NORM = Figure(
    metric="policy/grad_norm", title="Gradient norm", unit="L2 norm", format=".3~f", meaning="Before clipping"
)


def line_chart(summary: Summary, figure: Figure) -> Chart | None:
    """A metric by step; None when the run has no value of it."""
    rows = _rows(summary.steps, figure)
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    ends = (f"{_short(row['value'])} at step {row['step']}" for row in (first, last))
    caption = f"{figure.meaning}: {', '.join(ends)}."
    tooltip = [_STEP_TIP, tip("value", ".5~g", figure.unit)]
    spec = _layered(rows, [{"mark": {"type": "line", "color": SERIES_COLOURS[0]}}], _value_axis(figure), tooltip)
    if figure.logarithmic:
        spec["transform"] = [{"calculate": f"max(datum.value, {LEAST})", "as": "drawn"}]
    return Chart(
        key=figure.metric.replace("/", "-"),
        title=figure.title,
        caption=caption,
        spec=spec,
    )


def accuracy_chart(summary: Summary) -> Chart | None:
    """Accuracy by step with its interval, a colour and a dash for each data source."""
    rows = [
        {
            "step": evaluation.step,
            "source": evaluation.name,
            "accuracy": evaluation.values["accuracy"],
            "low": evaluation.values.get("accuracy_low", evaluation.values["accuracy"]),
            "high": evaluation.values.get("accuracy_high", evaluation.values["accuracy"]),
        }
        for evaluation in summary.evaluations
        if "accuracy" in evaluation.values
    ]
    if not rows:
        return None
    sources = list(dict.fromkeys(row["source"] for row in rows))
    colours = itertools.islice(itertools.cycle(SERIES_COLOURS), len(sources))
    by_source = colour("source", sources, list(colours), direction="vertical", symbolOpacity=1)
    if len(sources) == 1:
        by_source["legend"] = None
    y = share("accuracy", "accuracy")
    band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": by_source}
    bounds = (("accuracy", "accuracy"), ("low", "from"), ("high", "to"))
    tooltip = [_STEP_TIP, tip("source", title="evaluation"), *(tip(field, ".1%", title) for field, title in bounds)]
    layers = [
        {"mark": {"type": "area", "opacity": 0.18}, "encoding": band},
        {"mark": {"type": "rule", "opacity": 0.6}, "encoding": band},
        {
            "mark": {"type": "line"},
            "encoding": {"y": y, "color": by_source, "strokeDash": {"field": "source", "legend": None}},
        },
    ]
    return Chart(
        key="accuracy",
        title="Held-out accuracy",
        caption="Share of correct answers; the band is the 95 % bootstrap interval over problems.",
        spec=_layered(rows, layers, y, tooltip, {"color": by_source}),
    )


def phases_chart(summary: Summary) -> Chart | None:
    """Seconds of each step by phase, stacked."""
    rows = [row for step in summary.steps for row in _phase_rows(step)]
    if not rows:
        return None
    phases = [phase for phase in (*PHASES, OTHER) if any(row["phase"] == phase for row in rows)]
    colours = [f"var(--phase-{phase})" for phase in phases]
    return Chart(
        key="phases",
        title="Time by phase",
        caption="Seconds of each step. What is none of the phases is shown as other.",
        spec=bars(
            rows,
            x=category("step", "step", labelOverlap=True),
            y={**quantity("seconds", "seconds"), "stack": True},
            tooltip=[_STEP_TIP, tip("phase"), tip("seconds", ".2f")],
            color=colour("phase", phases, colours, columns=3),
            order={"field": "rank", "type": "quantitative"},
        ),
    )


_STEP_TIP = tip("step", "d")


def _value_axis(figure: Figure) -> Spec:
    if figure.logarithmic:
        scale = {"type": "log", "nice": True}
        return quantity("drawn", figure.unit, form=".0e", scale=scale, tickCount=4, labelOverlap=True)
    return quantity("value", figure.unit, form=figure.format, scale={"zero": figure.from_zero, "nice": True})


def _rows(steps: Sequence[StepValues], figure: Figure) -> list[Row]:
    return [{"step": s.step, "value": s.values[figure.metric]} for s in steps if figure.metric in s.values]


def _phase_rows(step: StepValues) -> list[Row]:
    seconds = {phase: step.values[f"timing/{phase}"] for phase in PHASES if f"timing/{phase}" in step.values}
    if "timing/step" in step.values:
        seconds[OTHER] = max(0.0, step.values["timing/step"] - sum(seconds.values()))
    return [
        {"step": step.step, "phase": phase, "seconds": spent, "rank": (*PHASES, OTHER).index(phase)}
        for phase, spent in seconds.items()
    ]


def _layered(rows: list[Row], layers: list[Spec], y: Spec, tooltip: list[Spec], shared: Spec | None = None) -> Spec:
    """Layers over the steps, and points of which the one at the pointer is enlarged and explained."""
    # What finds the nearest point loses the text of its tooltip: where there is some, points are to be met.
    on = {"on": "pointerover"} if shared else {"on": "pointermove", "nearest": True}
    hover = {"name": "hover", "select": {"type": "point", **on, "clear": "pointerout", "encodings": ["x"]}}
    points: Spec = {
        "params": [hover],
        "mark": {"type": "point", "filled": True, **({} if shared else {"color": SERIES_COLOURS[0]})},
        "encoding": {
            "y": y,
            "tooltip": tooltip,
            "size": {"condition": {"param": "hover", "empty": False, "value": 110}, "value": 45 if shared else 28},
            **(shared or {}),
        },
    }
    x = quantity("step", "step", form="d", tickMinStep=1)
    return {"data": {"values": rows}, "encoding": {"x": x, "y": y}, "layer": [*layers, points]}


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
