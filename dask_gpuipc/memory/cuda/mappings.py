"""The importer's side: other processes' allocations, opened here, and arrays in them."""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
from typing import Any, Final

from dask_gpuipc.errors import Failure, OpenFailed
from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import HANDLE_BYTES, Code, CudaError, as_open_failed
from dask_gpuipc.wire import Announce, Layout

logger = logging.getLogger("distributed.gpuipc")

_opening = threading.Lock()
"""Two threads that open one handle at once may both fail (openucx/ucx#6560)."""


_REASONS: Final[dict[int, Failure]] = {
    Code.INVALID_VALUE: Failure.STALE,
    Code.ALREADY_MAPPED: Failure.BUSY,
}


class Borrowed:
    """The address ranges in which this process has other processes' memory. Thread-safe.

    An array in one of them must not be exported: its handle would be another process's to give, and
    its lease ends when ours does. Kept for the process, not for an endpoint, since an array that
    came in by one endpoint may go out by another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, nbytes: int) -> None:
        """A mapping was opened; a handle opened twice has one address, and counts twice."""
        with self._lock:
            stop, count = self._ranges.get(start, (0, 0))
            if not count:
                bisect.insort(self._starts, start)
            self._ranges[start] = (max(stop, start + nbytes), count + 1)

    def remove(self, start: int) -> None:
        """A mapping is about to be closed."""
        with self._lock:
            stop, count = self._ranges.pop(start)
            if count > 1:
                self._ranges[start] = (stop, count - 1)
            else:
                self._starts.remove(start)

    def __contains__(self, pointer: int) -> bool:
        with self._lock:
            at = bisect.bisect_right(self._starts, pointer) - 1
            return at >= 0 and pointer < self._ranges[self._starts[at]][0]


BORROWED: Final = Borrowed()


class CudaMapping:
    """An allocation of another process, opened in this one. Thread-safe.

    Parameters
    ----------
    device : Device
        In whose context it is open.
    pointer : int
        Address of its first byte here.
    nbytes : int
        Its size, as announced and checked.
    """

    __slots__ = ("__weakref__", "_lock", "_open", "device", "nbytes", "pointer")

    def __init__(self, device: Device, pointer: int, nbytes: int) -> None:
        self.device = device
        self.pointer = pointer
        self.nbytes = nbytes
        self._open = True
        self._lock = threading.Lock()
        BORROWED.add(pointer, nbytes)

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<CudaMapping: {self.nbytes} bytes at {self.pointer:#x}, {state}>"

    def address(self, *, writeable: bool) -> int:
        """Where it is mapped for an array; legacy memory can always be written."""
        return self.pointer

    def close(self) -> None:
        """Have it closed by the device's closing thread, which may take seconds. Idempotent.

        Not by the caller's: opens wait in line there, and must not wait for an idle moment.
        """
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self.device.closer.submit(self._close)

    def _close(self) -> None:
        """Undo the open, when the context is idle."""
        try:
            self.device.wait_idle()
            BORROWED.remove(self.pointer)
            with self.device.current():
                self._give_back()
        except CudaError as error:
            logger.debug("%r was left open: %s", self, error)

    def _give_back(self) -> None:
        """`cuIpcCloseMemHandle`. Context current."""
        self.device.driver.close_handle(self.pointer)


def open_mapping(device: Device, announcement: Announce) -> CudaMapping:
    """Open an announced allocation on its device (`cuIpcOpenMemHandle`).

    Creates the device's context if this process has none yet.

    Raises
    ------
    OpenFailed
        STALE where its owner has freed it; BUSY where it lies at the address of an earlier
        allocation whose mapping has not been closed yet; OPEN_FAILED for all else that the driver
        says.
    """
    if len(announcement.handle) != HANDLE_BYTES or announcement.nbytes <= 0:
        raise OpenFailed(
            Failure.MALFORMED,
            f"handle of {len(announcement.handle)} bytes for {announcement.nbytes} bytes; "
            f"a CUDA handle has {HANDLE_BYTES}",
        )
    try:
        with device.driver.cupy_errors("import cupy"):
            import cupy  # noqa: F401 -- here, on the opening thread, rather than on the loop
        with device.current(), _opening:
            pointer = device.driver.open_handle(announcement.handle)
            device.imports = True
            base, size = _range_or_close(device, pointer)
    except CudaError as error:
        raise as_open_failed(error, _REASONS.get(error.code, Failure.OPEN_FAILED)) from error
    mapping = CudaMapping(device, pointer, announcement.nbytes)
    if pointer + announcement.nbytes > base + size:
        mapping.close()
        raise OpenFailed(
            Failure.OPEN_FAILED,
            f"the handle maps {base + size - pointer} bytes; {announcement.nbytes} were announced",
        )
    return mapping


def _range_or_close(device: Device, pointer: int) -> tuple[int, int]:
    try:
        return device.driver.address_range(pointer)
    except CudaError:
        with contextlib.suppress(CudaError):
            device.driver.close_handle(pointer)
        raise


class Loan:
    """The root owner of an array in a mapping; every view of the array keeps it.

    It holds the mapping, and its death is what ends the lease.
    """

    __slots__ = ("__weakref__", "mapping")

    def __init__(self, mapping: CudaMapping) -> None:
        self.mapping = mapping


def array_in(mapping: CudaMapping, layout: Layout, dtype: Any, owner: Loan) -> Any:
    """The ``cupy.ndarray`` of a layout in a mapping, strides and all.

    Calls no CUDA function, but for the first read-only array in a slab; that may be a `CudaError`.
    """
    import cupy

    address = mapping.address(writeable=layout.writeable)
    # The device is named: asked for the pointer's, CuPy would get the exporter's.
    memory = cupy.cuda.UnownedMemory(address, mapping.nbytes, owner, mapping.device.ordinal)
    start = cupy.cuda.MemoryPointer(memory, layout.offset)
    return cupy.ndarray(layout.shape, dtype, start, layout.strides)
