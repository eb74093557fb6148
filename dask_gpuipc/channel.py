"""The channel: one local socket between two peers of one node.

AF_UNIX SOCK_SEQPACKET, one message to a packet. The producer dials the consumer's listening socket,
which lives in a private directory (mode 0700). A connection that succeeds proves one kernel and a
shared file system; the kernel's word for the other side (SO_PEERCRED) gives its user and pid, and
the token, which only travelled in Dask's handshake, that it is a worker of this cluster.

What the kernel does, and what follows
--------------------------------------
- A child that a task forked keeps copies of the socket, so end of file is late or never: a peer's
  death is its pidfd becoming readable (`Watch`).
- A receiver that is out of descriptors gets MSG_CTRUNC and loses those sent to it: the message is
  handed on without them.
- An empty packet looks like end of file; nobody here sends one, so it ends the channel.
- Sending never blocks. `send` refuses when it would; `post` queues, for messages that must arrive.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import hmac
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dask_gpuipc import process
from dask_gpuipc.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ConfigError,
    WireError,
)
from dask_gpuipc.wire import (
    MAX_MESSAGE,
    Advertisement,
    Hello,
    Message,
    Welcome,
    decode_message,
    encode_message,
)

MAX_FDS: Final = 4
MAX_PATH: Final = 107
"""Bytes of a socket's path; the kernel has 108 with the closing zero."""
MAX_STRANGERS: Final = 64
"""Connections that have not said Hello; beyond it the oldest is closed."""
HELLO_TIMEOUT: Final = 5.0
ACCEPT_AGAIN: Final = 0.1
"""Seconds without accepting after a connection for which no descriptor was free."""
PREFIX: Final = "dask-gpuipc"

OnMessage = Callable[["Channel", Message, tuple[int, ...]], None]
OnBroken = Callable[["Channel", Exception], None]
# Full: a queue, the receiver's or the kernel's, or too many descriptors in flight.
_WOULD_BLOCK = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM)


