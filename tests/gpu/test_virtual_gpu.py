"""Virtual memory that others made: by descriptor where it has one, else staged."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from allocators import unavailable, using
from cuda_peer import close, descriptors, drop, load, look, memory, offer, open_
from test_cuda_memory import fill

from dask_gpuipc.memory.base import Rung
from dask_gpuipc.memory.cuda.virtual import SLABS, Slab, Virtual
from dask_gpuipc.wire import Announce

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def foreign(sizes, exportable=True):
    """The address of virtual memory that is mapped piece by piece, and unknown to us."""
    import cupy

    from dask_gpuipc.memory.cuda.driver import driver

    cupy.zeros(1)  # a context
    virtual = Virtual(driver(), 0)
    if not exportable:
        kinds = virtual._api.CUmemAllocationHandleType
        virtual._properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_NONE
    unit = virtual.granularity()
    sizes = [-(-size // unit) * unit for size in sizes]
    start = int(virtual._call("cuMemAddressReserve", sum(sizes), 0, 0, 0))
    at = start
    for size in sizes:
        handle = virtual.create(size)
        virtual._call("cuMemMap", at, size, 0, handle, 0)
        virtual.release(handle)
        at += size
    virtual._call("cuMemSetAccess", start, sum(sizes), [virtual._access(True)], 1)
    try:
        yield start, sum(sizes)
    finally:
        cupy.cuda.runtime.deviceSynchronize()
        at = start
        for size in sizes:
            virtual._call("cuMemUnmap", at, size)
            at += size
        virtual._call("cuMemAddressFree", start, sum(sizes))


def array_at(address, count, offset=0):
    import cupy

    whole = cupy.cuda.UnownedMemory(address, offset + 8 * count, None, 0)
    array = cupy.ndarray((count,), "f8", cupy.cuda.MemoryPointer(whole, offset))
    array[...] = cupy.arange(count) + address % 1000
    return array


@pytest.mark.parametrize("rung", ["share", "copy"])
def test_memory_with_a_descriptor_goes_by_it(peer, rung):
    with foreign([4 << 20]) as (address, nbytes):
        array = array_at(address, 100_000, offset=4096)
        pin, announcement = offer(array)
        assert pin.rung is None
        assert (pin.allocation.nbytes, pin.layout.offset) == (nbytes, 4096)
        [fd] = memory().handle(pin.allocation).fds
        assert not os.get_inheritable(fd)
        assert peer.call(open_, "m", announcement, *descriptors(pin)) == nbytes
        assert peer.call(load, "x", "m", pin.layout, rung) == rung
        values, _ = peer.call(look, "x")
        np.testing.assert_array_equal(values, array.get())
        pin.release()
        del array
    # An import outlives the exporter's mapping; what is known of it does not.
    values_then, _ = peer.call(look, "x")
    np.testing.assert_array_equal(values, values_then)
    assert pin.allocation in memory().collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    peer.call(drop, "x")
    peer.call(close, "m")


@pytest.mark.parametrize("why", ["without a descriptor", "in two pieces"])
def test_other_memory_is_staged(peer, why):
    sizes = [2 << 20, 2 << 20] if why == "in two pieces" else [4 << 20]
    with foreign(sizes, exportable=why == "in two pieces") as (address, nbytes):
        array = array_at(address, nbytes // 8)
        pin, announcement = offer(array)
        assert pin.rung is Rung.STAGE
        peer.call(open_, "m", announcement)
        assert peer.call(load, "x", "m", pin.layout, "copy") == "copy"
        np.testing.assert_array_equal(peer.call(look, "x")[0], array.get())
        pin.release()
        peer.call(drop, "x")
        peer.call(close, "m")


def test_memory_of_cuda_core(peer):
    name = "cuda.core virtual"
    reason = unavailable(name)
    if reason is not None:
        pytest.skip(reason)
    with using(name):
        host, array = fill()
        pin, announcement = offer(array)
        peer.call(open_, "m", announcement, *descriptors(pin))
        peer.call(load, "x", "m", pin.layout, "copy")
        np.testing.assert_array_equal(peer.call(look, "x")[0], host)
        assert pin.rung is None, f"by {pin.rung}"
        pin.release()
        peer.call(drop, "x")
        peer.call(close, "m")


def test_our_own_slabs_are_not_exported_twice():
    from dask_gpuipc.memory.cuda.driver import driver

    device = driver()
    with device.current(device.retain(0)):
        slab = Slab(Virtual(device, 0), 2 << 20)
        assert SLABS.find(slab.address) is slab
        array = array_at(slab.address, 100)
        pin, announcement = offer(array)
        assert isinstance(announcement, Announce)
        assert memory().handle(pin.allocation).fds == (slab.fd,)
        pin.release()
        del array
        slab.close()
    assert pin.allocation in memory().collect()
