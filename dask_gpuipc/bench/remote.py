"""What runs on the workers, and in no other process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from distributed import Worker

from dask_gpuipc import probe
from dask_gpuipc.comm import PREPARED
from dask_gpuipc.stats import collecting_arrivals
from dask_gpuipc.worker_plugin import NAME, GPUIPCPlugin

PATIENCE: Final = 60.0
"""Seconds for leases to end."""
BEAT: Final = 0.002
"""Seconds between two looks at the clock of an event loop."""
HELD: Final[list[Any]] = []
"""Chunks that this worker asked for, until `drop`."""


def make(memory: str, nbytes: int, first: int) -> Any:
    """A finished chunk; those of other ``first`` have other bytes."""
    chunk = probe.make(memory, nbytes, first)
    finish(memory)
    return chunk


def total(nbytes: int, first: int) -> int:
    """The sum of such a chunk, modulo 2**64."""
    n = nbytes // 8
    return probe.STEP * (n * first + n * (n - 1) // 2) % 2**64


def finish(memory: str) -> None:
    """Wait for the device."""
    if memory == "cuda":
        importlib.import_module("cupy").cuda.runtime.deviceSynchronize()


def read(chunk: Any, memory: str) -> tuple[int, float, float]:
    """All of a chunk: its sum modulo 2**64, the seconds of it, and what of its copy was left."""
    begin = time.perf_counter()
    finish(memory)
    arrived = time.perf_counter()
    found = int(chunk.sum()) % 2**64  # waits for the device
    return found, time.perf_counter() - arrived, arrived - begin


def read_all(chunks: Sequence[Any]) -> int:
    """The sum of all chunks, modulo 2**64."""
    return sum(int(chunk.sum()) for chunk in chunks) % 2**64


def copy_once(memory: str, nbytes: int) -> float:
    """Median seconds of a copy into a buffer that was written before, in the same memory."""
    source, target = make(memory, nbytes, 0), make(memory, nbytes, 1)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        target[...] = source
        finish(memory)
        times.append(time.perf_counter() - begin)
    return median(times)


def touch(memory: str, nbytes: int) -> None:
    """Have memory that was used before, and loaded what reading a chunk needs."""
    chunks = [make(memory, nbytes, 0) for _ in range(2)]
    read_all(chunks)


def has_key(key: str, dask_worker: Worker) -> bool:
    """Whether a worker has a chunk."""
    return key in dask_worker.data


def transfer_of(key: str, dask_worker: Worker) -> float:
    """Seconds that Dask logged for the transfer of a key to this worker."""
    for entry in reversed(dask_worker.transfer_incoming_log):
        if key in entry["keys"]:
            return float(entry["stop"] - entry["start"])
    raise LookupError(f"{key} did not come from another worker")


def transfers_since(begin: float, dask_worker: Worker) -> float:
    """Seconds of all transfers that Dask logged after a moment of this machine's clock."""
    log = [e for e in dask_worker.transfer_incoming_log if e["start"] >= begin]
    return float(sum(entry["stop"] - entry["start"] for entry in log))


def metered(dask_worker: Worker) -> dict[str, float]:
    """Seconds of the parts of all transfers so far, as Dask's metrics have them."""
    parts = {"readiness": 0.0, "export": 0.0, "import": 0.0}
    for name, seconds in list(dask_worker.digests_total.items()):
        if name == PREPARED:
            parts["readiness"] += seconds
        elif isinstance(name, tuple) and name[-1] == "seconds":
            for part in ("export", "import"):
                if f"gpuipc-{part}" in name:
                    parts[part] += seconds
    return parts


async def ask(key: str, source: str, memory: str, dask_worker: Worker) -> tuple[float, str]:
    """Fetch a chunk as a task's input is, and keep it: seconds until it is there, and its rung."""
    with collecting_arrivals() as arrived:
        begin = time.perf_counter()
        value = await probe.ask(key, source, False, dask_worker)
        finish(memory)
        taken = time.perf_counter() - begin
    if value is None:
        raise LookupError(f"{source} has {key} no more")
    HELD.append(value)
    rungs = [rung for _, rung in arrived]
    return taken, rungs[0] if rungs else "bytes"


async def drop(dask_worker: Worker) -> float:
    """Let go of what was asked for; seconds until nothing of it is held from here."""
    endpoint = endpoint_of(dask_worker)
    begin = time.perf_counter()
    HELD.clear()
    async with asyncio.timeout(PATIENCE):
        while endpoint is not None and endpoint.importer.holding:  # noqa: ASYNC110 -- it is timed
            await asyncio.sleep(0)
    return time.perf_counter() - begin


def forget(memory: str, dask_worker: Worker) -> None:
    """Give back what nobody uses, so that the next chunk lies in an allocation that is new."""
    endpoint = endpoint_of(dask_worker)
    if endpoint is not None:
        endpoint.collect()
    if memory == "cuda":
        importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()


def endpoint_of(worker: Worker) -> Any:
    """The plugin's, where there is one."""
    plugin = worker.plugins.get(NAME)
    return plugin.endpoint if isinstance(plugin, GPUIPCPlugin) else None


def shared_bytes() -> int:
    """Bytes in the arenas of this process."""
    blocks: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            if os.readlink(link).startswith("/memfd:dask-gpuipc"):
                found = link.stat()
                blocks[found.st_ino] = found.st_blocks  # an arena has two descriptors
    return 512 * sum(blocks.values())


async def heartbeat(seconds: float) -> list[float]:
    """How late this event loop was each time that it should have woken."""
    loop, late = asyncio.get_running_loop(), []
    end = loop.time() + seconds
    while (due := loop.time() + BEAT) < end:
        await asyncio.sleep(BEAT)
        late.append(max(0.0, loop.time() - due))
    return late
