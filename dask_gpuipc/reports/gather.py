"""The numbers of every worker, fetched by a client."""

from __future__ import annotations

import gc
from typing import Any

from distributed import Client, Worker

from dask_gpuipc.stats import Snapshot
from dask_gpuipc.worker_plugin import NAME, GPUIPCPlugin


def statistics(client: Client) -> dict[str, dict[str, Any]]:
    """What every worker's plugin did and holds, by worker address.

    Parameters
    ----------
    client : distributed.Client
        If it is asynchronous, the result must be awaited.

    Returns
    -------
    dict
        For each worker a dict of plain numbers:

        ``state``
            ``"enabled"``, or ``"disabled: "`` and the reason.
        ``memories``
            Kinds of memory that it shares: ``"cuda"``, ``"host"``.
        ``sent``, ``received``
            ``{rung: {"arrays": n, "bytes": n}}``, nominal bytes. ``sent["bytes"]`` are arrays of at
            least ``min-bytes`` that could not go by handle; smaller ones are in ``refused`` only.
        ``sent_to``
            ``{address: {rung: {"arrays": n, "bytes": n}}}``: ``sent``, by the worker that asked.
            ``""`` sums up who is no worker (a client), and workers of long ago beyond 256.
        ``timings``
            ``{memory: {"transfers": n, "bytes": n, "seconds": s}}``: answers in which chunks of
            that memory arrived by handle, their bytes, and the time from asking to having them.
        ``refused``
            ``{reason: n}``: why something went as bytes; see `dask_gpuipc.explain`.
        ``failed``
            ``{reason: n}``: why a handle that arrived could not be opened (it was asked for again).
        ``leases``, ``pinned_bytes``
            Claims of other workers on arrays of this one, and the bytes kept for them.
        ``holding``
            Claims of this worker on arrays of others.
        ``mappings``, ``mapped_bytes``
            Allocations of other workers that are open here, and their size.
        ``opens``, ``hits``
            How often one was opened, and how often it was found open.
    """
    result: dict[str, dict[str, Any]] = client.sync(_statistics, client)
    return result


async def _statistics(client: Client) -> dict[str, dict[str, Any]]:
    # by keyword: distributed passes the worker to this name
    return await client.run(worker_statistics)  # type: ignore[no-any-return]


def collect(client: Client) -> Any:
    """Have every worker free what can be freed now: idle mappings and free arena memory.

    Runs the garbage collector first, so that arrays in reference cycles release their leases. If
    the client is asynchronous, the result must be awaited.
    """
    return client.sync(_collect, client)


async def _collect(client: Client) -> None:
    await client.run(_worker_collect)


def _plugin(worker: Worker) -> GPUIPCPlugin | None:
    plugin = worker.plugins.get(NAME)
    return plugin if isinstance(plugin, GPUIPCPlugin) else None


async def worker_statistics(dask_worker: Worker) -> dict[str, Any]:
    """The numbers of one worker; runs there."""
    plugin = _plugin(dask_worker)
    if plugin is None:
        return Snapshot(state="disabled: not registered", memories=[]).to_dict()
    return plugin.snapshot().to_dict()


async def _worker_collect(dask_worker: Worker) -> None:
    gc.collect()
    plugin = _plugin(dask_worker)
    if plugin is not None and plugin.endpoint is not None:
        plugin.endpoint.collect()
