"""What must hold on every supported distributed: the line itself, and one workflow."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_gpuipc

OPTIONS = {
    "n_workers": 2,
    "threads_per_worker": 1,
    "dashboard_address": ":0",
    "memory_limit": "2GB",
}


@pytest.mark.parametrize("method", ["register_worker_plugin", "register_plugin"])
def test_the_line_itself_and_a_workflow(method: str) -> None:
    from dask_gpuipc import GPUIPCPlugin

    with LocalCluster(**OPTIONS) as cluster, Client(cluster) as client:
        getattr(client, method)(GPUIPCPlugin())
        whole = np.random.default_rng(0).integers(0, 100, (1024, 1024))
        x = da.from_array(whole, chunks=256)
        assert np.array_equal(client.compute(x + x.T).result(), whole + whole.T)
        stats = dask_gpuipc.statistics(client).values()
        assert {s["state"] for s in stats} == {"enabled"}
        assert sum(s["received"]["share"]["arrays"] for s in stats) > 0
        assert sum(s["sent"].get("bytes", {"arrays": 0})["arrays"] for s in stats) <= 16
