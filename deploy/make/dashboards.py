"""Grafana's dashboards as its own typed models: the run's numbers from Prometheus, its steps from Tempo or Jaeger."""

from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, table, tempo, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import tempo as tempo_models
from panels import SECTIONS, Panel, row

from beamline.protocol.metric_schema import prometheus_name

PROMETHEUS = models.DataSourceRef(type_val="prometheus", uid="prometheus")
TEMPO = models.DataSourceRef(type_val="tempo", uid="tempo")
JAEGER = models.DataSourceRef(type_val="jaeger", uid="jaeger")
HEIGHT, WIDTH = 8, 8
STEPS = '{ resource.service.name = "beamline-coordinator" && name = "step" && resource.beamline.run =~ "$run" }'
"""In TraceQL: the root of each step's trace."""


class JaegerQuery(Builder[Any]):
    """A search in Jaeger, for which there is no model."""

    def build(self) -> Any:
        return {
            "refId": "A",
            "queryType": "search",
            "service": "beamline-coordinator",
            "operation": "step",
            "tags": 'beamline.run="$run"',
            "limit": 100,
            "datasource": JAEGER.to_json(),
        }


def dashboards() -> dict[str, str]:
    """The dashboards' JSON by file name."""
    built = {"run": run_dashboard(), "steps-tempo": tempo_dashboard(), "steps-jaeger": jaeger_dashboard()}
    return {
        f"{name}.json": JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(builder.build()) + "\n"
        for name, builder in built.items()
    }


def run_dashboard() -> dashboard.Dashboard:
    """All that the run measures, section by section."""
    page = _page("Beamline: run", "beamline-run").refresh("10s").timezone("browser")
    for section in SECTIONS:
        page.with_row(dashboard.Row(section.title))
        for panel in section.panels:
            page.with_panel(_chart(panel))
    return page


def tempo_dashboard() -> dashboard.Dashboard:
    """The steps' traces in Tempo, the slowest ones to be opened."""
    query = (
        tempo.TempoQuery()
        .query_type("traceql")
        .query(STEPS)
        .limit(100)
        .table_type(tempo_models.SearchTableType.TRACES)
        .ref_id("A")
        .datasource(TEMPO)
    )
    return _page("Beamline: steps (Tempo)", "beamline-steps-tempo").with_panel(_steps(TEMPO, query))


def jaeger_dashboard() -> dashboard.Dashboard:
    """The same in Jaeger."""
    return _page("Beamline: steps (Jaeger)", "beamline-steps-jaeger").with_panel(_steps(JAEGER, JaegerQuery()))


def _page(title: str, uid: str) -> dashboard.Dashboard:
    step = prometheus_name(row("progress/step"))
    run = (
        dashboard.QueryVariable("run")
        .label("Run")
        .datasource(PROMETHEUS)
        .query(f"label_values({step}, run)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .tags(["beamline"])
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(run)
        .link(dashboard.DashboardLink("Beamline").type(models.DashboardLinkType.DASHBOARDS).tags(["beamline"]))
    )


def _chart(panel: Panel) -> timeseries.Panel:
    chart = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(PROMETHEUS)
        .unit(panel.unit)
        .height(HEIGHT)
        .span(WIDTH)
        .line_width(1)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.stacked:
        chart.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL)).fill_opacity(30)
    if panel.logarithmic:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        chart.scale_distribution(scale)
    if panel.bound is not None:
        steps = [models.Threshold(value=None, color="transparent"), models.Threshold(value=panel.bound, color="red")]
        chart.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        chart.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.LINE))
    for number, (expression, legend) in enumerate(panel.queries()):
        ref = chr(ord("A") + number)
        chart.with_target(prometheus.Dataquery().expr(expression).legend_format(legend).range().ref_id(ref))
    return chart


def _steps(source: models.DataSourceRef, query: Builder[Any]) -> table.Panel:
    return (
        table.Panel()
        .title("Steps: one trace each, with all services; open one to see where its time went")
        .datasource(source)
        .height(20)
        .span(24)
        .with_target(query)
    )
