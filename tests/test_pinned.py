"""The rung `host` but for CUDA itself: arenas, slots, mappings, and the choice of the way.

A device in host memory stands in for the GPU: addresses are this process's, copies are memmoves.
What a real one makes of all this is in ``tests/gpu/test_rungs.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import wait_until

from dask_gpuipc.dtypes import decode_dtype, encode_dtype
from dask_gpuipc.errors import Failure, OpenFailed, Refusal, Refused
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.memory.cuda.allocations import Allocations
from dask_gpuipc.memory.cuda.driver import Code, CudaError
from dask_gpuipc.memory.cuda.pinned import GRAIN, HostBlocks, HostMaps
from dask_gpuipc.memory.cuda.ready import CudaPreparation, Ways
from dask_gpuipc.memory.cuda.threads import DaemonExecutor
from dask_gpuipc.testing import ManualClock
from dask_gpuipc.wire import Announce

MIB = 1 << 20


class HostDriver:
    """Copies at once; counts what is registered."""

    def __init__(self):
        self.registered = {}
        self.registrations = 0
        self.error = None

    def unusable(self):
        return None

    def register(self, address, nbytes):
        if self.error is not None:
            raise self.error()
        assert address not in self.registered
        self.registered[address] = nbytes
        self.registrations += 1

    def unregister(self, address):
        del self.registered[address]

    def download(self, target, source, nbytes, stream):
        assert any(a <= target and target + nbytes <= a + n for a, n in self.registered.items())
        ctypes.memmove(target, source, nbytes)

    def address_range(self, pointer):
        return pointer, 1 << 30

    def buffer_id(self, pointer):
        return 1

    def exportable(self, pointer):
        return True


class HostDevice:
    """What the rooms of `memory.cuda` want of a device."""

    def __init__(self, uuid="GPU-0", ordinal=0, driver=None):
        self.uuid, self.ordinal = uuid, ordinal
        self.driver = driver or HostDriver()
        self.closer = DaemonExecutor("gpuipc-cuda-close-test", idle=0.0)
        self.stream = SimpleNamespace(ptr=0)
        self.capturing = False

    @contextlib.contextmanager
    def current(self):
        yield

    def refuse_capture(self):
        if self.capturing:
            raise CudaError("graph capture", Code.CAPTURE_IMPLICIT, "one is in progress")

    def mark(self):
        return SimpleNamespace(passed=lambda: True)

    mark_stream = lambda self, stream: self.mark()  # noqa: E731

    def when(self, mark, *keep):
        done = Future()
        done.set_result(None)
        return done

    def wait_idle(self):
        pass


class DeviceArray:
    """As much of a ``cupy.ndarray`` as is looked at before CUDA is."""

    def __init__(self, array, ordinal=0):
        self.array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=ordinal)
        for name in ("shape", "strides", "dtype", "itemsize", "nbytes", "size"):
            setattr(self, name, getattr(array, name))


class Side:
    """The exporter's side of one process."""

    def __init__(self, limit=None, clock=None, devices=None, **ways):
        more = {} if clock is None else {"clock": clock}
        self.devices = devices or {0: HostDevice()}
        ids = itertools.count(1)
        self.blocks = HostBlocks(ids, limit, **more)
        stages = dict.fromkeys(self.devices, SimpleNamespace(allocate=None))
        self.ways = Ways(self.devices, stages, Allocations(ids=ids), self.blocks, **ways)

    def prepare(self, *arrays, opened=frozenset()):
        prepared = CudaPreparation(self.ways, arrays, opened)
        asyncio.run(prepared.wait())
        return prepared

    def announce(self, pin):
        [fd] = self.blocks.handle(pin.allocation).fds
        place = ("cuda", pin.allocation.id, pin.allocation.generation)
        return Announce(*place, pin.allocation.nbytes, "", b""), fd


@pytest.fixture
def side():
    made = []

    def make(**options):
        made.append(Side(**options))
        return made[-1]

    yield make
    for one in made:
        one.blocks.close()
        for device in one.devices.values():
            wait_until(lambda device=device: not device.driver.registered, "all to be unpinned")


@pytest.fixture
def maps():
    maps = HostMaps(HostDevice())
    yield maps
    maps.close()
    wait_until(lambda: not maps._device.driver.registered, "all to be unpinned")


def numbers(n, seed=0):
    return DeviceArray(np.arange(n, dtype="f8") + seed)


