"""What the charts of every page are built of: Vega-Lite specifications as plain data, drawn by the page.

Colours are CSS variables of the page, so that a chart follows its light or dark scheme.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

type Spec = dict[str, Any]
type Row = dict[str, Any]

SERIES_COLOURS = [f"var(--series-{n})" for n in range(1, 7)]
MUTED = "var(--muted)"
BAR_WIDTH = 0.8
"""Of the room that a bar has."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A titled specification; `caption` says in words what it shows."""

    key: str
    title: str
    caption: str
    spec: Spec


def quantity(field: str, title: str, *, form: str = "", scale: Spec | None = None, **axis: Any) -> Spec:
    """An axis of numbers.

    Args:
        form: d3's format of its labels.
        axis: whatever else Vega-Lite knows of an axis.
    """
    form_of_labels = {"format": form} if form else {}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale or {},
        "axis": {**form_of_labels, **axis},
    }


def share(field: str, title: str) -> Spec:
    """An axis from 0 to 100 %."""
    return quantity(field, title, form=".0%", scale={"domain": [0, 1]}, values=[0, 0.25, 0.5, 0.75, 1])


def category(field: str, title: str | None = None, **axis: Any) -> Spec:
    """An axis of things in the order of the rows, its labels upright."""
    return {"field": field, "type": "ordinal", "title": title, "sort": None, "axis": {"labelAngle": 0, **axis}}


def colour(field: str, domain: Sequence[str], colours: Sequence[str], **legend: Any) -> Spec:
    """A colour for each thing, and a legend above the chart."""
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(domain), "range": list(colours)},
        "legend": {"title": None, "orient": "top", **legend},
    }


def bars(rows: Sequence[Row], *, x: Spec, y: Spec, tooltip: Sequence[Spec], **encoding: Spec) -> Spec:
    """A bar for each row, lying where x is the quantity; in the first colour unless the encoding has one."""
    lying = x["type"] == "quantitative"
    own_colour = {} if "color" in encoding else {"color": SERIES_COLOURS[0]}
    return {
        "data": {"values": list(rows)},
        "mark": {"type": "bar", "height" if lying else "width": {"band": BAR_WIDTH}, **own_colour},
        "encoding": {"x": x, "y": y, "tooltip": list(tooltip), **encoding},
    }


def tip(field: str, form: str = "", title: str | None = None) -> Spec:
    """A line of the tooltip: a number where a format is given, else text."""
    number = {"type": "quantitative", "format": form} if form else {}
    return {"field": field, **({"title": title} if title else {}), **number}


def ruled(x: Spec, y: Spec | None, rows: Sequence[Row]) -> Spec:
    """A dashed line to compare with: through the rows, or over the whole height where there is no y."""
    mark = {"strokeDash": [4, 4], "color": MUTED, "strokeWidth": 1}
    return {
        "data": {"values": list(rows)},
        "mark": {"type": "line" if y else "rule", **mark},
        "encoding": {"x": x, **({"y": y} if y else {})},
    }
