"""Puts the page on a scheduler's dashboard, beside Dask's own."""

from __future__ import annotations

from typing import Any, Final

from bokeh.document import Document
from bokeh.server.server import BokehTornado
from distributed import Scheduler
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env, individual_doc
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from distributed.http.scheduler.info import IndividualPlots
from distributed.utils import log_errors
from jinja2 import ChoiceLoader, PackageLoader
from tornado.ioloop import IOLoop

from dask_gpuipc.dashboard.components import (
    Causes,
    Headline,
    HeldByWorker,
    PairMatrix,
    RungsOverTime,
)
from dask_gpuipc.errors import GPUIPCError

PAGE: Final = "gpuipc"
INTERVAL: Final = 500
"""Milliseconds between two updates, as on Dask's own pages."""
PLOTS: Final = {
    "individual-gpuipc-pairs": ("GPUIPC Pairs of Workers", PairMatrix),
    "individual-gpuipc-rungs": ("GPUIPC Rungs over Time", RungsOverTime),
    "individual-gpuipc-held": ("GPUIPC Pinned and Mapped", HeldByWorker),
    "individual-gpuipc-causes": ("GPUIPC Refused and Failed", Causes),
}
"""Each part alone, as dask-labextension lays them out: route, and name in the menu."""


@log_errors
def page_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """Make the whole page for one visitor."""
    parts = (
        Headline(scheduler, sizing_mode="stretch_both"),
        PairMatrix(scheduler, sizing_mode="stretch_both"),
        RungsOverTime(scheduler, sizing_mode="stretch_both"),
        HeldByWorker(scheduler, sizing_mode="stretch_both"),
        Causes(scheduler, sizing_mode="stretch_both"),
    )
    for part in parts:
        part.update()
        add_periodic_callback(doc, part, INTERVAL)
        doc.add_root(part.root)
    doc.title = "Dask: Chunks by Handle"
    doc.template = _template()
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


def _template() -> Any:
    """Ours, which stands on Dask's."""
    loaders: list[Any] = [PackageLoader("dask_gpuipc.dashboard"), env.loader]
    return env.overlay(loader=ChoiceLoader(loaders)).get_template("gpuipc.html")


APPLICATIONS: Final = {
    f"/{PAGE}": page_doc,
    **{f"/{url}": individual_doc(cls, INTERVAL) for url, (_, cls) in PLOTS.items()},
}


class AllPlots(IndividualPlots):
    """Dask's list of its plots, with those of this page; dask-labextension reads it."""

    def write(self, chunk: Any) -> None:
        """Write Dask's answer, with ours in it."""
        if isinstance(chunk, dict):
            ours = {f"Individual {name}": f"/{url}" for url, (name, _) in PLOTS.items()}
            chunk = {**chunk, **ours}
        super().write(chunk)


def add_page(scheduler: Scheduler) -> None:
    """Serve the page, and name it in Dask's menus. To no effect where it is already.

    Raises
    ------
    GPUIPCError
        The scheduler has no dashboard.
    """
    dask_app = next(iter(_bokeh_apps(scheduler)), None)
    if dask_app is None:
        raise GPUIPCError("the scheduler was started without its dashboard")
    if any(f"/{PAGE}" in app.app_paths for app in _bokeh_apps(scheduler)):
        return
    variables = template_variables(scheduler)
    app = BokehApplication(
        APPLICATIONS, scheduler, prefix=dask_app.prefix, template_variables=variables
    )
    # Dask's own pages read these lists whenever they are opened.
    pages, plots = variables["pages"], variables["plots"]
    pages.insert(pages.index("profile") if "profile" in pages else len(pages), PAGE)
    plots.extend({"url": url, "name": name} for url, (name, _) in PLOTS.items())
    plots.sort(key=lambda plot: plot["name"])
    scheduler.http_application.add_application(app)
    app.initialize(IOLoop.current())
    app.start()
    # Routes that are added later are looked at first.
    route = f"{dask_app.prefix}/individual-plots.json"
    scheduler.http_application.add_handlers(r".*", [(route, AllPlots, {"dask_server": scheduler})])


def _bokeh_apps(scheduler: Scheduler) -> list[BokehTornado]:
    apps = scheduler.http_application.applications
    return [app for app in apps if isinstance(app, BokehTornado)]
