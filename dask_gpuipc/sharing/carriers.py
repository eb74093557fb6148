"""What a message travels in, and whether anybody can still read it.

An array that was put into a message must live until the message was read, which may be never: its
queue is dropped, its reader is killed. No clock can tell that. The kernel can: a message in a pipe
is lost when no process has the pipe open for reading, one in a socket when no process has the
socket of the other side, and one that starts a process when that process has ended.

``/proc`` shows what a process has open. Only processes of this user are looked at, as no other can
open anything here. One that does not show its descriptors counts as having all of them, if it began
after the sender did, as whoever inherits from it does. A descriptor on its way through a socket is
seen with nobody, so nothing is concluded from one look.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dask_gpuipc import process

_FILE: Final = re.compile(r"(pipe|socket):\[(\d+)\]")

# linux/sock_diag.h, linux/unix_diag.h
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_UDIAG_SHOW_PEER: Final = 4
_UNIX_DIAG_PEER: Final = 2
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBHIIIII")
_ANSWER: Final = struct.Struct("=BBBBIII")
_ATTRIBUTE: Final = struct.Struct("=HH")


class Kind(IntEnum):
    """Of a carrier; the numbers stand in the headers of segments."""

    UNKNOWN = 0
    PIPE = 1
    SOCKET = 2
    PROCESS = 3


@dataclass(frozen=True, slots=True)
class Carrier:
    """A pipe or a receiving socket by its inode, or a process by pid and start time."""

    kind: Kind
    number: int = 0
    start_time: int = 0


UNKNOWN: Final = Carrier(Kind.UNKNOWN)


def carrier_of(fd: int) -> Carrier:
    """What is written to a descriptor travels in this; `UNKNOWN` where that cannot be said."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        match = _FILE.fullmatch(os.readlink(f"/proc/self/fd/{fd}"))
        return Carrier(Kind.PIPE, int(match[2])) if match else UNKNOWN  # a named one has a path
    if stat.S_ISSOCK(mode):
        with contextlib.suppress(OSError):  # no sock_diag in this kernel, or no peer
            return Carrier(Kind.SOCKET, _peer_inode(os.fstat(fd).st_ino))
    return UNKNOWN


def carrier_to(pid: int) -> Carrier:
    """What is given to a process that is being started."""
    return Carrier(Kind.PROCESS, pid, process.start_time(pid))


def readable(carriers: Collection[Carrier], since: int) -> set[Carrier]:
    """Those out of which some process of this user can still read.

    ``since`` is the start time of the process that wrote to them.
    """
    alive = {c for c in carriers if c.kind is Kind.UNKNOWN or _runs(c)}
    wanted = {c for c in carriers if c.kind in (Kind.PIPE, Kind.SOCKET)}
    for pid in _pids():  # this process first, which mostly has them all
        if not wanted:
            break
        try:
            found = wanted.intersection(_open_for_reading(pid))
        except PermissionError:
            found = wanted if _began(pid) >= since else set()
        except OSError:
            continue  # it has ended
        alive |= found
        wanted -= found
    return alive


def _began(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return process.start_time(pid)
    return 0


def _runs(carrier: Carrier) -> bool:
    if carrier.kind is not Kind.PROCESS:
        return False
    with contextlib.suppress(ProcessLookupError):
        return (
            process.start_time(carrier.number) == carrier.start_time
            and process.state(carrier.number) not in "ZX"
        )
    return False


def _pids() -> Iterator[int]:
    me, uid = os.getpid(), os.geteuid()
    yield me
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    yield int(name)


def _open_for_reading(pid: int) -> Iterator[Carrier]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            match = _FILE.fullmatch(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:
            continue  # closed meanwhile
        if match is None:
            continue
        if match[1] == "socket":
            yield Carrier(Kind.SOCKET, int(match[2]))
        elif _reads(pid, name):
            yield Carrier(Kind.PIPE, int(match[2]))


def _reads(pid: int, name: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{name}") as info:
            flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
    except FileNotFoundError:
        return False
    return flags & os.O_ACCMODE != os.O_WRONLY


def _peer_inode(inode: int) -> int:
    """Inode of the socket at the other end of an AF_UNIX connection, as sock_diag says."""
    request = _REQUEST.pack(
        socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, _UDIAG_SHOW_PEER, *2 * [2**32 - 1]
    )
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.send(header + request)
        answer = netlink.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError("sock_diag does not know the socket")
    at = _HEADER.size + _ANSWER.size
    while at + _ATTRIBUTE.size <= len(answer):
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == _UNIX_DIAG_PEER:
            peer: int = struct.unpack_from("=I", answer, at + _ATTRIBUTE.size)[0]
            return peer
        at += max(_ATTRIBUTE.size, (length + 3) & ~3)
    raise OSError("the socket has no peer")
