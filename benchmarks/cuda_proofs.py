"""What must hold of CuPy chunks on one GPU, whatever the streams: order, memory, the event loop.

    python benchmarks/cuda_proofs.py

Two ``dask worker`` processes on one GPU for each way that a chunk is received (copy, share), as in
``transfers.py``. Three proofs, each one JSON object a line on standard output, after the line of
the environment; the exit status is 1 if one did not hold.

``order``
    A task writes a chunk by a kernel that takes its time, on one of four kinds of streams (default,
    per-thread default, blocking, non-blocking), and returns at once. A task on the other worker
    starts a kernel, on one of the four kinds, that takes its time, then compares every byte, and
    returns at once: its last reference dies while the kernel reads. The client releases the key
    meanwhile, and the next rounds get the same blocks from the pools. ``wrong`` counts bytes over
    all rounds and must be 0; ``control`` is one round that expects something else, and must find
    every element.
``memory``
    Free device memory, and what both pools hold, before and after 10,000 transfers with churn.
``loop``
    The longest time for which each worker's event loop did not run, by a coroutine that wakes every
    millisecond, while chunks of 2 GiB come and go; beside plain Dask.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from distributed import Worker, get_worker, wait
from transfers import Side, cluster, environment, until

import dask_gpuipc

KINDS = ("default", "per-thread", "blocking", "non-blocking")
CODE = r"""
typedef unsigned long long u64;
__device__ void pass(u64 ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < ns);
}
extern "C" __global__ void fill(long long* out, long long n, long long seed, u64 ns) {
    pass(ns);
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
         i += (long long)gridDim.x * blockDim.x) out[i] = seed * 1000003 + i;
}
extern "C" __global__ void check(const long long* in, long long n, long long seed,
                                 u64 ns, u64* wrong) {
    pass(ns);
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
         i += (long long)gridDim.x * blockDim.x)
        if (in[i] != seed * 1000003 + i) atomicAdd(wrong, 1ULL);
}
"""


# -- on the workers -------------------------------------------------------------------------------


def kernel(name: str) -> Any:
    """Return one of the two kernels, compiled once; an attribute of the worker."""
    import cupy

    kernels = get_worker().__dict__.setdefault("proof_kernels", {})
    if name not in kernels:
        kernels[name] = cupy.RawKernel(CODE, name)
    return kernels[name]


def stream_of(kind: str) -> Any:
    """Return a stream of a kind, the same one each time; an attribute of the worker."""
    import cupy

    streams = get_worker().__dict__.setdefault("proof_streams", {})
    if not streams:
        streams |= {
            "default": cupy.cuda.Stream.null,
            "per-thread": cupy.cuda.Stream.ptds,
            "blocking": cupy.cuda.Stream(),
            "non-blocking": cupy.cuda.Stream(non_blocking=True),
        }
    return streams[kind]


def fill(n: int, seed: int, kind: str, seconds: float) -> Any:
    """Return a chunk that a kernel will have written in so many seconds."""
    import cupy
    import numpy as np

    with stream_of(kind):
        chunk = cupy.empty(n, "i8")
        times = (chunk, np.int64(n), np.int64(seed), np.uint64(seconds * 1e9))
        kernel("fill")((32,), (256,), times)
    return chunk


def check(chunk: Any, seed: int, kind: str, seconds: float) -> None:
    """Have a kernel compare a chunk in so many seconds; return at once."""
    import cupy
    import numpy as np

    worker = get_worker()
    if not hasattr(worker, "proof_wrong"):
        worker.proof_wrong = cupy.zeros(1, "u8")
        cupy.cuda.runtime.deviceSynchronize()
    with stream_of(kind):
        times = (chunk, np.int64(chunk.size), np.int64(seed), np.uint64(seconds * 1e9))
        kernel("check")((32,), (256,), (*times, worker.proof_wrong))


def wrong() -> int:
    """Return the elements that were wrong since the last call, all kernels having ended."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    counter = get_worker().proof_wrong
    found = int(counter[0])
    counter[:] = 0
    cupy.cuda.runtime.deviceSynchronize()
    return found


def make(nbytes: int) -> Any:
    """Return a chunk of zeros, on its way."""
    import cupy

    return cupy.zeros(nbytes, "u1")


def touch(chunk: Any) -> int:
    """Return a chunk's size, having added to it on the device."""
    chunk += 1
    return int(chunk.nbytes)


def settle() -> dict[str, int]:
    """Give the pool's free blocks back; return free device memory and what the pool still has."""
    import gc

    import cupy

    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    return {"free": int(cupy.cuda.runtime.memGetInfo()[0]), "pool": pool.total_bytes()}


async def listen(dask_worker: Worker) -> None:
    """Begin to measure how long the event loop does not run."""
    gaps: list[float] = []

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    dask_worker.proof_gaps = gaps  # type: ignore[attr-defined]
    dask_worker.proof_beat = asyncio.create_task(beat())  # type: ignore[attr-defined]


async def heard(dask_worker: Worker) -> dict[str, float]:
    """End it; return the longest gap and a high percentile in milliseconds."""
    task = dask_worker.proof_beat  # type: ignore[attr-defined]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gaps = sorted(dask_worker.proof_gaps)  # type: ignore[attr-defined]
    high = gaps[int(0.999 * (len(gaps) - 1))]
    return {"longest_ms": round(gaps[-1] * 1e3, 2), "p99.9_ms": round(high * 1e3, 2)}


