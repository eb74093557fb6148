"""Objects on the GPU other than CuPy arrays, by handle; and p2p with CuPy chunks."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
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


def numbers() -> Any:
    return importlib.import_module("cupy").arange(N, dtype="f8")


def on_torch(dtype: str = "float64", device: str = "cuda") -> Any:
    torch = importlib.import_module("torch")
    return torch.arange(N, device=device).to(getattr(torch, dtype)).reshape(512, -1)


def sparse(layout: str) -> Any:
    module = importlib.import_module("cupyx.scipy.sparse")
    return module.random(2000, 2000, density=0.1, random_state=7, format=layout)


OBJECTS: dict[str, Callable[[], Any]] = {
    "torch tensor": on_torch,
    "torch tensor, strided": lambda: on_torch()[::2].T,
    "torch bfloat16": lambda: on_torch("bfloat16"),
    "torch on the host": lambda: on_torch(device="cpu"),
    "numba": lambda: importlib.import_module("numba.cuda").to_device(np.arange(N, dtype="f8")),
    "rmm": lambda: importlib.import_module("rmm").DeviceBuffer.to_device(
        np.arange(N, dtype="f8").tobytes()
    ),
    "cupyx csr": lambda: sparse("csr"),
    "cupyx coo": lambda: sparse("coo"),
    "list": lambda: [1, numbers(), "text", numbers()[::2]],
    "dict in tuple": lambda: ({"a": numbers()}, numbers().reshape(512, -1).T),
    "deque": lambda: deque([numbers(), numbers() + 1]),
    "dataclass": lambda: Holder("x", numbers()),
    "with numpy": lambda: {"device": numbers(), "host": np.arange(N)},
}


def make_object(name: str) -> Any:
    """An object with device memory in it, finished or not."""
    return OBJECTS[name]()


def look_at(x: Any) -> Any:
    """What it is, small enough to be told; sums are exact."""
    if isinstance(x, Holder):
        return "holder", x.label, look_at(x.array)
    if isinstance(x, dict):
        return {key: look_at(value) for key, value in x.items()}
    if isinstance(x, (list, tuple, deque)):
        return type(x).__name__, [look_at(value) for value in x]
    return x if isinstance(x, (int, str)) else look_at_array(x)


def look_at_array(x: Any) -> Any:
    kind = f"{type(x).__module__}.{type(x).__name__}"
    if kind.startswith("torch"):
        return kind, str(x.device.type), str(x.dtype), tuple(x.shape), float(x.double().sum())
    if kind.startswith("cupyx"):
        rows = importlib.import_module("cupy").arange(x.shape[0], dtype="f8")
        return kind, x.shape, int(x.nnz), float((x.tocsr().T @ rows).sum())
    if kind.startswith("rmm"):
        return kind, x.size, float(np.frombuffer(bytes(x.copy_to_host()), "f8").sum())
    if hasattr(x, "copy_to_host"):
        x = x.copy_to_host()
    return kind, str(x.dtype), x.shape, float(x.sum())


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
