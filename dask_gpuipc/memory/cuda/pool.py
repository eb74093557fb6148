"""An allocator for CuPy over memory that is exported by file descriptor."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

import cupy

from dask_gpuipc.config import Size, parse_size
from dask_gpuipc.memory.cuda.driver import Code, CudaError, driver
from dask_gpuipc.memory.cuda.virtual import Slab, Virtual

UNIT = 512
"""Bytes to which CuPy's pools round, and align."""


class Pool:
    """Exportable CUDA memory whose importers survive its exporter. Thread-safe.

    ::

        pool = dask_gpuipc.sharing.Pool()
        cupy.cuda.set_allocator(pool.malloc)  # or: with cupy.cuda.using_allocator(pool.malloc)

    CuPy's own pool, over slabs of virtual memory instead of `cudaMalloc`: it keeps what is freed
    for later, and `free_all_blocks` gives slabs that are empty back to the device. Nothing here
    changes CuPy's allocator; that is the application's to do.

    Parameters
    ----------
    slab : int or str
        Bytes of one slab; a larger array gets one of its own. A slab is the unit that importers
        map, so they can read what lies beside an array in it.

    Raises
    ------
    ConfigError
        ``slab`` is no size.
    MemoryUnavailable
        There are no CUDA bindings, no driver or no device.
    """

    def __init__(self, slab: Size = "32 MiB") -> None:
        self._slab = max(UNIT, parse_size("slab", slab))
        self._driver = driver()
        self._lock = threading.Lock()
        self._devices: dict[int, _Slabs] = {}
        self._freed: deque[tuple[int, int]] = deque()
        allocator = cupy.cuda.PythonFunctionAllocator(self._take, self._give)
        self._pool = cupy.cuda.MemoryPool(allocator.malloc)

    def __repr__(self) -> str:
        slabs = [slab for device in self._devices.values() for slab in device.slabs]
        return f"<Pool: {len(slabs)} slabs, {sum(s.nbytes for s in slabs)} bytes>"

    def malloc(self, size: int) -> Any:
        """A ``cupy.cuda.MemoryPointer`` to so many bytes on the current device."""
        return self._pool.malloc(size)

    def free_all_blocks(self) -> None:
        """Give slabs back that nothing lies in; waits for the device."""
        self._pool.free_all_blocks()
        self._settle()

    def used_bytes(self) -> int:
        """Bytes in arrays, on the current device."""
        return int(self._pool.used_bytes())

    def total_bytes(self) -> int:
        """Bytes of all slabs, on every device."""
        return sum(s.nbytes for device in list(self._devices.values()) for s in list(device.slabs))

    def set_limit(self, size: int) -> None:
        """At most so many bytes in arrays and free blocks, on the current device; 0 is no limit."""
        self._pool.set_limit(size=size)

    # -- what CuPy's pool calls -------------------------------------------------------------------

    def _take(self, size: int, ordinal: int) -> int:
        with self._lock:
            device = self._devices.get(ordinal)
            if device is None:
                device = self._devices[ordinal] = _Slabs(self._driver, ordinal, self._slab)
            try:
                pointer = device.take(-(-size // UNIT) * UNIT)
            except CudaError as error:
                if error.code == Code.OUT_OF_MEMORY:
                    # CuPy's pool frees its blocks at this very error, and asks once more.
                    raise cupy.cuda.runtime.CUDARuntimeError(Code.OUT_OF_MEMORY) from error
                raise
        self._settle()
        return pointer

    def _give(self, pointer: int, ordinal: int) -> None:
        # Runs in finalizers too, perhaps of this very thread while it has the lock.
        self._freed.append((pointer, ordinal))
        self._settle()

    def _settle(self) -> None:
        while self._freed and self._lock.acquire(blocking=False):
            try:
                while self._freed:
                    pointer, ordinal = self._freed.popleft()
                    self._devices[ordinal].give(pointer)
            finally:
                self._lock.release()


class _Slabs:
    """The slabs of one device. Guarded by the pool's lock."""

    def __init__(self, driver_: Any, ordinal: int, size: int) -> None:
        self._driver = driver_
        self._ordinal = ordinal
        self._context = driver_.retain(ordinal)
        self._virtual = Virtual(driver_, ordinal)
        with driver_.current(self._context):
            self._granularity = self._virtual.granularity()
        self._size = size
        self.slabs: list[Slab] = []
        self._parts: dict[int, tuple[Slab, int]] = {}

    @property
    def nbytes(self) -> int:
        """Of all slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    def take(self, nbytes: int) -> int:
        """Address of a free part; raises `CudaError`."""
        for slab in self.slabs:
            offset = slab.extents.take(nbytes)
            if offset is not None:
                break
        else:
            slab = self._new(nbytes)
            offset = slab.extents.take(nbytes)
            assert offset is not None
        slab.live += 1
        self._parts[slab.address + offset] = slab, nbytes
        return slab.address + offset

    def _new(self, nbytes: int) -> Slab:
        whole = -(-max(nbytes, self._size) // self._granularity) * self._granularity
        with self._driver.current(self._context):
            slab = Slab(self._virtual, whole)
        self.slabs.append(slab)
        return slab

    def give(self, pointer: int) -> None:
        """Take a part back; the last one takes its slab along. Raises nothing."""
        slab, nbytes = self._parts.pop(pointer)
        slab.extents.give(pointer - slab.address, nbytes)
        slab.live -= 1
        if slab.live:
            return
        # As cudaFree does: what runs on it may go on until it ends. During a capture, at exit and
        # in a forked child it stays, and may be used again.
        with contextlib.suppress(CudaError), self._driver.current(self._context):
            with self._driver.cupy_errors("cudaDeviceSynchronize"):
                cupy.cuda.runtime.deviceSynchronize()
            self.slabs.remove(slab)
            slab.close()