def seen(mapping, layout):
    """The array of a layout, read where the importer has the arena."""
    raw = (ctypes.c_char * mapping.nbytes).from_address(mapping.address)
    return np.ndarray(
        layout.shape, decode_dtype(layout.dtype), raw, layout.offset, layout.strides
    ).copy()


def test_bytes_are_where_the_importer_reads_them(side, maps):
    exporter = side()
    arrays = [numbers(1000, i) for i in range(5)]
    prepared = exporter.prepare(*arrays)
    pins = [prepared.pin(array) for array in arrays]
    announcement, fd = exporter.announce(pins[0])
    mapping = maps.open(announcement, (fd,))
    for array, pin in zip(arrays, pins, strict=True):
        assert pin.rung is Rung.HOST
        assert (pin.nbytes, pin.allocation.device) == (8000, "")
        np.testing.assert_array_equal(seen(mapping, pin.layout), array.array)
    assert prepared.allocations[0] == pins[0].allocation
    mapping.close()
    for pin in pins:
        pin.release()


def test_a_slot_is_free_when_pins_and_preparation_are_gone(side):
    exporter = side()
    array = numbers(1000)
    prepared = exporter.prepare(array)
    first, second = prepared.pin(array), prepared.pin(array)
    [arena] = exporter.blocks._arenas.values()
    first.release()
    del prepared, first
    assert not arena.free
    second.release()
    del second
    assert arena.free
    before = array.array.copy()
    offsets = set()
    for _ in range(50):
        prepared = exporter.prepare(array)
        offsets.add(prepared.pin(array).layout.offset)
        del prepared
    assert offsets == {0}
    assert exporter.devices[0].driver.registrations == 1
    np.testing.assert_array_equal(array.array, before)


