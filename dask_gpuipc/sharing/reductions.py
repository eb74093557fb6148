"""Arrays in multiprocessing's messages go as handles."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Literal

import numpy as np

from dask_gpuipc.config import Size, parse_size
from dask_gpuipc.dtypes import encode_dtype
from dask_gpuipc.errors import ConfigError, MemoryUnavailable, Refused, SourceGone
from dask_gpuipc.memory.host import HostMemory, flat
from dask_gpuipc.sharing import segments
from dask_gpuipc.sharing.events import array_type, event_payload, event_type, open_event
from dask_gpuipc.sharing.fetching import Ticket, fetch
from dask_gpuipc.sharing.handles import OpenedArray, opened_type
from dask_gpuipc.sharing.node import current, node
from dask_gpuipc.sharing.post import post_of, watch_messages
from dask_gpuipc.wire import Layout

Strategy = Literal["descriptor", "name"]
MIN_BYTES: Final = "1 MiB"


@dataclass(frozen=True, slots=True)
class _Options:
    min_bytes: int
    strategy: Strategy


_options = _Options(0, "descriptor")


def init_reductions(*, min_bytes: Size = MIN_BYTES, strategy: Strategy = "descriptor") -> None:
    """Have multiprocessing send arrays and events of this process as handles.

    For queues, pipes, pools and arguments of `multiprocessing`, and for
    `concurrent.futures.ProcessPoolExecutor`: CuPy arrays and events, and NumPy arrays from a size
    on. What cannot go by handle goes as bytes, as before. Who receives need not call this, only who
    sends; with spawn and forkserver, a process that is to send calls it itself.

    Called again, it changes the settings of what is sent from then on.

    Parameters
    ----------
    min_bytes : int or str
        Smaller NumPy arrays are pickled.
    strategy : str
        How NumPy arrays go. ``descriptor``: in recycled shared memory without a name, opened by way
        of this process, which is quick, and leaves nothing behind. ``name``: each in a file in
        ``/dev/shm``, which whoever receives it opens without asking, even if this process was
        killed; see `sweep` for what may stay behind.

    Raises
    ------
    ConfigError
        An argument is not what it must be.
    """
    global _options
    if strategy not in ("descriptor", "name"):
        raise ConfigError(f"strategy is {strategy!r}; it must be 'descriptor' or 'name'")
    _options = _Options(max(1, parse_size("min_bytes", min_bytes)), strategy)
    watch_messages()
    for kind in (np.ndarray, OpenedArray):
        ForkingPickler.register(kind, _reduce_numpy)
    if importlib.util.find_spec("cupy") is not None:
        _register_cupy()
    if strategy == "name":
        segments.sweep()


def _register_cupy() -> None:
    base = array_type()
    for kind in (base, opened_type(base)):
        ForkingPickler.register(kind, _reduce_cupy)
    ForkingPickler.register(event_type(), _reduce_event)


# -- sending --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """What travels instead of a NumPy array.

    ``ticket`` is None where a segment holds the array.
    """

    key: bytes
    layout: Layout
    ticket: Ticket | None


def _reduce_numpy(array: np.ndarray[Any, Any]) -> Any:
    array = array.view(np.ndarray)
    if array.nbytes < _options.min_bytes:
        return array.__reduce__()
    if not array.flags.forc:
        array = np.ascontiguousarray(array)  # as pickle does, of what is broadcast too
    send = _send_by_name if _options.strategy == "name" else _send_by_descriptor
    try:
        return rebuild, (send(array),)
    except (Refused, MemoryUnavailable, OSError):
        return array.__reduce__()


def _send_by_descriptor(array: np.ndarray[Any, Any]) -> Message:
    here = node()
    memory = here.endpoint("host").memories[0]
    assert isinstance(memory, HostMemory)
    snapshot = memory.snapshot(array)
    entry = here.shelf.add("host", snapshot.array, once=True, release=snapshot.release)
    post_of(here).send(entry.key, entry)
    return Message(entry.key, _layout(array), Ticket(here.desk.address, entry.key, "host"))


def _send_by_name(array: np.ndarray[Any, Any]) -> Message:
    key = os.urandom(16)
    message = Message(key, _layout(array), None)
    segments.create(key, flat(array))
    post_of(node()).send(key)
    return message


def _layout(array: np.ndarray[Any, Any]) -> Layout:
    """That of the copy of a contiguous array. It can be written, as what was pickled can."""
    return Layout(
        0, encode_dtype(array.dtype), array.itemsize, array.shape, array.strides, writeable=True
    )


def _reduce_cupy(array: Any) -> Any:
    array = array.view(type=array_type())
    if not array.size:
        return array.__reduce__()
    try:
        return rebuild_cupy, (_send("cuda", array),)
    except MemoryUnavailable:
        return array.__reduce__()


def _reduce_event(event: Any) -> Any:
    return rebuild_event, (_send("event", event, payload=event_payload(event)),)


def _send(kind: str, obj: Any, **more: Any) -> Ticket:
    here = node()
    here.endpoint("cuda")
    entry = here.shelf.add(kind, obj, once=True, **more)
    post_of(here).send(entry.key, entry)
    return Ticket(here.desk.address, entry.key, kind)


# -- receiving ------------------------------------------------------------------------------------


def rebuild(message: Message) -> np.ndarray[Any, Any]:
    """The array of a message; called by pickle.

    Raises
    ------
    SourceGone
        Who sent it was killed, or it was received before.
    """
    if message.ticket is None:
        return segments.adopt(message.key, message.layout)
    if message.ticket.address.is_here:
        return _own(message)
    try:
        array: np.ndarray[Any, Any] = fetch(message.ticket, once=True)
    except SourceGone as gone:
        try:
            return segments.adopt(message.key, message.layout)
        except SourceGone:
            raise gone from None
    return array


def rebuild_cupy(ticket: Ticket) -> Any:
    """The array of a ticket; called by pickle. Errors as of `IPCMemoryHandle.open`."""
    return _taken(ticket) if ticket.address.is_here else fetch(ticket, once=True)


def rebuild_event(ticket: Ticket) -> Any:
    """The event of a ticket; called by pickle. Errors as of `IPCEventHandle.open`."""
    return _taken(ticket) if ticket.address.is_here else open_event(ticket)


def _own(message: Message) -> np.ndarray[Any, Any]:
    """What this process sent to itself: a copy, as by pickle."""
    try:
        array: np.ndarray[Any, Any] = _taken(message).copy(order="K")
    except SourceGone:
        return segments.adopt(message.key, message.layout)  # `stop` came between
    return array


def _taken(sent: Message | Ticket) -> Any:
    here = current()
    entry = None if here is None else here.shelf.find(sent.key)
    obj = None if entry is None else entry.obj
    if here is None or entry is None or obj is None:
        raise SourceGone("this process sent it to itself, and has received it already")
    here.shelf.withdraw(entry)
    return obj
