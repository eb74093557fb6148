"""Who a process is: identity that survives pid reuse, its node, its namespaces, its death."""

from __future__ import annotations

import functools
import os

from dask_gpuipc.errors import MemoryUnavailable

PAGE = os.sysconf("SC_PAGESIZE")
NAMESPACES = ("ipc", "mnt", "pid", "user")
"""Those that must be equal: handles, sockets and pids mean the same only inside them."""


def start_time(pid: int) -> int:
    """Clock ticks after boot at which a process began.

    Raises
    ------
    ProcessLookupError
        There is no such process (or /proc does not show it).
    """
    return int(_stat(pid)[19])


def state(pid: int) -> str:
    """The letter by which the kernel describes a process: R, S, T, Z and others.

    Raises
    ------
    ProcessLookupError
        There is no such process.
    """
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """Fields 3 and later of ``/proc/PID/stat``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"no process {pid} in /proc") from error
    # Field 2 is the program's name in parentheses, and may hold spaces and parentheses itself.
    return text.rpartition(b")")[2].decode().split()


@functools.cache
def boot_id() -> str:
    """The kernel's random id of this boot: equal for two processes of one running kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


@functools.cache
def overflow_uid() -> int:
    """The uid by which the kernel names users of foreign user namespaces."""
    try:
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except OSError:
        return 65534


def namespaces() -> tuple[str, ...]:
    """Identities of this process's namespaces, in the order of `NAMESPACES`."""
    return tuple(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES)


def pid_namespace() -> int:
    """Identity of the pid namespace, in which a pid means what it says."""
    return os.stat("/proc/self/ns/pid").st_ino


def open_pidfd(pid: int, started: int) -> int:
    """A descriptor that becomes readable when this very process ends; close-on-exec.

    Raises
    ------
    ProcessLookupError
        The process has ended, or its pid is another process's by now.
    MemoryUnavailable
        The kernel has no pidfd (before 5.3).
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise MemoryUnavailable(f"pidfd_open: {error}; Linux 5.3 or later is needed") from error
    try:
        # Opened first, compared after: the pid cannot change hands while the descriptor is held
        # and the process lives.
        if start_time(pid) != started:
            raise ProcessLookupError(f"pid {pid} belongs to another process now")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def rss() -> int:
    """Resident bytes of this process, as Dask's memory monitor counts them."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)  # half the time of a file object: see callers
    try:
        return int(os.read(statm, 128).split()[1]) * PAGE
    finally:
        os.close(statm)
