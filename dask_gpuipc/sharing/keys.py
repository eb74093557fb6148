"""Sharing by key: a short text names an array, and its exporter says who may open it."""

from __future__ import annotations

import base64
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterable
from typing import Any, Final

from dask_gpuipc import process
from dask_gpuipc.channel import default_base, folders_of
from dask_gpuipc.errors import HandleClosed, NotPermitted, SourceGone, StillOpen
from dask_gpuipc.sharing.desk import SOCKET, Address
from dask_gpuipc.sharing.fetching import TIMEOUT, Ticket, fetch
from dask_gpuipc.sharing.handles import check_exportable, layout_of, plain
from dask_gpuipc.sharing.node import node
from dask_gpuipc.sharing.offers import Offer
from dask_gpuipc.sharing.shelf import Who

SECRET: Final = 10
"""Random bytes in a key; 16 letters."""
KEY: Final = re.compile(r"gpuipc-(host|cuda)-(\d+)-([a-z2-7]{16})")
Process = int | str
"""A pid, or ``"host:pid"``."""


class _Keys:
    """What this process gave keys for, and what it opened by key. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.given: dict[str, Offer] = {}
        self.opened: dict[str, tuple[Any, int]] = {}
        """The array, and how often it was opened."""

    def mine(self, key: str) -> Offer:
        """What this process gave out under a key; `HandleClosed` if it did not, or no longer."""
        with self.lock:
            offer = self.given.get(key)
        if offer is None:
            raise HandleClosed(f"this process did not export {key!r}, or has closed it")
        return offer


_keys = _Keys()


def _after_fork_in_child() -> None:
    # Another thread may have had the lock, and what the parent exports is the parent's.
    global _keys
    opened, _keys = _keys.opened, _Keys()
    _keys.opened = opened


os.register_at_fork(after_in_child=_after_fork_in_child)


def export_key(array: Any, pids: Iterable[Process] | None = None) -> str:
    """A short printable key by which other processes can open an array.

    The array stays alive, and open to others, until `close_key`.

    Parameters
    ----------
    array : cupy.ndarray or numpy.ndarray
        As for `get_ipc_handle`, and not empty.
    pids : iterable of int or str, optional
        The processes that may open it, as for `allow`; by default every process of this user.

    Raises
    ------
    ValueError
        It has no elements, so no memory to share.
    TypeError, Refused, MemoryUnavailable, NotPermitted, ProcessLookupError
        As for `get_ipc_handle` and `allow`.
    """
    array, kind = plain(array)
    layout_of(array)
    if not array.size:
        raise ValueError("an array without elements has no memory to share")
    allowed = None if pids is None else {_who(p) for p in pids}
    here = node()
    check_exportable(here, array, kind)
    secret = base64.b32encode(secrets.token_bytes(SECRET)).decode().lower()
    entry = here.shelf.add(kind, array, key=secret.encode(), allowed=allowed)
    key = f"gpuipc-{kind}-{here.pid}-{secret}"
    with _keys.lock:
        _keys.given[key] = Offer(here, entry)
    return key


def allow(key: str, pids: Iterable[Process]) -> None:
    """Let these processes open what this process exported under a key.

    The first call, or ``export_key(pids=...)``, makes the list the whole of those that may; each
    further call adds to it. Who has it open keeps it. The kernel says who asks (SO_PEERCRED), and a
    pid stands for the process that has it now, not for one that has it later.

    Parameters
    ----------
    pids : iterable of int or str
        Pids on this host, as numbers or ``"host:pid"``.

    Raises
    ------
    HandleClosed
        The key is not this process's, or is closed.
    NotPermitted
        A process on another host, or of another user.
    ProcessLookupError
        There is no such process.
    """
    offer = _keys.mine(key)
    offer.allow({_who(p) for p in pids})


def set_attributes(key: str, *, readonly: bool) -> None:
    """Say how others get what this process exported under a key. For those who open it later.

    Parameters
    ----------
    readonly : bool
        They cannot write to it: the kernel or the driver maps it for reading only. Possible for
        host memory and for CUDA memory of `Pool`.

    Raises
    ------
    HandleClosed
        The key is not this process's, or is closed.
    ValueError
        This memory can always be written by who opens it.
    """
    _keys.mine(key).set_readonly(readonly)


def open_key(key: str, timeout: float = TIMEOUT) -> Any:
    """The array that another process exported under a key.

    Opened again, it is the same memory; each `open_key` wants its `close_key`. In the exporting
    process it is the original array.

    Parameters
    ----------
    timeout : float
        Seconds that the exporter has for each answer.

    Raises
    ------
    ValueError
        The text is no key.
    SourceGone
        The exporter has ended, or closed the key.
    NotPermitted
        This process is not among those that may.
    NotAnswering, MemoryUnavailable, Refused, OpenFailed
        As for `IPCMemoryHandle.open`.
    """
    with _keys.lock:
        offer = _keys.given.get(key)
        if offer is not None:
            return offer.array
        if key in _keys.opened:
            return _count_open(key, _keys.opened[key][0])
    array = fetch(_ticket(key), timeout)
    with _keys.lock:
        return _count_open(key, array)


def _count_open(key: str, array: Any) -> Any:
    _, uses = _keys.opened.get(key, (None, 0))
    _keys.opened[key] = (array, uses + 1)
    return array


def close_key(key: str, timeout: float = 30.0) -> None:
    """Be done with a key.

    Where it was opened: undo one `open_key`. The array stays valid while anything refers to it, and
    the exporter is told when nothing does any more.

    Where it was exported: nobody else can open it from now on; wait until nobody has it open, so
    that no order of closing can hurt. After an error it may be called again.

    Parameters
    ----------
    timeout : float
        Seconds to wait for the others.

    Raises
    ------
    StillOpen
        Others have it open still; the text says which processes. Their memory is left alone.
    HandleClosed
        The key is not open here.
    """
    with _keys.lock:
        offer = _keys.given.get(key)
        if offer is None:
            _close_opened(key)
            return
    offer.withdraw()
    if not offer.wait(timeout):
        raise StillOpen(
            f"after {timeout:g} s {key} is open in processes {list(offer.holders())}; have them "
            "close it and drop what refers to it"
        )
    with _keys.lock:
        _keys.given.pop(key, None)


def _close_opened(key: str) -> None:
    array, uses = _keys.opened.get(key, (None, 0))
    if not uses:
        raise HandleClosed(f"{key!r} is not open here")
    if uses > 1:
        _keys.opened[key] = (array, uses - 1)
    else:
        del _keys.opened[key]


def _ticket(key: str) -> Ticket:
    match = KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is no key; they look like 'gpuipc-host-1234-abcdefghijklmnop'")
    kind, pid, secret = match[1], int(match[2]), match[3].encode()
    try:
        started = process.start_time(pid)
    except ProcessLookupError as error:
        raise SourceGone(f"process {pid}, which exported {key}, has ended") from error
    for base in _bases():
        for folder in folders_of(base, pid, started):
            path = os.path.join(folder, SOCKET)
            if os.path.exists(path):
                address = Address(path, pid, started, process.boot_id())
                return Ticket(address, secret, kind)
    raise SourceGone(
        f"process {pid} shares nothing, or where this one does not look; both need the same "
        "gpuipc.socket-directory, or XDG_RUNTIME_DIR and TMPDIR"
    )


def _bases() -> list[str]:
    bases = [node().settings.socket_directory, default_base(), tempfile.gettempdir()]
    return [base for base in dict.fromkeys(bases) if base and os.path.isdir(base)]


def _who(entry: Process) -> Who:
    pid = entry if isinstance(entry, int) else _pid_here(entry)
    started = process.start_time(pid)
    uid = os.stat(f"/proc/{pid}").st_uid
    if uid != os.geteuid():
        raise NotPermitted(f"process {pid} is of user {uid}; only those of user {os.geteuid()} may")
    return pid, started


def _pid_here(entry: str) -> int:
    host, colon, pid = entry.rpartition(":")
    if not pid.isdigit():
        raise ValueError(f"{entry!r} is neither a pid nor 'host:pid'")
    if colon and host not in ("localhost", socket.gethostname()):
        raise NotPermitted(
            f"{entry}: descriptors and CUDA IPC handles stay on {socket.gethostname()}; it takes "
            "fabric handles to leave a host, see docs/design/0012-several-hosts.md"
        )
    return int(pid)
