"""Device buffers of any library, as CuPy arrays of bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def wrap(buffer: Any) -> Any | None:
    """A ``cupy.ndarray`` of ``u1`` over what has ``__cuda_array_interface__``; None if it has not.

    Nothing is copied or waited for: readiness is established for all streams of the context, so the
    stream that the interface may name does not matter.

    Parameters
    ----------
    buffer : object
        C-contiguous; kept by the array.
    """
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return None
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    nbytes = dtype.itemsize * math.prod(shape)
    if nbytes and not _packed(shape, interface.get("strides"), dtype.itemsize):
        return None
    import cupy

    if not nbytes:
        return cupy.empty(0, np.uint8)
    if type(buffer) is cupy.ndarray:  # over its own memory, so that the root owner shows
        start = buffer.data
    else:
        memory = cupy.cuda.UnownedMemory(interface["data"][0], nbytes, buffer)
        start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray((nbytes,), np.uint8, start)


def _packed(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None:
        return True
    step = itemsize
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def download(array: Any) -> memoryview:
    """The bytes of a finished array of bytes, copied to the host."""
    return memoryview(array.get())


def upload(data: Any) -> Any:
    """An array of bytes on the current device, with a copy of host bytes; also of none."""
    import cupy

    return cupy.asarray(np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8))
