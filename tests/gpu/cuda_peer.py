"""A second process for the CUDA tests, and what it can be asked to do.

The functions below run in either process; the peer's `Peer.call` runs them in a spawned one, which
keeps what they return under a name where a name is given.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import threading
import time
import traceback
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any
from unittest import mock

import numpy as np

from dask_gpuipc.config import Settings
from dask_gpuipc.errors import OpenFailed, Refused
from dask_gpuipc.memory.base import Allocation, Rung
from dask_gpuipc.memory.cuda import CudaMemory
from dask_gpuipc.memory.cuda.mappings import BORROWED
from dask_gpuipc.wire import Announce, Layout

SPIN = r"""
extern "C" __global__ void spin(double* out, const double* in, long long n, double add,
                                unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); }
    while (now - start < nanoseconds);
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
         i += (long long)gridDim.x * blockDim.x)
        out[i] = in[i] + add;
}
"""

held: dict[str, Any] = {}


@functools.cache
def memory() -> CudaMemory:
    return CudaMemory(Settings.load())


def stream_of(kind: str) -> Any:
    import cupy

    return {
        "default": lambda: cupy.cuda.Stream.null,
        "per-thread": lambda: cupy.cuda.Stream.ptds,
        "blocking": cupy.cuda.Stream,
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
    }[kind]()


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(SPIN, "spin")


def spin(out: Any, source: Any, seconds: float, add: float, stream: Any) -> None:
    """Start a kernel that waits, and then writes ``out = source + add``."""
    arguments = (out, source, np.int64(out.size), np.float64(add), np.uint64(seconds * 1e9))
    with stream:
        _kernel()((32,), (256,), arguments)


def warm_up() -> None:
    """Compile and run everything once, so that no later time has it in it."""
    import cupy

    x = cupy.zeros(8)
    spin(x, x, 0, 0, cupy.cuda.Stream.null)
    cupy.cuda.runtime.deviceSynchronize()


# -- exporter -----------------------------------------------------------------------------------


def ready(*arrays: Any, devices: Any = None) -> Any:
    """Arrays finished for a peer that opens these devices' handles; None is all."""
    prepared = memory().prepare(arrays, devices)
    asyncio.run(prepared.wait())
    return prepared


def offer(array: Any, prepared: Any = None) -> tuple[Any, Announce]:
    """A pin on an array and the announcement of its allocation."""
    pin = memory().pin(array, prepared or ready(array))
    return pin, announce(pin.allocation)


def announce(allocation: Allocation) -> Announce:
    handle = memory().handle(allocation).payload
    place = ("cuda", allocation.id, allocation.generation)
    return Announce(*place, allocation.nbytes, allocation.device, handle)


def descriptors(pin: Any) -> list[Fd]:
    """Those of a pin's allocation, for a call of the peer."""
    return [Fd(fd) for fd in memory().handle(pin.allocation).fds]


# -- importer -----------------------------------------------------------------------------------


def open_(name: str, announcement: Announce, *fds: int) -> int:
    """Open an allocation; with the `descriptors` of it, if it has any."""
    held[name] = memory().open(announcement, fds)
    return held[name].nbytes


def open_arena(name: str, announcement: Announce, pid: int, fd: int) -> int:
    """Open an arena of another process, whose descriptor is got by way of /proc."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    held[name] = memory().open(announcement, (mine,))
    return held[name].nbytes


def pinned_maps() -> int:
    """Mappings of pinned arenas in this process."""
    with open("/proc/self/maps") as maps:
        return sum("dask-gpuipc-pinned" in line for line in maps)


def collect() -> None:
    memory().collect()


def uuid_of(ordinal: int) -> str:
    """UUID of a device of this process, as the runtime tells it."""
    import uuid

    import cupy

    raw = cupy.cuda.runtime.getDeviceProperties(ordinal)["uuid"]
    return f"GPU-{uuid.UUID(bytes=bytes(np.frombuffer(raw, 'u1')[:16]))}"


def home() -> tuple[str, ...]:
    return memory().devices()


def place(name: str) -> tuple[int, str]:
    """Ordinal and UUID of the device on which an imported array is said to be."""
    ordinal = held[name].array.device.id
    return ordinal, uuid_of(ordinal)


def examine(device: str, nbytes: int, handle: bytes) -> bytes:
    return memory().prover.examine(device, nbytes, handle).result(30)


def active(ordinal: int) -> bool:
    """Whether this process has a primary context on a device."""
    from cuda.bindings import driver as api

    return bool(api.cuDevicePrimaryCtxGetState(api.cuDeviceGet(ordinal)[1])[2])


def load(name: str, mapping: str, layout: Layout, rung: str) -> str:
    held[name] = memory().load(held[mapping], layout, Rung(rung))
    return held[name].rung.value


def look(name: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Bytes of an imported array as the default stream finds them now, and its strides."""
    array = held[name].array
    return array.get(), array.strides


def settle(name: str) -> None:
    held[name].done.result(10)


