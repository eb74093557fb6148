"""Handles: one array, for any process of this user that gets the pickle."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from types import TracebackType
from typing import Any

import numpy as np

from dask_gpuipc.dtypes import decode_dtype, encode_dtype
from dask_gpuipc.errors import HandleClosed, Refused, SourceGone
from dask_gpuipc.sharing.fetching import TIMEOUT, Ticket, fetch, from_host
from dask_gpuipc.sharing.node import Node, current, node
from dask_gpuipc.sharing.offers import Handle, Offer
from dask_gpuipc.wire import Layout


class IPCMemoryHandle(Handle):
    """Names an array of one process so that others can open it. Picklable; thread-safe.

    Made by `get_ipc_handle`. In the process that made it, it keeps its array alive and open to
    others until it is closed or dies; who has opened the array by then keeps it. Elsewhere it is
    a copy that came by pickle::

        with handle.open() as array:
            total = array.sum()

    or ``array = handle.open()`` and, later, ``handle.close()``. A ``with`` over the handle itself
    does the same, and works in the process that made it too.

    What `open` returns:

    - CuPy: the same memory of the GPU, strides and all. A write is seen by everybody.
    - NumPy: a copy-on-write view of one copy in shared memory, made when the first process opens
      the handle and kept while any has it. A write is the writer's own.

    `close` says that this handle is done with. The array itself stays valid for as long as anything
    refers to it, views included; the source is told, and may reuse the memory, when nothing does
    any more and the GPU has finished with it.
    """

    def __init__(self, ticket: Ticket, layout: Layout, offer: Offer | None = None) -> None:
        super().__init__(ticket, offer)
        self._layout = layout

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return IPCMemoryHandle, (self._ticket, self._layout)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<IPCMemoryHandle of process {self.source}, {self.kind} {self.shape} {self.dtype}: "
            f"{state}>"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array."""
        return decode_dtype(self._layout.dtype)

    @property
    def kind(self) -> str:
        """``cuda`` or ``host``."""
        return self._ticket.kind

    @property
    def closed(self) -> bool:
        """Whether `close` was called on it."""
        return self._closed

    @property
    def holders(self) -> tuple[int, ...]:
        """Pids of the processes that have the array open. Known to its source only.

        Raises
        ------
        ValueError
            This is another process.
        """
        return self._mine().holders()

    def open(self, timeout: float = TIMEOUT) -> Any:
        """The array.

        Opened again, here or by another copy of the handle in this process, it is the same memory.
        In the process that made the handle it is the original array.

        Parameters
        ----------
        timeout : float
            Seconds that the source has for each answer.

        Raises
        ------
        HandleClosed
            This handle was closed before.
        SourceGone
            The source's process has ended, or its handle was closed or has died.
        NotAnswering
            The source is stopped, or too busy to answer.
        MemoryUnavailable
            This process cannot open such memory, as after a fork with CUDA in use: use spawn.
        Refused, OpenFailed
            The memory cannot be shared with this process; the text says why.
        """
        return self._open(timeout)

    def _find(self, timeout: float) -> Any:
        if self._ticket.address.is_here:
            return _original(self._ticket)
        nothing = 0 in self.shape
        array = empty(self._layout, self.kind) if nothing else fetch(self._ticket, timeout)
        base: Any = type(array)
        return opened_type(base).of(array, self)

    def wait_closed(self, timeout: float) -> bool:
        """Wait until no other process has the array open; return whether none has.

        In the source only. It says nothing about who opens the handle later: close it first.
        """
        return self._mine().wait(timeout)

    def _mine(self) -> Offer:
        if self._offer is None or not self._offer.is_here:
            raise ValueError(f"only its source, process {self.source}, knows who holds the array")
        return self._offer


