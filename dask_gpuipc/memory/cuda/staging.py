"""Device memory of this package's own, which has handles: the rung ``stage``.

A pool of CuPy's over plain ``cudaMalloc``, one for each device, whatever allocator the application
uses. Blocks go back to it when the last lease on what lies in them ends, and to the device when
nothing was staged for a while: freeing waits for the device, so it happens in an idle moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import CudaError

logger = logging.getLogger("distributed.gpuipc")

IDLE: Final = 5.0
"""Seconds without staging after which free blocks are given back."""


class Stage:
    """The pool of one device. Thread-safe.

    Parameters
    ----------
    device : Device
    limit : int or None
        Bytes of the pool, at most.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self, device: Device, limit: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._pool: Any = None
        self._last_use = 0.0
        self._dirty = False
        """Whether blocks were taken since it was emptied last."""

    def __repr__(self) -> str:
        state = "empty" if not self._dirty else "in use or lately"
        return f"<Stage of {self._device!r}: {state}>"

    def allocate(self, nbytes: int) -> Any:
        """A ``cupy.cuda.MemoryPointer`` to so many bytes. Context and a stream current."""
        with self._lock:
            if self._pool is None:
                import cupy

                self._pool = cupy.cuda.MemoryPool()  # over cudaMalloc, not the current allocator
                if self._limit is not None:
                    self._pool.set_limit(size=self._limit)
            self._last_use = self._clock()
            self._dirty = True
        return self._pool.malloc(nbytes)

    def trim(self, idle: float = IDLE) -> None:
        """Give free blocks back, some time soon, if nothing was staged for so many seconds."""
        with self._lock:
            if not self._dirty or self._clock() - self._last_use < idle:
                return
            self._dirty = False
        self._device.closer.submit(self._empty)

    def _empty(self) -> None:
        device = self._device
        try:
            device.wait_idle()
            with device.current(), device.driver.cupy_errors("cudaFree"):
                self._pool.free_all_blocks()
                kept = self._pool.total_bytes()  # of the current device
        except CudaError as error:
            logger.debug("%r keeps its blocks: %s", self, error)
            return
        if kept:  # some are in use: they are freed by and by
            with self._lock:
                self._dirty = True
