"""Summary and completions to one HTML page.

The page carries Vega-Lite's scripts and its own data, and its content security policy forbids every request.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from beamline.coordinator.eval_dumps import dump_path, read_completions
from beamline.coordinator.report import charts, content
from beamline.coordinator.report.chart_library import chart_library
from beamline.coordinator.report.vega import Chart
from beamline.coordinator.summary import Artifacts, Summary, read_summary, write_atomically

if TYPE_CHECKING:
    import jinja2

ASSETS = Path(__file__).parent / "assets"


def write_report(run_dir: Path) -> Path:
    """Make `report.html` of a run's folder from its summary and evaluation dumps, and return its path.

    Raises:
        ConfigError: there is no summary, or a dump is damaged.
    """
    summary = read_summary(run_dir / "summary.json")
    page = render(summary, _read_dumps(run_dir / "evals", summary))
    path = run_dir / "report.html"
    write_atomically(path, page.encode())
    return path


def render(summary: Summary, dumps: content.Dumps) -> str:
    """The page. Pure: the same input gives the same text."""
    sections = _sections(summary)
    drawn = [chart for _, _, found in sections for chart in found]
    return (
        environment(ASSETS)
        .get_template("page.html.j2")
        .render(
            summary=summary,
            tiles=content.tiles(summary),
            sections=sections,
            ledger_ends=content.ledger_ends(summary.ledger),
            evaluations=content.evaluation_table(summary),
            steps=content.step_table(summary),
            examples=content.examples(summary, dumps),
            settings=_flatten(summary.config),
            libraries=_library_table(summary.versions),
            artifacts=_links(summary.artifacts),
            duration=content.duration(summary.duration_s),
            style=(ASSETS / "page.css").read_text(),
            script=script(),
            chart_library=chart_library() if drawn else "",
            specs=script_json({chart.key: chart.spec for chart in drawn}),
        )
    )


def environment(*folders: Path) -> "jinja2.Environment":
    """Templates of these folders, with all text escaped and unknown names refused."""
    import jinja2  # here, since only the end of a run needs it

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def script() -> str:
    """What draws a page's own charts, which stand in its element `specs`."""
    return "".join((ASSETS / name).read_text() for name in ("draw.js", "page.js"))


def _sections(summary: Summary) -> list[tuple[str, str, list[Chart]]]:
    """Key, title and charts of each section that has any."""
    sections = [
        (
            "learning",
            "Does it learn?",
            [charts.accuracy_chart(summary), *_lines(summary, charts.REWARD, charts.LENGTH)],
        ),
        ("soundness", "Is it sound?", _lines(summary, charts.MISMATCH, charts.ENTROPY, charts.GRAD_NORM)),
        ("time", "Where does the time go?", [charts.phases_chart(summary), *_lines(summary, charts.THROUGHPUT)]),
    ]
    kept = [(key, title, [chart for chart in found if chart is not None]) for key, title, found in sections]
    return [section for section in kept if section[2]]


def _lines(summary: Summary, *figures: charts.Figure) -> list[Chart | None]:
    return [charts.line_chart(summary, figure) for figure in figures]


def _read_dumps(evals_dir: Path, summary: Summary) -> content.Dumps:
    paths = {(e.step, e.name): dump_path(evals_dir, e.step, e.name) for e in summary.evaluations}
    return {key: read_completions(path) for key, path in paths.items() if path.exists()}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys, as in an override, and values as JSON."""
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            rows += _flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", json.dumps(value, ensure_ascii=False)))
    return rows


def _library_table(versions: Mapping[str, Mapping[str, str]]) -> content.Table:
    """One row a library, one column a service."""
    names = sorted({name for libraries in versions.values() for name in libraries}, key=str.lower)
    rows = [[name, *(libraries.get(name, "") for libraries in versions.values())] for name in names]
    return content.Table(header=["library", *versions], rows=rows)


def _links(artifacts: Artifacts) -> list[tuple[str, str, str]]:
    """Name, path, and a link that is relative to the page; empty for what lies outside the run's folder."""
    folder = PurePath(artifacts.report).parent
    found: list[tuple[str, str, str]] = []
    for name in ("metrics", "evals", "logs", "traces", "checkpoint", "export"):
        path = getattr(artifacts, name)
        inside = bool(path) and PurePath(path).is_relative_to(folder)
        found.append((name, path, PurePath(path).relative_to(folder).as_posix() if inside else ""))
    return found


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