def test_an_array_larger_than_an_arena_gets_one_of_its_own(side):
    exporter = side()
    small, large = numbers(1000), numbers((GRAIN + MIB) // 8)
    prepared = exporter.prepare(small, large)
    sizes = [prepared.pin(array).allocation.nbytes for array in (small, large)]
    assert sizes == [GRAIN, 2 * GRAIN]


def test_the_limit_frees_what_is_free_before_it_refuses(side):
    exporter = side(limit=2 * GRAIN)
    first, second, large = numbers(1000), numbers(1000), numbers((GRAIN + MIB) // 8)
    prepared = exporter.prepare(first)
    pin = prepared.pin(first)
    with pytest.raises(Refused) as refused:
        exporter.prepare(large).pin(large)
    assert refused.value.reason is Refusal.NO_MEMORY
    assert "host-limit" in refused.value.detail
    assert exporter.prepare(second).pin(second).allocation == pin.allocation
    gone = pin.allocation
    pin.release()
    del pin, prepared, refused
    gc.collect()  # the traceback's frames
    prepared = exporter.prepare(large)
    assert prepared.pin(large).allocation.nbytes == 2 * GRAIN
    assert exporter.blocks.trim() == [gone]
    with pytest.raises(Refused, match="closed"):
        exporter.blocks.handle(gone)


def test_idle_arenas_are_closed(side):
    clock = ManualClock()
    exporter = side(clock=clock)
    array = numbers(10)
    pin = exporter.prepare(array).pin(array)
    clock.advance(100)
    assert exporter.blocks.trim() == []
    allocation = pin.allocation
    pin.release()
    assert exporter.blocks.trim() == [allocation]
    assert exporter.blocks.trim() == []


def test_a_failed_registration_is_a_refusal(side):
    exporter = side()
    exporter.devices[0].driver.error = partial(CudaError, "cuMemHostRegister", 712, "again")
    array = numbers(10)
    with pytest.raises(Refused) as refused:
        exporter.prepare(array).pin(array)
    assert refused.value.reason is Refusal.NOT_EXPORTABLE


def test_a_capture_refuses_and_the_next_answer_goes(side):
    exporter = side()
    array = numbers(10)
    exporter.devices[0].capturing = True
    with pytest.raises(Refused) as refused:
        exporter.prepare(array).pin(array)
    assert refused.value.reason is Refusal.CAPTURING
    exporter.devices[0].capturing = False
    assert exporter.prepare(array).pin(array).rung is Rung.HOST


@pytest.mark.parametrize(
    ("ways", "opened", "rungs", "unproven"),
    [
        ({}, None, [None, None], set()),
        ({}, {"GPU-0", "GPU-1"}, [None, None], set()),
        ({}, {"GPU-0"}, [None, Rung.HOST], {"GPU-1"}),
        ({}, set(), [Rung.HOST, Rung.HOST], {"GPU-0", "GPU-1"}),
        ({"peer_access": False}, {"GPU-0"}, [None, Rung.HOST], set()),
        ({"ipc": False}, {"GPU-0"}, [Rung.HOST, Rung.HOST], set()),
    ],
)
def test_the_way_is_chosen_by_device(side, ways, opened, rungs, unproven):
    driver = HostDriver()  # what one device's context registers is pinned for all
    devices = {n: HostDevice(f"GPU-{n}", n, driver) for n in range(2)}
    exporter = side(devices=devices, **ways)
    arrays = [DeviceArray(np.arange(10.0), ordinal) for ordinal in devices]
    prepared = exporter.prepare(*arrays, opened=opened)
    pins = [prepared.pin(array) for array in arrays]
    assert [pin.rung for pin in pins] == rungs
    assert prepared.unproven == unproven
    assert [pin.allocation.device for pin in pins] == [
        "" if rung else device.uuid for rung, device in zip(rungs, devices.values(), strict=True)
    ]
    for pin in pins:
        pin.release()


# -- importer ------------------------------------------------------------------------------------


def test_an_arena_is_pinned_once_however_often_it_is_opened(side, maps):
    exporter = side()
    array = numbers(10)
    announcement, fd = exporter.announce(exporter.prepare(array).pin(array))
    first = maps.open(announcement, (fd,))
    again = os.dup(fd)
    second = maps.open(announcement, (again,))
    os.close(again)
    assert first.address == second.address
    first.close()
    first.close()
    maps.trim(0)
    np.testing.assert_array_equal(seen(second, numbers_layout()), np.arange(10.0))
    second.close()
    third = maps.open(announcement, (fd,))  # kept: nothing was trimmed in between
    third.close()
    assert maps._device.driver.registrations == 1
    maps.trim(0)
    maps.open(announcement, (fd,)).close()
    assert maps._device.driver.registrations == 2


def numbers_layout():
    return SimpleNamespace(shape=(10,), dtype=encode_dtype(np.dtype("f8")), offset=0, strides=(8,))


def test_a_mapping_that_outlives_its_memory_is_unpinned_when_it_closes(side, maps):
    exporter = side()
    array = numbers(10)
    announcement, fd = exporter.announce(exporter.prepare(array).pin(array))
    mapping = maps.open(announcement, (fd,))
    maps.close()
    assert maps._device.driver.registered
    mapping.close()
    wait_until(lambda: not maps._device.driver.registered, "the arena to be unpinned")


def test_an_exporter_that_closes_waits_for_the_last_slot(side):
    exporter = side()
    array = numbers(10)
    prepared = exporter.prepare(array)
    exporter.blocks.close()
    driver = exporter.devices[0].driver
    assert driver.registered
    del prepared
    wait_until(lambda: not driver.registered, "the arena to be unpinned")


@pytest.mark.parametrize("bad", ["size", "seals", "none", "two", "pipe"])
def test_what_is_no_arena_is_refused(maps, bad):
    with contextlib.ExitStack() as stack:

        def memfd():
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.ftruncate(fd, MIB)
            return fd

        if bad == "pipe":
            fds = os.pipe()
            for fd in fds:
                stack.callback(os.close, fd)
            fds = fds[:1]
        else:
            fds = [memfd() for _ in range({"none": 0, "two": 2}.get(bad, 1))]
        nbytes = 2 * MIB if bad == "size" else MIB
        with pytest.raises(OpenFailed) as failed:
            maps.open(Announce("cuda", 1, 0, nbytes, "", b""), fds)
        assert failed.value.reason is Failure.OPEN_FAILED


def test_an_arena_that_cannot_be_pinned_is_an_open_failed(side, maps):
    exporter = side()
    array = numbers(10)
    announcement, fd = exporter.announce(exporter.prepare(array).pin(array))
    maps._device.driver.error = partial(
        CudaError, "cuMemHostRegister", Code.OUT_OF_MEMORY, "none left"
    )
    with pytest.raises(OpenFailed) as failed:
        maps.open(announcement, (fd,))
    assert failed.value.reason is Failure.NO_MEMORY
    maps._device.driver.error = None
    maps.open(announcement, (fd,)).close()
