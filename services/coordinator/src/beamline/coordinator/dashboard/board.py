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
from beamline.coordinator.summary import Summary

type Change = dict[str, Any]
"""`panels`: the new ones by name, None for one that is gone. `rows`: by chart, how to make the new ones of the old:
leave out the first `drop`, take `keep`, then add `rows`."""


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
    charts = _draw_charts(files, summary, news, before)
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
    if "samples" in news:
        lists["sampled"] = panels.sampled(files.sampled_steps())
    return Board(panels={**lists, **charts.panels}, rows=charts.rows)


def change(old: Board, new: Board) -> Change:
    """What makes the new board of the old one; empty when they are alike."""
    changed = {name: panel for name, panel in new.panels.items() if name not in old.panels or old.panels[name] != panel}
    gone = dict.fromkeys(old.panels.keys() - new.panels.keys())
    rows = {}
    for key, found in new.rows.items():
        known = old.rows.get(key, [])
        if known != found:
            drop = known.index(found[0]) if found and found[0] in known else 0
            keep = _num_alike(known[drop:], found)
            rows[key] = {"drop": drop, "keep": keep, "rows": found[keep:]}
    return {name: part for name, part in (("panels", changed | gone), ("rows", rows)) if part}


CHART = "chart/"
"""Begins the name of a panel that is a chart, its key follows."""
TIMELINE = "gantt"
CAPTIONS = "captions"
"""Of all charts, by key: they change where a chart does not."""


def _draw_charts(files: RunFiles, summary: Summary, news: set[str], before: Board) -> Board:
    """The panels and rows of the charts alone."""
    panels = {name: panel for name, panel in before.panels.items() if name.startswith(CHART)}
    panels[CAPTIONS] = dict(before.panels.get(CAPTIONS, {}))
    board = Board(panels=panels, rows=dict(before.rows))
    if before is EMPTY or news & {"metrics", "summary", "life"}:
        found = list(line_charts(summary))
        for key in board.rows.keys() - {chart.key for _, chart in found} - {TIMELINE}:
            del board.rows[key], board.panels[CHART + key], board.panels[CAPTIONS][key]
        for place, (section, chart) in enumerate(found):
            _place(chart, section, place, board)
    if "spans" in news and (chart := gantt_chart(files.spans.traces())) is not None:
        _place(chart, "timeline", 0, board)
    return board


def _place(chart: Chart, section: str, place: int, board: Board) -> None:
    board.panels[CHART + chart.key] = {
        "section": section,
        "place": place,
        "title": chart.title,
        "spec": {**chart.spec, "data": {"name": "rows"}},
    }
    board.panels[CAPTIONS][chart.key] = chart.caption
    board.rows[chart.key] = chart.spec["data"]["values"]


def _num_alike(old: list[Row], new: list[Row]) -> int:
    """Rows at the beginning of both."""
    alike = 0
    for before, after in zip(old, new, strict=False):
        if before != after:
            break
        alike += 1
    return alike
