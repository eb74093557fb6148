"""The exporter's side: base allocations, what the driver said of them, and pins on them."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from dask_gpuipc.dtypes import encode_dtype
from dask_gpuipc.errors import Refusal, Refused, WireError
from dask_gpuipc.memory.base import Allocation, Handle, Pin
from dask_gpuipc.memory.cuda.copying import dense_strides
from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import CudaError
from dask_gpuipc.memory.cuda.virtual import SLABS, Slab, Virtual
from dask_gpuipc.wire import Layout

MAX_KNOWN: Final = 1024
"""Allocations remembered without a pin on them."""
LOOKS: Final = 32
"""Allocations that one `Allocations.trim` asks after; about 5 us each."""


@dataclass(eq=False, slots=True)
class _Base:
    """What is known of one base allocation: asked once, true while its generation is."""

    device: Device
    address: int
    allocation: Allocation
    exportable: bool
    slab: Slab | None = None
    """Of `pool.Pool`; its handle is a descriptor."""
    fd: int | None = None
    """Of virtual memory that somebody else made; closed with what is known of it."""
    handle: Handle | None = None
    """None also means that no peer knows of it."""
    pins: int = 0

    def freed(self) -> bool:
        """Whether its memory was given back to the driver."""
        if self.slab is not None:
            return self.slab.closed
        driver = self.device.driver
        try:
            with self.device.current():
                return driver.buffer_id(self.address) != self.allocation.generation
        except CudaError:
            return not driver.unusable()


class Allocations:
    """The base allocations that arrays were exported from. Thread-safe; its lock is a leaf.

    An allocation's id belongs to its address; the driver's buffer id, asked for at each pin, is its
    generation. Nothing tells when one is freed, so those without a pin are asked after, in turn:
    a consumer's mapping keeps freed memory from the device until it learns of it.
    """

    def __init__(self, limit: int = MAX_KNOWN, ids: Iterator[int] | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._bases: OrderedDict[int, _Base] = OrderedDict()  # by address: CUDA has one space
        self._addresses: dict[int, int] = {}  # by id
        self._gone: list[Allocation] = []
        self._ids = itertools.count(1) if ids is None else ids

    def __len__(self) -> int:
        return len(self._bases)

    def pin(self, device: Device, array: Any) -> Pin:
        """Find the allocation of an array, and hold its bytes in place.

        Raises
        ------
        Refused
            The array has no bytes, or its memory has no handle.
        CudaError
            The driver knows nothing of its memory.
        """
        layout, low, high = _layout(array)
        base = self._find(device, low)
        address, nbytes = base.address, base.allocation.nbytes
        if not base.exportable:
            self._unpin(base)
            raise Refused(
                Refusal.NOT_EXPORTABLE,
                f"{nbytes} bytes at {address:#x} have no handle (managed or stream-ordered memory, "
                "or virtual memory made without one)",
            )
        if high > address + nbytes:
            self._unpin(base)
            raise Refused(
                Refusal.NOT_EXPORTABLE,
                f"the array ends {high - address - nbytes} bytes behind its allocation",
            )
        hold = _Hold(self, base, array)
        return Pin(
            base.allocation,
            replace(layout, offset=layout.offset - address),
            high - low,
            hold.release,
        )

    def exportable(self, device: Device, array: Any) -> bool:
        """Whether the allocation below an array has a handle, and all of the array in it.

        Raises
        ------
        CudaError
            The driver makes no calls any more, or a graph capture is in the way.
        """
        try:
            _, low, high = _layout(array)
        except Refused:
            return True  # what `pin` says of it is said there
        try:
            base = self._find(device, low)
        except CudaError as error:
            if error.capturing or device.driver.unusable():
                raise
            return False  # memory of which the driver knows nothing
        self._unpin(base)
        return base.exportable and high <= base.address + base.allocation.nbytes

    def _find(self, device: Device, pointer: int) -> _Base:
        """The base below a pointer, pinned once more."""
        slab = SLABS.find(pointer)
        if slab is not None:
            place = (slab.address, slab.generation, slab.nbytes)
            return self._known(*place) or self._learn(device, *place, True, slab)
        with device.current():
            address, nbytes = device.driver.address_range(pointer)
            generation = device.driver.buffer_id(address)
            base = self._known(address, generation, nbytes)
            if base is None:
                fd = None
                exportable = device.driver.exportable(address)
                if not exportable:
                    fd = _descriptor(device, address, nbytes)
                    exportable = fd is not None
                base = self._learn(device, address, generation, nbytes, exportable, fd=fd)
        return base

    def handle(self, allocation: Allocation) -> Handle:
        """The handle of an allocation that is pinned now; raises `Refused`, `CudaError`."""
        with self._lock:
            base = self._bases.get(self._addresses.get(allocation.id, 0))
        if base is None or base.allocation != allocation:
            raise Refused(Refusal.NOT_EXPORTABLE, f"{allocation} is not pinned here")
        fd = base.fd if base.slab is None else base.slab.fd
        if base.handle is None and fd is not None:
            base.handle = Handle(fds=(fd,))
        elif base.handle is None:
            with base.device.current():
                base.handle = Handle(base.device.driver.get_handle(base.address))
        return base.handle

    def trim(self, looks: int = LOOKS) -> list[Allocation]:
        """Look for freed allocations among so many; return what is gone or was forgotten."""
        with self._lock:
            idle = (base for base in self._bases.values() if not base.pins)
            asked = list(itertools.islice(idle, looks))
            for base in asked:
                self._bases.move_to_end(base.address)
        freed = [base for base in asked if base.freed()]
        with self._lock:
            for base in freed:
                if not base.pins and self._bases.get(base.address) is base:
                    self._drop(base)
            gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """Forget all that nobody has pinned, and close their descriptors."""
        with self._lock:
            for base in [base for base in self._bases.values() if not base.pins]:
                self._drop(base)

    def _known(self, address: int, generation: int, nbytes: int) -> _Base | None:
        """The base, pinned once more, if it is still the same."""
        with self._lock:
            base = self._bases.get(address)
            if base is None or (base.allocation.generation, base.allocation.nbytes) != (
                generation,
                nbytes,
            ):
                return None
            self._bases.move_to_end(address)
            base.pins += 1
            return base

    def _learn(
        self,
        device: Device,
        address: int,
        generation: int,
        nbytes: int,
        exportable: bool,
        slab: Slab | None = None,
        fd: int | None = None,
    ) -> _Base:
        """A base new here, or new at its address; pinned once."""
        with self._lock:
            known = self._bases.get(address)
            number = next(self._ids) if known is None else known.allocation.id
            allocation = Allocation(number, generation, nbytes, device.uuid)
            if known is not None and known.allocation == allocation:
                known.pins += 1
                if fd is not None:
                    os.close(fd)
                return known  # another thread was quicker
            if known is not None:
                self._drop(known)
            base = _Base(device, address, allocation, exportable, slab, fd, pins=1)
            self._bases[address] = base
            self._addresses[number] = address
            self._forget(len(self._bases) - self._limit)
            return base

    def _forget(self, surplus: int) -> None:
        if surplus > 0:
            idle = (base for base in self._bases.values() if not base.pins)
            for base in list(itertools.islice(idle, surplus)):
                self._drop(base)

    def _drop(self, base: _Base) -> None:
        del self._bases[base.address], self._addresses[base.allocation.id]
        if base.handle is not None:
            self._gone.append(base.allocation)
        if base.fd is not None:
            os.close(base.fd)

    def _unpin(self, base: _Base) -> None:
        with self._lock:
            base.pins -= 1


class _Hold:
    """What a pin holds: the array, and its base's place in the memory's knowledge."""

    __slots__ = ("_allocations", "_array", "_base")

    def __init__(self, allocations: Allocations, base: _Base, array: Any) -> None:
        self._allocations = allocations
        self._base = base
        self._array = array

    def release(self) -> None:
        if self._array is not None:
            self._array = None
            self._allocations._unpin(self._base)


def _descriptor(device: Device, address: int, nbytes: int) -> int | None:
    """Of virtual memory, if it has one. Context current."""
    try:
        return Virtual(device.driver, device.ordinal).export_range(address, nbytes)
    except CudaError as error:
        if error.capturing or device.driver.unusable():
            raise
        return None


def dense_layout(array: Any) -> Layout:
    """The layout of an array's contiguous copy, whose first byte has the offset zero."""
    strides = dense_strides(array.shape, array.strides, array.itemsize)
    return Layout(0, encode_dtype(array.dtype), array.itemsize, tuple(array.shape), strides)


def _layout(array: Any) -> tuple[Layout, int, int]:
    """The layout of an array with its address for an offset, and its first and last address."""
    layout = Layout(
        array.data.ptr,
        encode_dtype(array.dtype),
        array.itemsize,
        tuple(array.shape),
        tuple(array.strides),
    )
    try:
        return layout, *layout.extent()
    except WireError as error:
        raise Refused(Refusal.TOO_SMALL, str(error)) from error