# -- the proofs -----------------------------------------------------------------------------------


def submit(side: Side, where: str, function: Any, *arguments: Any) -> Any:
    """Run a task on one worker."""
    return side.client.submit(function, *arguments, workers=[where], pure=False)


def rounds(side: Side, count: int, seconds: float, n: int, ahead: int = 6) -> None:
    """Have so many chunks written, moved and compared, some ahead of each other."""
    flying: list[Any] = []
    kinds = itertools.cycle(itertools.product(KINDS, KINDS))
    for seed, (writer, reader) in zip(range(count), kinds, strict=False):
        chunk = submit(side, side.home, fill, n, seed, writer, seconds)
        flying.append(submit(side, side.away, check, chunk, seed, reader, seconds))
        del chunk  # the client lets go of it at once
        if len(flying) >= ahead:
            flying.pop(0).result()
    for future in flying:
        future.result()


def order(side: Side, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield wrong bytes of many rounds of short kernels, and of some of long ones."""
    for count, seconds in ((options.rounds, 0.005), (16, 1.0)):
        start = time.perf_counter()
        rounds(side, count, seconds, 1 << 18)
        found = submit(side, side.away, wrong).result()
        took = time.perf_counter() - start
        rounds(side, 1, 0.0, 1 << 18)
        chunk = submit(side, side.home, fill, 1 << 18, 1, "default", 0.0)
        submit(side, side.away, check, chunk, 2, "default", 0.0).result()
        control = submit(side, side.away, wrong).result()
        yield {
            "kind": "order",
            "mode": side.mode,
            "rounds": count,
            "kernel_s": seconds,
            "chunk_bytes": 8 << 18,
            "took_s": round(took, 1),
            "wrong": found,
            "control": control,
            "by_handle": side.handles(),
            "holds": found == 0 and control == 1 << 18,
        }


def memory(side: Side, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what 10,000 transfers with churn changed in free device memory."""
    before = churn(side, 100)
    handles = side.handles()
    after = churn(side, options.transfers)
    lost = {
        name: before[where]["free"] - after[where]["free"]
        for name, where in (("home", side.home), ("away", side.away))
    }
    yield {
        "kind": "memory",
        "mode": side.mode,
        "transfers": options.transfers,
        "by_handle": side.handles() - handles,
        "lost_bytes": lost,
        "pool_bytes": {w: [before[w]["pool"], after[w]["pool"]] for w in before},
        "holds": max(lost.values()) <= 4 << 20,
    }


def churn(side: Side, count: int) -> dict[str, dict[str, int]]:
    """Move chunks of many sizes; return what is free when all is given back."""
    for first in range(0, count, 50):
        sizes = [((first + i) * 7919 % 61 + 1) * 65536 for i in range(50)]
        chunks = [submit(side, side.home, make, nbytes) for nbytes in sizes]
        got = [submit(side, side.away, touch, chunk) for chunk in chunks]
        del chunks
        assert side.client.gather(got) == sizes
        del got
        if first % 500 == 0:
            submit(side, side.home, settle).result()
    until(lambda: not dask_gpuipc.statistics(side.client)[side.home]["leases"], "leases end")
    dask_gpuipc.collect(side.client)
    until(
        lambda: not any(s["mappings"] for s in dask_gpuipc.statistics(side.client).values()),
        "mappings close",
    )
    for _ in range(2):  # a mapping's block counts until both sides let go
        found = {where: submit(side, where, settle).result() for where in (side.home, side.away)}
    return found


def loop(side: Side, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield how long event loops stood while chunks of 2 GiB came and went."""
    chunk_rounds(side, 3)
    side.client.run(listen)
    chunk_rounds(side, options.loop_rounds)
    found = side.client.run(heard)
    yield {
        "kind": "loop",
        "mode": side.mode,
        "rounds": options.loop_rounds,
        "home": found[side.home],
        "away": found[side.away],
        "holds": not side.has_plugin or max(f["longest_ms"] for f in found.values()) <= 20,
    }


def chunk_rounds(side: Side, count: int) -> None:
    """Move chunks of 2 GiB, one after the other."""
    for _ in range(count):
        chunk = submit(side, side.home, make, 2 << 30)
        with side.client.as_current():
            wait(chunk)
        submit(side, side.away, touch, chunk).result()
        del chunk


def main() -> None:
    """Run all proofs, one mode after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000, help="of order; default: 1000")
    parser.add_argument("--transfers", type=int, default=10_000, help="of memory; default: 10000")
    parser.add_argument("--loop-rounds", type=int, default=40, help="of loop; default: 40")
    parser.add_argument("--gpu", default="0", help="CUDA_VISIBLE_DEVICES of both workers")
    options = parser.parse_args()
    options.memory, options.memory_limit, options.warm_up = "cuda", 0, 0
    here, path = os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([here, path])  # workers import transfers.py too
    failed, first = False, True
    for mode, proofs in (
        ("plugin-copy", (order, memory, loop)),
        ("plugin-share", (order, memory, loop)),
        ("plain", (loop,)),
    ):
        with cluster(mode, options) as side:
            if first:
                tell({**environment(side, options), "command": ["benchmarks/cuda_proofs.py"]})
                first = False
            for line in itertools.chain.from_iterable(proof(side, options) for proof in proofs):
                tell(line)
                failed |= not line["holds"]
    sys.exit(failed)


def tell(line: dict[str, Any]) -> None:
    """Print one line."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
