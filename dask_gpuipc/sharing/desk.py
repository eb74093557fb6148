"""The desk: where other processes ask for what this one gives out.

An AF_UNIX SOCK_SEQPACKET socket in a private folder, one short visit for each array. The visitor
says which key it wants; the kernel says who it is (SO_PEERCRED), and only a process of this user
gets an answer. The memory itself goes over the channel that the source dials to the visitor's
endpoint, as between workers: a visit carries no handle and, where handles can go, no array bytes.

A visit ends with its socket or with the visitor's process, which its pidfd tells: a child that was
forked meanwhile keeps the socket open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from dask_gpuipc import process
from dask_gpuipc.channel import Watch, check_credentials, private_folder
from dask_gpuipc.errors import (
    ChannelError,
    MemoryUnavailable,
    NotAnswering,
    NotPermitted,
    SourceGone,
    WireError,
)
from dask_gpuipc.wire import MAX_MESSAGE, decode, encode

logger = logging.getLogger("distributed.gpuipc")

T = TypeVar("T")
SOCKET: Final = "d"
"""Name of the desk's socket in its folder."""


class Verdict(StrEnum):
    """What a desk says to a visitor."""

    GRANTED = "granted"
    """A descriptor follows."""
    BYTES = "bytes"
    """A layout and the bytes follow."""
    EVENT = "event"
    """The handle of an event follows; the visit lasts as long as its use."""
    GONE = "gone"
    NOT_PERMITTED = "not_permitted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Want:
    """Visitor to desk, first."""

    key: bytes
    kind: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Desk to visitor: what became of the wish."""

    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Visitor to desk: whether it has the array now."""

    good: bool


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process keeps its desk, and which process that is."""

    path: str
    pid: int
    start_time: int
    boot_id: str

    @classmethod
    def here(cls, path: str) -> Address:
        """That of this process."""
        return cls(path, os.getpid(), process.start_time(os.getpid()), process.boot_id())

    @property
    def is_here(self) -> bool:
        """Whether it is this process's own."""
        return self.pid == os.getpid() and self.start_time == process.start_time(self.pid)


Serve = Callable[["Guest"], Coroutine[Any, Any, None]]


class Guest:
    """A visitor, seen from the desk: its socket, and the kernel's word for its pid."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        check_credentials(sock, None)
        self.pid = _peer_pid(sock)
        self.start_time = process.start_time(self.pid)
        self._sock = sock
        self._loop = loop

    async def send(self, record: object) -> None:
        """Send a record."""
        await self.send_bytes(encode(record))

    async def send_bytes(self, data: bytes | memoryview) -> None:
        """Send one packet."""
        await self._loop.sock_sendall(self._sock, data)

    async def receive(self, cls: type[T]) -> T:
        """The next record; `WireError` if it is another, `ConnectionError` at the end."""
        data = await self._loop.sock_recv(self._sock, MAX_MESSAGE)
        if not data:
            raise ConnectionResetError("the visitor left")
        return decode(cls, data)

    async def wait_gone(self) -> None:
        """Return when it has closed its end."""
        while await self._loop.sock_recv(self._sock, MAX_MESSAGE):
            pass


class Desk:
    """The listening side. Belongs to its loop's thread.

    Parameters
    ----------
    directory : str, optional
        Where the private folder is made, as for channels.
    serve : callable
        Coroutine function of a `Guest`; what it raises ends the visit, and nothing else.
    """

    def __init__(
        self, directory: str | None, loop: asyncio.AbstractEventLoop, serve: Serve
    ) -> None:
        self._loop = loop
        self._serve = serve
        self._visits: set[asyncio.Task[None]] = set()
        self._folder = private_folder(directory)
        self.address = Address.here(os.path.join(self._folder, SOCKET))
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._sock.bind(self.address.path)
            self._sock.listen(128)
            self._sock.setblocking(False)
        except BaseException:
            self._sock.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._accepting = loop.create_task(self._accept())

    def __repr__(self) -> str:
        return f"<Desk {self.address.path}: {len(self._visits)} visits>"

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                logger.info("A visitor could not be let in: %s", error)
                await asyncio.sleep(0.1)  # no descriptor is free: others may give some back
                continue
            task = self._loop.create_task(self._visit(sock))
            self._visits.add(task)
            task.add_done_callback(self._visits.discard)

    async def _visit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with sock:
            try:
                guest = Guest(sock, self._loop)
                watch = Watch(guest.pid, guest.start_time, self._loop, _cancel_current())
            except (ChannelError, ProcessLookupError, MemoryUnavailable) as error:
                logger.info("A visitor was turned away: %s", error)
                return
            try:
                await self._serve(guest)
            except (OSError, WireError) as error:
                logger.info("A visit of process %d ended: %s", guest.pid, error)
            except Exception:
                logger.warning("A visit of process %d failed", guest.pid, exc_info=True)
            finally:
                watch.close()

    async def close(self) -> None:
        """Let nobody in any more, and end all visits."""
        tasks = [self._accepting, *self._visits]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Visit:
    """The visitor's side: one talk with a desk. Blocks; belongs to one thread.

    Parameters
    ----------
    address : Address
    timeout : float
        Seconds to wait for each answer.

    Raises
    ------
    SourceGone
        The process has ended, or keeps no desk any more.
    NotPermitted
        It is on another host, or not the process that the address names.
    NotAnswering
        It lives, and lets nobody in.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        if address.boot_id != process.boot_id():
            raise NotPermitted(
                "the memory is on another host (or this one was booted anew): handles of this kind "
                "reach one kernel only; see docs/design/0012-several-hosts.md"
            )
        try:
            self._pidfd = process.open_pidfd(address.pid, address.start_time)
        except ProcessLookupError as error:
            raise SourceGone(f"process {address.pid}, which had the memory, has ended") from error
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        pid = self._address.pid
        # Not settimeout: with a full backlog, connect would fail at once instead of waiting.
        limit = struct.pack("ll", *divmod(int(self._timeout * 1e6), 10**6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._sock.connect(self._address.path)
            check_credentials(self._sock, pid)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise SourceGone(f"process {pid} lives, and shares nothing any more") from error
        except BlockingIOError as error:
            raise self._no_answer() from error
        except OSError as error:  # ChannelBroken among them
            raise NotPermitted(f"process {pid} cannot be asked: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it. Idempotent."""
        self._sock.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def send(self, record: object) -> None:
        """Send a record; one that nobody is there to read is no error: the answer tells."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            self._sock.sendall(encode(record))

    def receive(self, cls: type[T]) -> T:
        """The next record; `SourceGone`, `NotAnswering`, or `NotPermitted` for nonsense."""
        data = self.receive_bytes()
        try:
            return decode(cls, data)
        except WireError as error:
            raise NotPermitted(f"process {self._address.pid}: {error}") from error

    def receive_bytes(self) -> bytes:
        """The next packet."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(self._timeout * 1000):
            raise self._no_answer()
        data = b""
        with contextlib.suppress(OSError):  # nothing there: it is the process that has ended
            data = self._sock.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
        if not data:
            raise SourceGone(f"process {self._address.pid}, which had the memory, went away")
        return data

    def _no_answer(self) -> NotAnswering:
        return NotAnswering(
            f"process {self._address.pid} did not answer within {self._timeout:g} s; "
            "it may be stopped, or busy in code that holds the interpreter"
        )


def _cancel_current() -> Callable[[], None]:
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        task.cancel("the visitor's process has ended")

    return cancel


def _peer_pid(sock: socket.socket) -> int:
    ucred = struct.Struct("iII")
    pid: int = ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))[0]
    return pid
