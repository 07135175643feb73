"""The dashboard's charts: the report's, over as many steps as a page draws with ease."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from beamline.coordinator.report import charts
from beamline.coordinator.report.vega import Chart
from beamline.coordinator.summary import StepValues, Summary

MAX_POINTS = 400
"""Of a line."""
MAX_BARS = 40
"""Steps whose phases are shown, the newest ones."""


def line_charts(summary: Summary) -> Iterator[tuple[str, Chart]]:
    """Each chart that the run has values for, with the section that it stands in."""
    thin = replace(summary, steps=thinned(summary.steps, MAX_POINTS))
    last = replace(summary, steps=summary.steps[-MAX_BARS:])
    found = [
        ("learning", charts.accuracy_chart(thin)),
        *(("learning", charts.line_chart(thin, figure)) for figure in (charts.REWARD, charts.LENGTH)),
        ("soundness", charts.line_chart(thin, charts.MISMATCH_LOG)),
        *(("soundness", charts.line_chart(thin, figure)) for figure in (charts.ENTROPY, charts.GRAD_NORM)),
        ("time", charts.phases_chart(last)),
        ("time", charts.line_chart(thin, charts.THROUGHPUT)),
    ]
    return ((section, chart) for section, chart in found if chart is not None)


def thinned(steps: Sequence[StepValues], most: int) -> list[StepValues]:
    """Every n-th step and the newest, with n a power of two, so that what was shown stays where it is."""
    stride = 1
    while len(steps) > stride * most:
        stride *= 2
    kept = list(steps[::stride])
    return kept if not steps or kept[-1] is steps[-1] else [*kept, steps[-1]]
