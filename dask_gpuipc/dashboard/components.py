"""The parts of the page, each a component as the dashboard's own: `root` to show, `update` to call.

Each one stands alone too, so that it can be laid out with the rest of Dask's plots.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from bokeh.core.properties import without_property_validation
from bokeh.layouts import row
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DataRange1d,
    Div,
    FactorRange,
    HoverTool,
    HTMLTemplateFormatter,
    NumberFormatter,
    NumeralTickFormatter,
    OpenURL,
    Range1d,
    TapTool,
)
from bokeh.models.widgets import DataTable, TableColumn
from bokeh.plotting import figure
from dask.utils import format_bytes
from distributed import Scheduler
from distributed.dashboard.components import DashboardComponent
from distributed.dashboard.components.scheduler import TICKS_1024
from distributed.dashboard.utils import _DATATABLE_STYLESHEETS_KWARGS, update
from distributed.utils import log_errors, url_escape

from dask_gpuipc.dashboard import feed
from dask_gpuipc.reports.layout import Field, labels, matrix, ordered
from dask_gpuipc.reports.record import RUNGS, Cause, Pair, Report, WorkerRow, percent

COLOURS: Final = {
    "share": "#4BA645",
    "copy": "#4C8DD6",
    "stage": "#9A6FC4",
    "host": "#C9B037",
    "bytes": "#E8743B",
}
GRAY: Final = "#9D9D9D"
WINDOW: Final = 4.0
"""Seconds over which a rate is taken; heartbeats come a few times in it."""
KEPT: Final = 600
"""Points of the time series."""
LEAST: Final = 2**20
"""Bytes that an axis shows where there are none."""
CROWDED: Final = 24
"""Workers beyond which cells have no text."""


class Component(DashboardComponent):
    """A part of the page: `root` is what is shown, `update` is called by a timer of the page."""

    root: Any
    source: Any

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    @without_property_validation  # type: ignore[untyped-decorator]
    @log_errors
    def update(self, messages: Any = None) -> None:
        """Read the numbers again. Errors are logged, as in all of Dask's components."""
        self._update()

    def _update(self) -> None:
        raise NotImplementedError


class Headline(Component):
    """One line: is it on, what went by handle, is anything held."""

    def __init__(self, scheduler: Scheduler, **kwargs: Any) -> None:
        super().__init__(scheduler)
        self.root = Div(text="", name="gpuipc_headline", **kwargs)

    def _update(self) -> None:
        report = feed.report(self.scheduler)
        on = bool(report.workers) and all(worker.enabled for worker in report.workers)
        colour = COLOURS["share"] if on else COLOURS["bytes"]
        text = (
            f'<span style="color: {colour}; font-size: 18px;">&#9679;</span> '
            f'<span style="font-size: 16px;">{report.headline}</span>'
        )
        if text != self.root.text:
            self.root.text = text


class PairMatrix(Component):
    """Bytes between each two workers: from row to column, and how much of it by handle."""

    def __init__(self, scheduler: Scheduler, **kwargs: Any) -> None:
        super().__init__(scheduler)
        names = ("source", "target", "color", "alpha", "text", "text_color", "part", *RUNGS,
                 "from_address", "to_address")  # fmt: skip
        self.source = ColumnDataSource({name: [] for name in names})
        self.root = figure(
            title="Bytes between workers, from row to column",
            x_range=FactorRange(),
            y_range=FactorRange(),
            x_axis_location="above",
            tools="",
            toolbar_location=None,
            name="gpuipc_pairs",
            **kwargs,
        )
        at = {"x": "target", "y": "source", "source": self.source}
        self.root.rect(
            width=0.96, height=0.94, color="color", fill_alpha="alpha", line_alpha=0, **at
        )
        self.labels = self.root.text(
            text="text",
            text_color="text_color",
            text_align="center",
            text_baseline="middle",
            text_font_size="12px",
            **at,
        )
        self.root.grid.grid_line_color = None
        self.root.axis.axis_line_color = None
        self.root.axis.major_tick_line_color = None
        self.root.axis.major_label_text_font_size = "12px"
        self.root.xaxis.axis_label, self.root.yaxis.axis_label = "to", "from"
        self.root.add_tools(
            HoverTool(
                renderers=[self.root.renderers[0]],
                tooltips=[
                    ("from", "@from_address"),
                    ("to", "@to_address"),
                    ("by handle", "@part"),
                    *((rung, f"@{{{rung}}}{{0.00 b}}") for rung in RUNGS),
                ],
            )
        )

    def _update(self) -> None:
        report = feed.report(self.scheduler)
        workers = ordered(report)
        names = labels(workers)
        short = [names[worker.address] for worker in workers]
        if list(self.root.x_range.factors) != short:
            self.root.x_range.factors = short
            self.root.y_range.factors = short[::-1]
            crowded = len(short) > CROWDED
            self.labels.visible = not crowded
            self.root.axis.major_label_text_font_size = "8px" if crowded else "12px"
            # Addresses would run into each other.
            self.root.xaxis.major_label_orientation = (
                0.5 if max(map(len, short), default=0) > 6 or crowded else "horizontal"
            )
        update(self.source, _cells(report, workers, short))


