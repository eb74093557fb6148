"""CuPy events between processes: ``cupy.cuda.Event(disable_timing=True, interprocess=True)``."""

from __future__ import annotations

import weakref
from typing import Any

from dask_gpuipc.errors import (
    MemoryUnavailable,
    NotPermitted,
    SourceGone,
)
from dask_gpuipc.sharing.desk import Reply, Verdict, Visit, Want
from dask_gpuipc.sharing.fetching import TIMEOUT, Ticket
from dask_gpuipc.sharing.node import Node, node
from dask_gpuipc.sharing.offers import Handle, Offer


class IPCEventHandle(Handle):
    """Names an event of one process so that others can wait for it, or record it. Picklable.

    In the process that made it, it keeps the event alive, and open to others, until it is closed or
    dies; after that until those that opened it are done with it, since the driver forbids to
    destroy an event that others use. Thread-safe.

    Parameters
    ----------
    event : cupy.cuda.Event
        Made with ``disable_timing=True, interprocess=True``.

    Raises
    ------
    ValueError
        It was made otherwise.
    MemoryUnavailable
        CUDA cannot be used in this process; the text says why.
    """

    def __init__(self, event: Any) -> None:
        here = node()
        here.endpoint("cuda")
        entry = here.shelf.add("event", event, payload=event_payload(event))
        super().__init__(Ticket(here.desk.address, entry.key, "event"), Offer(here, entry))

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return _unpickled, (self._ticket,)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<IPCEventHandle of process {self.source}: {state}>"

    def open(self, timeout: float = TIMEOUT) -> Any:
        """The event; the current device must be its own.

        In its own process the original; elsewhere an object for ``stream.wait_event``,
        ``stream.record``, and with ``done``, ``record`` and ``synchronize`` as CuPy's have.

        Raises
        ------
        HandleClosed, SourceGone, NotAnswering, NotPermitted, MemoryUnavailable
            As for `IPCMemoryHandle.open`.
        """
        return self._open(timeout)

    def _find(self, timeout: float) -> Any:
        return (
            self._original() if self._ticket.address.is_here else open_event(self._ticket, timeout)
        )

    def _original(self) -> Any:
        entry = node().shelf.find(self._ticket.key)
        if entry is None:
            raise SourceGone("this process had the event, and has closed its handle")
        return entry.obj


def _unpickled(ticket: Ticket) -> IPCEventHandle:
    handle = IPCEventHandle.__new__(IPCEventHandle)
    Handle.__init__(handle, ticket)
    return handle


def open_event(ticket: Ticket, timeout: float = TIMEOUT) -> Any:
    """The event of a ticket, which is another process's; see `IPCEventHandle.open`."""
    here = node()
    here.endpoint("cuda")  # or raise what there is to say
    visit = Visit(ticket.address, timeout)
    try:
        visit.send(Want(ticket.key, ticket.kind))
        reply = visit.receive(Reply)
        if reply.verdict is Verdict.NOT_PERMITTED:
            raise NotPermitted(f"process {ticket.address.pid}: {reply.detail}")
        if reply.verdict is not Verdict.EVENT:
            raise SourceGone(f"process {ticket.address.pid}: {reply.detail}")
        event = _interop().OpenedEvent(visit.receive_bytes())
    except BaseException:
        visit.close()
        raise
    weakref.finalize(event, here.later, _end, here, event.ptr, visit).atexit = False
    return event


def _end(here: Node, ptr: int, visit: Visit) -> None:
    """Close an opened event, and tell its source when nothing waits for it any more."""
    _interop().destroy_event(ptr)
    fence = here.endpoint("cuda").memories[0].fence()
    if fence is None:
        visit.close()
    else:
        fence.add_done_callback(lambda _: visit.close())


def event_payload(event: Any) -> bytes:
    """The handle of an event; `ValueError` if it has none."""
    payload: bytes = _interop().event_handle(event)
    return payload


def event_type() -> Any:
    """``cupy.cuda.Event``."""
    return _interop().event_type()


def array_type() -> Any:
    """``cupy.ndarray``."""
    return _interop().array_type()


def _interop() -> Any:
    try:
        from dask_gpuipc.memory.cuda import interop
    except ImportError as error:
        raise MemoryUnavailable(f"cupy: {error}") from error
    return interop
