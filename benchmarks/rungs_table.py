"""By which rung arrays of each type cross, by allocator: writes the table of docs/allocators.md.

    python benchmarks/rungs_table.py [--write]

Wants one GPU. Two workers, on that GPU; each cell is one array that went from one to the other,
three times: with the default settings, with ``transfer="share"``, and without CUDA IPC. Its bytes
are compared with the source's, and the rungs are those that the producer counted. Exits with 1 if
anything arrived other than it was sent. Allocators that cannot be had are told with the reason.

Without ``--write`` the page goes to standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "allocators.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from allocators import KINDS, unavailable, using  # noqa: E402 -- shared with the tests

STRUCTURE = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
TYPES = ("C order", "F order", "strided", "reversed", "one row", "0-d", "complex", "structured",
         "bfloat16")  # fmt: skip
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("auto", {"gpuipc.cuda.ipc": True}),
    "share": ("share", {"gpuipc.cuda.ipc": True}),
    "no IPC": ("auto", {"gpuipc.cuda.ipc": False}),
}
SHAPE = (500, 400)


def make(allocator: str, kind: str) -> Any:
    """An array of a type, in an allocator's memory."""
    import cupy

    with using(allocator):
        base = cupy.arange(np.prod(SHAPE), dtype="f8").reshape(SHAPE)
        views = {
            "C order": lambda: base,
            "F order": lambda: cupy.asfortranarray(base),
            "strided": lambda: base[::2, 1::3],
            "reversed": lambda: base[::-1, ::-2],
            "one row": lambda: base[17],
            "0-d": lambda: base[3, 5, ...],
            "complex": lambda: base + 1j * base,
            "structured": lambda: as_dtype(base, STRUCTURE),
            "bfloat16": lambda: as_dtype(base, _bfloat16()),
        }
        return views[kind]()


def as_dtype(base: Any, dtype: np.dtype) -> Any:
    """The bytes of an array as another dtype, for which CuPy need not have kernels."""
    import cupy

    return cupy.ndarray(base.nbytes // dtype.itemsize, dtype, base.data)


def _bfloat16() -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def describe(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    """What must be equal on both sides."""
    import cupy

    dense = x if x.flags.c_contiguous or x.flags.f_contiguous else cupy.ascontiguousarray(x)
    order = dense if dense.flags.c_contiguous else dense.T
    raw = cupy.ndarray((order.nbytes,), "u1", order.data).get()
    values = np.ndarray(order.shape, order.dtype, raw)
    values = values if dense.flags.c_contiguous else values.T
    return str(x.dtype), x.shape, values.tobytes()


def configure(settings: dict[str, Any]) -> None:
    """Set Dask's configuration of this worker, for good."""
    dask.config.set(settings)


def crossed(client: Client, places: list[str], allocator: str, kind: str) -> str:
    """The rung by which one array went; or what went wrong with it."""
    a, b = places
    before = counts(client, a)
    source = client.submit(make, allocator, kind, workers=[a], pure=False)
    wait(source)
    if source.status == "error":
        return f"({type(source.exception()).__name__})"
    got = client.submit(describe, source, workers=[b], pure=False).result()
    if got != client.submit(describe, source, workers=[a], pure=False).result():
        return "WRONG"
    after = counts(client, a)
    rungs = [rung for rung, number in after.items() if number > before.get(rung, 0)]
    return rungs[0] if rungs else "bytes"


def counts(client: Client, worker: str) -> dict[str, int]:
    """Arrays that a worker has sent, by rung."""
    found = dask_gpuipc.statistics(client)[worker]["sent"]
    return {rung: traffic["arrays"] for rung, traffic in found.items()}


@contextmanager
def two_workers() -> Iterator[tuple[Client, list[str]]]:
    """A cluster of two worker processes on one GPU."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client, sorted(client.scheduler_info()["workers"])


def measure() -> Iterator[tuple[str, str, list[str]]]:
    """Each allocator and type, with the rungs of the modes; or why there is no allocator."""
    with two_workers() as (client, places):
        why = {
            name: client.submit(unavailable, name, workers=[places[0]], pure=False).result()
            for name in KINDS
        }
        found: dict[tuple[str, str], list[str]] = {}
        for transfer, settings in MODES.values():
            client.run(configure, settings)
            client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
            for name in KINDS:
                for kind in TYPES:
                    if why[name] is None:
                        rung = crossed(client, places, name, kind)
                        found.setdefault((name, kind), []).append(rung)
            client.unregister_worker_plugin("gpuipc")
        for name in KINDS:
            if why[name] is not None:
                yield name, "", [str(why[name])]
            for kind in TYPES:
                if (name, kind) in found:
                    yield name, kind, found[name, kind]


def table(cells: list[tuple[str, str, list[str]]]) -> str:
    """The cells in Markdown: a row for each allocator."""
    rows = [f"| allocator | {' | '.join(TYPES)} |", f"|{'---|' * (len(TYPES) + 1)}"]
    for name in dict.fromkeys(name for name, _, _ in cells):
        row = {kind: ", ".join(rungs) for one, kind, rungs in cells if one == name}
        if "" in row:
            rows.append(f"| {name} | not run: {row['']} |{' |' * (len(TYPES) - 1)}")
        else:
            rows.append(f"| {name} | {' | '.join(row[kind] for kind in TYPES)} |")
    return "\n".join(rows)


def machine() -> str:
    """Where the table was made, in one line."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    packages = []
    for package in ("cupy", "cupy-cuda13x", "cupy-cuda12x", "rmm-cu13", "cuda-core"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    driver = cupy.cuda.runtime.driverGetVersion()
    return f"Run on {name}, CUDA driver {driver}, {', '.join(packages)}."


def main() -> None:
    """Fill the table, and exit with 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    cells = list(measure())
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page = f"{head}{BEGIN}\n{machine()}\n\n{table(cells)}\n{END}{tail}"
    if options.write:
        PAGE.write_text(page)
    print(page)
    sys.exit(any("WRONG" in rungs for _, _, rungs in cells))


if __name__ == "__main__":
    main()
