"""Device memory with a file descriptor: made by `cuMemCreate`, opened by `cuMemImport...`.

The driver promises of such memory that it is freed "when all outstanding mappings to the memory are
unmapped and when all outstanding references to the handle (including its shareable counterparts)
are also released" (`cuMemRelease`): an importer survives its exporter, whatever order they end in.
And a mapping can be for reading only.

A *slab* is one such allocation with its descriptor; `pool` hands out parts of it. What others made
is exported too, where it can be.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
import threading
from typing import Any, Final

from dask_gpuipc.errors import Failure, OpenFailed
from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import CudaError, Driver, as_open_failed
from dask_gpuipc.memory.cuda.mappings import BORROWED, CudaMapping
from dask_gpuipc.memory.extents import Extents
from dask_gpuipc.wire import Announce

logger = logging.getLogger("distributed.gpuipc")


class Virtual:
    """The driver's calls for virtual memory on one device. Thread-safe; context current."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._call = driver._call
        self._api = api = driver._api
        self._fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self._fd_type
        self._location = api.CUmemLocation()
        self._location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = ordinal
        self._properties.location = self._location

    def granularity(self) -> int:
        """Sizes are multiples of so many bytes (`cuMemGetAllocationGranularity`)."""
        recommended = (
            self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        )
        return int(self._call("cuMemGetAllocationGranularity", self._properties, recommended))

    def create(self, nbytes: int) -> Any:
        """Physical memory (`cuMemCreate`)."""
        return self._call("cuMemCreate", nbytes, self._properties, 0)

    def export(self, handle: Any) -> int:
        """A descriptor of it, close-on-exec (`cuMemExportToShareableHandle`)."""
        fd = int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))
        os.set_inheritable(fd, False)
        return fd

    def export_range(self, address: int, nbytes: int) -> int | None:
        """A descriptor of mapped memory, whoever made it; None if it has none that covers it all.

        It has one where its maker asked for that (`CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES`), and
        where the range is one piece of physical memory (`cuMemRetainAllocationHandle`).
        """
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        if not int(self._call("cuPointerGetAttribute", attribute, address)) & self._fd_type.value:
            return None
        first = self._call("cuMemRetainAllocationHandle", address)
        try:
            last = self._call("cuMemRetainAllocationHandle", address + nbytes - 1)
            self.release(last)
            return self.export(first) if int(first) == int(last) else None
        finally:
            self.release(first)

    def import_(self, fd: int) -> Any:
        """Physical memory by its descriptor (`cuMemImportFromShareableHandle`)."""
        return self._call("cuMemImportFromShareableHandle", fd, self._fd_type)

    def map(self, handle: Any, nbytes: int, *, writeable: bool = True) -> int:
        """Address of physical memory, mapped for this device. Undone by `unmap`."""
        address = int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, nbytes, [self._access(writeable)], 1)
            except CudaError:
                self._call("cuMemUnmap", address, nbytes)
                raise
        except CudaError:
            with contextlib.suppress(CudaError):
                self._call("cuMemAddressFree", address, nbytes)
            raise
        return address

    def _access(self, writeable: bool) -> Any:
        flags = self._api.CUmemAccess_flags
        access = self._api.CUmemAccessDesc()
        access.location = self._location
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writeable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        return access

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`; nothing may be running on it."""
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemAddressFree", address, nbytes)

    def release(self, handle: Any) -> None:
        """Let go of physical memory (`cuMemRelease`); mappings keep it."""
        self._call("cuMemRelease", handle)


# -- exporter -------------------------------------------------------------------------------------

_numbers = itertools.count(1)


class Slab:
    """One allocation with a descriptor. Its extents belong to the pool that made it.

    Raises
    ------
    CudaError
        With OUT_OF_MEMORY where there is no room.
    """

    def __init__(self, virtual: Virtual, nbytes: int) -> None:
        self.nbytes = nbytes
        self.generation = -next(_numbers)  # below zero: the driver's own buffer ids are above
        self.extents = Extents(nbytes)
        self.live = 0
        self.closed = False
        self._virtual = virtual
        handle = virtual.create(nbytes)
        try:
            self.fd = virtual.export(handle)
            try:
                self.address = virtual.map(handle, nbytes)
            except CudaError:
                os.close(self.fd)
                raise
        finally:
            virtual.release(handle)  # the mapping and the descriptor hold it
        SLABS.add(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.live} parts in use"
        return f"<Slab: {self.nbytes} bytes at {self.address:#x}, {state}>"

    def close(self) -> None:
        """Unmap it; importers keep what they have. Context current, and the device idle."""
        self.closed = True
        SLABS.remove(self)
        os.close(self.fd)
        self._virtual.unmap(self.address, self.nbytes)


class Slabs:
    """The slabs of this process by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._slabs: dict[int, Slab] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, slab: Slab) -> None:
        """It was mapped."""
        with self._lock:
            bisect.insort(self._starts, slab.address)
            self._slabs[slab.address] = slab

    def remove(self, slab: Slab) -> None:
        """It is about to be unmapped."""
        with self._lock:
            self._starts.remove(slab.address)
            del self._slabs[slab.address]

    def find(self, pointer: int) -> Slab | None:
        """The slab that a pointer lies in."""
        with self._lock:
            at = bisect.bisect_right(self._starts, pointer) - 1
            slab = self._slabs[self._starts[at]] if at >= 0 else None
        return slab if slab is not None and pointer < slab.address + slab.nbytes else None


SLABS: Final = Slabs()


# -- importer -------------------------------------------------------------------------------------


class VirtualMapping(CudaMapping):
    """Another process's slab, mapped here; a second time for reading only, when that is asked."""

    __slots__ = ("_handle", "_readonly", "_virtual")

    def __init__(
        self, device: Device, virtual: Virtual, handle: Any, pointer: int, nbytes: int
    ) -> None:
        super().__init__(device, pointer, nbytes)
        self._virtual = virtual
        self._handle = handle
        self._readonly = 0

    def address(self, *, writeable: bool) -> int:
        """Where it is mapped for an array; raises `CudaError`."""
        if writeable:
            return self.pointer
        with self._lock:
            if not self._readonly:
                with self.device.current():
                    self._readonly = self._virtual.map(self._handle, self.nbytes, writeable=False)
                BORROWED.add(self._readonly, self.nbytes)
            return self._readonly

    def _give_back(self) -> None:
        if self._readonly:
            BORROWED.remove(self._readonly)
            self._virtual.unmap(self._readonly, self.nbytes)
        self._virtual.unmap(self.pointer, self.nbytes)
        self._virtual.release(self._handle)


def open_virtual(device: Device, announcement: Announce, fd: int) -> VirtualMapping:
    """Map an announced slab on a device. The descriptor stays the caller's.

    Raises
    ------
    OpenFailed
        The driver does not know it, or it is smaller than announced.
    """
    nbytes = announcement.nbytes
    virtual = Virtual(device.driver, device.ordinal)
    try:
        with device.driver.cupy_errors("import cupy"):
            import cupy  # noqa: F401 -- here, on the opening thread, rather than on the loop
        with device.current():
            handle = virtual.import_(fd)
            try:
                pointer = virtual.map(handle, nbytes)  # refused where the slab is smaller
            except CudaError:
                virtual.release(handle)
                raise
            device.imports = True
    except CudaError as error:
        raise as_open_failed(error, Failure.OPEN_FAILED) from error
    return VirtualMapping(device, virtual, handle, pointer, nbytes)


def one_descriptor(fds: Any) -> int:
    """The only one of an announcement; `OpenFailed` where there are others."""
    if len(fds) != 1:
        raise OpenFailed(Failure.OPEN_FAILED, f"1 descriptor wanted, got {len(fds)}")
    fd: int = fds[0]
    return fd
