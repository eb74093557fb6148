"""Pinned host memory that two processes have: the rung ``host``.

The way between two GPUs of which one cannot open the other's handles. The exporter copies an array
down into an arena, a memfd that is registered with CUDA on both sides, before it offers it; the
importer copies it up, asynchronously, and releases it when that is done. Arenas are recycled, since
registering one takes a fraction of a millisecond for each MiB: they are kept for a while on both
sides, and the importer hears of a new one before anything was copied into it.

A slot goes back to its arena when its last reference dies: a pin, a preparation, or a copy that is
still under way.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from dask_gpuipc.errors import Failure, OpenFailed, Refusal, Refused
from dask_gpuipc.memory.base import Allocation, Handle
from dask_gpuipc.memory.cuda.copying import Allocate, dense_strides, private_copy, same_place
from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import CudaError, as_open_failed
from dask_gpuipc.memory.cuda.threads import DaemonExecutor
from dask_gpuipc.memory.extents import Extents
from dask_gpuipc.wire import Announce

logger = logging.getLogger("distributed.gpuipc")

GRAIN: Final = 64 << 20
"""Arenas are multiples of this, in bytes."""
ALIGNMENT: Final = 4096
IDLE: Final = 30.0
"""Seconds for which an arena, or a mapping of one, is kept without use."""
LOOK: Final = 0.05
"""Seconds between two looks at whether the last slots are free."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


class Pages:
    """A mapped memfd, pinned once it was asked to be. Thread-safe.

    Parameters
    ----------
    fd : int
        Of the memfd; it stays the caller's.
    nbytes : int
    device : Device
        In whose context it is registered, for all contexts of this process.
    """

    def __init__(self, fd: int, nbytes: int, device: Device) -> None:
        self.nbytes = nbytes
        self._device = device
        self._lock = threading.Lock()
        self._pinned = False
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def pin(self) -> None:
        """Register the pages with CUDA. Slow the first time; raises `CudaError`."""
        with self._lock:
            if not self._pinned:
                with self._device.current():
                    self._device.driver.register(self.address, self.nbytes)
                self._pinned = True

    def close(self) -> None:
        """Have it unpinned and unmapped by the device's closing thread."""
        self._device.closer.submit(self._close)

    def _close(self) -> None:
        try:
            with self._lock:
                if self._pinned:
                    self._device.wait_idle()
                    with self._device.current():
                        self._device.driver.unregister(self.address)
        except CudaError as error:
            logger.debug("%d bytes of host memory stay pinned: %s", self.nbytes, error)
            return
        self._map.close()


# -- exporter -------------------------------------------------------------------------------------


