"""Panels, variables and queries that the dashboards share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    table,
    tempo,
    timeseries,
)
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
)

TAG: Final = "outrider"
HERE: Final = (  # what is chosen at the top; the release is a label that the ServiceMonitor gives
    'namespace=~"$namespace",app_kubernetes_io_instance=~"$release",job=~"$job"'
)
MODEL: Final = f'{HERE},model_name=~"$model"'  # gateways and proposers have no model_name
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")


class Series(NamedTuple):
    """One query; `legend` in Grafana's syntax."""

    expr: str
    legend: str
    exemplars: bool = False  # shows the traces that the histogram's exemplars lead to


@dataclass(frozen=True)
class Graph:
    """A time series panel. `stack`: "normal", "percent" or none."""

    title: str
    description: str
    unit: str
    series: tuple[Series, ...]
    stack: str = ""
    width: int = 8  # of 24


@dataclass(frozen=True)
class Number:
    """A panel with the present value of one query."""

    title: str
    description: str
    unit: str
    expr: str


@dataclass(frozen=True)
class Traces:
    """A table of the latest traces of a service, from Tempo or Jaeger."""

    title: str
    description: str
    source: Literal["tempo", "jaeger"]
    service: str


Panel = Graph | Number | Traces


class _JaegerSearch(variants.Dataquery, Builder[variants.Dataquery]):
    """A query of Jaeger's data source, which the SDK lacks."""

    def __init__(self, service: str) -> None:
        self._service = service

    def build(self) -> variants.Dataquery:
        return self

    def to_json(self) -> dict[str, object]:
        return {"refId": "A", "queryType": "search", "service": self._service, "limit": 20}


def rate(counter: str, matchers: str = MODEL) -> str:
    """Return the rate of a counter over an interval that Grafana chooses."""
    return f"rate({counter}{{{matchers}}}[$__rate_interval])"


def total(counter: str, by: str = "", matchers: str = MODEL) -> str:
    """Return the sum of `rate` over all processes, grouped `by` labels."""
    return f"sum{f' by ({by})' if by else ''} ({rate(counter, matchers)})"


def mean(summary: str, by: str, matchers: str = MODEL) -> str:
    """Return the mean of what a summary or histogram observed, grouped `by` labels."""
    return f"{total(f'{summary}_sum', by, matchers)} / {total(f'{summary}_count', by, matchers)}"


def quantiles(
    histogram: str, matchers: str = MODEL, *, exemplars: bool = False
) -> tuple[Series, ...]:
    """Return the median, 95th and 99th percentile of a histogram over all processes."""
    buckets = total(f"{histogram}_bucket", "le", matchers)
    return tuple(
        Series(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}", exemplars)
        for q in (0.5, 0.95, 0.99)
    )


def build(
    uid: str, title: str, description: str, rows: dict[str, Sequence[Panel]]
) -> dashboard.Dashboard:
    """Build a dashboard with a row of panels under each heading."""
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Outrider")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(_choice("namespace", "Namespace", "outrider:build_info, namespace"))
        .with_variable(
            _choice(
                "release",
                "Release",
                'outrider:build_info{namespace=~"$namespace"}, app_kubernetes_io_instance',
            )
        )
        .with_variable(_choice("job", "Job", 'outrider:build_info{namespace=~"$namespace"}, job'))
        .with_variable(
            _choice("model", "Model", f"outrider:num_requests_running{{{HERE}}}, model_name")
        )
    )
    for source in sorted({p.source for ps in rows.values() for p in ps if isinstance(p, Traces)}):
        builder.with_variable(
            dashboard.DatasourceVariable(source).label(source.capitalize()).type(source)
        )
    for heading, panels in rows.items():
        builder.with_row(dashboard.Row(heading))
        for panel in panels:
            match panel:
                case Graph():
                    builder.with_panel(_graph(panel))
                case Number():
                    builder.with_panel(_number(panel))
                case Traces():
                    builder.with_panel(_traces(panel))
    return builder


def _traces(panel: Traces) -> table.Panel:
    """Build a table, whose rows open their trace."""
    source = DataSourceRef(type_val=panel.source, uid=f"${{{panel.source}}}")
    query: Builder[variants.Dataquery] = _JaegerSearch(panel.service)
    if panel.source == "tempo":
        traceql = f'{{resource.service.name="{panel.service}"}}'
        query = tempo.TempoQuery().query_type("traceql").query(traceql).limit(20).ref_id("A")
    return (
        table.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(source)
        .height(8)
        .span(12)
        .with_target(query)
    )


def _choice(name: str, label: str, values: str) -> dashboard.QueryVariable:
    """Build a variable that selects any values of a metric's label."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(f"label_values({values})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )


def _graph(panel: Graph) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .height(8)
        .span(panel.width)
        .fill_opacity(25 if panel.stack else 0)
        .show_points(models.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI))
    )
    if panel.stack:
        built.stacking(common.StackingConfig().mode(models.StackingMode(panel.stack)))
    for series in panel.series:
        query = prometheus.Dataquery().expr(series.expr).legend_format(series.legend)
        built.with_target(query.exemplar(True) if series.exemplars else query)
    return built


def _number(panel: Number) -> stat.Panel:
    return (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .decimals(2)
        .height(4)
        .span(6)
        .graph_mode(models.BigValueGraphMode.AREA)
        .with_target(prometheus.Dataquery().expr(panel.expr))
    )
