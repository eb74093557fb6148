"""Bandwidth of a received copy across two GPUs, beside memcpyPeer.

    CUDA_VISIBLE_DEVICES=0,1 python benchmarks/peer_copy.py

One process exports arrays on the first GPU, another one imports them on the second. There, turn by
turn: ``copy`` (import as the rung ``copy`` does, until the device is idle), ``share`` (import as
an alias) and ``memcpyPeer`` (the driver's copy between the GPUs, of two buffers of its own, until
the device is idle). All of them allocate from CuPy's pool, which holds the block already.

Standard output takes one JSON object a line: ``environment``, then one ``measure`` by size, with
medians in milliseconds, GB/s (10**9), and ``of_peer``: memcpyPeer's time / that of ``copy``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from dask.utils import format_bytes, parse_bytes
from transfers import commit, describe_gpu, gpu_driver, versions

from dask_gpuipc.config import Settings
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.memory.cuda import CudaMemory
from dask_gpuipc.memory.cuda.mappings import BORROWED
from dask_gpuipc.wire import Announce

SIZES = [
    parse_bytes(s) for s in ("64 KiB", "1 MiB", "16 MiB", "256 MiB", "1 GiB", "2 GiB", "8 GiB")
]
ROUNDS, WARM_UP = 12, 2


def timed(function: Callable[[], Any], times: list[float]) -> None:
    """Run a function on an idle device, until the device is idle again."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    held = function()
    cupy.cuda.runtime.deviceSynchronize()
    times.append(time.perf_counter() - start)
    del held


def consumer(pipe: Any) -> None:
    """Import what comes down the pipe, and send times back."""
    import cupy

    runtime, memory = cupy.cuda.runtime, CudaMemory(Settings.load())
    with cupy.cuda.Device(1):
        runtime.deviceEnablePeerAccess(0)
    runtime.deviceEnablePeerAccess(1)
    while (message := pipe.recv()) is not None:
        announcement, layout = message
        nbytes = announcement.nbytes
        mapping = memory.open(announcement, ())
        with cupy.cuda.Device(1):
            theirs = cupy.ones(nbytes, "u1")
            runtime.deviceSynchronize()

        def copy(mapping: Any = mapping, layout: Any = layout) -> Any:
            return memory.load(mapping, layout, Rung.COPY)

        def share(mapping: Any = mapping, layout: Any = layout) -> Any:
            return memory.load(mapping, layout, Rung.SHARE)

        def peer(theirs: Any = theirs, nbytes: int = nbytes) -> Any:
            mine = cupy.empty(nbytes, "u1")
            runtime.memcpyPeerAsync(mine.data.ptr, 0, theirs.data.ptr, 1, nbytes, 0)
            return mine

        ways = {"copy": copy, "share": share, "memcpyPeer": peer}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS):
            for name in [*ways][number % 3 :] + [*ways][: number % 3]:
                timed(ways[name], times[name])
        got = copy()
        got.done.result(30)
        right = bool((got.array.view("u1") == announcement.allocation % 251).all())
        del got, theirs
        mapping.close()
        while len(BORROWED):  # the next allocation may get the same address
            time.sleep(0.01)
        cupy.get_default_memory_pool().free_all_blocks()
        pipe.send((times, right))


def main() -> None:
    """Export by size, and print what the consumer measured."""
    import cupy

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    first, second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    os.environ["CUDA_VISIBLE_DEVICES"] = f"{second},{first}"
    process = context.Process(target=consumer, args=(theirs,), daemon=True)
    process.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = f"{first},{second}"
    gpu = {**describe_gpu(), "driver": gpu_driver()}
    print(json.dumps({
        "kind": "environment", "command": ["benchmarks/peer_copy.py"], "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "versions": versions(),
        "system": platform.platform(), "gpu": gpu, "rounds": ROUNDS - WARM_UP,
    }), flush=True)  # fmt: skip
    memory = CudaMemory(Settings.load())
    for number, nbytes in enumerate(map(parse_bytes, SIZES), start=1):
        array = cupy.full(max(nbytes, 4 << 20), number % 251, "u1")[:nbytes]
        prepared = memory.prepare([array])
        assert prepared is not None
        asyncio.run(prepared.wait())
        pin = memory.pin(array, prepared)
        place = ("cuda", number, pin.allocation.generation)
        handle = memory.handle(pin.allocation).payload
        pipe.send(
            (Announce(*place, pin.allocation.nbytes, pin.allocation.device, handle), pin.layout)
        )
        times, right = pipe.recv()
        assert right, "other bytes arrived"
        medians = {name: statistics.median(all_[WARM_UP:]) for name, all_ in times.items()}
        print(json.dumps({
            "kind": "measure", "nbytes": nbytes, "size": format_bytes(nbytes),
            "median_ms": {name: round(s * 1e3, 4) for name, s in medians.items()},
            "gb_per_s": {n: round(nbytes / s / 1e9, 1) for n, s in medians.items() if n != "share"},
            "of_peer": round(medians["memcpyPeer"] / medians["copy"], 3),
            "all_ms": {n: [round(s * 1e3, 4) for s in t[WARM_UP:]] for n, t in times.items()},
        }), flush=True)  # fmt: skip
        pin.release()
        del array, prepared, pin
        cupy.get_default_memory_pool().free_all_blocks()
        memory.collect()
    pipe.send(None)
    process.join(30)


if __name__ == "__main__":
    main()
