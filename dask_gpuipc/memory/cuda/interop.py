"""What floors above want of CuPy without importing it: types, uploads, interprocess events."""

from __future__ import annotations

import contextlib
from typing import Any

import cupy
import numpy as np


def array_type() -> Any:
    """``cupy.ndarray``."""
    return cupy.ndarray


def event_type() -> Any:
    """``cupy.cuda.Event``."""
    return cupy.cuda.Event


def upload(array: np.ndarray[Any, Any]) -> Any:
    """A ``cupy.ndarray`` with the elements of a NumPy array, on the current device."""
    return cupy.asarray(array)


def event_handle(event: Any) -> bytes:
    """The IPC handle of an event.

    Raises
    ------
    ValueError
        It was not made for other processes.
    """
    try:
        handle: bytes = cupy.cuda.runtime.ipcGetEventHandle(event.ptr)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ValueError(
            f"the event has no handle ({error}); make it with "
            "cupy.cuda.Event(disable_timing=True, interprocess=True)"
        ) from error
    return handle


class OpenedEvent:
    """Another process's event, opened in this one.

    Works where CuPy wants a ``cupy.cuda.Event``: ``stream.wait_event(event)``,
    ``stream.record(event)``. Its device must be the current one when it is made.
    """

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, handle: bytes) -> None:
        self.ptr = int(cupy.cuda.runtime.ipcOpenEventHandle(handle))

    @property
    def done(self) -> bool:
        """Whether all that was recorded before it is over."""
        return bool(cupy.cuda.runtime.eventQuery(self.ptr) == 0)

    def record(self, stream: Any = None) -> None:
        """Record it in a stream; the current one by default."""
        stream = cupy.cuda.get_current_stream() if stream is None else stream
        cupy.cuda.runtime.eventRecord(self.ptr, stream.ptr)

    def synchronize(self) -> None:
        """Wait until all that was recorded before it is over."""
        cupy.cuda.runtime.eventSynchronize(self.ptr)


def destroy_event(ptr: int) -> None:
    """Close an opened event; what waits for it on a device still does. Raises nothing."""
    with contextlib.suppress(Exception):  # the context may be gone by now
        cupy.cuda.runtime.eventDestroy(ptr)