class Channel:
    """One connection. Thread-safe.

    Parameters
    ----------
    sock : socket.socket
        Connected, SOCK_SEQPACKET; owned by the channel from now on.
    loop : asyncio.AbstractEventLoop
        Reads and writes whenever the socket is ready.
    on_message : callable
        ``(channel, message, fds)``, in the order of arrival and never twice at a time, on the loop
        or on the thread that calls `drain`. It owns the descriptors. It must be quick.
    on_broken : callable
        ``(channel, error)``, once, when the other side has ended the channel or broken its rules.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_message: OnMessage,
        on_broken: OnBroken,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = loop
        self._on_message = on_message
        self._on_broken = on_broken
        self._read_lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._closed = False
        self._broken = False
        self._writing = False
        loop.add_reader(sock.fileno(), self.drain)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._broken else "open"
        return f"<Channel {state}: {len(self._outbox)} queued>"

    @property
    def usable(self) -> bool:
        """Whether neither side has ended it, as far as is known."""
        return not (self._closed or self._broken)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send now, after everything that was posted.

        Raises
        ------
        ChannelFull
            It would block. Nothing was sent.
        ChannelClosed, ChannelBroken
            This or the other side has ended it.
        """
        data = encode_message(message)
        with self._send_lock:
            self._check()
            if self._outbox:
                raise ChannelFull(f"{len(self._outbox)} messages wait for the peer to read")
            self._send(data, fds)

    def post(self, message: Message) -> None:
        """Send as soon as the peer reads; a channel that has ended drops it."""
        data = encode_message(message)
        with self._send_lock:
            if not self.usable:
                return
            self._outbox.append(data)
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                self._send(self._outbox[0], ())
                self._outbox.popleft()
        except ChannelFull:
            self._want_write()
        except ChannelError:
            self._outbox.clear()

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno in _WOULD_BLOCK:
                raise ChannelFull(f"the peer does not read: {error}") from error
            raise ChannelBroken(f"the peer is gone: {error}") from error

    def _want_write(self) -> None:
        if not self._writing:
            self._writing = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is leaving
                self._loop.call_soon_threadsafe(self._watch_writable)

    def _watch_writable(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with self._send_lock:
            self._loop.remove_writer(self._sock.fileno())
            self._writing = False
            if self.usable:
                self._flush()

    def _check(self) -> None:
        if self._closed:
            raise ChannelClosed("the channel was closed on this side")
        if self._broken:
            raise ChannelBroken("the channel was ended by the peer")

    def drain(self) -> None:
        """Read and hand on everything that has arrived; returns when it has been dealt with.

        The only reader: the loop calls it when the socket is readable, and importers call it before
        they look an announcement up.
        """
        with self._read_lock:
            try:
                while self.usable and self._receive():
                    pass
            except (ChannelError, WireError) as error:
                self._break(error)

    def _receive(self) -> bool:
        try:
            data, rights, flags, _ = self._sock.recvmsg(
                MAX_MESSAGE + 1, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ChannelBroken(f"the peer is gone: {error}") from error
        fds = _received_fds(rights)
        if flags & socket.MSG_CTRUNC:
            fds = _close_all(fds)
        try:
            if not data:
                raise ChannelBroken("end of file")
            if flags & socket.MSG_TRUNC:
                raise WireError(f"packet of more than {MAX_MESSAGE} bytes")
            message = decode_message(data)
        except BaseException:
            _close_all(fds)
            raise
        self._on_message(self, message, fds)
        return True

    def _break(self, error: Exception) -> None:
        if self._broken or self._closed:
            return
        self._broken = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._unwatch)
        self._on_broken(self, error)

    def _unwatch(self) -> None:
        """Leave the loop and close the socket. On the loop's thread."""
        with self._read_lock, self._send_lock:
            fd = self._sock.fileno()
            if fd >= 0:
                self._loop.remove_reader(fd)
                self._loop.remove_writer(fd)
                self._sock.close()

    def close(self) -> None:
        """End the channel; what was posted and not yet read by the kernel is lost. On the loop."""
        self._closed = True
        self._unwatch()


class Watch:
    """Calls back on the loop when a process ends. Thread-safe to close from the loop only.

    Raises
    ------
    ProcessLookupError
        It has ended already, or its pid is another's.
    MemoryUnavailable
        The kernel has no pidfd.
    """

    def __init__(
        self,
        pid: int,
        start_time: int,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_death = on_death
        self._pidfd = process.open_pidfd(pid, start_time)
        loop.add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        self.close()
        self._on_death()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class Listener:
    """The consumer's listening socket.

    A connection becomes a channel when its kernel credentials are this user's and its first message
    is a `Hello` with the token; anything else is closed and changes nothing for the rest.

    Parameters
    ----------
    directory : str, optional
        Where the private directory is made; None is $XDG_RUNTIME_DIR or the temporary directory.
    accept : callable
        ``(sock, hello) -> None``: takes the socket over. May raise `ChannelError` to refuse.
    """

    def __init__(
        self,
        directory: str | None,
        loop: asyncio.AbstractEventLoop,
        accept: Callable[[socket.socket, Hello], None],
    ) -> None:
        self.token = secrets.token_bytes(16)
        self.refused = 0
        self._loop = loop
        self._accept = accept
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._folder = private_folder(directory)
        self.path = os.path.join(self._folder, "s")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._sock.bind(self.path)
            self._sock.listen(128)
            self._sock.setblocking(False)
            loop.add_reader(self._sock.fileno(), self._on_connection)
        except BaseException:
            self._sock.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _on_connection(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            # else it is gone already
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause()
            return
        try:
            check_credentials(sock, None)
        except ChannelError:
            self.refused += 1
            sock.close()
            return
        sock.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        self._strangers[sock] = self._loop.call_later(HELLO_TIMEOUT, self._dismiss, sock)
        self._loop.add_reader(sock.fileno(), self._on_hello, sock)

    def _pause(self) -> None:
        """Without a descriptor to be had the socket stays readable: look again in a while."""
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(ACCEPT_AGAIN, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._on_connection)

    def _on_hello(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(MAX_MESSAGE)
            hello = decode_message(data)
            self._check_hello(sock, hello)
        except (OSError, WireError):
            self._dismiss(sock)
            return
        self._forget(sock)
        try:
            assert isinstance(hello, Hello)
            self._accept(sock, hello)
        except ChannelError:
            self.refused += 1
            sock.close()

    def _check_hello(self, sock: socket.socket, hello: Message) -> None:
        if not isinstance(hello, Hello):
            raise WireError(f"the first message must be Hello; got {type(hello).__name__}")
        if not hmac.compare_digest(hello.token, self.token):
            raise ChannelBroken("wrong token")
        check_credentials(sock, hello.pid)

    def _dismiss(self, sock: socket.socket) -> None:
        self._forget(sock)
        self.refused += 1
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        timer = self._strangers.pop(sock, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(sock.fileno())

    def close(self) -> None:
        """Stop listening and remove the socket; channels live on. Idempotent, on the loop."""
        for sock in list(self._strangers):
            self._dismiss(sock)
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            shutil.rmtree(self._folder, ignore_errors=True)


async def dial(
    them: Advertisement, hello: Hello, loop: asyncio.AbstractEventLoop, timeout: float
) -> socket.socket:
    """Connect to an advertised socket, say Hello and wait for the Welcome.

    Returns the connected socket. Raises `ChannelError` when that takes longer than ``timeout``
    seconds, the socket cannot be reached, or the process behind it is not the one that advertised.
    """
    if not os.path.isabs(them.socket_path) or "\0" in them.socket_path:
        # A zero at the front would name an abstract socket, which anybody may have made.
        raise ChannelBroken(f"{them.socket_path!r} is not the absolute path of a socket")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ChannelBroken(f"no socket to be had: {error}") from error
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout):
            await loop.sock_connect(sock, them.socket_path)
            check_credentials(sock, them.pid)
            await loop.sock_sendall(sock, encode_message(hello))
            reply = decode_message(await loop.sock_recv(sock, MAX_MESSAGE))
        if reply != Welcome(them.peer):
            raise ChannelBroken(f"Welcome of {them.peer} expected, got {reply!r}")
    except (OSError, WireError, TimeoutError) as error:
        sock.close()
        if isinstance(error, ChannelError):
            raise
        raise ChannelBroken(f"{them.socket_path}: {error!r}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def check_credentials(sock: socket.socket, pid: int | None) -> None:
    """Compare the kernel's word for the other side with this user and the pid that it claims.

    Raises
    ------
    ChannelBroken
        Another user; the overflow uid (a foreign user namespace); pid 0 (a foreign pid namespace);
        another pid than the claimed one.
    """
    ucred = struct.Struct("iII")  # pid, uid, gid
    found, uid, _ = ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))
    if uid != os.geteuid() or uid == process.overflow_uid():
        raise ChannelBroken(f"the other side runs as uid {uid}, this one as {os.geteuid()}")
    if found == 0:
        raise ChannelBroken("the other side is in a foreign pid namespace")
    if pid is not None and pid != found:
        raise ChannelBroken(f"the other side is process {found}, it claims to be {pid}")


def default_base() -> str:
    """Where private folders are made unless a setting says otherwise."""
    return os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()


def private_folder(directory: str | None) -> str:
    """Make a folder of mode 0700 for a socket, which `sweep` knows by this process in its name.

    Raises
    ------
    ConfigError
        ``directory`` is none, or so long that the path of a socket of a one-letter name is too.
    """
    base = directory or default_base()
    if not os.path.isdir(base):
        raise ConfigError(
            f"gpuipc.socket-directory {base!r} is not a directory; create it or name another"
        )
    sweep(base)
    started = process.start_time(os.getpid())
    name = f"{PREFIX}-{process.pid_namespace()}-{os.getpid()}-{started}-"
    folder = tempfile.mkdtemp(prefix=name, dir=base)
    length = len(os.fsencode(os.path.join(folder, "s")))
    if length > MAX_PATH:
        os.rmdir(folder)
        raise ConfigError(
            f"the socket's path in {base!r} would have {length} bytes, at most {MAX_PATH} are "
            "possible; set gpuipc.socket-directory to a shorter one"
        )
    return folder


def sweep(base: str) -> list[str]:
    """Remove the folders that killed processes of this user left in ``base``; return them.

    Only those of this pid namespace: in another the same pid is somebody else, who may live.
    """
    pattern = re.compile(rf"{PREFIX}-{process.pid_namespace()}-(\d+)-(\d+)-\w+")
    removed = []
    for entry in os.scandir(base):
        match = pattern.fullmatch(entry.name)
        if match is None or not _is_stale(entry.path, int(match[1]), int(match[2])):
            continue
        shutil.rmtree(entry.path, ignore_errors=True)
        removed.append(entry.path)
    return removed


def folders_of(base: str, pid: int, started: int) -> list[str]:
    """The private folders in ``base`` of one process of this user and pid namespace."""
    prefix = f"{PREFIX}-{process.pid_namespace()}-{pid}-{started}-"
    found = []
    for entry in os.scandir(base):
        if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
            info = entry.stat(follow_symlinks=False)
            if info.st_uid == os.geteuid() and not info.st_mode & 0o077:
                found.append(entry.path)
    return found


def _is_stale(path: str, pid: int, started: int) -> bool:
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return False
        return process.start_time(pid) != started
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _received_fds(rights: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)


def _close_all(fds: Sequence[int]) -> tuple[int, ...]:
    for fd in fds:
        os.close(fd)
    return ()
