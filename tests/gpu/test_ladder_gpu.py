"""The ladder between workers on one GPU: every allocator, IPC switched off, large chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from allocators import HANDLE, KINDS, unavailable, using
from cluster_fixtures import (
    addresses,
    arrays,
    check_nothing_left,
    client,
    cluster,
    move,
    refused,
)
from distributed import Client, Worker
from test_cluster_gpu import describe_gpu, from_gpu, layout_gpu, make_gpu, same_gpu

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

__all__ = ["client", "cluster"]
pytestmark = pytest.mark.gpu
N = 1 << 20


def configure(**settings: Any) -> None:
    dask.config.set(settings)


@pytest.fixture
def configured(client: Client) -> Iterator[Any]:
    """Registers the plugin with settings of ``gpuipc.cuda``, on workers as named; then undone."""

    def register(
        workers: list[str] | None = None, transfer: str | None = None, **settings: Any
    ) -> None:
        client.run(configure, workers=workers, **keys(settings))
        client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))

    def keys(settings: dict[str, Any]) -> dict[str, Any]:
        return {f"gpuipc.cuda.{name.replace('_', '-')}": v for name, v in settings.items()}

    yield register
    client.run(configure, **keys({"ipc": True, "peer_access": True, "host_limit": 0.25}))
    check_nothing_left(client)


def make_with(allocator: str, n: int, seed: int) -> Any:
    with using(allocator):
        return make_gpu(n, seed)


@pytest.mark.parametrize("transfer", ["auto", "share"])
@pytest.mark.parametrize("allocator", KINDS)
def test_every_allocator(client: Client, configured: Any, allocator: str, transfer: str) -> None:
    a, b, _ = addresses(client)
    reason = client.submit(unavailable, allocator, workers=[a], pure=False).result()
    if reason is not None:
        pytest.skip(reason)
    configured(transfer=transfer)
    handle = "share" if transfer == "share" else "copy"
    rung = handle if KINDS[allocator] is HANDLE else "stage"
    for seed in range(3):
        source = client.submit(make_with, allocator, N, seed, workers=[a], pure=False)
        assert move(client, source, b, same_gpu, N, seed).result()
        assert client.submit(same_gpu, source, N, seed, workers=[a], pure=False).result()
    stats = dask_gpuipc.statistics(client)
    assert stats[a]["sent"] == {rung: {"arrays": 3, "bytes": 3 * 8 * N}}
    assert stats[b]["received"] == stats[a]["sent"]
    assert not stats[a]["refused"]
    del source


@pytest.mark.parametrize("where", ["both", "producer", "consumer"])
def test_without_ipc_chunks_go_by_the_host(client: Client, configured: Any, where: str) -> None:
    a, b, _ = addresses(client)
    off = {"both": None, "producer": [a], "consumer": [b]}[where]
    configured(workers=off, ipc=False)
    for seed in range(10):
        source = client.submit(make_gpu, N, seed, workers=[a], pure=False)
        assert move(client, source, b, same_gpu, N, seed).result()
    stats = dask_gpuipc.statistics(client)
    assert stats[a]["sent"] == {"host": {"arrays": 10, "bytes": 80 * N}}
    assert stats[b]["received"] == stats[a]["sent"]
    assert stats[b]["mappings"] == 1
    del source


@pytest.mark.parametrize("name", ["C", "F", "strided", "negative", "row", "list", "dict in tuple"])
def test_objects_by_the_host_are_as_plain_dask_delivers_them(
    client: Client, configured: Any, name: str
) -> None:
    a, b, _ = addresses(client)
    source = client.submit(layout_gpu, name, workers=[a], pure=False)
    plain = move(client, source, b, describe_gpu).result()
    other = client.submit(layout_gpu, name, workers=[a], pure=False)
    configured(ipc=False)
    assert move(client, other, b, describe_gpu).result() == plain
    assert arrays(client, "sent", "host") >= 1
    assert arrays(client, "sent", "bytes") == 0
    del source, other


def never_pause(dask_worker: Worker) -> None:
    manager = dask_worker.memory_manager
    manager.memory_pause_fraction = False
    manager.memory_spill_fraction = False


def test_a_large_chunk_by_the_host(client: Client, configured: Any) -> None:
    """Above Dask's limits of 64 MiB for a frame and of 2 GiB."""
    a, b, _ = addresses(client)
    client.run(never_pause)  # registered memory counts in the RSS, and the worker has 4 GB
    configured(ipc=False, host_limit="3 GiB")
    for n in ((100 << 20) // 8, (2100 << 20) // 8):
        source = client.submit(make_gpu, n, 5, workers=[a], pure=False)
        assert move(client, source, b, same_gpu, n, 5).result()
        del source
    assert arrays(client, "sent", "host") == 2


def test_beyond_the_limit_of_pinned_memory_chunks_go_as_bytes(
    client: Client, configured: Any
) -> None:
    a, b, _ = addresses(client)
    configured(ipc=False, host_limit="64 MiB")
    n = (100 << 20) // 8
    source = client.submit(make_gpu, n, 1, workers=[a], pure=False)
    assert move(client, source, b, same_gpu, n, 1).result()
    assert arrays(client, "sent", "bytes") == refused(client, "no_memory") == 1
    del source


def to_gpu_with(block: Any, allocator: str) -> Any:
    import cupy

    with using(allocator):
        return cupy.array(block)


@pytest.mark.parametrize(
    ("allocator", "settings"),
    [("cupy managed", {}), ("cupy async", {}), ("cupy pool", {"ipc": False})],
)
def test_workflows_equal_numpy(
    client: Client, configured: Any, allocator: str, settings: dict[str, Any]
) -> None:
    configured(**settings)
    whole = np.random.default_rng(1).integers(0, 100, (1024, 1024)).astype("f8")
    with dask.config.set({"array.rechunk.method": "tasks"}):
        x = da.from_array(whole, chunks=256).map_blocks(to_gpu_with, allocator)
        for expression, want in (
            (x + x.T, whole + whole.T),
            (x @ x.T, whole @ whole.T),
            (x[::-2, 5:], whole[::-2, 5:]),
        ):
            got = client.compute(expression.map_blocks(from_gpu)).result()
            np.testing.assert_array_equal(got, want)
    assert arrays(client, "sent", "host" if settings else "stage") > 0
