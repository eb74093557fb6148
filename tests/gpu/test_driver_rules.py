"""What `dask_gpuipc.memory.cuda` takes the driver and CuPy to do. Run these first."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from cuda_peer import Failed, announce, close, memory, offer, open_, spin

from dask_gpuipc.errors import Failure
from dask_gpuipc.memory.cuda.driver import CudaError

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return memory()._devices[0]


def test_a_pushed_context_is_the_runtimes_and_leaves_no_trace(device):
    import cupy
    from cuda.bindings import driver as api

    found = {}

    def body():
        with device.current():
            found["inside"] = cupy.cuda.runtime.getDevice()
            found["capture mode"] = device.driver.capturing()
        found["after"] = int(api.cuCtxGetCurrent()[1])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == {"inside": 0, "capture mode": False, "after": 0}


def test_a_context_event_covers_non_blocking_streams_and_a_stream_can_wait_for_it(device):
    import cupy

    assert device.driver.context_events, "driver or bindings before CUDA 12.5"
    x = cupy.zeros(8)
    y = cupy.zeros(8)
    cupy.cuda.runtime.deviceSynchronize()
    spin(x, x, 0.5, 3.0, cupy.cuda.Stream(non_blocking=True))
    with device.current():
        mark = device.mark_all()
        device.driver.hold(device.stream.ptr, mark.event)
        device.driver.copy(y.data.ptr, x.data.ptr, x.nbytes, device.stream.ptr)
    assert not mark.passed()
    device.stream.synchronize()
    assert mark.passed()
    assert y.get().tolist() == [3.0] * 8


def test_a_context_can_wait_for_the_event_of_one_stream(device):
    import cupy

    x = cupy.zeros(8)
    y = cupy.zeros(8)
    cupy.cuda.runtime.deviceSynchronize()
    with device.current():
        spin(x, x, 0.5, 3.0, device.stream)
        mark = device.mark_stream(device.stream.ptr)
        device.driver.hold_all(device.context, mark.event)
    spin(y, x, 0, 0, cupy.cuda.Stream(non_blocking=True))
    cupy.cuda.runtime.deviceSynchronize()
    assert y.get().tolist() == [3.0] * 8


def test_an_event_is_recorded_anew_while_a_stream_waits_for_what_it_was(device):
    import cupy

    x = cupy.zeros(8)
    y = cupy.zeros(8)
    cupy.cuda.runtime.deviceSynchronize()
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    spin(x, x, 0.3, 3.0, first)
    with device.current():
        mark = device.mark_all()
        device.driver.hold(second.ptr, mark.event)
        device.driver.record(device.stream.ptr, mark.event)
    spin(y, x, 0, 0, second)
    cupy.cuda.runtime.deviceSynchronize()
    assert y.get().tolist() == [3.0] * 8


def test_waiting_for_a_mark_lets_other_threads_run(device):
    import cupy

    x = cupy.zeros(8)
    spin(x, x, 0.5, 0, cupy.cuda.Stream(non_blocking=True))
    done = device.when(device.mark())
    turns = 0
    while not done.done():
        time.sleep(0.01)
        turns += 1
    assert turns > 20


def test_an_idle_device_is_found_idle(device):
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    assert device._idle()


def test_a_capture_is_seen_on_blocking_streams_only_and_not_broken(device):
    import cupy

    for non_blocking in (False, True):
        x = cupy.zeros(8)
        x += 1  # loads the kernel before the capture
        cupy.cuda.runtime.deviceSynchronize()
        stream = cupy.cuda.Stream(non_blocking=non_blocking)
        with stream:
            stream.begin_capture()
            x += 1
            with device.current():
                seen = device.driver.capturing()
            graph = stream.end_capture()
        assert seen is not non_blocking
        graph.launch(stream)
        stream.synchronize()
        assert x.get().tolist() == [2.0] * 8


def test_a_global_capture_survives_queries_of_another_thread(device):
    import cupy

    stream = cupy.cuda.Stream()
    x = cupy.zeros(8)
    x += 1
    mark = device.mark()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        x += 1
        thread = threading.Thread(target=mark.settle)
        thread.start()
        thread.join(5)
        stuck = thread.is_alive()
        stream.end_capture()
    assert not stuck, "the wait was taken for part of the capture"
    assert memory().disabled is None


def test_a_freed_address_is_an_error_and_no_more(device):
    import cupy

    raw = cupy.cuda.Memory(64 << 20)
    address = raw.ptr
    with device.current():
        assert device.driver.buffer_id(address) > 0
        del raw
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            device.driver.buffer_id(address)
    assert memory().disabled is None


@pytest.mark.parametrize("nbytes", [512, 1 << 20, 3 << 20])
def test_a_small_block_is_opened_whole_and_is_not_ours_to_lend(peer, nbytes):
    import cupy

    block = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
    array = cupy.ndarray((nbytes // 8,), "f8", block)
    array[...] = 1
    pin, announcement = offer(array)
    assert pin.allocation.nbytes == nbytes
    assert peer.call(open_, "m", announcement) == nbytes
    base, size, exportable = peer.call(look_at_mapping, "m")
    assert base <= 0
    assert base + size >= nbytes
    assert not exportable, "the driver would lend an import on"
    peer.call(close, "m")
    pin.release()


def look_at_mapping(name):
    """The driver's range of an import, relative to its pointer; whether it gives a handle."""
    from cuda_peer import held

    mapping = held[name]
    with mapping.device.current():
        base, size = mapping.device.driver.address_range(mapping.pointer)
        exportable = mapping.device.driver.exportable(mapping.pointer)
    return base - mapping.pointer, size, exportable


def test_a_handle_opens_twice_and_never_in_its_own_process(peer):
    import cupy

    pin, announcement = offer(cupy.zeros(1 << 16))
    peer.call(open_, "a", announcement)
    peer.call(open_, "b", announcement)
    peer.call(close, "a", "b")
    with pytest.raises(OSError, match="open_failed"):
        memory().open(announcement, ())
    assert memory().disabled is None
    pin.release()


def test_a_handle_of_freed_memory_is_stale(peer):
    import cupy

    block = cupy.cuda.MemoryPointer(cupy.cuda.Memory(32 << 20), 0)
    pin, announcement = offer(cupy.ndarray((8,), "f8", block))
    allocation = pin.allocation
    assert announcement == announce(allocation)
    pin.release()
    del pin, block
    with pytest.raises(Failed) as failed:
        peer.call(open_, "m", announcement)
    assert failed.value.reason is Failure.STALE
    assert allocation in memory().collect()


def test_uuids_are_the_runtimes():
    import uuid

    import cupy

    devices = memory().devices()
    assert len(devices) == 1  # that of ordinal 0, where plain Dask would put a received chunk
    for ordinal, name in enumerate(devices):
        raw = cupy.cuda.runtime.getDeviceProperties(ordinal)["uuid"]
        assert name == f"GPU-{uuid.UUID(bytes=bytes(np.frombuffer(raw, 'u1')[:16]))}"
