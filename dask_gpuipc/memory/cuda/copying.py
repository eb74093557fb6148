"""A private copy of an array on a device.

The source may lie on the same device, on another one that it can read, or in pinned host memory.
The destination comes from CuPy's current pool under the legacy default stream, where every block
that a task may get comes from, so that the pool strands none. The copy runs on the device's private
stream, between two events over the whole context:

1. it waits for all that was submitted before, since the pool hands out blocks that a kernel of any
   stream may still use: pools free in the order of the host, not of the device;
2. all that is submitted later waits for it, so that no stream sees it half done.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dask_gpuipc.memory.cuda.device import Device, Mark
from dask_gpuipc.memory.cuda.driver import CudaError, Driver
from dask_gpuipc.wire import Layout

WORDS = (8, 4, 2, 1)

Allocate = Callable[[int], Any]


def dense_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Strides of the contiguous array that plain Dask delivers for one.

    It sends a C- or F-contiguous array as it is, and ``cupy.array(x, copy=True)`` of any other,
    whose axes keep their order in memory (order "K").

    Parameters
    ----------
    shape, strides
        Of the source; strides in bytes.
    itemsize : int
        Bytes of one element.
    """
    c_order = _packed(shape, range(len(shape))[::-1], itemsize)
    f_order = _packed(shape, range(len(shape)), itemsize)
    for packed in (c_order, f_order):
        if same_place(shape, strides, packed):
            return packed
    return _packed(
        shape, sorted(range(len(shape)), key=lambda axis: (abs(strides[axis]), -axis)), itemsize
    )


def same_place(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides put every element of a shape in the same place."""
    return all(n <= 1 or a == b for n, a, b in zip(shape, one, other, strict=True))


def _packed(shape: tuple[int, ...], innermost_first: Any, itemsize: int) -> tuple[int, ...]:
    strides = [0] * len(shape)
    step = itemsize
    for axis in innermost_first:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def private_copy(device: Device, source: Any, allocate: Allocate | None = None) -> tuple[Any, Mark]:
    """Begin to copy an array into memory of this process's own.

    Returns at once; nothing is waited for.

    Parameters
    ----------
    device : Device
        On which the copy shall live, and which can read the source.
    source : cupy.ndarray
        Of any layout. It must stay until the mark has passed.
    allocate : callable, optional
        Takes bytes, gives a ``cupy.cuda.MemoryPointer``; the default is CuPy's current allocator.

    Returns
    -------
    cupy.ndarray, Mark
        The copy, which may be used on any stream at once; and the point at which it is made.

    Raises
    ------
    CudaError
        With ``capturing`` during a graph capture; with OUT_OF_MEMORY where there is no room.
    """

    def make() -> Any:
        import cupy

        strides = dense_strides(source.shape, source.strides, source.itemsize)
        memory = (allocate or cupy.cuda.alloc)(source.nbytes)
        return cupy.ndarray(source.shape, source.dtype, memory, strides)

    def fill(target: Any, stream: Any) -> None:
        _fill(target, source, stream, device.driver)

    return _made(device, make, fill)


def upload(device: Device, layout: Layout, dtype: Any, base: int) -> tuple[Any, Mark]:
    """Begin to copy what lies in pinned host memory to a device; as `private_copy`.

    Parameters
    ----------
    device : Device
    layout : Layout
        In the host memory, all of which between its first and last byte is copied.
    dtype : numpy.dtype
        Of the array.
    base : int
        Address of the host memory, which must stay until the mark has passed.
    """
    low, high = layout.extent()

    def make() -> Any:
        import cupy

        memory = cupy.cuda.alloc(high - low)
        return cupy.ndarray(layout.shape, dtype, memory + (layout.offset - low), layout.strides)

    def fill(target: Any, stream: Any) -> None:
        start = target.data.ptr - (layout.offset - low)
        device.driver.upload(start, base + low, high - low, stream.ptr)

    return _made(device, make, fill)


def _made(
    device: Device, make: Callable[[], Any], fill: Callable[[Any, Any], None]
) -> tuple[Any, Mark]:
    """An array, and the mark behind what fills it on the private stream."""
    driver = device.driver
    with device.current():
        device.refuse_capture()
        target = _allocated(driver, make)
        stream = device.stream
        before = device.mark_all()  # named: its event is another's once it dies
        driver.hold(stream.ptr, before.event)
        try:
            with driver.cupy_errors("copy"):
                fill(target, stream)
            mark = device.mark_stream(stream.ptr)
            driver.hold_all(device.context, mark.event)
            if device.synchronize and not driver.context_events:
                mark.wait()
        except CudaError:
            # The pool gets the block back when we leave: nothing may still write into it.
            with contextlib.suppress(CudaError), driver.cupy_errors("cudaStreamSynchronize"):
                stream.synchronize()
            raise
    return target, mark


def _allocated(driver: Driver, make: Callable[[], Any]) -> Any:
    """What a function makes, under the legacy default stream."""
    with driver.cupy_errors("cudaMalloc"):
        import cupy

        with cupy.cuda.Stream.null:
            return make()


def _fill(target: Any, source: Any, stream: Any, driver: Driver) -> None:
    if same_place(source.shape, source.strides, target.strides):
        driver.copy(target.data.ptr, source.data.ptr, source.nbytes, stream.ptr)
        return
    with stream:
        word = _word(target, source)
        _as_words(target, word)[...] = _as_words(source, word)


def _word(*arrays: Any) -> int:
    """Bytes of the largest unsigned integer that all elements consist of, and lie aligned to.

    Elements are copied as such words: CuPy has no kernels for structured and foreign dtypes, and a
    few words make few kernels to compile.
    """
    steps = [s for a in arrays for n, s in zip(a.shape, a.strides, strict=True) if n > 1]
    places = [n for a in arrays for n in (a.itemsize, a.data.ptr)]
    return next(word for word in WORDS if math.gcd(*steps, *places) % word == 0)


def _as_words(array: Any, word: int) -> Any:
    import cupy

    shape, strides = array.shape, array.strides
    if array.itemsize != word:
        shape, strides = (*shape, array.itemsize // word), (*strides, word)
    return cupy.ndarray(shape, np.dtype(f"u{word}"), array.data, strides)
