"""How long one chunk takes from one worker to another, by size and by way.

    python benchmarks/transfers.py
    python benchmarks/transfers.py --memory cuda --mode plain plugin-copy plugin-share plugin-host
    python benchmarks/transfers.py --memory cuda --mode plain plugin-copy plugin-share --gpu 0 1

Each mode gets a cluster of its own: a scheduler and two ``dask worker`` processes, started as users
start them, on one GPU where the chunks are CuPy's. All clusters are alive at the same time and take
turns, so that what the machine does meanwhile falls on all of them alike.

One round makes a chunk on the first worker and waits until it is finished there (for CuPy: the
device was synchronised), has a task on the second worker read all of it, and drops it again. Told
are, as medians over the rounds after the warm-up:

``transfer_ms``
    What Dask itself logs for the transfer (``transfer_incoming_log`` of the second worker), from
    ``start`` to ``stop``: its ``duration`` is never less than 1 ms.
``with_read_ms``
    The same, and the first full read of what arrived: a handle may leave work to the reader.
``wall_ms``
    What the client waits for the task on the second worker.
``first_ms``
    ``transfer_ms`` of the very first round: connections and handles are made in it.

Every read is an exact sum, compared with the first worker's; after the first round of each size a
CRC of all bytes is compared too.

Standard output takes one JSON object a line, told apart by ``kind``: ``environment`` first, then by
size one ``measure`` for each mode, ``copy`` (what copying those bytes once costs, the floor),
with two GPUs ``peer`` (memcpyPeer between them) and, with ``plain`` among the modes, ``ratio``
(plain / mode). Progress and a table go to standard error.

The package may be installed or in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from dask.utils import format_bytes, parse_bytes
from distributed import Client, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.bench.setting import commit, cpu, gpu_driver

Kind = Literal["host", "cuda"]

MODES = ("plain", "plugin", "plugin-copy", "plugin-share", "plugin-host", "ucx")
SIZES = ("1 KiB", "64 KiB", "1 MiB", "16 MiB", "128 MiB", "512 MiB", "2 GiB")
PACKAGES = (
    "dask", "distributed", "numpy", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings",
    "distributed-ucxx-cu12", "distributed-ucxx-cu13",
)  # fmt: skip
TIMES = ("transfer", "with_read", "wall")
PEER_COPY = """
import statistics, sys, time
import cupy
runtime, nbytes = cupy.cuda.runtime, int(sys.argv[1])
with cupy.cuda.Device(0):
    source = cupy.ones(nbytes // 8, "u8")
    runtime.deviceEnablePeerAccess(1)
with cupy.cuda.Device(1):
    target = cupy.zeros(nbytes // 8, "u8")
    runtime.deviceEnablePeerAccess(0)
    times = []
    for _ in range(9):
        runtime.deviceSynchronize()
        start = time.perf_counter()
        runtime.memcpyPeerAsync(target.data.ptr, 1, source.data.ptr, 0, nbytes, 0)
        runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
print(statistics.median(times[2:]))
"""
PATIENCE = 120
"""Seconds for a cluster to start, and for a dropped chunk to be gone."""


# -- on the workers -------------------------------------------------------------------------------


def make(memory: Kind, nbytes: int, seed: int) -> Any:
    """Return a finished chunk of ``nbytes`` bytes, all of them different for another seed."""
    chunk = library(memory).arange(seed, seed + nbytes // 8, dtype="u8")
    chunk *= 0x1E3779B97F4A7C15  # spreads neighbours over all 64 bits; wraps around
    finish(memory)
    return chunk


def library(memory: Kind) -> Any:
    """NumPy or CuPy."""
    return importlib.import_module("numpy" if memory == "host" else "cupy")


def finish(memory: Kind) -> None:
    """Wait for the device."""
    if memory == "cuda":
        library(memory).cuda.runtime.deviceSynchronize()


def read(chunk: Any) -> tuple[int, float]:
    """Sum all of a chunk, modulo 2**64; return the sum and the seconds it took."""
    start = time.perf_counter()
    total = int(chunk.sum())  # waits for the device
    return total, time.perf_counter() - start


def checksum(chunk: Any) -> int:
    """CRC of all bytes of a chunk."""
    return zlib.crc32(chunk if isinstance(chunk, np.ndarray) else chunk.get())


def copy_once(memory: Kind, nbytes: int) -> float:
    """Median seconds of a copy into a buffer that was written before, in the same memory."""
    source, target = make(memory, nbytes, 0), make(memory, nbytes, 1)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target[...] = source
        finish(memory)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def warm_up(memory: Kind, nbytes: int) -> None:
    """Touch as much memory as the largest chunk takes, and load what reading one needs."""
    read(make(memory, nbytes, 0))
    if memory == "host":
        read(np.ones(3 * nbytes // 8, "u8"))  # the source, its copy in an arena, the reader's


def describe_gpu() -> dict[str, Any]:
    """Name, UUID and CUDA versions of the worker's GPU."""
    runtime = library("cuda").cuda.runtime
    found = runtime.getDeviceProperties(0)
    return {
        "name": found["name"].decode(),
        "uuid": f"GPU-{uuid.UUID(bytes=bytes(found['uuid']))}",
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }


def has_key(key: str, dask_worker: Any) -> bool:
    """Whether a worker still holds a chunk."""
    return key in dask_worker.data


def transfer_of(key: str, dask_worker: Any) -> float:
    """Seconds that Dask logged for the transfer of a key to this worker."""
    for entry in reversed(dask_worker.transfer_incoming_log):
        if key in entry["keys"]:
            return float(entry["stop"] - entry["start"])
    raise LookupError(f"{key} did not come from another worker")


# -- clusters -------------------------------------------------------------------------------------


@dataclass
class Side:
    """One cluster, what runs on it, and what it took."""

    mode: str
    client: Client
    home: str
    away: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def has_plugin(self) -> bool:
        """Whether handles can cross at all."""
        return self.mode.startswith("plugin")

    def handles(self) -> int:
        """Arrays that the second worker has received by handle so far."""
        if not self.has_plugin:
            return 0
        received = dask_gpuipc.statistics(self.client)[self.away]["received"]
        return sum(rung["arrays"] for rung in received.values())

    def has_dropped(self, key: str) -> bool:
        """Whether both workers forgot a chunk, and no lease on it is left."""
        if any(self.client.run(has_key, key).values()):
            return False
        return not self.has_plugin or not dask_gpuipc.statistics(self.client)[self.home]["leases"]


@dataclass(frozen=True)
class Round:
    """Seconds of one round."""

    transfer: float
    with_read: float
    wall: float


@contextlib.contextmanager
def cluster(mode: str, options: argparse.Namespace) -> Iterator[Side]:
    """A scheduler and two workers, processes of their own; with the plugin if the mode says so."""
    protocol = "ucx" if mode == "ucx" else "tcp"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder, "scheduler.json")
        common = ("--scheduler-file", str(file), "--protocol", protocol, "--no-dashboard")
        log = stack.enter_context(open(Path(folder, "log"), "ab"))
        stack.enter_context(started("dask_scheduler", *common, "--port", "0", log=log))
        until(file.exists, f"the scheduler of {mode} writes {file}")
        limit = ("--memory-limit", str(options.memory_limit), "--nthreads", "1")
        settings = {"DASK_GPUIPC__CUDA__IPC": "False"} if mode == "plugin-host" else {}
        for name, gpu in zip(("home", "away"), options.gpu[:1] + options.gpu[-1:], strict=True):
            if options.memory == "cuda":
                settings["CUDA_VISIBLE_DEVICES"] = gpu
            place = ("--name", name, "--local-directory", folder)
            stack.enter_context(
                started("dask_worker", *common, *limit, *place, log=log, **settings)
            )
        client = stack.enter_context(
            Client(scheduler_file=str(file), timeout=PATIENCE, set_as_default=False)
        )
        client.wait_for_workers(2, timeout=PATIENCE)
        if mode.startswith("plugin"):
            _, _, transfer = mode.partition("-")
            known = transfer if transfer in ("copy", "share") else None
            client.register_worker_plugin(GPUIPCPlugin(transfer=known))
        workers = client.scheduler_info()["workers"]
        addresses = {str(worker["name"]): address for address, worker in workers.items()}
        yield Side(mode, client, addresses["home"], addresses["away"])


@contextlib.contextmanager
def started(program: str, *arguments: str, log: Any, **environment: str) -> Iterator[None]:
    """Run one of distributed's programs until the end of the block; it finds this module."""
    places = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", f"distributed.cli.{program}", *arguments]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Any, what: str) -> None:
    """Wait for a condition; exit with what was waited for if it does not come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited {PATIENCE} s in vain: {what}")
        time.sleep(0.02)


# -- measuring ------------------------------------------------------------------------------------


def one_round(side: Side, memory: Kind, nbytes: int, seed: int, check: bool) -> Round:
    """Move one chunk, read it on the second worker, and drop it."""

    def run(address: str, function: Any, *arguments: Any) -> Any:
        return side.client.submit(function, *arguments, workers=[address], pure=False)

    source = run(side.home, make, memory, nbytes, seed)
    with side.client.as_current():
        wait(source)
    start = time.perf_counter()
    total, seconds = run(side.away, read, source).result()
    wall = time.perf_counter() - start
    transfer = side.client.run(transfer_of, source.key, workers=[side.away])[side.away]
    agree(run(side.home, read, source).result()[0], total, side, nbytes)
    if check:
        crc = [run(address, checksum, source).result() for address in (side.home, side.away)]
        agree(*crc, side, nbytes)
    key = source.key
    del source
    until(lambda: side.has_dropped(key), f"the workers drop {key}")
    return Round(transfer, transfer + seconds, wall)


def peer_copy(gpus: list[str], nbytes: int) -> float:
    """Seconds in which the driver copies those bytes from one GPU to the other, in one process."""
    first, last = (gpu.split(",")[0] for gpu in (gpus[0], gpus[-1]))
    visible = {**os.environ, "CUDA_VISIBLE_DEVICES": f"{first},{last}"}
    command = [sys.executable, "-c", PEER_COPY, str(nbytes)]
    done = subprocess.run(command, env=visible, capture_output=True, text=True, check=True)
    return float(done.stdout)


def agree(sent: int, arrived: int, side: Side, nbytes: int) -> None:
    """Exit if what arrived is not what was sent."""
    if sent != arrived:
        sys.exit(f"{side.mode}, {nbytes} bytes: {arrived} arrived, {sent} was sent")


def measure(
    sides: list[Side], nbytes: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Run all rounds of one size, every side in turn; yield the lines to print."""
    before = [side.handles() for side in sides]
    for side in sides:
        side.rounds.clear()
    for number in range(options.warm_up + options.rounds):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:  # each goes first as often as the others
            done = one_round(side, options.memory, nbytes, number, check=not number)
            side.rounds.append(done)
    where = {"memory": options.memory, "nbytes": nbytes}
    for side, handles in zip(sides, before, strict=True):
        counted = side.rounds[options.warm_up :]
        yield {
            "kind": "measure",
            "mode": side.mode,
            **where,
            **{f"{name}_ms": milliseconds(median(counted, name)) for name in TIMES},
            "first_ms": milliseconds(side.rounds[0].transfer),
            "rounds": len(counted),
            "by_handle": side.handles() - handles,
            "all_ms": {name: [milliseconds(getattr(r, name)) for r in counted] for name in TIMES},
        }
    first = sides[0]
    copied = first.client.submit(
        copy_once, options.memory, nbytes, workers=[first.away], pure=False
    ).result()
    yield {"kind": "copy", **where, "copy_ms": milliseconds(copied)}
    if len(set(options.gpu)) > 1:
        yield {"kind": "peer", **where, "copy_ms": milliseconds(peer_copy(options.gpu, nbytes))}
    yield from ratios(sides, options, where)


def ratios(
    sides: list[Side], options: argparse.Namespace, where: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield how many times longer plain Dask took than each other mode."""
    medians = {
        side.mode: {name: median(side.rounds[options.warm_up :], name) for name in TIMES}
        for side in sides
    }
    plain = medians.pop("plain", None)
    for mode, took in medians.items() if plain else ():
        faster = {name: round(plain[name] / seconds, 2) for name, seconds in took.items()}
        yield {"kind": "ratio", "mode": mode, **where, **faster}


def median(rounds: list[Round], name: str) -> float:
    """Median of one of the rounds' times, in seconds."""
    return statistics.median(getattr(one, name) for one in rounds)


def milliseconds(seconds: float) -> float:
    """As printed: to the microsecond."""
    return round(seconds * 1e3, 3)


# -- environment ----------------------------------------------------------------------------------


def environment(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Return what somebody needs to know to repeat this run."""
    gpu = None
    if options.memory == "cuda":
        gpu = side.client.submit(describe_gpu, workers=[side.home]).result()
        gpu["driver"] = gpu_driver()
    return {
        "kind": "environment",
        "command": [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "versions": versions(),
        "system": platform.platform(),
        "cpu": cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "worker_memory_limit": options.memory_limit,
        "rounds": options.rounds,
        "warm_up": options.warm_up,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what takes part, where installed."""
    found = {"python": platform.python_version(), "dask-gpuipc": dask_gpuipc.__version__}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# -- command line ---------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="How long one chunk takes from one worker to another, by size and by way.",
        epilog="One JSON object a line on standard output; see the top of this file.",
    )
    add = parser.add_argument
    add("--memory", choices=("host", "cuda"), default="host", help="NumPy (the default) or CuPy")
    add("--mode", nargs="+", choices=MODES, default=["plain", "plugin"],
        help="one cluster for each; default: plain plugin. ucx wants distributed-ucxx")  # fmt: skip
    add("--size", nargs="+", type=size, default=[size(text) for text in SIZES],
        help=f"default: {', '.join(SIZES)}")  # fmt: skip
    add("--rounds", type=int, default=11, help="counted rounds of each size; default: 11")
    add("--warm-up", type=int, default=3, help="rounds before them; default: 3")
    add("--gpu", nargs="+", default=["0"],
        help="CUDA_VISIBLE_DEVICES of both workers, or of each; default: 0")  # fmt: skip
    add("--memory-limit", type=parse_bytes, default=parse_bytes("8 GiB"),
        help="of each worker; default: 8 GiB")  # fmt: skip
    options = parser.parse_args()
    if "ucx" in options.mode and importlib.util.find_spec("distributed_ucxx") is None:
        parser.error("mode ucx wants the package distributed-ucxx")
    if options.rounds < 1 or options.warm_up < 0:
        parser.error("at least one round, and no negative warm-up")
    options.mode = list(dict.fromkeys(options.mode))
    return options


def size(text: str) -> int:
    """Bytes of a chunk, such as ``16 MiB``: whole 64-bit numbers."""
    nbytes = int(parse_bytes(text))
    if nbytes < 8 or nbytes % 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 8 bytes")
    return nbytes


def tell(line: dict[str, Any]) -> None:
    """Print one line for programs, and one for people."""
    print(json.dumps(line), flush=True)
    print(as_row(line), file=sys.stderr, flush=True)


def as_row(line: dict[str, Any]) -> str:
    """One row of the table; the first line becomes its head."""
    match line["kind"]:
        case "environment":
            return f"{'chunk':>10}  {'':<20}" + "".join(f"{name:>14}" for name in TIMES)
        case "measure":
            name, values, unit = line["mode"], [line[f"{name}_ms"] for name in TIMES], "ms"
        case "copy" | "peer":
            name = "one copy" if line["kind"] == "copy" else "memcpyPeer"
            values, unit = [line["copy_ms"]], "ms"
        case _:
            name, values, unit = f"plain / {line['mode']}", [line[name] for name in TIMES], "x"
    cells = "".join(f"{value:>11.2f} {unit:<2}" for value in values)
    handles = f"  {line['by_handle']} by handle" if line.get("by_handle") else ""
    return f"{format_bytes(line['nbytes']):>10}  {name:<20}{cells}{handles}"


def main() -> None:
    """Start the clusters and go through the sizes."""
    options = arguments()
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(cluster(mode, options)) for mode in options.mode]
        tell(environment(sides[0], options))
        for side in sides:
            for address in (side.home, side.away):
                side.client.submit(
                    warm_up, options.memory, max(options.size), workers=[address], pure=False
                ).result()
        for nbytes in options.size:
            for line in measure(sides, nbytes, options):
                tell(line)


if __name__ == "__main__":
    main()
