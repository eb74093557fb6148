"""CuPy arrays in memory of every allocator that tests and the table of rungs know.

An allocator is made once for each process and kept, with what it stands on: it must outlive its
arrays. Nothing here changes what the process allocates by otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

HANDLE, NONE = "handle", "none"
KINDS = {
    "cupy pool": HANDLE,
    "cupy no pool": HANDLE,
    "cupy managed": NONE,
    "cupy async": NONE,
    "cupy async pool": NONE,
    "rmm cuda": HANDLE,
    "rmm pool": HANDLE,
    "rmm arena": HANDLE,
    "rmm pool, statistics adaptor": HANDLE,
    "rmm async": NONE,
    "rmm managed": NONE,
    "rmm pool of managed": NONE,
    "cuda.core device": NONE,
    "cuda.core device, ipc": NONE,
    "cuda.core virtual": HANDLE,
}
"""What is known of the memory of each: whether it has handles."""
POOL = 64 << 20


def missing(name: str) -> str | None:
    """The package that an allocator wants and that is not installed."""
    package = {"rmm": "rmm", "cuda.core": "cuda.core"}.get(name.split()[0], "cupy")
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(package) is not None:
            return None
    return package


@functools.cache
def unavailable(name: str) -> str | None:
    """Why arrays cannot be had from an allocator in this process; None if they can."""
    package = missing(name)
    if package is not None:
        return f"{package} is not installed"
    try:
        allocator(name)(1 << 20)
    except Exception as error:  # noqa: BLE001 -- each library has its own
        return f"{type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within, CuPy allocates by this, in this thread."""
    import cupy

    with cupy.cuda.using_allocator(allocator(name)):
        yield


@functools.cache
def allocator(name: str) -> Callable[[int], Any]:
    """A function that takes bytes and gives a ``cupy.cuda.MemoryPointer``."""
    family = name.split()[0]
    return {"cupy": _cupy, "rmm": _rmm, "cuda.core": _core}[family](name)


def _cupy(name: str) -> Callable[[int], Any]:
    import cupy

    return {
        "cupy pool": lambda: cupy.cuda.MemoryPool().malloc,
        "cupy no pool": lambda: lambda n: cupy.cuda.MemoryPointer(cupy.cuda.Memory(n), 0),
        "cupy managed": lambda: cupy.cuda.malloc_managed,
        "cupy async": lambda: cupy.cuda.malloc_async,
        "cupy async pool": lambda: cupy.cuda.MemoryAsyncPool().malloc,
    }[name]()


def _rmm(name: str) -> Callable[[int], Any]:
    import cupy
    import rmm.mr as mr
    from rmm import DeviceBuffer
    from rmm.pylibrmm.stream import Stream

    made = {
        "rmm cuda": lambda: mr.CudaMemoryResource(),
        "rmm pool": lambda: mr.PoolMemoryResource(mr.CudaMemoryResource(), POOL),
        "rmm arena": lambda: mr.ArenaMemoryResource(mr.CudaMemoryResource(), POOL),
        "rmm pool, statistics adaptor": lambda: mr.StatisticsResourceAdaptor(
            mr.PoolMemoryResource(mr.CudaMemoryResource(), POOL)
        ),
        "rmm async": lambda: mr.CudaAsyncMemoryResource(),
        "rmm managed": lambda: mr.ManagedMemoryResource(),
        "rmm pool of managed": lambda: mr.PoolMemoryResource(mr.ManagedMemoryResource(), POOL),
    }[name]()

    def allocate(nbytes: int) -> Any:
        # What rmm.allocators.cupy does, with this resource instead of the current one.
        stream = Stream(obj=cupy.cuda.get_current_stream())
        buffer = DeviceBuffer(size=nbytes, stream=stream, mr=made)
        return _unowned(buffer.ptr, nbytes, buffer)

    return allocate


def _core(name: str) -> Callable[[int], Any]:
    from cuda.core import (
        Device,
        DeviceMemoryResource,
        DeviceMemoryResourceOptions,
        VirtualMemoryResource,
    )

    device = Device()
    device.set_current()
    stream = device.create_stream()
    made = {
        "cuda.core device": lambda: DeviceMemoryResource(device),
        "cuda.core device, ipc": lambda: DeviceMemoryResource(
            device, DeviceMemoryResourceOptions(ipc_enabled=True, max_size=POOL)
        ),
        "cuda.core virtual": lambda: VirtualMemoryResource(device),
    }[name]()

    def allocate(nbytes: int) -> Any:
        buffer = made.allocate(nbytes, stream=stream)
        stream.sync()
        return _unowned(int(buffer.handle), nbytes, buffer)

    return allocate


def _unowned(pointer: int, nbytes: int, owner: Any) -> Any:
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner, ordinal)
    return cupy.cuda.MemoryPointer(memory, 0)
