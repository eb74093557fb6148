"""`dask_gpuipc.sharing.Pool` beside CuPy's default pool, on one GPU.

    python benchmarks/pool.py [--rounds 20]

By size: the time to allocate from an empty pool and to free into it; to allocate again what the
pool has; to fill the array (bandwidth); and to open it in another process. One line of JSON for
what was run, and one for each pool and size, with medians in microseconds and GB/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cupy  # noqa: TID253 -- it measures nothing else
from dask.utils import format_bytes, parse_bytes

from dask_gpuipc import sharing


def open_all(connection: Connection) -> None:
    """Open each handle that comes, and answer with the microseconds it took."""
    cupy.zeros(1)
    while (handle := connection.recv()) is not None:
        start = time.perf_counter()
        array = handle.open()
        took = 1e6 * (time.perf_counter() - start)
        handle.close()
        del array
        connection.send(took)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds of a call until the device has finished with it, and its result."""
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    result = call()
    cupy.cuda.runtime.deviceSynchronize()
    return 1e6 * (time.perf_counter() - start), result


def measure(pool: Any, connection: Connection, size: int, rounds: int) -> dict[str, float]:
    """Medians for one pool and size."""
    found: dict[str, list[float]] = {}
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(rounds):
            pool.free_all_blocks()
            fresh, array = timed(partial(cupy.empty, size, "u1"))
            del array
            again, array = timed(partial(cupy.empty, size, "u1"))
            array.fill(1)
            filled, _ = timed(partial(array.fill, 2))
            handle = sharing.get_ipc_handle(array)
            connection.send(handle)
            opened = connection.recv()
            handle.close()
            handle.wait_closed(20)
            del array, handle
            released, _ = timed(pool.free_all_blocks)
            for name, value in {
                "allocate_us": fresh,
                "again_us": again,
                "fill_gb_s": size / filled / 1e3,
                "open_us": opened,
                "release_us": released,
            }.items():
                found.setdefault(name, []).append(value)
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="4KiB,1MiB,64MiB,1GiB")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    setting = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "device": device,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(setting), flush=True)
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=open_all, args=(theirs,))
    process.start()
    pools = {"cupy": cupy.cuda.MemoryPool(), "sharing": sharing.Pool()}
    for size in map(parse_bytes, options.sizes.split(",")):
        for name, pool in pools.items():
            found = measure(pool, mine, size, options.rounds)
            print(json.dumps({"pool": name, "size": format_bytes(size), **found}), flush=True)
    mine.send(None)
    process.join()
    sharing.stop(20)


if __name__ == "__main__":
    main()
