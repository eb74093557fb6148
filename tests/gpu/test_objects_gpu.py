"""Objects on the GPU other than CuPy arrays, by handle; and p2p with CuPy chunks."""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import addresses, arrays, client, cluster, move, refused, shared
from distributed import Client
from test_cluster_gpu import from_gpu, to_gpu

__all__ = ["client", "cluster", "shared"]
pytestmark = pytest.mark.gpu
N = 1 << 18


def missing(name: str) -> str | None:
    """The library that an object wants and that is not installed."""
    needed = {"torch": "torch", "numba": "numba.cuda", "rmm": "rmm"}.get(name.split()[0])
    if needed is None:
        return None
    try:
        importlib.import_module(needed)
    except ImportError:
        return needed
    return None


@dataclass
class Holder:
    label: str
    array: Any


def make_object(name: str) -> Any:
    """An object with device memory in it, finished or not."""
    import cupy

    numbers = cupy.arange(N, dtype="f8")
    match name:
        case "torch tensor":
            import torch

            return torch.arange(N, dtype=torch.float64, device="cuda").reshape(512, -1)
        case "torch tensor, strided":
            import torch

            return torch.arange(N, dtype=torch.float32, device="cuda").reshape(512, -1)[::2].T
        case "torch bfloat16":
            import torch

            return torch.arange(N, device="cuda").to(torch.bfloat16)
        case "torch on the host":
            import torch

            return torch.arange(N, dtype=torch.float64)
        case "numba":
            from numba import cuda

            return cuda.to_device(np.arange(N, dtype="f8"))
        case "rmm":
            import rmm

            return rmm.DeviceBuffer.to_device(np.arange(N, dtype="f8").tobytes())
        case "cupyx csr":
            from cupyx.scipy import sparse

            return sparse.random(2000, 2000, density=0.1, random_state=7, format="csr")
        case "cupyx coo":
            from cupyx.scipy import sparse

            return sparse.random(2000, 2000, density=0.1, random_state=7, format="coo")
        case "list":
            return [1, numbers, "text", numbers[::2]]
        case "dict in tuple":
            return ({"a": numbers}, numbers.reshape(512, -1).T)
        case "deque":
            return deque([numbers, numbers + 1])
        case "dataclass":
            return Holder("x", numbers)
        case "with numpy":
            return {"device": numbers, "host": np.arange(N)}
    raise LookupError(name)


def look_at(x: Any) -> Any:
    """What it is, small enough to be told; sums are exact."""
    import cupy

    if isinstance(x, Holder):
        return "holder", x.label, look_at(x.array)
    if isinstance(x, dict):
        return {key: look_at(value) for key, value in x.items()}
    if isinstance(x, (list, tuple, deque)):
        return type(x).__name__, [look_at(value) for value in x]
    if isinstance(x, (int, str)):
        return x
    kind = f"{type(x).__module__}.{type(x).__name__}"
    if kind.startswith("torch"):
        return kind, str(x.device.type), str(x.dtype), tuple(x.shape), float(x.double().sum())
    if kind.startswith("cupyx"):
        dense = x.tocsr()
        rows = cupy.arange(dense.shape[0], dtype="f8")
        return kind, dense.shape, int(dense.nnz), float((dense.T @ rows).sum())
    if kind.startswith("rmm"):
        held = np.frombuffer(x.copy_to_host().tobytes(), "f8")
        return kind, x.size, float(held.sum())
    if hasattr(x, "copy_to_host"):
        x = x.copy_to_host()
        return "numba", str(x.dtype), x.shape, float(x.sum())
    return kind, str(x.dtype), x.shape, float(x.sum())


OBJECTS = [
    "torch tensor", "torch tensor, strided", "torch bfloat16", "torch on the host", "numba", "rmm",
    "cupyx csr", "cupyx coo", "list", "dict in tuple", "deque", "dataclass", "with numpy",
]  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_as_plain_dask_delivers_them(shared: Client, name: str) -> None:
    lacks = missing(name)
    if lacks is not None:
        pytest.skip(f"{lacks} is not installed")
    a, b, _ = addresses(shared)
    source = shared.submit(make_object, name, workers=[a], pure=False)
    here = shared.submit(look_at, source, workers=[a]).result()
    assert move(shared, source, b, look_at).result() == here
    if name != "torch on the host":
        handles = sum(arrays(shared, "sent", rung) for rung in ("copy", "share", "stage"))
        assert handles >= 1
    del source


@pytest.mark.parametrize("method", [None, "p2p", "tasks"])
def test_rechunk_of_cupy_chunks(shared: Client, method: str | None) -> None:
    """With the default configuration too, in which p2p of CuPy chunks raises on plain Dask."""
    whole = np.arange(1024 * 1024, dtype="f8").reshape(1024, 1024)
    options = {} if method is None else {"array.rechunk.method": method}
    with dask.config.set(options):
        x = da.from_array(whole, chunks=(128, 1024)).map_blocks(to_gpu)
        y = x.rechunk((1024, 128))
        got = shared.compute(y.map_blocks(from_gpu)).result()
    np.testing.assert_array_equal(got, whole)
    if method == "tasks":
        assert arrays(shared, "sent", "copy") > 0
    elif method == "p2p":
        assert refused(shared, "p2p") > 0