def _cells(report: Report, workers: Sequence[WorkerRow], short: Sequence[str]) -> dict[str, Any]:
    sent = {(pair.source, pair.target): pair for pair in report.pairs}
    fields = matrix(report, workers, largest=None) or []
    most = max((field.moved or 0 for row in fields for field in row), default=0)
    rows = [
        {
            "source": short[i],
            "target": short[j],
            "from_address": workers[i].address,
            "to_address": workers[j].address,
            **_look(field, most),
            **_by_rung(sent.get((workers[i].address, workers[j].address))),
        }
        for i, row in enumerate(fields)
        for j, field in enumerate(row)
    ]
    columns = (*rows[0],) if rows else ()
    return {name: [row[name] for row in rows] for name in columns} or _nothing()


def _nothing() -> dict[str, Any]:
    names = ("source", "target", "color", "alpha", "text", "text_color", "part", *RUNGS,
             "from_address", "to_address")  # fmt: skip
    return {name: [] for name in names}


def _look(field: Field, most: int) -> dict[str, Any]:
    if not field.moved:
        alpha = 0.22 if field.moved is None else 0.07
        return {"color": GRAY, "alpha": alpha, "text": "", "text_color": GRAY, "part": "-"}
    part = field.fraction or 0.0
    text = format_bytes(field.moved)
    alpha = 0.15 + 0.75 * field.moved / most
    return {
        "color": COLOURS["share"] if part >= 0.5 else COLOURS["bytes"],
        "alpha": alpha,
        "text": text if part == 1 else f"{text}\n{percent(part)}",
        "text_color": "white" if alpha > 0.75 else "#222222",
        "part": percent(part),
    }


def _by_rung(pair: Pair | None) -> dict[str, int]:
    return {rung: pair.bytes(rung) if pair else 0 for rung in RUNGS}


class RungsOverTime(Component):
    """Bytes per second that workers send, by rung, stacked."""

    def __init__(self, scheduler: Scheduler, **kwargs: Any) -> None:
        super().__init__(scheduler)
        self._last: dict[str, Mapping[str, int]] = {}
        self._sum: Counter[str] = Counter()
        self._history: deque[tuple[float, Counter[str]]] = deque()
        self.source = ColumnDataSource({name: [] for name in ("time", *RUNGS)})
        self.root = figure(
            title="Sent by rung",
            x_axis_type="datetime",
            x_range=DataRange1d(follow="end", follow_interval=60_000, range_padding=0),
            y_range=DataRange1d(start=0, range_padding=0.1),
            tools="xpan, xwheel_zoom, reset",
            toolbar_location="right",
            name="gpuipc_rungs",
            **kwargs,
        )
        self.root.varea_stack(
            list(RUNGS),
            x="time",
            color=[COLOURS[rung] for rung in RUNGS],
            alpha=0.85,
            legend_label=list(RUNGS),
            source=self.source,
        )
        self.root.legend.location = "top_left"
        self.root.legend.orientation = "horizontal"
        self.root.legend.background_fill_alpha = 0.6
        self.root.legend.border_line_color = None
        self.root.yaxis[0].formatter = NumeralTickFormatter(format="0.0b")
        self.root.yaxis[0].ticker = BasicTicker(**TICKS_1024)
        self.root.yaxis.axis_label = "bytes / second"
        self.root.yaxis.minor_tick_line_alpha = 0
        self.root.xgrid.visible = False

    def _update(self) -> None:
        now = time.time()
        self._count()
        self._history.append((now, self._sum.copy()))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW:
            self._history.popleft()
        begin, before = self._history[0]
        elapsed = now - begin
        rates = {
            rung: [(self._sum[rung] - before[rung]) / elapsed if elapsed else 0.0] for rung in RUNGS
        }
        self.source.stream({"time": [1000 * now], **rates}, KEPT)
        going = sum(rate for (rate,) in rates.values())
        self.root.title.text = f"Sent by rung: {format_bytes(int(going))}/s"

    def _count(self) -> None:
        """Sum up what each worker sent since last time; one that restarted begins at zero."""
        sent: dict[str, Mapping[str, int]] = {
            address: {rung: traffic["bytes"] for rung, traffic in mine["sent"].items()}
            for address, mine in feed.numbers(self.scheduler).items()
        }
        for address, rungs in sent.items():
            before = self._last.get(address, rungs)
            for rung, nbytes in rungs.items():
                # A worker's first numbers are its past, unless the page saw it without them.
                self._sum[rung] += max(0, nbytes - before.get(rung, 0))
        self._last = sent


