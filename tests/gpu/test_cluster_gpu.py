"""CuPy chunks between worker processes on one GPU, as users run them."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import (
    addresses,
    arrays,
    check_nothing_left,
    client,
    cluster,
    move,
    shared,
)
from distributed import Client, LocalCluster

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

__all__ = ["client", "cluster", "shared"]
pytestmark = pytest.mark.gpu
N = 1 << 20


def make_gpu(n: int = N, seed: int = 0) -> Any:
    import cupy

    return cupy.arange(n, dtype="i8") * 7 + seed


def same_gpu(x: Any, n: int, seed: int) -> bool:
    import cupy

    return isinstance(x, cupy.ndarray) and bool((x == make_gpu(n, seed)).all())


def layout_gpu(name: str) -> Any:
    import cupy

    base = cupy.arange(N, dtype="f8").reshape(1024, -1)
    return {
        "C": base,
        "F": cupy.asfortranarray(base),
        "strided": base[::2, 1::3],
        "negative": base[::-1, ::-2],
        "row": base[5],
        "list": [base, base[::2], 3],
        "dict in tuple": ({"a": base}, cupy.asfortranarray(base)),
    }[name]


def describe_gpu(x: Any) -> Any:
    """All that tells it from another; small, since the client asks for it as bytes."""
    import cupy

    if isinstance(x, cupy.ndarray):
        flags = (x.flags.c_contiguous, x.flags.f_contiguous)
        return ("cupy", str(x.dtype), x.shape, flags, sha256(x.get().tobytes()).digest())
    if isinstance(x, dict):
        return {k: describe_gpu(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [describe_gpu(v) for v in x]
    return x


@pytest.mark.parametrize("name", ["C", "F", "strided", "negative", "row", "list", "dict in tuple"])
def test_received_objects_are_as_plain_dask_delivers_them(shared: Client, name: str) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(layout_gpu, name, workers=[a], pure=False)
    ours = move(shared, source, b, describe_gpu).result()
    assert arrays(shared, "sent", "copy") >= 1
    shared.unregister_worker_plugin("gpuipc")
    another = shared.submit(layout_gpu, name, workers=[a], pure=False)  # b has a copy of the first
    assert ours == move(shared, another, b, describe_gpu).result()


def overwrite_gpu(x: Any) -> bool:
    x[:] = -1
    return bool((x == -1).all())


@pytest.mark.parametrize(("transfer", "rung"), [("auto", "copy"), ("share", "share")])
def test_writing_into_an_input(client: Client, transfer: str, rung: str) -> None:
    """``copy`` is private to the receiver; ``share`` is an alias of the source, as documented."""
    client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
    a, b, _ = addresses(client)
    source = client.submit(make_gpu, workers=[a], pure=False)
    assert move(client, source, b, same_gpu, N, 0).result()
    assert move(client, source, b, overwrite_gpu).result()
    assert arrays(client, "sent", rung) >= 1
    assert move(client, source, a, same_gpu, N, 0).result() == (rung == "copy")
    del source
    check_nothing_left(client)


@pytest.mark.parametrize("transfer", ["copy", "share"])
def test_workflows_equal_numpy(client: Client, transfer: str) -> None:
    client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
    whole = np.random.default_rng(1).integers(0, 100, (1024, 1024)).astype("f8")
    with dask.config.set({"array.rechunk.method": "tasks"}):
        x = da.from_array(whole, chunks=256).map_blocks(to_gpu)
        for expression, want in (
            (x + x.T, whole + whole.T),
            (x @ x.T, whole @ whole.T),
            (x.rechunk((1024, 64)).cumsum(axis=0), whole.cumsum(axis=0)),
            (x[::-2, 5:], whole[::-2, 5:]),
        ):
            got = client.compute(expression.map_blocks(from_gpu)).result()
            np.testing.assert_array_equal(got, want)
    assert arrays(client, "sent", transfer) > 20
    check_nothing_left(client)


def to_gpu(block: Any) -> Any:
    import cupy

    return cupy.asarray(block)


def from_gpu(block: Any) -> Any:
    return block.get()


def test_many_transfers_with_churn(shared: Client) -> None:
    """The pool recycles what was released, and nothing recycled is ever read."""
    a, b, c = addresses(shared)
    kept = []
    for seed in range(60):
        source = shared.submit(make_gpu, N, seed, workers=[a], pure=False)
        got = move(shared, source, (b, c)[seed % 2])
        assert move(shared, got, (b, c)[seed % 2], same_gpu, N, seed).result()
        if seed % 10 == 0:
            kept.append((seed, got))
        del source, got
    for seed, future in kept:
        assert move(shared, future, c, same_gpu, N, seed).result()
    del kept, future


def use_rmm() -> None:
    """As an application does: `LocalCUDACluster` sets RMM's resource, and not CuPy's allocator."""
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    cupy.cuda.set_allocator(rmm_cupy_allocator)


@pytest.mark.parametrize("pool", [None, "1GB"], ids=["cupy's pool", "rmm's pool"])
def test_local_cuda_cluster(pool: str | None) -> None:
    dask_cuda = pytest.importorskip("dask_cuda")
    if pool is not None:
        pytest.importorskip("rmm")
    with (
        dask_cuda.LocalCUDACluster(
            dashboard_address=":0", silence_logs=40, rmm_pool_size=pool
        ) as cluster,
        Client(cluster) as client,
    ):
        if pool is not None:
            client.run(use_rmm)
        client.register_worker_plugin(GPUIPCPlugin())
        stats = dask_gpuipc.statistics(client)
        assert {s["state"] for s in stats.values()} == {"enabled"}
        assert all(s["memories"] == ["cuda", "host"] for s in stats.values())
        whole = np.random.default_rng(1).integers(0, 100, (1024, 1024)).astype("f8")
        x = da.from_array(whole, chunks=512).map_blocks(to_gpu)
        got = client.compute((x + x.T).map_blocks(from_gpu)).result()
        np.testing.assert_array_equal(got, whole + whole.T)
        check_nothing_left(client)


def test_over_ucx_it_stands_aside() -> None:
    """A reader of ucx takes no other family: all goes by UCX, and the reason is counted."""
    pytest.importorskip("distributed_ucxx")
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(**options, protocol="ucx", silence_logs=40) as cluster,
        Client(cluster) as client,
    ):
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        for seed in range(3):
            source = client.submit(make_gpu, N, seed, workers=[a], pure=False)
            assert move(client, source, b, same_gpu, N, seed).result()
        stats = dask_gpuipc.statistics(client)
        assert stats[a]["refused"].get("other_transport", 0) >= 3
        assert set(stats[a]["sent"]) == {"bytes"}
        assert not stats[b]["received"]
        del source
