"""The diagnosis as Vega-Lite specifications, in the colours of the run report."""

from collections.abc import Iterable

import numpy as np

from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.report.charts import SERIES_COLOURS, Chart, Row, Spec

MAX_POINTS = 2_000
"""Of the scatter plot; evenly picked where there are more tokens."""
SMALLEST = 1e-9
"""What a logarithmic axis shows for a gap of zero."""
BLUE, ORANGE = SERIES_COLOURS[:2]


def charts(diagnosis: Diagnosis, engine_L: np.ndarray, trainer_L: np.ndarray) -> list[Chart]:
    """All of them, those without anything to show left out."""
    found = [
        readings_chart(diagnosis),
        scatter_chart(engine_L, trainer_L),
        causes_chart(diagnosis),
        positions_chart(diagnosis),
        layers_chart(diagnosis),
    ]
    return [chart for chart in found if chart is not None]


def readings_chart(diagnosis: Diagnosis) -> Chart:
    """The mean gap under each reading on a logarithmic axis, with the noise floor."""
    rows: list[Row] = [
        {"reading": r.name, "gap": max(r.gap.mean_abs, SMALLEST), "kind": "the run's" if r.own else "other"}
        for r in diagnosis.readings
    ]
    x: Spec = {
        "field": "gap",
        "type": "quantitative",
        "title": "mean |gap|, nats",
        "scale": {"type": "log", "nice": True},
        "axis": {"format": ".0e", "tickCount": 4, "grid": False, "labelOverlap": True},
    }
    y: Spec = {
        "field": "reading", "type": "nominal", "title": None, "sort": {"field": "gap", "order": "ascending"},
        "axis": {"labelLimit": 220, "grid": True},
    }  # fmt: skip
    colour = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": ["the run's", "other"], "range": [ORANGE, BLUE]},
        "legend": {"title": None, "orient": "top"},
    }
    floor = {
        "data": {"values": [{"gap": diagnosis.noise_floor}]},
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": "var(--muted)"},
        "encoding": {"x": x},
    }
    points = {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
        "encoding": {"x": x, "y": y, "color": colour, "tooltip": _tips(("reading", ""), ("gap", ".3~e"))},
    }
    return Chart(
        key="readings",
        title="What is left of the gap under each reading",
        caption=f"The dashed line is what {diagnosis.dtype} alone explains ({diagnosis.noise_floor:.2g}). A reading "
        "far to the left of the run's own undoes what is wrong.",
        spec={"layer": [floor, points], "height": 24 * len(rows) + 40},
    )


def scatter_chart(engine_L: np.ndarray, trainer_L: np.ndarray) -> Chart:
    """Engine against trainer, a point a token."""
    picked = np.unique(np.linspace(0, len(engine_L) - 1, min(len(engine_L), MAX_POINTS)).astype(int))
    rows = [
        {"engine": round(float(engine), 5), "trainer": round(float(trainer), 5)}
        for engine, trainer in zip(engine_L[picked], trainer_L[picked], strict=True)
    ]
    low = float(np.floor(min(engine_L.min(), trainer_L.min())))
    scale = {"domain": [low, 0], "nice": False}
    x, y = (_axis(side, f"{side}'s log-probability", scale) for side in ("engine", "trainer"))
    diagonal = {
        "data": {"values": [{"engine": low, "trainer": low}, {"engine": 0, "trainer": 0}]},
        "mark": {"type": "line", "strokeDash": [4, 4], "color": "var(--muted)", "strokeWidth": 1},
        "encoding": {"x": x, "y": y},
    }
    points = {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "size": 16, "opacity": 0.5, "color": BLUE},
        "encoding": {
            "x": x,
            "y": y,
            "tooltip": _tips(("engine", ".4f"), ("trainer", ".4f")),
        },
    }
    number = f"{len(picked):,} of {len(engine_L):,}" if len(picked) < len(engine_L) else f"{len(engine_L):,}"
    return Chart(
        key="scatter",
        title="Engine against trainer",
        caption=f"A point a token ({number} tokens). Equal log-probabilities lie on the dashed line.",
        spec={"layer": [diagonal, points], "height": 260},
    )


def causes_chart(diagnosis: Diagnosis) -> Chart | None:
    """Share of the gap by cause; nothing where there is no gap to explain."""
    if diagnosis.agrees:
        return None
    rows = [{"cause": cause.name, "share": cause.share} for cause in diagnosis.causes]
    return Chart(
        key="causes",
        title="What the gap is made of",
        caption="Share of the mean gap that goes with each cause. Shares may overlap.",
        spec={
            "data": {"values": rows},
            "mark": {"type": "bar", "color": BLUE},
            "encoding": {
                "x": _axis("share", "share of the gap", {"domain": [0, 1]}, form=".0%"),
                "y": {"field": "cause", "type": "nominal", "title": None, "sort": None},
                "tooltip": _tips(("cause", ""), ("share", ".1%")),
            },
            "height": 24 * len(rows) + 20,
        },
    )


def positions_chart(diagnosis: Diagnosis) -> Chart:
    """The mean gap over the response."""
    rows = [
        {"position": p.start, "gap": p.mean_abs, "tokens": p.num_tokens, "to": p.end - 1} for p in diagnosis.positions
    ]
    y = _axis("gap", "mean |trainer − engine|", {"zero": True, "nice": True}, form=".2~e")
    tips = _tips(("position", "d"), ("to", "d"), ("gap", ".3~e"), ("tokens", "d"))
    x = _axis("position", "response token", {"nice": False}, form="d")
    return Chart(
        key="positions",
        title="Gap by position",
        caption="A gap that grows along the response points at what is carried along; one at its start at the prompt.",
        spec={
            "data": {"values": rows},
            "encoding": {"x": x, "y": y, "tooltip": tips},
            "layer": [
                {"mark": {"type": "line", "color": BLUE}},
                {"mark": {"type": "point", "filled": True, "color": BLUE, "size": 28}},
            ],
        },
    )


def layers_chart(diagnosis: Diagnosis) -> Chart | None:
    """Route agreement by layer."""
    if not diagnosis.layers:
        return None
    rows = [{"layer": layer.layer, "agreement": layer.agreement} for layer in diagnosis.layers]
    lowest = min(row["agreement"] for row in rows)
    return Chart(
        key="layers",
        title="Same experts, by layer",
        caption=f"Share of tokens for which the live trainer would choose the engine's experts; lowest {lowest:.1%}.",
        spec={
            "data": {"values": rows},
            "mark": {"type": "bar", "color": BLUE},
            "encoding": {
                "x": {"field": "layer", "type": "ordinal", "title": "layer", "axis": {"labelAngle": 0}},
                "y": _axis("agreement", "same experts", {"domain": [0, 1]}, form=".0%"),
                "tooltip": _tips(("layer", "d"), ("agreement", ".2%")),
            },
        },
    )


def _axis(field: str, title: str, scale: Spec, form: str | None = None) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": {"format": form} if form else {},
    }


def _tips(*fields: tuple[str, str]) -> Iterable[Spec]:
    return [
        {"field": field, "type": "quantitative", "format": form} if form else {"field": field} for field, form in fields
    ]
