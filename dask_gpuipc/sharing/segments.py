"""Arrays under a name in ``/dev/shm``, for messages that outlive who sent them.

A segment belongs to one message. Who receives it opens it, removes the name and has the pages to
itself; nobody needs to be asked, and the sender need not live. In return a name stays behind where
a message is lost, so each segment says in its header who made it and what its message travels in
(`carriers`): `sweep` removes those of dead processes that nobody can receive any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dask_gpuipc import process
from dask_gpuipc.errors import Failure, OpenFailed, SourceGone
from dask_gpuipc.memory.host import array_of, map_private, pwrite
from dask_gpuipc.sharing.carriers import UNKNOWN, Carrier, Kind, readable
from dask_gpuipc.wire import Layout

FOLDER: Final = "/dev/shm"
NAME: Final = re.compile(r"dask-gpuipc-([0-9a-f]{32})")
_HEADER: Final = struct.Struct("=8sQQQQQQ")
_MAGIC: Final = b"gpuipc01"
DATA: Final = mmap.PAGESIZE
"""Offset of the array; the header has a page to itself."""


@dataclass(frozen=True, slots=True)
class Header:
    """Who made a segment, and what its message travels in."""

    pid: int
    start_time: int
    namespace: int
    carrier: Carrier

    @classmethod
    def here(cls, carrier: Carrier = UNKNOWN) -> Header:
        """That of a segment of this process."""
        pid = os.getpid()
        return cls(pid, process.start_time(pid), process.pid_namespace(), carrier)

    def pack(self) -> bytes:
        """Its bytes."""
        c = self.carrier
        return _HEADER.pack(
            _MAGIC, self.pid, self.start_time, self.namespace, c.kind, c.number, c.start_time
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """From its bytes; `ValueError` if they are none."""
        if len(data) != _HEADER.size:
            raise ValueError(f"a header has {_HEADER.size} bytes; got {len(data)}")
        magic, pid, started, namespace, kind, number, since = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise ValueError(f"{magic!r} is not {_MAGIC!r}")
        return cls(pid, started, namespace, Carrier(Kind(kind), number, since))


def create(key: bytes, data: np.ndarray[Any, Any], carrier: Carrier = UNKNOWN) -> None:
    """Write a segment.

    Parameters
    ----------
    key : bytes
        16 of them; the message has them too.
    data : numpy.ndarray
        The array's bytes, as one row of ``uint8``.

    Raises
    ------
    OSError
        There is no room, or no such folder.
    """
    path = _path(key)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, Header.here(carrier).pack(), 0)
        pwrite(fd, data, DATA)  # an error where there is no memory, not a SIGBUS
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def tie(key: bytes, carrier: Carrier) -> None:
    """Say what the message of a segment of this process travels in."""
    with contextlib.suppress(FileNotFoundError), open(_path(key), "r+b", buffering=0) as file:
        file.write(Header.here(carrier).pack())


def exists(key: bytes) -> bool:
    """Whether a segment has a name still."""
    return os.path.exists(_path(key))


def remove(key: bytes) -> None:
    """Take its name away. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(key))


def adopt(key: bytes, layout: Layout) -> np.ndarray[Any, Any]:
    """The array of a segment, which is this process's alone from now on.

    Parameters
    ----------
    layout : Layout
        With offsets from the beginning of the data.

    Raises
    ------
    SourceGone
        There is no such segment, or another process of this user was first.
    OpenFailed
        It is not what the message says.
    """
    path = _path(key)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SourceGone(f"{path} is not there any more: {error}") from error
    try:
        _check(fd, layout, path)
        try:
            os.unlink(path)
        except FileNotFoundError as error:
            raise SourceGone(f"{path} was received by another process") from error
        _, high = layout.extent()
        return array_of(map_private(fd, DATA, high), layout)
    finally:
        os.close(fd)


def _check(fd: int, layout: Layout, path: str) -> None:
    info, (low, high) = os.fstat(fd), layout.extent()
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        raise OpenFailed(Failure.OPEN_FAILED, f"{path} is not a file of this user")
    if low != 0 or info.st_size < DATA + high:
        raise OpenFailed(
            Failure.OUT_OF_BOUNDS,
            f"bytes {low} to {high} of {path}, which has {info.st_size - DATA}",
        )


def sweep() -> list[str]:
    """Remove the segments that dead processes of this user left and nobody can receive any more.

    Done by itself whenever a process begins to share by name, and at its exit.

    Returns
    -------
    list of str
        What was removed.
    """
    dead = dict(_dead())
    since = min((header.start_time for header in dead.values()), default=0)
    known = {h.carrier for h in dead.values() if h.carrier.kind is not Kind.UNKNOWN}
    alive = readable(known, since) if known else set()
    gone = [path for path, header in dead.items() if header.carrier not in alive]
    for path in gone:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return gone


def _dead() -> Iterator[tuple[str, Header]]:
    """Segments of processes of this pid namespace that have ended."""
    namespace = process.pid_namespace()
    for name in os.listdir(FOLDER):
        if NAME.fullmatch(name) is None:
            continue
        path = os.path.join(FOLDER, name)
        with contextlib.suppress(OSError, ValueError):
            if os.lstat(path).st_uid != os.geteuid():
                continue
            with open(path, "rb", buffering=0) as file:
                header = Header.unpack(file.read(_HEADER.size))
            if header.namespace == namespace and not _lives(header):
                yield path, header


def _lives(header: Header) -> bool:
    try:
        return process.start_time(header.pid) == header.start_time
    except ProcessLookupError:
        return False


def _path(key: bytes) -> str:
    return os.path.join(FOLDER, f"dask-gpuipc-{key.hex()}")
