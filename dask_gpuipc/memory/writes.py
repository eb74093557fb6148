"""Whether memory was written since a moment, as the kernel knows it.

The pages of an array are write-protected (userfaultfd, asynchronous mode: Linux 6.7); the first
write to one lifts its protection, in the kernel, and nobody waits. One scan of the page table
(``PAGEMAP_SCAN``) then tells in microseconds whether any is lifted, where a comparison would read
every byte.

A watch errs on one side only: what it does not know counts as written.

- Whoever has a device open, or io_uring, may have it write to memory past the page table, which no
  protection sees: nothing is watched then (`may_be_written_by_devices`).
- Only private anonymous memory is watched; a page of a file may be changed through the file.
- Pages that an array shares with its neighbours at both ends are not covered: `Watch.edges`.
- Protecting pages again would hide writes from an earlier watch on them, so it ends that one.
- A page that was dropped, and a mapping that is another one now, count as written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import threading
import weakref
from typing import Final

from dask_gpuipc.errors import MemoryUnavailable

PAGE: Final = mmap.PAGESIZE
MAX_WATCHES: Final = 1024
"""Ranges at once: each may cut one of the process's mappings in three, of 65530."""
HARMLESS: Final = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/", "shm/")
"""Files below /dev that write to nobody's memory by themselves."""
ANONYMOUS: Final = (
    "[eventfd", "[eventpoll]", "[fanotify]", "[perf_event]", "[pidfd]", "[signalfd]", "[timerfd]",
    "[userfaultfd]", "inotify",
)  # fmt: skip
"""The same of those without a name; io_uring and KVM are not among them."""

SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
"""Number of userfaultfd."""
USER_MODE_ONLY: Final = 1
"""UFFD_USER_MODE_ONLY, which needs no privilege; faults in the kernel are not seen but resolved."""
API, API_VERSION = 0xC018AA3F, 0xAA
"""UFFDIO_API."""
FEATURES: Final = 1 << 0 | 1 << 13 | 1 << 15
"""UFFD_FEATURE_PAGEFAULT_FLAG_WP, _WP_UNPOPULATED and _WP_ASYNC."""
REGISTER, REGISTER_MODE_WP = 0xC020AA00, 2
UNREGISTER: Final = 0x8010AA01
WRITEPROTECT, WRITEPROTECT_MODE_WP = 0xC018AA06, 1
PAGEMAP_SCAN: Final = 0xC0606610
SCAN_CHECK_WPASYNC: Final = 2
"""PM_SCAN_CHECK_WPASYNC: an error where a page is not watched."""
WRITTEN, THERE = 1 << 1, 1 << 3 | 1 << 4
"""PAGE_IS_WRITTEN; PAGE_IS_PRESENT and _SWAPPED, of which a page that was dropped is neither."""
PROCMAP_QUERY: Final = 0xC0686611
VMA_SHARED: Final = 8


