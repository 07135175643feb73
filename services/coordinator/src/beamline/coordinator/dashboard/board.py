"""The board: all that a page shows of a run, and what changed of it between two moments."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from beamline.coordinator.dashboard import panels
from beamline.coordinator.dashboard.charts import line_charts
from beamline.coordinator.dashboard.gantt import gantt_chart
from beamline.coordinator.dashboard.run_files import RunFiles
from beamline.coordinator.observe.view import RunView
from beamline.coordinator.report.vega import Chart, Row

type Change = dict[str, Any]
"""`panels`: the new ones by name, None for one that is gone. `rows`: by chart, `keep` of the old and then these."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """Panels by name, and the rows of each panel that is a chart."""

    panels: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])


EMPTY = Board()


def draw(files: RunFiles, view: RunView | None, notes: Sequence[str], news: set[str], before: Board) -> Board:
    """The board of this moment.

    Args:
        view: what the run's bus tells; None where the run is over.
        notes: sentences to show beside what the folder lacks.
        news: parts of the folder that `files.poll` found new.
        before: the board that was drawn last; what cannot have changed is taken from it.
    """
    summary = files.summary()
    lists = {
        "header": panels.header(summary, view, files.num_steps),
        "figures": panels.figures(summary),
        "ledger": panels.ledger(summary, view),
        "workers": panels.workers(summary, view),
        "gauges": panels.gauges(view),
        "evaluations": panels.evaluations(summary),
        "troubles": panels.troubles(files.errors, view.failures if view else ()),
        "sampled": before.panels.get("sampled"),
        "notes": [*notes, *files.missing()],
    }
    if lists["sampled"] is None or "samples" in news:
        lists["sampled"] = files.sampled_steps()
    charts = {name: panel for name, panel in before.panels.items() if name.startswith(CHART)}
    rows = dict(before.rows)
    if not charts or news & {"metrics", "summary", "life"}:
        timeline = charts.get(CHART + "gantt")
        charts = {CHART + "gantt": timeline} if timeline else {}
        rows = {"gantt": rows["gantt"]} if "gantt" in rows else {}
        for section, chart in line_charts(summary):
            _place(chart, section, charts, rows)
    if "spans" in news and (chart := gantt_chart(files.spans.traces())) is not None:
        _place(chart, "timeline", charts, rows)
    return Board(panels={**lists, **charts}, rows=rows)


def change(old: Board, new: Board) -> Change:
    """What makes the new board of the old one; empty when they are alike."""
    changed = {name: panel for name, panel in new.panels.items() if name not in old.panels or old.panels[name] != panel}
    gone = dict.fromkeys(old.panels.keys() - new.panels.keys())
    rows = {}
    for key, found in new.rows.items():
        known = old.rows.get(key, [])
        if known != found:
            keep = _num_alike(known, found)
            rows[key] = {"keep": keep, "rows": found[keep:]}
    return {name: part for name, part in (("panels", changed | gone), ("rows", rows)) if part}


CHART = "chart/"
"""Begins the name of a panel that is a chart, its key follows."""


def _place(chart: Chart, section: str, charts: dict[str, Any], rows: dict[str, list[Row]]) -> None:
    spec = {**chart.spec, "data": {"name": "rows"}}
    charts[CHART + chart.key] = {
        "section": section,
        "place": len(charts),
        "title": chart.title,
        "caption": chart.caption,
        "spec": spec,
    }
    rows[chart.key] = chart.spec["data"]["values"]


def _num_alike(old: list[Row], new: list[Row]) -> int:
    """Rows at the beginning of both."""
    alike = 0
    for before, after in zip(old, new, strict=False):
        if before != after:
            break
        alike += 1
    return alike
