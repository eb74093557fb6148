"""`register`, for a client, and `dask_setup`, for ``--preload dask_gpuipc``: all there is."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from distributed import Client, Scheduler, Worker

from dask_gpuipc.dashboard.plugin import DashboardPage
from dask_gpuipc.errors import GPUIPCError
from dask_gpuipc.worker_plugin import NAME, GPUIPCPlugin

logger = logging.getLogger("distributed.gpuipc")


def register(client: Client, plugin: GPUIPCPlugin | None = None) -> Any:
    """Have all workers share chunks, and put a page about it on the scheduler's dashboard.

    The first half is ``client.register_plugin(plugin)``, for workers of now and later. The second
    half, `dask_gpuipc.dashboard.plugin.DashboardPage`, wants this package and bokeh where the
    scheduler runs; where one is missing there is a warning, and the workers share all the same.

    Parameters
    ----------
    client : distributed.Client
        If it is asynchronous, the result must be awaited.
    plugin : GPUIPCPlugin, optional
        With settings of its own.

    Returns
    -------
    str or None
        Link to the page, if it is there.
    """
    return client.sync(_register, client, plugin or GPUIPCPlugin())


async def _register(client: Client, plugin: GPUIPCPlugin) -> str | None:
    await client.register_plugin(plugin, name=NAME)
    try:
        await client.register_plugin(DashboardPage())
    # Whatever the scheduler could not do with it: what it lacks comes back as any exception.
    except Exception as error:  # noqa: BLE001
        warnings.warn(
            f"The dashboard has no page of dask-gpuipc: {error}. The workers share all the same.",
            stacklevel=2,
        )
        return None
    link = client.dashboard_link
    return link and f"{link.rpartition('/')[0]}/gpuipc"


async def dask_setup(server: Worker | Scheduler) -> None:
    """For ``dask worker --preload dask_gpuipc``; on a scheduler, for all workers, with the page."""
    if isinstance(server, Worker):
        await server.plugin_add(GPUIPCPlugin(), name=NAME)
        return
    from distributed.protocol.pickle import dumps

    await server.register_worker_plugin(
        comm=None, plugin=dumps(GPUIPCPlugin()), name=NAME, idempotent=False
    )
    try:
        await server.register_scheduler_plugin(DashboardPage(), idempotent=True)
    except GPUIPCError as error:
        logger.warning("The dashboard has no page of dask-gpuipc: %s", error)
