"""The diagnosis as charts."""

import numpy as np

from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.report.vega import (
    SERIES_COLOURS,
    Chart,
    Row,
    bars,
    category,
    colour,
    quantity,
    ruled,
    share,
    tip,
)

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
    rows.sort(key=lambda row: row["gap"])
    log = {"type": "log", "nice": True}
    x = quantity("gap", "mean |gap|, nats", form=".0e", scale=log, tickCount=4, grid=False, labelOverlap=True)
    points = {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
        "encoding": {
            "x": x,
            "y": category("reading", labelLimit=220, grid=True),
            "color": colour("kind", ["the run's", "other"], [ORANGE, BLUE]),
            "tooltip": [tip("reading"), tip("gap", ".3~e")],
        },
    }
    return Chart(
        key="readings",
        title="What is left of the gap under each reading",
        caption=f"The dashed line is what {diagnosis.dtype} alone explains ({diagnosis.noise_floor:.2g}). A reading "
        "far to the left of the run's own undoes what is wrong.",
        spec={"layer": [ruled(x, None, [{"gap": diagnosis.noise_floor}]), points], "height": 24 * len(rows) + 40},
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
    x, y = (quantity(side, f"{side}'s log-probability", scale=scale) for side in ("engine", "trainer"))
    diagonal = ruled(x, y, [{"engine": low, "trainer": low}, {"engine": 0, "trainer": 0}])
    points = {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "size": 16, "opacity": 0.5, "color": BLUE},
        "encoding": {"x": x, "y": y, "tooltip": [tip("engine", ".4f"), tip("trainer", ".4f")]},
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
    rows: list[Row] = [{"cause": cause.name, "share": cause.share} for cause in diagnosis.causes]
    drawn = bars(
        rows,
        x=share("share", "share of the gap"),
        y=category("cause"),
        tooltip=[tip("cause"), tip("share", ".1%")],
    )
    return Chart(
        key="causes",
        title="What the gap is made of",
        caption="Share of the mean gap that goes with each cause. Shares may overlap.",
        spec={**drawn, "height": 24 * len(rows) + 20},
    )


def positions_chart(diagnosis: Diagnosis) -> Chart:
    """The mean gap over the response."""
    rows = [
        {"position": p.start, "gap": p.mean_abs, "tokens": p.num_tokens, "to": p.end - 1} for p in diagnosis.positions
    ]
    x = quantity("position", "response token", form="d", scale={"nice": False})
    y = quantity("gap", "mean |trainer − engine|", form=".2~g", scale={"zero": True, "nice": True})
    tips = [tip("position", "d"), tip("to", "d"), tip("gap", ".3~e"), tip("tokens", "d")]
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
    rows: list[Row] = [{"layer": layer.layer, "agreement": layer.agreement} for layer in diagnosis.layers]
    lowest = min(row["agreement"] for row in rows)
    return Chart(
        key="layers",
        title="Same experts, by layer",
        caption=f"Share of tokens for which the live trainer would choose the engine's experts; lowest {lowest:.1%}.",
        spec=bars(
            rows,
            x=category("layer", "layer"),
            y=share("agreement", "same experts"),
            tooltip=[tip("layer", "d"), tip("agreement", ".2%")],
        ),
    )