def may_be_written_by_devices() -> bool:
    """Whether this process has a file open through which a device may write to its memory."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            if not _harmless(os.readlink(f"/proc/self/fd/{fd}")):
                return True
    return False


def _harmless(file: str) -> bool:
    for prefix, names in (("/dev/", HARMLESS), ("anon_inode:", ANONYMOUS)):
        if file.startswith(prefix):
            return file.removeprefix(prefix).startswith(names)
    return True


class Watcher:
    """Watches memory of this process. Thread-safe.

    Raises
    ------
    MemoryUnavailable
        The kernel cannot do it, or may not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._uffd = self._pagemap = self._maps = -1
        try:
            self._uffd = _userfaultfd()
            fcntl.ioctl(self._uffd, API, struct.pack("3Q", API_VERSION, FEATURES, 0))
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
            self._is_anonymous(id(self), id(self) + 1)
        except OSError as error:
            self.close()
            raise MemoryUnavailable(f"writes cannot be watched: {error}") from error

    def watch(self, address: int, nbytes: int) -> Watch | None:
        """Begin to watch memory, as it is now; None if that is not possible."""
        start, stop = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
        if start >= stop or may_be_written_by_devices():
            return None
        watch = Watch(self, address, nbytes, start, stop)
        with self._lock:
            if self._uffd < 0 or self._pid != os.getpid() or len(self._watches) >= MAX_WATCHES:
                return None
            try:
                if not self._is_anonymous(start, stop):
                    return None
                size = stop - start
                fcntl.ioctl(
                    self._uffd, REGISTER, struct.pack("4Q", start, size, REGISTER_MODE_WP, 0)
                )
                self._protect(watch)
            except OSError:
                return None
            watch.live = True
            self._watches.add(watch)
        return watch

    def _protect(self, watch: Watch) -> None:
        for other in self._watches:
            if other is not watch and other.start < watch.stop and watch.start < other.stop:
                other.live = False
        size = watch.stop - watch.start
        arguments = struct.pack("3Q", watch.start, size, WRITEPROTECT_MODE_WP)
        fcntl.ioctl(self._uffd, WRITEPROTECT, arguments)

    def renew(self, watch: Watch) -> None:
        """Go on from what the memory is now."""
        with self._lock:
            if watch.live and self._uffd >= 0:
                try:
                    self._protect(watch)
                except OSError:
                    watch.live = False

    def written(self, watch: Watch) -> bool:
        """Whether a page was written since `watch` or `renew`, or may have been."""
        if may_be_written_by_devices():
            return True
        with self._lock:
            if not watch.live or self._uffd < 0 or self._pid != os.getpid():
                return True
            try:
                return self._any(watch, WRITTEN) or self._any(watch, THERE, inverted=THERE)
            except OSError:
                watch.live = False
                return True

    def _any(self, watch: Watch, categories: int, inverted: int = 0) -> bool:
        """Whether a page has all of these categories, or lacks those that are inverted."""
        region = (ctypes.c_uint64 * 3)()
        vector = (ctypes.addressof(region), 1, 1)  # its length, and the pages to find at most
        masks = (inverted, categories, 0, categories)
        arguments = (96, SCAN_CHECK_WPASYNC, watch.start, watch.stop, 0, *vector, *masks)
        packed = bytearray(struct.pack("12Q", *arguments))
        return bool(fcntl.ioctl(self._pagemap, PAGEMAP_SCAN, packed))

    def _is_anonymous(self, start: int, stop: int) -> bool:
        """Whether all mappings in a range are private and of no file."""
        while start < stop:
            query = bytearray(104)
            struct.pack_into("3Q", query, 0, len(query), 0, start)
            fcntl.ioctl(self._maps, PROCMAP_QUERY, query)
            _, _, _, _, start, flags, _, _, inode, major, minor = struct.unpack_from("9Q2I", query)
            if flags & VMA_SHARED or inode or major or minor:
                return False
        return True

    def end(self, watch: Watch) -> None:
        """Watch it no more."""
        with self._lock:
            self._watches.discard(watch)
            if watch.live and self._uffd >= 0 and self._pid == os.getpid():
                with contextlib.suppress(OSError):
                    arguments = struct.pack("2Q", watch.start, watch.stop - watch.start)
                    fcntl.ioctl(self._uffd, UNREGISTER, arguments)
            watch.live = False

    def close(self) -> None:
        """End all watches. Idempotent."""
        with self._lock:
            for watch in self._watches:
                watch.live = False
            fds = (self._uffd, self._pagemap, self._maps)
            self._uffd = self._pagemap = self._maps = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class Watch:
    """One range that is watched; the whole pages in an array's memory."""

    def __init__(self, watcher: Watcher, address: int, nbytes: int, start: int, stop: int) -> None:
        self._watcher = watcher
        self.start, self.stop = start, stop
        self.head = start - address
        self.tail = address + nbytes - stop
        """Bytes at both ends that are not covered."""
        self.address = address
        self.live = False

    def __repr__(self) -> str:
        return f"<Watch {self.stop - self.start} bytes, {'live' if self.live else 'ended'}>"

    def written(self) -> bool:
        """See `Watcher.written`."""
        return self._watcher.written(self)

    def renew(self) -> None:
        """See `Watcher.renew`."""
        self._watcher.renew(self)

    def end(self) -> None:
        """See `Watcher.end`."""
        self._watcher.end(self)


def _userfaultfd() -> int:
    number = SYSCALL.get(os.uname().machine)
    if number is None:
        raise OSError(f"no number of userfaultfd is known for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd
