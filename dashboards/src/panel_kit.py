"""What every dashboard is made of: panels with a unit, a word on what bad looks like and a runbook; rows, variables, notes.

Owns how a panel is laid out and the conventions that tests check. Never names a metric. Colour red stands only where an alert
exists: its threshold is the panel's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
STAT_HEIGHT, PLOT_HEIGHT = 4, 7
SECONDS, RATIO, RATE, BYTES, COUNT, BYTES_RATE = "s", "percentunit", "ops", "bytes", "short", "Bps"
RED, GREEN = "red", "green"
REFRESH = "10s"


@dataclass(frozen=True)
class Panel:
    """One panel: ``queries`` are (expression, legend); ``above`` or ``below`` is where its alert begins."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str
    says: str
    bad: str
    runbook: str
    kind: str = "plot"
    width: int = 6
    stacked: bool = False
    bars: bool = False
    from_zero: bool = True
    exemplars: bool = False
    by_name: bool = False
    above: float | None = None
    below: float | None = None
    decimals: int | None = None


@dataclass(frozen=True)
class Note:
    """An annotation: a line wherever the expression has a value."""

    name: str
    expression: str
    text: str
    colour: str
    enabled: bool = True
    """Whether it is drawn before somebody ticks it."""


@dataclass(frozen=True)
class Board:
    """A dashboard before it is laid out; ``rows`` are (title, panels)."""

    uid: str
    title: str
    says: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    notes: tuple[Note, ...] = ()
    variables: tuple[tuple[str, str, bool], ...] = field(default=(("run", "label_values(rollbook_run_state, run)", False),))
    """(name, query, whether several may be chosen)."""
    since: str = "now-1h"


def build(board: Board) -> models.Dashboard:
    """Lay a board out as Grafana reads it."""
    made = (
        dashboard.Dashboard(board.title).uid(board.uid).description(board.says).tags(["rollbook"]).refresh(REFRESH)
        .time(board.since, "now").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR).editable()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )  # fmt: skip
    for name, query, is_many in board.variables:
        made = made.with_variable(_variable(name, query, is_many))
    made = made.with_variable(
        dashboard.TextBoxVariable("runbooks").label("Runbooks at").default_value("http://127.0.0.1:9090/user")
    ).link(dashboard.DashboardLink("Rollbook").type(models.DashboardLinkType.DASHBOARDS).tags(["rollbook"]).keep_time(True).include_vars(True))
    for note in board.notes:
        made = made.annotation(_annotation(note))
    number, y = 1, 0
    for title, panels in board.rows:
        made = made.with_row(dashboard.Row(title).id(number).grid_pos(_at(0, y, WIDTH, 1)))
        number, y, x = number + 1, y + 1, 0
        for panel in panels:
            height = _height(panel)
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            made = made.with_panel(_panel(panel, number).grid_pos(_at(x, y, panel.width, height)))
            number, x = number + 1, x + panel.width
        y += _height(panels[-1])
    return made.build()


def _height(panel: Panel) -> int:
    return STAT_HEIGHT if panel.kind == "stat" else PLOT_HEIGHT


def _at(x: int, y: int, width: int, height: int) -> models.GridPos:
    return models.GridPos(h=height, w=width, x=x, y=y)


def _variable(name: str, query: str, is_many: bool) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(name).label(name.capitalize()).datasource(DATASOURCE).query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.ALPHABETICAL_ASC)
    )  # fmt: skip
    return made.multi(True).include_all(True).all_value(".+") if is_many else made


def _annotation(note: Note) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery().name(note.name).datasource(DATASOURCE).enable(note.enabled).hide(False).icon_color(note.colour)
        .expr(note.expression).step("10s").title_format(note.name).text_format(note.text)
    )  # fmt: skip


def _panel(panel: Panel, number: int) -> Any:
    made: Any = {"plot": _plot, "stat": _stat, "heatmap": _heatmap}[panel.kind](panel)
    made = (
        made.id(number).title(panel.title).datasource(DATASOURCE)
        .description(f"{panel.says} Bad: {panel.bad} [Runbook]({_page(panel)})")
        .links([dashboard.DashboardLink("Runbook").type(models.DashboardLinkType.LINK).url(_page(panel)).target_blank(True)])
    )  # fmt: skip
    for letter, (expression, legend) in zip("ABCDEFGH", panel.queries, strict=False):
        query = prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend).datasource(DATASOURCE)
        # A name is of this moment: over a range, every state that there was would be told beside the newest.
        query = query.instant() if panel.by_name else query.range()
        if panel.kind == "heatmap":
            query = query.format(PromQueryFormat.HEATMAP)
        if panel.exemplars:
            query = query.exemplar(True)
        made = made.with_target(query)
    return made


def _page(panel: Panel) -> str:
    return f"${{runbooks}}/{panel.runbook}.md"


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    if panel.above is not None:
        steps = [models.Threshold(value=None, color=GREEN), models.Threshold(value=panel.above, color=RED)]
    elif panel.below is not None:
        steps = [models.Threshold(value=None, color=RED), models.Threshold(value=panel.below, color=GREEN)]
    else:
        steps = [models.Threshold(value=None, color="text" if panel.kind == "stat" else GREEN)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _plot(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel().unit(panel.unit).thresholds(_thresholds(panel)).line_width(1)
        .fill_opacity(70 if panel.bars else 25 if panel.stacked else 5)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST)
                .placement(common_models.LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
                 .sort(common_models.SortOrder.DESCENDING))
    )  # fmt: skip
    if panel.from_zero:
        made = made.min(0)
    if panel.unit == RATIO and panel.from_zero and not panel.stacked:
        made = made.axis_soft_max(1)
    if panel.stacked:
        made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if panel.bars:
        made = made.draw_style(common_models.GraphDrawStyle.BARS)
    if panel.above is not None or panel.below is not None:
        made = made.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    return made if panel.decimals is None else made.decimals(panel.decimals)


def _stat(panel: Panel) -> stat.Panel:
    made = (
        stat.Panel().unit(panel.unit).thresholds(_thresholds(panel)).graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )  # fmt: skip
    if panel.by_name:
        made = made.text_mode(common_models.BigValueTextMode.NAME).graph_mode(common_models.BigValueGraphMode.NONE)
    return made if panel.decimals is None else made.decimals(panel.decimals)


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel().unit(panel.unit).calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Spectral").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
    )  # fmt: skip
