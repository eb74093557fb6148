"""The scheduler plugin that brings the page."""

from __future__ import annotations

from distributed import Scheduler, SchedulerPlugin

from dask_gpuipc.errors import GPUIPCError


class DashboardPage(SchedulerPlugin):
    """Puts the page ``/gpuipc`` on the dashboard of the scheduler that it is registered with.

    ``client.register_plugin(DashboardPage())``; `dask_gpuipc.register` does it beside the workers'
    plugin. The page stays until the scheduler ends. Registering again changes nothing.
    """

    name = "gpuipc-dashboard"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the page.

        Raises
        ------
        GPUIPCError
            The scheduler has no dashboard; the text says why.
        """
        try:
            from dask_gpuipc.dashboard.page import add_page
        except ImportError as error:
            raise GPUIPCError(
                f"the dashboard needs bokeh where the scheduler runs: {error}"
            ) from error
        add_page(scheduler)
