"""The visitor's side: from a ticket to an array.

A ticket names an entry of another process and can be opened by nobody but this user's processes.
What was opened by a ticket is kept in a weak table, so that a second opening, by any copy of the
ticket, finds the same array, and two threads that open at once open once.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dask_gpuipc.dtypes import decode_dtype
from dask_gpuipc.errors import (
    MemoryUnavailable,
    NotPermitted,
    OpenFailed,
    Refusal,
    Refused,
    SourceGone,
)
from dask_gpuipc.sharing.desk import Address, Outcome, Reply, Verdict, Visit, Want
from dask_gpuipc.sharing.node import Node, node
from dask_gpuipc.wire import Descriptor, Layout

TIMEOUT: Final = 30.0
"""Seconds that a source has for each answer, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one array of another process. Picklable."""

    address: Address
    key: bytes
    kind: str


class _Turn:
    """A lock that lives as long as somebody waits for it."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Opened:
    """What this process has opened, by key, as long as it lives. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        self._turns: weakref.WeakValueDictionary[bytes, _Turn] = weakref.WeakValueDictionary()

    def get(self, key: bytes, open_: Callable[[], Any]) -> Any:
        """The array of a key, opened if it is not open."""
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
        with turn.lock:
            array = self._arrays.get(key)
            if array is None:
                array = open_()
                self._arrays[key] = array
            return array


_opened = Opened()


def _after_fork_in_child() -> None:
    global _opened
    _opened = Opened()  # another thread may have had its locks


os.register_at_fork(after_in_child=_after_fork_in_child)


def fetch(ticket: Ticket, timeout: float = TIMEOUT, *, once: bool = False) -> Any:
    """The array of a ticket, which is another process's.

    Parameters
    ----------
    timeout : float
        Seconds that its source has for each answer.
    once : bool
        It came in a message: what cannot come by handle comes as bytes.

    Raises
    ------
    SourceGone, NotPermitted, NotAnswering
        See `dask_gpuipc.errors`.
    MemoryUnavailable
        This process cannot open that kind of memory; the text says why, and what to do.
    Refused
        The source cannot share it with this process, for the reason given.
    OpenFailed
        This process could not open the handle.
    """
    return _opened.get(ticket.key, functools.partial(_fetch, node(), ticket, timeout, once))


def _fetch(here: Node, ticket: Ticket, timeout: float, once: bool) -> Any:
    endpoint = here.endpoint(ticket.kind)
    with Visit(ticket.address, timeout) as visit:
        visit.send(Want(ticket.key, ticket.kind))
        visit.send(endpoint.advertisement)
        reply = visit.receive(Reply)
        if reply.verdict is Verdict.GRANTED:
            descriptor = visit.receive(Descriptor)
            try:
                array = endpoint.importer.load(descriptor)
            except OpenFailed:
                visit.send(Outcome(False))
                if not once:
                    raise
                reply = visit.receive(Reply)
            else:
                visit.send(Outcome(True))
                return array
        _raise_for(reply, ticket)
        array = _receive_bytes(visit, ticket.kind)
        visit.send(Outcome(True))
        return array


def _raise_for(reply: Reply, ticket: Ticket) -> None:
    source = f"process {ticket.address.pid}"
    match reply.verdict:
        case Verdict.BYTES:
            return
        case Verdict.GONE:
            raise SourceGone(f"{source}: {reply.detail}")
        case Verdict.NOT_PERMITTED:
            raise NotPermitted(f"{source}: {reply.detail}")
        case _:
            reason, _, detail = reply.detail.partition(": ")
            raise Refused(Refusal(reason), f"{source}: {detail}" if detail else source)


def _receive_bytes(visit: Visit, kind: str) -> Any:
    layout = visit.receive(Layout)
    data = np.empty(layout.nbytes, np.uint8)
    filled = 0
    while filled < data.size:
        packet = np.frombuffer(visit.receive_bytes(), np.uint8)
        if filled + packet.size > data.size:
            raise NotPermitted("more bytes came than were announced")
        data[filled : filled + packet.size] = packet
        filled += packet.size
    array = data.view(decode_dtype(layout.dtype)).reshape(layout.shape)
    return array if kind == "host" else from_host(array)


def from_host(array: np.ndarray[Any, Any]) -> Any:
    """The ``cupy.ndarray`` of a ``numpy.ndarray``, on the current device."""
    try:
        from dask_gpuipc.memory.cuda.interop import upload
    except ImportError as error:
        raise MemoryUnavailable(f"a CuPy array came here: {error}") from error
    return upload(array)
