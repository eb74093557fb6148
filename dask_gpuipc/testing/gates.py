"""Gates: one process waits in the middle of a step until another lets it go.

The process that is held has a `Gate`, the one that holds it a `Keeper`; a local socket joins them::

    keeper = Keeper("/tmp/gate")  # in the test
    Fault("pin", hold=Gate("/tmp/gate"))  # in a worker, which stops in `pin`
    pid = wait_until(keeper.arrived)  # it is there
    ...  # whatever shall happen meanwhile
    keeper.let_go()
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Self


class Gate:
    """A point that a process passes when a `Keeper` lets it, or when there is none (any more).

    `wait` has the form of `threading.Event.wait`, so that a `Fault` can be held by it. It blocks
    the calling thread alone. Picklable; safe to use from any thread.

    Parameters
    ----------
    path : str
        The keeper's socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Gate({self.path!r})"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most so many seconds; whether the way was free, or became so."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(timeout)
            try:
                sock.connect(self.path)
                sock.recv(1)  # end of file: the keeper let it go, or has gone
            except TimeoutError:
                return False
            except OSError:
                return True  # nobody keeps it
        return True


class Keeper:
    """Holds the first process that comes to a gate; all later ones pass. Not thread-safe.

    Parameters
    ----------
    path : str
        Where its socket shall be; at most 107 bytes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._held: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(path)
            self._listener.listen(16)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arrived(self) -> int | None:
        """The pid of the process that is held; None while nobody has come. Does not block."""
        if self._held is None:
            try:
                self._held, _ = self._listener.accept()
            except BlockingIOError:
                return None
            self._unlisten()
        ucred = struct.Struct("iII")
        option = self._held.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size)
        return int(ucred.unpack(option)[0])

    def let_go(self) -> None:
        """Let the held process go, and everybody after it. Idempotent."""
        self._unlisten()
        if self._held is not None and self._held.fileno() >= 0:
            self._held.close()

    def close(self) -> None:
        """As `let_go`."""
        self.let_go()

    def _unlisten(self) -> None:
        # those that wait to be accepted see end of file, and pass
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