class Arena:
    """One memfd, its pages and its free extents. Guarded by its `HostBlocks`."""

    def __init__(self, number: int, size: int, device: Device) -> None:
        self.allocation = Allocation(number, 0, size)
        self.extents = Extents(size)
        self.live = 0
        self.returned: deque[tuple[int, int]] = deque()
        """Extents that slots gave back; appended to without a lock."""
        self.fd = os.memfd_create("dask-gpuipc-pinned", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.pages = Pages(self.fd, size, device)
        except BaseException:
            os.close(self.fd)
            raise

    def fill(self) -> None:
        """Have the kernel provide and CUDA pin all pages. Raises `OSError` and `CudaError`."""
        os.posix_fallocate(self.fd, 0, self.allocation.nbytes)  # or it fails with a bus error
        self.pages.pin()

    def take(self, nbytes: int) -> int | None:
        """Offset of a free extent, which is taken; None if there is none."""
        while self.returned:
            self.extents.give(*self.returned.popleft())
            self.live -= 1
        offset = self.extents.take(nbytes)
        self.live += offset is not None
        return offset

    @property
    def free(self) -> bool:
        """Whether no slot of it lives."""
        return len(self.returned) == self.live

    def close(self) -> None:
        """Close the memfd; the pages follow on the device's closing thread."""
        os.close(self.fd)
        self.pages.close()


class Slot:
    """A piece of an arena, until its last reference dies."""

    __slots__ = ("__weakref__", "_room", "arena", "offset")

    def __init__(self, arena: Arena, offset: int, room: int) -> None:
        self.arena = arena
        self.offset = offset
        self._room = room

    @property
    def address(self) -> int:
        """In this process."""
        return self.arena.pages.address + self.offset

    def __del__(self) -> None:
        self.arena.returned.append((self.offset, self._room))  # atomic, and takes no lock


class HostBlocks:
    """The arenas of one exporter. Thread-safe.

    Parameters
    ----------
    ids : iterator of int
        Numbers the arenas.
    limit : int or None
        Bytes of all arenas, at most.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        ids: Iterator[int],
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ids = ids
        self._limit = limit
        self._clock = clock
        self._thread = DaemonExecutor("gpuipc-cuda-host")
        self._lock = threading.Lock()
        self._arenas: dict[int, Arena] = {}
        self._gone: list[Allocation] = []
        self._last_use = 0.0

    def __repr__(self) -> str:
        return f"<HostBlocks: {len(self._arenas)} arenas>"

    def take(self, nbytes: int, device: Device) -> Slot:
        """A slot of so many bytes. Does not wait; raises `Refused`."""
        room = _up(nbytes, ALIGNMENT)
        with self._lock:
            self._last_use = self._clock()
            for arena in self._arenas.values():
                offset = arena.take(room)
                if offset is not None:
                    return Slot(arena, offset, room)
            arena = self._new(_up(room, GRAIN), device)
            offset = arena.take(room)
            assert offset is not None
            return Slot(arena, offset, room)

    def _new(self, size: int, device: Device) -> Arena:
        if not self._fits(size):
            self._drop_free()
        if not self._fits(size):
            held = sum(a.allocation.nbytes for a in self._arenas.values())
            raise Refused(
                Refusal.NO_MEMORY,
                f"{size} bytes of pinned host memory beside {held}; at most {self._limit} "
                "(gpuipc.cuda.host-limit)",
            )
        try:
            arena = Arena(next(self._ids), size, device)
        except (OSError, ValueError) as error:
            raise Refused(Refusal.NO_MEMORY, f"an arena of {size} bytes: {error}") from error
        self._arenas[arena.allocation.id] = arena
        return arena

    def _fits(self, size: int) -> bool:
        held = sum(arena.allocation.nbytes for arena in self._arenas.values())
        return self._limit is None or held + size <= self._limit

    def _drop_free(self) -> None:
        for number, arena in list(self._arenas.items()):
            if arena.free:
                del self._arenas[number]
                self._gone.append(arena.allocation)
                arena.close()

    def fill(
        self, slot: Slot, device: Device, array: Any, allocate: Allocate
    ) -> Future[Future[None]]:
        """Copy a finished array into a slot, dense: begun on a thread, then waited for.

        The first future fails with `CudaError` or `OSError`; the second does not fail.
        """
        return self._thread.submit(_fill, slot, device, array, allocate)

    def handle(self, allocation: Allocation) -> Handle:
        """The arena's descriptor; raises `Refused`."""
        with self._lock:
            arena = self._arenas.get(allocation.id)
            if arena is None or arena.allocation != allocation:
                raise Refused(Refusal.NO_MEMORY, f"arena {allocation.id} is closed")
            return Handle(fds=(arena.fd,))

    def trim(self, idle: float = IDLE) -> list[Allocation]:
        """Close free arenas if none was used for so many seconds; return what is gone."""
        with self._lock:
            if self._clock() - self._last_use >= idle:
                self._drop_free()
            gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """Close all arenas, each when its last slot dies, and let the thread end. Idempotent."""
        with self._lock:
            self._drop_free()
            left = bool(self._arenas)
        if left:  # an answer was given up while it was prepared
            self._thread.submit(self._close_rest)
        self._thread.shutdown(wait=False)

    def _close_rest(self) -> None:
        while True:
            with self._lock:
                self._drop_free()
                if not self._arenas:
                    return
            time.sleep(LOOK)


def _fill(slot: Slot, device: Device, array: Any, allocate: Allocate) -> Future[None]:
    slot.arena.fill()
    source = array
    strides = dense_strides(array.shape, array.strides, array.itemsize)
    if not same_place(array.shape, array.strides, strides):
        source, _ = private_copy(device, array, allocate)
    with device.current():
        device.refuse_capture()
        stream = device.stream
        device.driver.download(slot.address, source.data.ptr, source.nbytes, stream.ptr)
        mark = device.mark_stream(stream.ptr)
    return device.when(mark, slot, source)


# -- importer -------------------------------------------------------------------------------------


class HostMapping:
    """An arena of another process, pinned in this one. Thread-safe."""

    def __init__(self, maps: HostMaps, key: tuple[int, int], pages: Pages, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = pages.address
        self.pages = pages
        self._maps = maps
        self._key: tuple[int, int] | None = key

    def close(self) -> None:
        """Let go of it; it stays pinned for a while. Idempotent."""
        key, self._key = self._key, None
        if key is not None:
            self._maps.release(key)


class _Kept:
    """Pages by their memfd: opened once, however often they are announced."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.uses = 0
        self.last_use = 0.0


class HostMaps:
    """Other processes' arenas in this one. Thread-safe.

    One whose memfd is mapped cannot have its inode taken by another.
    """

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<HostMaps: {len(self._kept)} arenas>"

    def open(self, announcement: Announce, fds: Sequence[int]) -> HostMapping:
        """Map and pin an announced arena; the descriptors stay the caller's.

        Raises
        ------
        OpenFailed
            It is no sealed memfd of that size, or cannot be pinned.
        """
        key = _checked(announcement, fds)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                kept = _Kept(self._map(fds[0], os.fstat(fds[0]).st_size))
                self._kept[key] = kept
            kept.uses += 1
        mapping = HostMapping(self, key, kept.pages, announcement.nbytes)
        try:
            kept.pages.pin()
        except CudaError as error:
            mapping.close()
            raise as_open_failed(error, Failure.OPEN_FAILED) from error
        return mapping

    def _map(self, fd: int, nbytes: int) -> Pages:
        try:
            return Pages(fd, nbytes, self._device)
        except (OSError, ValueError) as error:
            raise OpenFailed(Failure.OPEN_FAILED, f"{nbytes} bytes: {error}") from error

    def release(self, key: tuple[int, int]) -> None:
        """One mapping of an arena was closed."""
        with self._lock:
            kept = self._kept[key]
            kept.uses -= 1
            kept.last_use = self._clock()
            closed = self._closed
        if closed:
            self.trim(0)

    def close(self) -> None:
        """Unpin everything, each arena when its last mapping is closed. Idempotent."""
        with self._lock:
            self._closed = True
        self.trim(0)

    def trim(self, idle: float = IDLE) -> None:
        """Unpin what no mapping has used for so many seconds."""
        now = self._clock()
        with self._lock:
            gone = [k for k, v in self._kept.items() if not v.uses and now - v.last_use >= idle]
            pages = [self._kept.pop(key).pages for key in gone]
        for one in pages:
            one.close()


def _checked(announcement: Announce, fds: Sequence[int]) -> tuple[int, int]:
    if len(fds) != 1 or announcement.nbytes <= 0:
        raise OpenFailed(
            Failure.OPEN_FAILED,
            f"1 descriptor wanted, got {len(fds)} for {announcement.nbytes} bytes",
        )
    try:
        seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        found = os.fstat(fds[0])
    except OSError as error:
        raise OpenFailed(Failure.OPEN_FAILED, f"not a memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK or found.st_size < announcement.nbytes:
        raise OpenFailed(
            Failure.OPEN_FAILED,
            f"arena of {found.st_size} bytes, seals {seals:#x}; announced were "
            f"{announcement.nbytes} bytes, sealed against shrinking",
        )
    return found.st_dev, found.st_ino
