"""Ordinary dask.array work, with the plugin and on plain Dask: the same results.

Two clusters, alike but for the plugin, compute each workflow; what they get is compared exactly,
since the data are integers, or else to 1e-12. The workflows are those of this file on NumPy, and
with ``-m gpu`` on CuPy.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import arrays, check_nothing_left
from distributed import Client, LocalCluster, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

ROUNDING = 1e-12
SIDE, CHUNK = 512, 128
"""Of the matrices: 16 chunks of 128 KiB."""


@dataclass(frozen=True)
class Workplace:
    """An array library, and a client with and one without the plugin."""

    xp: Any
    ours: Client
    plain: Client
    memory: str

    def matrix(self, seed: int = 0, shape: Any = (SIDE, SIDE), chunks: Any = CHUNK) -> da.Array:
        """Small whole numbers, made on the workers."""
        return da.map_blocks(
            block_of,
            chunks=da.core.normalize_chunks(chunks, shape, dtype="f8"),
            dtype="f8",
            meta=self.xp.empty((0,) * len(shape)),
            library=self.xp.__name__,
            seed=seed,
        )


def block_of(library: str, seed: int, block_info: Any = None) -> Any:
    info = block_info[None]
    where = [seed, *info["chunk-location"]]
    numbers = np.random.default_rng(where).integers(-50, 50, info["chunk-shape"])
    return importlib.import_module(library).asarray(numbers.astype("f8"))


def to_numpy(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x


@contextlib.contextmanager
def cluster_of_two() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=40
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(
    scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)]
)  # fmt: skip
def place(request: pytest.FixtureRequest) -> Iterator[Workplace]:
    xp = np if request.param == "host" else pytest.importorskip("cupy")
    with contextlib.suppress(ImportError):
        importlib.import_module("zarr").array([0])  # starts a thread that lives on
    with cluster_of_two() as plain, cluster_of_two() as ours:
        ours.register_worker_plugin(GPUIPCPlugin(min_bytes=1 << 16))
        yield Workplace(xp, ours, plain, request.param)
        check_nothing_left(ours)


cluster = place
"""Outlives a test; see conftest."""

# -- the workflows --------------------------------------------------------------------------------

Workflow = Callable[[Workplace], Any]
WORKFLOWS: dict[str, tuple[Workflow, bool]] = {}
"""Function, and whether its results are whole numbers."""


def workflow(exact: bool = True) -> Callable[[Workflow], Workflow]:
    def note(function: Workflow) -> Workflow:
        WORKFLOWS[function.__name__] = function, exact
        return function

    return note


@workflow()
def elementwise(w: Workplace) -> Any:
    x, y = w.matrix(1), w.matrix(2)
    return da.where(x > y, x * 2 - y.T, abs(y) + x.T // 3)


@workflow()
def reductions(w: Workplace) -> Any:
    x = w.matrix(1).rechunk((64, SIDE), method="tasks")
    return [x.sum(axis=0), x.max(axis=1), x.min(), x.cumsum(axis=0), (x * x).sum(axis=0).sum()]


@workflow(exact=False)
def moments(w: Workplace) -> Any:
    x = w.matrix(1)
    return [x.mean(axis=0), x.std(axis=1), x.var()]


@workflow()
def arg_reductions(w: Workplace) -> Any:
    x = w.matrix(1) * SIDE + w.matrix(7).T
    return [x.argmax(axis=0), x.argmin(axis=1)]


@workflow()
def matrix_product(w: Workplace) -> Any:
    x = w.matrix(1)
    return x @ x.T


@workflow()
def tensordot(w: Workplace) -> Any:
    x = w.matrix(1, (64, 64, 64), 32)
    return da.tensordot(x, w.matrix(2, (64, 64, 16), (32, 32, 16)), axes=((0, 1), (1, 0)))


@workflow()
def einsum(w: Workplace) -> Any:
    return da.einsum("ij,kj->ik", w.matrix(1), w.matrix(2)) + w.matrix(3)


@workflow(exact=False)
def tall_qr(w: Workplace) -> Any:
    x = w.matrix(1, (2048, 32), (512, 32))
    q, r = da.linalg.qr(x)
    return [q @ r, abs(r)]


@workflow(exact=False)
def tall_svd(w: Workplace) -> Any:
    x = w.matrix(1, (2048, 32), (512, 32))
    u, s, v = da.linalg.svd(x)
    return [s, (u * s) @ v]


@workflow(exact=False)
def fft(w: Workplace) -> Any:
    x = w.matrix(1).rechunk((SIDE, 64), method="tasks")
    return da.fft.fft(x, axis=0)


def blur(block: Any) -> Any:
    return sum(np.roll(block, s, axis) for s in (-1, 1) for axis in (0, 1)) + block


@workflow()
def map_overlap(w: Workplace) -> Any:
    return w.matrix(1).map_overlap(blur, depth=1, boundary="periodic")


@workflow()
def stencil_twice(w: Workplace) -> Any:
    x = w.matrix(1).map_overlap(blur, depth=2, boundary="reflect")
    return x.map_overlap(blur, depth=1, boundary=0)


@workflow()
def sliding_windows(w: Workplace) -> Any:
    x = w.matrix(1)
    return da.lib.stride_tricks.sliding_window_view(x, 3, axis=0).sum(axis=-1)


@workflow()
def slicing(w: Workplace) -> Any:
    x = w.matrix(1)
    return [x[3:-5:2, ::-1], x[::-3, 100:400], x[7], x[:, None, 5:300:4], x[::-1].T + x.T]


@workflow()
def fancy_indexing(w: Workplace) -> Any:
    rows = np.random.default_rng(5).permutation(SIDE)
    return w.matrix(1)[rows][:, rows[:200]]


@workflow()
def boolean_mask(w: Workplace) -> Any:
    x = w.matrix(1)
    return [x[x.sum(axis=1) > 0].sum(axis=0), x[x > 10]]


@workflow()
def concatenate_and_stack(w: Workplace) -> Any:
    x, y = w.matrix(1), w.matrix(2)
    return [
        da.concatenate([x, y.T], axis=1) + 1,
        da.stack([x, y]).sum(axis=0),
        da.block([[x], [y]]),
    ]


@workflow()
def reshape(w: Workplace) -> Any:
    x = w.matrix(1)
    return [x.reshape(-1)[::5], x.reshape(SIDE // 4, 4, SIDE).sum(axis=1), da.ravel(x.T)]


@workflow()
def setitem(w: Workplace) -> Any:
    x = w.matrix(1).copy()
    x[10:300:3, 5:-5] = 7
    x[:, 100] = -x[:, 101]
    return x


@workflow()
def ufunc_out(w: Workplace) -> Any:
    x, y = w.matrix(1), w.matrix(2)
    out = da.zeros_like(x)
    da.add(x, y.T, out=out)
    return out


@workflow()
def histogram(w: Workplace) -> Any:
    counts, edges = da.histogram(w.matrix(1), bins=10, range=(-50, 50))
    return [counts, edges]


@workflow(exact=False)
def solve(w: Workplace) -> Any:
    x = w.matrix(1, (256, 256), 128) + 10_000 * da.eye(256, chunks=128)
    b = w.matrix(2, (256,), 128)
    return da.linalg.solve(x, b)


@workflow(exact=False)
def percentile(w: Workplace) -> Any:
    x = w.matrix(1, (1 << 17,), 1 << 14)
    return da.percentile(x, [10, 50, 90])


@workflow()
def rechunk_by_tasks(w: Workplace) -> Any:
    x = w.matrix(1)
    return x.rechunk((SIDE, 64), method="tasks").rechunk((64, SIDE), method="tasks") + 1


@workflow()
def rechunk_as_configured(w: Workplace) -> Any:
    return w.matrix(1).rechunk((SIDE, 32)) + 1


@workflow()
def transposes(w: Workplace) -> Any:
    x = w.matrix(1, (64, 64, 64), 32)
    return x.transpose(2, 0, 1) + da.moveaxis(x, 0, 1) + da.rot90(x)


@workflow()
def differences_and_rolls(w: Workplace) -> Any:
    x = w.matrix(1)
    return [da.diff(x, axis=0), da.roll(x, 77, axis=1) + x, da.flip(x, 0) - x]


@workflow()
def unique_and_sorted(w: Workplace) -> Any:
    return [da.unique(w.matrix(1)), da.topk(w.matrix(2), 5, axis=0)]


NOT_ON_CUPY = {
    "percentile": "dask.array.percentile has internal methods of NumPy",
    "solve": "dask.array.linalg.solve factorises with SciPy",
}


def compute(client: Client, expression: Any) -> list[Any]:
    """The values, in NumPy, with what each chunk was."""
    several = expression if isinstance(expression, list) else [expression]
    with client.as_current(), dask.config.set(scheduler=None):
        return [to_numpy(x) for x in client.gather(client.compute(several))]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_results_are_plain_dasks(place: Workplace, name: str) -> None:
    function, exact = WORKFLOWS[name]
    if place.memory == "cuda" and name in NOT_ON_CUPY:
        pytest.skip(NOT_ON_CUPY[name])
    plain = compute(place.plain, function(place))
    ours = compute(place.ours, function(place))
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if exact:
            np.testing.assert_array_equal(b, a)
        else:
            np.testing.assert_allclose(b, a, rtol=ROUNDING, atol=ROUNDING * abs(a).max())


def test_they_moved_chunks_by_handle(place: Workplace) -> None:
    """What the workflows above left in the counters."""
    by_handle = sum(arrays(place.ours, "sent", rung) for rung in ("share", "copy", "stage", "host"))
    assert by_handle > 150
    assert not sum(sum(s["failed"].values()) for s in dask_gpuipc.statistics(place.ours).values())


def test_store_and_zarr(place: Workplace, tmp_path: Any) -> None:
    zarr = pytest.importorskip("zarr")
    whole = to_numpy(compute(place.plain, place.matrix(1) + place.matrix(1).T)[0])
    target = zarr.open_array(
        str(tmp_path / "a"), mode="w", shape=whole.shape, chunks=(CHUNK, CHUNK), dtype="f8"
    )
    with place.ours.as_current():
        x = place.matrix(1)
        host = (x + x.T).map_blocks(to_numpy, dtype="f8", meta=np.empty((0, 0)))
        host.store(target, lock=False)
        host.to_zarr(str(tmp_path / "b"))
    np.testing.assert_array_equal(target[:], whole)
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "b"), mode="r")[:], whole)


def test_xarray_on_top(place: Workplace) -> None:
    xarray = pytest.importorskip("xarray")

    def climate(client: Client) -> list[Any]:
        data = place.matrix(1, (360, 128, 64), (90, 64, 64))
        x = xarray.DataArray(data, dims=("time", "y", "x"), coords={"time": np.arange(360) % 12})
        with client.as_current():
            means = x.groupby("time").sum()
            anomaly = (x.rolling(y=3).sum() - x.shift(y=1)).isel(y=slice(3, None)).sum("time")
            return compute(client, [means.data, anomaly.data, x.transpose("x", "time", "y").data])

    for ours, plain in zip(climate(place.ours), climate(place.plain), strict=True):
        np.testing.assert_array_equal(ours, plain)


# -- completeness ---------------------------------------------------------------------------------


def arrived(dask_worker: Any) -> dict[str, int]:
    """Sizes of all chunks that came from other workers, with a number for each time."""
    return {
        f"{number} {key}": nbytes
        for number, entry in enumerate(dask_worker.transfer_incoming_log)
        for key, nbytes in entry["keys"].items()
    }


def of_kind(number: int, library: str) -> Any:
    """Chunks of which some go by handle, some are refused, and some are too small to count."""
    xp = importlib.import_module(library)
    return [
        lambda: xp.arange(1 << 15) + number,
        lambda: np.array([number] * (1 << 14), dtype=object),
        lambda: xp.arange(100) + number,
        lambda: np.ma.masked_array(np.arange(1 << 15), mask=np.arange(1 << 15) % 3 == 0),
        lambda: bytes(1 << 17),
        lambda: [xp.ones(1 << 15)],
    ][number % 6]()


def test_refusals_are_complete(place: Workplace) -> None:
    """Each chunk at or above min-bytes is in one rung's count, and bytes have their reasons."""
    client, least = place.ours, 1 << 16
    a, b = sorted(client.scheduler_info()["workers"])
    client.unregister_worker_plugin("gpuipc")
    client.register_worker_plugin(GPUIPCPlugin(min_bytes=least))
    before = client.run(arrived)
    made = [
        client.submit(of_kind, i, place.xp.__name__, workers=[a], pure=False) for i in range(36)
    ]
    with client.as_current():
        wait(client.map(id, made, workers=[b], pure=False))
    after = client.run(arrived)
    came = [size for key, size in after[b].items() if key not in before[b] and size >= least]
    rungs = {
        rung: traffic.arrays
        for pair in dask_gpuipc.report(client).pairs
        if (pair.source, pair.target) == (a, b)
        for rung, traffic in pair.rungs.items()
    }
    assert len(came) == 30  # all but the small ones
    masks = 6  # parts of large objects, too small for handles of their own: counted as well
    assert sum(rungs.values()) == len(came) + masks, rungs
    assert rungs["bytes"] >= 12
    refused = dask_gpuipc.statistics(client)[a]["refused"]
    assert sum(refused.values()) >= rungs["bytes"], refused
    assert {"unsupported_dtype", "unsupported_type"} & set(refused), refused