def write(name: str, value: float) -> None:
    import cupy

    held[name].array[...] = value
    cupy.cuda.runtime.deviceSynchronize()


def drop(*names: str) -> None:
    for name in names:
        del held[name]


def close(*names: str) -> None:
    """Close mappings, and wait until they are."""
    for name in names:
        held.pop(name).close()
    deadline = time.monotonic() + 10
    while len(BORROWED) and time.monotonic() < deadline:
        time.sleep(0.005)


def in_thread(function: Any, *arguments: Any) -> Any:
    """Call a function in a new thread, which has no context."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(function(*arguments)))
    thread.start()
    thread.join()
    return box[0]


def reexport(name: str, step: int) -> tuple[Layout, Announce]:
    """Export a view of an imported array."""
    held["view"] = held[name].array[::step]
    pin, announcement = offer(held["view"])
    held["pin"] = pin
    return pin.layout, announcement


def fence_behind_kernel(name: str, seconds: float) -> tuple[float, float]:
    """Read an import by a long kernel, drop it; times until the fence is there and has passed."""
    import cupy

    out = cupy.empty_like(held[name].array)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    start = time.monotonic()
    spin(out, held.pop(name).array, seconds, 0, stream)
    fence = memory().fence()
    made = time.monotonic() - start
    fence.result(20)
    return made, time.monotonic() - start


def close_behind_kernel(name: str, seconds: float) -> tuple[float, float, float]:
    """Close a mapping during a kernel; times of the call, of a launch after it, of the close."""
    import cupy

    x = cupy.zeros(8)
    cupy.cuda.runtime.deviceSynchronize()
    spin(x, x, seconds, 0, cupy.cuda.Stream(non_blocking=True))
    start = time.monotonic()
    held.pop(name).close()
    called = time.monotonic() - start
    time.sleep(0.05)
    start_launch = time.monotonic()
    cupy.zeros(8)
    launched = time.monotonic() - start_launch
    while len(BORROWED):
        time.sleep(0.005)
    return called, launched, time.monotonic() - start


def load_into_used_block(mapping: str, layout: Layout) -> tuple[bool, float]:
    """Import into a pool block that a kernel of a non-blocking stream still reads.

    Returns whether the block was the same, and the least that the kernel read.
    """
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        old = cupy.full(layout.shape, 7.0)
        seen, later = cupy.empty_like(old), cupy.empty_like(old)
        cupy.cuda.runtime.deviceSynchronize()
        spin(seen, old, 0.5, 0, cupy.cuda.Stream(non_blocking=True))
        address = old.data.ptr
        del old
        imported = memory().load(held[mapping], layout, Rung.COPY)
        same = imported.array.data.ptr == address
        spin(later, imported.array, 0, 0, cupy.cuda.Stream(non_blocking=True))
        cupy.cuda.runtime.deviceSynchronize()
        assert float(later.max()) == 3.0, "a later kernel saw the import half done"
        return same, float(seen.min())


def load_without_room(name: str, mapping: str, layout: Layout) -> str:
    import cupy

    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=512)
    with cupy.cuda.using_allocator(pool.malloc):
        return load(name, mapping, layout, "copy")


def load_during_capture(mapping: str, layout: Layout) -> str:
    import cupy

    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        try:
            memory().load(held[mapping], layout, Rung.COPY)
        except OpenFailed as failed:
            return str(failed)
        finally:
            stream.end_capture()
    return "loaded"


# -- the process ----------------------------------------------------------------------------------


class Fd(int):
    """A descriptor among the arguments of a call: the peer gets one of its own."""


def _serve(pipe: Any) -> None:
    while True:
        message = pipe.recv()
        if message is None:
            return
        function, arguments = message
        arguments = [recv_handle(pipe) if isinstance(a, Fd) else a for a in arguments]
        try:
            answer = (True, function(*arguments))
        except (OpenFailed, Refused) as error:
            answer = (False, (error.reason, str(error)))
        except BaseException:  # noqa: BLE001 -- it is raised again at the other end
            answer = (False, (None, traceback.format_exc()))
        pipe.send(answer)


class Failed(Exception):
    """What the peer raised: its reason, if it has one, and its text."""

    def __init__(self, reason: Any, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Peer:
    """A spawned process that calls functions of this module, in an environment of its own."""

    def __init__(self, **environment: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        theirs.close()

    def call(self, function: Any, *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.finish()

    def start(self, function: Any, *arguments: Any) -> None:
        self._pipe.send((function, arguments))
        for fd in arguments:
            if isinstance(fd, Fd):
                send_handle(self._pipe, fd, None)

    def finish(self) -> Any:
        assert self._pipe.poll(30), "the peer does not answer"
        good, value = self._pipe.recv()
        if not good:
            raise Failed(*value)
        return value

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(20)
        assert self._process.exitcode == 0, f"the peer ended with {self._process.exitcode}"
        self._pipe.close()
        self._process.close()