class HeldByWorker(Component):
    """Bytes that each worker keeps in place for others, and has mapped of others."""

    def __init__(self, scheduler: Scheduler, **kwargs: Any) -> None:
        super().__init__(scheduler)
        names = ("worker", "address", "escaped_worker", "pinned", "mapped", "leases", "holding",
                 "mappings", "state")  # fmt: skip
        self.source = ColumnDataSource({name: [] for name in names})
        self._workers = FactorRange()
        self.pinned = self._bars("pinned", COLOURS["copy"], "@pinned{0.00 b}, @leases leases")
        self.mapped = self._bars("mapped", COLOURS["stage"], "@mapped{0.00 b}, @mappings mappings")
        self.mapped.yaxis.visible = False  # the same as beside it
        self.root = row(self.pinned, self.mapped, name="gpuipc_held", spacing=24, **kwargs)

    def _bars(self, field: str, colour: str, text: str) -> Any:
        plot = figure(
            y_range=self._workers,
            x_range=Range1d(start=0, end=1),
            tools="",
            toolbar_location=None,
            sizing_mode="stretch_both",
            title=" ",
        )
        plot.hbar(
            y="worker", right=field, height=0.7, color=colour, line_color=None, source=self.source
        )
        plot.xaxis[0].formatter = NumeralTickFormatter(format="0.0 b")
        plot.xaxis[0].ticker = BasicTicker(**TICKS_1024, desired_num_ticks=4)
        plot.xaxis.minor_tick_line_alpha = 0
        plot.ygrid.visible = False
        plot.add_tools(
            TapTool(callback=OpenURL(url="./info/worker/@escaped_worker.html")),
            HoverTool(
                point_policy="follow_mouse",
                tooltips=[
                    ("worker", "@address"),
                    (field, text),
                    ("arrays of others", "@holding"),
                    ("state", "@state"),
                ],
            ),
        )
        return plot

    def _update(self) -> None:
        workers = ordered(feed.report(self.scheduler))
        names = labels(workers)
        short = [names[worker.address] for worker in workers]
        if list(self._workers.factors) != short[::-1]:
            self._workers.factors = short[::-1]
        columns: dict[str, list[Any]] = {
            "worker": short,
            "address": [w.address for w in workers],
            "escaped_worker": [url_escape(w.address) for w in workers],
            "pinned": [w.pinned_bytes for w in workers],
            "mapped": [w.mapped_bytes for w in workers],
            "leases": [w.leases for w in workers],
            "holding": [w.holding for w in workers],
            "mappings": [w.mappings for w in workers],
            "state": [w.state for w in workers],
        }
        for plot, title, values in (
            (self.pinned, "Pinned for others", columns["pinned"]),
            (self.mapped, "Mapped of others", columns["mapped"]),
        ):
            plot.title.text = f"{title}: {format_bytes(sum(values))}"
            plot.x_range.end = 1.05 * max(values, default=0) or LEAST
        update(self.source, columns)


class Causes(Component):
    """Why something went as bytes, or did not open, and what to do about it."""

    COLUMNS: ClassVar = (
        ("kind", "Kind", 70),
        ("reason", "Reason", 140),
        ("times", "Times", 70),
        ("workers", "Workers", 70),
        ("meaning", "Meaning", 420),
        ("remedy", "What to do", 420),
    )

    def __init__(self, scheduler: Scheduler, width: int = 1000, **kwargs: Any) -> None:
        super().__init__(scheduler)
        self.source = ColumnDataSource({field: [] for field, *_ in self.COLUMNS})
        text = HTMLTemplateFormatter(template='<span title="<%- value %>"><%- value %></span>')
        number = NumberFormatter(format="0,0")
        columns = [
            TableColumn(
                field=field,
                title=title,
                width=wide,
                formatter=number if field in ("times", "workers") else text,
            )
            for field, title, wide in self.COLUMNS
        ]
        self.root = DataTable(
            source=self.source,
            columns=columns,
            width=width,
            sortable=True,
            reorderable=True,
            selectable=True,
            index_position=None,
            name="gpuipc_causes",
            **_DATATABLE_STYLESHEETS_KWARGS,
            **kwargs,
        )

    def _update(self) -> None:
        report = feed.report(self.scheduler)
        rows = [
            *(_cause("refused", cause) for cause in report.refused),
            *(_cause("failed", cause) for cause in report.failed),
        ]
        update(
            self.source,
            {field: [row[i] for row in rows] for i, (field, *_) in enumerate(self.COLUMNS)},
        )


def _cause(kind: str, cause: Cause) -> tuple[Any, ...]:
    explanation = cause.explanation
    return (
        kind,
        cause.reason,
        cause.count,
        cause.workers,
        explanation.meaning.replace("`", ""),
        explanation.remedy.replace("`", ""),
    )
