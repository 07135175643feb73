"""The diagnosis as one HTML page that needs nothing else: the run report's style, script and chart library."""

from pathlib import Path

import numpy as np

from beamline.coordinator.doctor.charts import charts
from beamline.coordinator.doctor.diagnosis import Diagnosis, Gap
from beamline.coordinator.report import page as report
from beamline.coordinator.report.chart_library import chart_library

ASSETS = Path(__file__).parent / "assets"


def render(diagnosis: Diagnosis, engine_L: np.ndarray, trainer_L: np.ndarray) -> str:
    """The page. Pure: the same input gives the same text.

    Args:
        engine_L: the engine's log-probabilities.
        trainer_L: the trainer's own.
    """
    drawn = charts(diagnosis, engine_L, trainer_L)
    template = report.environment(ASSETS).get_template("mismatch.html.j2")
    return template.render(
        diagnosis=diagnosis,
        charts=drawn,
        tiles=_tiles(diagnosis),
        readings=[(r.name, r.own, gap_cells(r.gap)) for r in diagnosis.readings],
        style=(report.ASSETS / "page.css").read_text(),
        script=report.script(),
        chart_library=chart_library(),
        specs=report.script_json({chart.key: chart.spec for chart in drawn}),
    )


def gap_cells(gap: Gap) -> list[str]:
    """The figures of a gap, in the order of GAP_COLUMNS."""
    return [
        f"{gap.mean_abs:.2e}",
        f"{gap.mean:+.1e}",
        f"{gap.p50_abs:.1e}",
        f"{gap.p99_abs:.1e}",
        f"{gap.max_abs:.1e}",
        f"{gap.share_over_tenth:.1%}",
    ]


GAP_COLUMNS = ("mean |l|", "signed", "p50", "p99", "max", "over 0.1")


def _tiles(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """Label, value and note of each headline figure."""
    version = f"policy {diagnosis.sampled_version}"
    if diagnosis.checkpoint_version >= 0:
        version += f", checkpoint of step {diagnosis.checkpoint_version}"
    return [
        ("mean gap", f"{diagnosis.gap.mean_abs:.2g}", "nats a token"),
        ("noise floor", f"{diagnosis.noise_floor:.2g}", f"of {diagnosis.dtype}"),
        ("largest gap", f"{diagnosis.gap.max_abs:.2g}", "of a single token"),
        ("tokens", f"{diagnosis.num_tokens:,}", f"of {diagnosis.num_trajectories} trajectories"),
        ("temperature", f"{diagnosis.temperature:g}", f"routing: {diagnosis.routing}"),
        ("sampled by", version.split(",")[0], version.partition(", ")[2]),
    ]
