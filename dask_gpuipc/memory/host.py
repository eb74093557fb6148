"""Host memory: arenas in memfds, shared by file descriptor, imported copy-on-write.

Exporting copies an array once into a page-aligned slot of an arena; importing maps that slot
``MAP_PRIVATE``, so no byte is copied and the receiver may write. Nothing is left behind whoever
dies: a memfd has no name, and the kernel frees it with its last descriptor and mapping.

Rules that the kernel imposes
-----------------------------
- A ``MAP_PRIVATE`` page shows its owner's later writes until it is written itself, so a slot is
  recycled only when its lease is over, and a private mapping is never kept for a second import.
- Writing to a page that the kernel cannot provide is a SIGBUS through a mapping, but an error
  through ``pwrite``: fresh pages are always written by ``pwrite``.
- Mapped shared pages count in the RSS of each process that maps them, and Dask pauses workers by
  RSS. Near the limit the arenas' pages are dropped from this process's page tables
  (``MADV_DONTNEED`` on a shared mapping loses nothing) and slots are written by ``pwrite``.
- A file that shrinks under a mapping is a SIGBUS in the reader: arenas are sealed against it, and
  an importer refuses what is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from pickle import PickleBuffer
from typing import Any, Final

import numpy as np

from dask_gpuipc import process
from dask_gpuipc.dtypes import decode_dtype, encode_dtype
from dask_gpuipc.errors import Failure, MemoryUnavailable, OpenFailed, Refusal, Refused
from dask_gpuipc.memory.base import (
    Allocation,
    Handle,
    Imported,
    Mapping,
    Pin,
    Preparation,
    Prover,
    Rung,
)
from dask_gpuipc.memory.extents import Extents
from dask_gpuipc.memory.writes import Watch, Watcher
from dask_gpuipc.wire import Announce, Layout

logger = logging.getLogger("distributed.gpuipc")

PAGE: Final = mmap.PAGESIZE
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_WRITE: Final = 0x7FFFF000
"""Bytes that one pwrite takes at most (Linux)."""
WATCHED: Final = 4 << 20
"""Bytes from which on writes to an array are watched; less is compared as quickly."""
LOOK_AFTER: Final = 1 << 20
"""Bytes written to slots after which the resident size is looked at again."""
PUNCH_HOLE: Final = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Arena:
    """One memfd and its slots. Not thread-safe but for `write`, on slots that are apart."""

    def __init__(self, number: int, size: int) -> None:
        self.allocation = Allocation(id=number, generation=0, nbytes=size)
        self.live = 0
        self.touched = 0
        """No page at or above this offset was ever written."""
        self.punched = False
        """Pages below `touched` were given back, so any of them may be fresh."""
        self.loose = False
        """Slots were freed since the free extents were last given back."""
        self.extents = Extents(size)
        self.fd = os.memfd_create("dask-gpuipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.shared_fd = -1
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            # Peers get a descriptor that cannot write: a stray write of theirs fails.
            self.shared_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED)
        except BaseException:
            self._close_fds()
            raise

    def write(self, offset: int, array: np.ndarray[Any, Any], target: Layout, fresh: bool) -> None:
        """Copy an array's elements into a slot."""
        if not fresh and not array.flags.forc:
            view: np.ndarray[Any, Any] = np.ndarray(
                array.shape, array.dtype, self._map, offset, target.strides
            )
            np.copyto(view, array)
            return
        data = _solid_bytes(array)
        if fresh:
            pwrite(self.fd, data, offset)
        else:
            row: np.ndarray[Any, Any] = np.ndarray(data.shape, data.dtype, self._map, offset)
            np.copyto(row, data)

    def view(self, layout: Layout, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array over a slot; for this process, which may not change what peers read."""
        # As an argument of ndarray, the map could be closed below the view: this holds it open.
        whole = np.frombuffer(self._map, np.uint8)
        return np.ndarray(layout.shape, dtype, whole, layout.offset, layout.strides)

    def holds(self, offset: int, data: np.ndarray[Any, Any]) -> bool:
        """Whether bytes lie at an offset, in a slot that is in use."""
        held: np.ndarray[Any, Any] = np.ndarray(data.shape, data.dtype, self._map, offset)
        one, other = held.ctypes.data, data.ctypes.data
        # A snapshot's array lies in the slot itself.
        return one == other or not _libc.memcmp(one, other, data.nbytes)

    def unmap_pages(self) -> None:
        """Drop the pages from this process's RSS; their bytes stay in the memfd."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def punch(self) -> None:
        """Give the memory of all free extents back to the system."""
        for start, stop in self.extents:
            stop = min(stop, _pages(self.touched))
            if start < stop:
                _libc.fallocate(self.fd, PUNCH_HOLE, start, stop - start)
        self.loose = False
        self.punched = self.live > 0
        if not self.live:
            self.touched = 0

    def close(self) -> None:
        """Unmap and close; importers keep what they have."""
        with contextlib.suppress(BufferError):  # a view of it lives, and unmaps it when it dies
            self._map.close()
        self._close_fds()

    def _close_fds(self) -> None:
        for fd in (self.fd, self.shared_fd):
            if fd >= 0:
                os.close(fd)


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of an array in shared memory, until `release`, which is called once."""

    array: np.ndarray[Any, Any]
    release: Callable[[], None]


@dataclass(eq=False, slots=True)
class _Slot:
    arena: Arena
    offset: int
    room: int
    layout: Layout
    key: int
    ref: weakref.ref[np.ndarray[Any, Any]]
    watch: Watch | None = None
    uses: int = 1


class HostMemory:
    """NumPy arrays over shared host memory; implements `memory.base.Memory`. Thread-safe.

    Parameters
    ----------
    arena_size : int
        Bytes of one arena. Arenas are sparse; a larger array gets one of its own.
    limit : int, optional
        Above so many touched bytes, free memory is given back before more is taken.
    resident_limit : int, optional
        When the process's RSS would exceed this, arenas are kept out of it.
    idle_timeout : float
        Seconds without an export after which free memory is given back.
    watch_writes : bool
        Whether the kernel is asked if a large array was changed since it was copied, where it can
        tell; else its bytes are compared before the copy is used again.
    clock : callable
        Monotonic seconds.

    Raises
    ------
    MemoryUnavailable
        The system has no sealable memfd, or no /proc.
    """

    kind = "host"
    executor: Executor | None = None
    prepares = False
    prover: Prover | None = None

    def __init__(
        self,
        arena_size: int = 256 << 20,
        limit: int | None = None,
        resident_limit: int | None = None,
        idle_timeout: float = 5.0,
        watch_writes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch_writes = watch_writes
        self._watcher: Watcher | None = None
        self._arena_size = _pages(max(arena_size, PAGE))
        self._limit = limit
        self._resident_limit = resident_limit
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._arenas: dict[int, Arena] = {}
        self._slots: dict[int, _Slot] = {}
        self._last_use = clock()
        self._resident = False
        self._unlooked = LOOK_AFTER
        self._closed = False
        self._probe()

    def __repr__(self) -> str:
        with self._lock:
            live = sum(a.live for a in self._arenas.values())
            touched = sum(a.touched for a in self._arenas.values())
        return f"<HostMemory: {len(self._arenas)} arenas, {live} slots, {touched} bytes touched>"

    def _probe(self) -> None:
        try:
            Arena(0, PAGE).close()
            process.rss()
        except (OSError, AttributeError) as error:
            raise MemoryUnavailable(
                f"shared host memory needs Linux with sealable memfds and /proc: {error}"
            ) from error

    # -- exporter ---------------------------------------------------------------------------------

    def accepts(self, obj: object) -> bool:
        """Exactly ``numpy.ndarray``: subclasses carry more than their bytes."""
        return type(obj) is np.ndarray

    def devices(self) -> tuple[str, ...]:
        """No devices: host memory is everywhere on the node."""
        return ()

    def prepare(
        self, arrays: Sequence[Any], devices: Collection[str] | None = None
    ) -> Preparation | None:
        """Host arrays are always finished."""
        return None

    def wrap(self, buffer: Any) -> np.ndarray[Any, Any] | None:
        """Over whatever has Python's buffer protocol and is contiguous, in either order."""
        try:
            raw = PickleBuffer(buffer).raw()
        except (TypeError, BufferError, ValueError):
            return None
        return np.frombuffer(raw, np.uint8) if raw.nbytes else None

    def download(self, array: np.ndarray[Any, Any]) -> memoryview:
        """The same bytes."""
        return array.data

    def upload(self, data: Any) -> np.ndarray[Any, Any]:
        """A copy on the heap."""
        return np.frombuffer(data, np.uint8).copy()

    def pin(self, array: np.ndarray[Any, Any], prepared: Preparation | None) -> Pin:
        """Copy an array into a slot, or find the slot that already holds a copy of it.

        A live array that is exported again while a lease on its copy lives shares that copy: a
        chunk that is fetched by many workers is copied once. Not if it was changed in place since.
        """
        dtype = encode_dtype(array.dtype)
        with self._lock:
            self._last_use = self._clock()
            slot = self._reuse(array, dtype)
        if slot is not None and not self._still_holds(slot, array):
            self._release(slot)
            slot = None
        if slot is None:
            slot = self._fill(array, dtype, _writeable(array))
        return Pin(
            allocation=slot.arena.allocation,
            layout=slot.layout,
            nbytes=slot.room,
            release=partial(self._release, slot),
        )

    def snapshot(self, array: np.ndarray[Any, Any]) -> Snapshot:
        """Copy an array into a slot now; pins of the snapshot's array make no further copy.

        The copy can be written, whether the array can or not.

        Raises
        ------
        Refused
            The dtype does not travel, or there is no memory.
        """
        dtype = encode_dtype(array.dtype)
        with self._lock:
            self._last_use = self._clock()
        slot = self._fill(array, dtype, writeable=True, watched=False)
        view = slot.arena.view(slot.layout, array.dtype)
        with self._lock:
            if self._slots.get(slot.key) is slot:
                del self._slots[slot.key]
            slot.key, slot.ref = id(view), weakref.ref(view)
            self._slots[slot.key] = slot
        return Snapshot(view, partial(self._release, slot))

    def pin_copies(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether there is no slot with a copy of this live array."""
        with self._lock:
            slot = self._slots.get(id(array))
            return slot is None or slot.ref() is not array

    def _reuse(self, array: np.ndarray[Any, Any], dtype: str) -> _Slot | None:
        slot = self._slots.get(id(array))
        # ids are reused, and an array's shape can be set in place
        if slot is None or slot.ref() is not array:
            return None
        kept = slot.layout
        if (kept.dtype, kept.shape, kept.writeable) != (dtype, array.shape, _writeable(array)):
            return None
        slot.uses += 1
        return slot

    def _still_holds(self, slot: _Slot, array: np.ndarray[Any, Any]) -> bool:
        """Whether a slot's bytes are the array's; looking takes no longer than a copy would.

        Where the array is watched and was not written, only its ends are looked at.
        """
        data = _solid_bytes(_without_broadcast(array))
        with self._lock:
            # Nobody else may take it for unwritten between its renewal and the comparison.
            watch, slot.watch = slot.watch, None
        if watch is not None and watch.address != _address(data):
            watch.end()
            watch = None
        parts = [slice(0, data.nbytes)]
        if watch is not None and not watch.written():
            parts = [slice(0, watch.head), slice(data.nbytes - watch.tail, data.nbytes)]
        elif watch is not None:
            watch.renew()  # before the bytes are looked at
        same = all(slot.arena.holds(slot.offset + part.start, data[part]) for part in parts)
        with self._lock:
            self._resident = True  # its pages were touched: under pressure they leave again
            if same:
                slot.watch = watch
        if watch is not None and not same:
            watch.end()
        return same

    def _watch(self, solid: np.ndarray[Any, Any]) -> Watch | None:
        """Begin to watch a large array, before it is copied; None where that is not possible."""
        if solid.nbytes < WATCHED or not solid.flags.forc:
            return None
        with self._lock:
            if self._watcher is None and self._watch_writes and not self._closed:
                try:
                    self._watcher = Watcher()
                except MemoryUnavailable as error:
                    logger.info("Arrays are compared before a copy is used again: %s", error)
                    self._watch_writes = False
            watcher = self._watcher
        return watcher.watch(_address(solid), solid.nbytes) if watcher is not None else None

    def _fill(
        self, array: np.ndarray[Any, Any], dtype: str, writeable: bool, *, watched: bool = True
    ) -> _Slot:
        solid = _without_broadcast(array)
        strides = _strides(array, solid)
        room = _pages(solid.nbytes)
        try:
            arena, offset, fresh = self._take(room)
        except (OSError, ValueError) as error:
            raise Refused(Refusal.NO_MEMORY, f"an arena for {room} bytes: {error}") from error
        layout = Layout(offset, dtype, array.itemsize, array.shape, strides, writeable)
        slot = _Slot(arena, offset, room, layout, id(array), weakref.ref(array))
        slot.watch = self._watch(solid) if watched else None
        try:
            arena.write(offset, solid, layout, fresh or self._pressed(room))
        except (OSError, MemoryError) as error:
            arena.punched = True  # its pages may not be there: a mapping would be a SIGBUS
            self._release(slot)
            raise Refused(Refusal.NO_MEMORY, f"{room} bytes of an arena: {error}") from error
        with self._lock:
            self._slots[slot.key] = slot
        return slot

    def _take(self, room: int) -> tuple[Arena, int, bool]:
        with self._lock:
            if self._closed:
                raise Refused(Refusal.STOPPING)
            self._make_room(room)
            for arena in self._arenas.values():
                offset = arena.extents.take(room)
                if offset is not None:
                    break
            else:
                arena = Arena(next(self._numbers), max(room, self._arena_size))
                self._arenas[arena.allocation.id] = arena
                offset = arena.extents.take(room)
                assert offset is not None
            arena.live += 1
            fresh = arena.punched or offset + room > arena.touched
            arena.touched = max(arena.touched, offset + room)
            return arena, offset, fresh

    def _make_room(self, room: int) -> None:
        if self._limit is None:
            return
        if sum(a.touched for a in self._arenas.values()) + room > self._limit:
            for arena in self._arenas.values():
                if not arena.live:
                    arena.punch()

    def _pressed(self, nbytes: int) -> bool:
        """Whether the slot must be written without mapping it; drops mapped pages if so.

        Not worth a look for little: what else takes memory is looked at with Dask's monitor.
        """
        self._unlooked += nbytes
        if self._resident_limit is not None and self._unlooked >= LOOK_AFTER:
            self._unlooked = 0
            if process.rss() + nbytes > self._resident_limit:
                self._unlooked = LOOK_AFTER  # until it is over
                self._unmap_pages()
                return True
        self._resident = True
        return False

    def _unmap_pages(self) -> None:
        with self._lock:
            if self._resident:
                for arena in self._arenas.values():
                    arena.unmap_pages()
            self._resident = False

    def _release(self, slot: _Slot) -> None:
        with self._lock:
            slot.uses -= 1
            if slot.uses:
                return
            if self._slots.get(slot.key) is slot:
                del self._slots[slot.key]
            arena = slot.arena
            arena.live -= 1
            arena.loose = True
            arena.extents.give(slot.offset, slot.room)
            if self._closed and not arena.live:
                del self._arenas[arena.allocation.id]
                arena.close()
        if slot.watch is not None:
            slot.watch.end()

    def protects(self, array: np.ndarray[Any, Any]) -> bool:
        """Always: read-only pages are mapped for reading."""
        return True

    def handle(self, allocation: Allocation) -> Handle:
        """The arena's read-only descriptor."""
        with self._lock:
            arena = self._arenas.get(allocation.id)
            if arena is None:
                raise Refused(Refusal.NO_MEMORY, f"arena {allocation.id} is closed")
            return Handle(fds=(arena.shared_fd,))

    # -- importer ---------------------------------------------------------------------------------

    def open(self, announcement: Announce, fds: Sequence[int]) -> Mapping:
        """Keep the descriptor, after a look at what it is."""
        try:
            if not fds:  # this process had none free as it came: announced again, it may be there
                raise OpenFailed(Failure.EVICTED, "the announcement came without its descriptor")
            if len(fds) != 1:
                raise OpenFailed(Failure.OPEN_FAILED, f"1 descriptor wanted, got {len(fds)}")
            return _Mapped(_checked_fd(fds[0], announcement.nbytes), announcement.nbytes)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        """Map the pages of one array, private to this process."""
        assert isinstance(mapping, _Mapped)
        try:
            array, block = _array_in(mapping, layout)
        except ValueError as error:
            raise OpenFailed(Failure.MALFORMED, str(error)) from error
        return Imported(array, Rung.SHARE, owner=block)

    def owner_of(self, array: np.ndarray[Any, Any]) -> Any | None:
        """The mapped pages below an array."""
        base: Any = array
        while isinstance(base, (np.ndarray, memoryview)):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        return base if isinstance(base, _Block) else None

    def own(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy on the heap; what is broadcast stays so."""
        copy = _without_broadcast(array).copy(order="K")
        if copy.shape != array.shape:
            copy = np.lib.stride_tricks.as_strided(
                copy, array.shape, _strides(array, copy), writeable=True
            )
        copy.flags.writeable = array.flags.writeable
        return copy

    def rung(self, preferred: str) -> Rung:
        """Always shared: copy-on-write makes it the receiver's own."""
        return Rung.SHARE

    def fence(self) -> Future[None] | None:
        """Reads of host memory end with the last reference."""
        return None

    # -- both -------------------------------------------------------------------------------------

    def trim(self) -> Sequence[Allocation]:
        """Leave the RSS when it is high, and give idle memory back."""
        limit = self._resident_limit
        if self._resident and limit is not None and process.rss() > limit:
            self._unmap_pages()
        with self._lock:
            if not self._arenas or self._clock() - self._last_use < self._idle_timeout:
                return ()
            return self._shrink()

    def collect(self) -> Sequence[Allocation]:
        """Give all memory back that no lease holds, now."""
        with self._lock:
            return self._shrink()

    def _shrink(self) -> list[Allocation]:
        gone = [a for a in self._arenas.values() if not a.live]
        for arena in gone:
            del self._arenas[arena.allocation.id]
            arena.close()
        for arena in self._arenas.values():
            if arena.loose:
                arena.punch()
        return [arena.allocation for arena in gone]

    def close(self) -> None:
        """Close the arenas that no lease holds; the others follow with their last lease."""
        with self._lock:
            self._closed = True
            watcher, self._watcher = self._watcher, None
            for number, arena in list(self._arenas.items()):
                if not arena.live:
                    del self._arenas[number]
                    arena.close()
        if watcher is not None:
            watcher.close()


@dataclass(eq=False, slots=True)
class _Mapped:
    """An arena of another process: its descriptor. Each import maps its own pages."""

    fd: int
    nbytes: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _Block:
    """Mapped pages, and the root of every array over them."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int, writeable: bool) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, not writeable),
            "version": 3,
        }


def _array_in(mapping: _Mapped, layout: Layout) -> tuple[np.ndarray[Any, Any], _Block]:
    # WireError of a layout or dtype, ValueError of a shape beyond NumPy: the caller translates
    decode_dtype(layout.dtype)  # before anything is mapped for it
    low, high = layout.extent()
    start = low // PAGE * PAGE
    block = map_private(mapping.fd, start, high - start, writeable=layout.writeable)
    return array_of(block, replace(layout, offset=layout.offset - start)), block


def array_of(block: _Block, layout: Layout) -> np.ndarray[Any, Any]:
    """The array of a layout whose offset is from the beginning of the block."""
    dtype = decode_dtype(layout.dtype)
    return np.ndarray(layout.shape, dtype, np.asarray(block), layout.offset, layout.strides)


def map_private(fd: int, offset: int, nbytes: int, *, writeable: bool = True) -> _Block:
    """Map a file's bytes, private to this process; unmapped when the block dies.

    Raises
    ------
    OpenFailed
        The kernel does not do it.
    """
    # not mmap.mmap: before Python 3.13 it keeps a duplicate of the descriptor for each mapping
    address = _libc.mmap(
        None,
        nbytes,
        mmap.PROT_READ | (mmap.PROT_WRITE if writeable else 0),
        mmap.MAP_PRIVATE | _MAP_NORESERVE,
        fd,
        offset,
    )
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        reason = Failure.NO_MEMORY if number == errno.ENOMEM else Failure.OPEN_FAILED
        raise OpenFailed(reason, f"mmap of {nbytes} bytes at {offset}: {os.strerror(number)}")
    block = _Block(address, nbytes, writeable)
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    return block


def _checked_fd(fd: int, nbytes: int) -> int:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise OpenFailed(Failure.OPEN_FAILED, f"not a memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK or size < nbytes:
        raise OpenFailed(
            Failure.OPEN_FAILED,
            f"arena of {size} bytes, seals {seals:#x}; announced were {nbytes} bytes, sealed "
            "against shrinking",
        )
    return fd


def pwrite(fd: int, data: np.ndarray[Any, Any], offset: int) -> None:
    """Write bytes, all of them; an `OSError` where the kernel has no page for them."""
    view = memoryview(data)  # type: ignore[arg-type]
    while view:
        written = os.pwrite(fd, view[:MAX_WRITE], offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
        offset += written


def flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous array, padding of structured dtypes included."""
    order = array if array.flags.c_contiguous else array.T
    return order.reshape(-1).view(np.uint8)


def _solid_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array as they lie in a slot: in its own order, or else in C order."""
    return flat(array if array.flags.forc else np.ascontiguousarray(array))


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _without_broadcast(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The part of an array that has bytes of its own: axes of stride zero cut to length one."""
    if 0 not in array.strides:
        return array
    return array[tuple(slice(None) if s else slice(1) for s in array.strides)]


def _writeable(array: np.ndarray[Any, Any]) -> bool:
    """As plain Dask delivers it: what it has to copy because of its strides may be written."""
    return bool(array.flags.writeable or not (array.flags.forc or 0 in array.strides))


def _strides(array: np.ndarray[Any, Any], solid: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Strides of the copy: contiguous in the order that plain Dask keeps, zero where broadcast."""
    fortran = solid.flags.f_contiguous and not solid.flags.c_contiguous
    axes = range(solid.ndim) if fortran else range(solid.ndim - 1, -1, -1)
    strides, step = [0] * solid.ndim, array.itemsize
    for axis in axes:
        strides[axis] = step if array.strides[axis] or array.shape[axis] == 1 else 0
        step *= solid.shape[axis]
    return tuple(strides)