def get_ipc_handle(array: Any) -> IPCMemoryHandle:
    """A handle by which other processes of this user can open an array.

    Parameters
    ----------
    array : cupy.ndarray or numpy.ndarray
        Any view. CuPy memory must have an IPC handle: that of CuPy's default pool has.

    Raises
    ------
    TypeError
        It is no such array, or its dtype does not travel.
    Refused
        CUDA has no handle for this memory, or another process lent it.
    MemoryUnavailable
        This process cannot share such memory; the text says why.

    Warns
    -----
    UserWarning
        It is of a subclass; what is opened will be of the base type.
    """
    array, kind = plain(array)
    here = node()
    layout = layout_of(array)
    check_exportable(here, array, kind)
    entry = here.shelf.add(kind, array)
    ticket = Ticket(here.desk.address, entry.key, kind)
    return IPCMemoryHandle(ticket, layout, Offer(here, entry))


def plain(array: Any) -> tuple[Any, str]:
    """An array of exactly its base type, and its kind of memory; warns of a subclass."""
    cupy = sys.modules.get("cupy")
    for module, kind in ((np, "host"), (cupy, "cuda")):
        base = getattr(module, "ndarray", None)
        if base is None or not isinstance(array, base):
            continue
        if type(array) is base:
            return array, kind
        if not isinstance(array, _Opened):
            warnings.warn(
                f"{type(array).__name__} is shared as {base.__name__}: only its elements travel",
                stacklevel=3,
            )
        return array.view(type=base), kind
    raise TypeError(f"numpy.ndarray or cupy.ndarray expected, got {type(array).__name__}")


def layout_of(array: Any) -> Layout:
    """Layout of a contiguous copy of an array; `TypeError` for a dtype that does not travel."""
    try:
        dtype = encode_dtype(array.dtype)
    except Refused as refused:
        raise TypeError(str(refused)) from refused
    shape = tuple(array.shape)
    return Layout(0, dtype, array.itemsize, shape, _c_strides(shape, array.itemsize))


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= n
    return tuple(reversed(strides))


def check_exportable(here: Node, array: Any, kind: str) -> None:
    """Raise now what the first who opens would be told; and have the endpoint made."""
    memory: Any = here.endpoint(kind).memories[0]
    if kind == "cuda" and array.size:
        memory.check_exportable(array)


def _original(ticket: Ticket) -> Any:
    here = current()
    entry = None if here is None else here.shelf.find(ticket.key)
    array = None if entry is None else entry.obj
    if array is None:
        raise SourceGone("this process had the array, and has closed its handle")
    return array


def empty(layout: Layout, kind: str) -> Any:
    """An array without elements, which has no memory to share."""
    array = np.empty(layout.shape, decode_dtype(layout.dtype))
    return array if kind == "host" else from_host(array)


# -- arrays that close their handle ---------------------------------------------------------------


class _Opened:
    """Mixed into the type of an array: ``with`` gives the array and closes the handle after it.

    What is computed from it is of the plain type; so is its pickle.
    """

    _handle: weakref.ref[IPCMemoryHandle] | None = None  # the handle has the array: no cycle

    @classmethod
    def of(cls, array: Any, handle: IPCMemoryHandle) -> Any:
        view = array.view(type=cls)
        view._handle = weakref.ref(handle)
        return view

    def __enter__(self) -> Any:
        if self._handle is None:
            raise HandleClosed("this is a part of an opened array; use with on the whole, or not")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handle = None if self._handle is None else self._handle()
        if handle is not None:
            handle.close()


class OpenedArray(_Opened, np.ndarray[Any, Any]):
    """A ``numpy.ndarray`` that `IPCMemoryHandle.open` gave."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain_array = array.view(np.ndarray)
        return plain_array[()] if return_scalar else plain_array

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


@functools.cache
def opened_type(base: Any) -> Any:
    """The type of what `IPCMemoryHandle.open` gives for an array of a base type."""
    if base is np.ndarray:
        return OpenedArray

    def reduce(self: Any, protocol: Any) -> Any:
        return self.view(type=base).__reduce_ex__(protocol)

    assert isinstance(base, type)
    return type("OpenedArray", (_Opened, base), {"__reduce_ex__": reduce})
