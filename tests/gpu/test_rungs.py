"""Rungs `stage` and `host` on one GPU: memory without handles, and GPUs without IPC."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from allocators import HANDLE, KINDS, unavailable, using
from cuda_peer import (
    Failed,
    announce,
    close,
    collect,
    descriptors,
    drop,
    examine,
    held,
    load,
    look,
    memory,
    offer,
    open_,
    open_arena,
    pinned_maps,
    ready,
    settle,
    spin,
    stream_of,
)
from helpers import wait_until
from test_cuda_memory import LAYOUTS, beside_a_heartbeat, fill

from dask_gpuipc.config import Settings
from dask_gpuipc.errors import Refusal, Refused
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.memory.cuda import CudaMemory
from dask_gpuipc.memory.cuda.copying import dense_strides
from dask_gpuipc.wire import Announce

pytestmark = pytest.mark.gpu
NOWHERE = frozenset()
"""Devices whose handles are opened by a peer that opens none."""


def by_host(peer, array, name="x"):
    """Import an array in the peer by way of pinned memory; the exporter's pin."""
    prepared = ready(array, devices=NOWHERE)
    pin = memory().pin(array, prepared)
    assert pin.rung is Rung.HOST
    open_host(peer, pin)
    assert peer.call(load, name, "m", pin.layout, "host") == "host"
    return pin


def open_host(peer, pin):
    [fd] = memory().handle(pin.allocation).fds
    place = ("cuda", pin.allocation.id, pin.allocation.generation)
    announcement = Announce(*place, pin.allocation.nbytes, pin.allocation.device, b"")
    assert peer.call(open_arena, "m", announcement, os.getpid(), fd) == pin.allocation.nbytes


def end_host(peer, *names):
    for name in names or ("x",):
        peer.call(settle, name)
    peer.call(drop, *(names or ("x",)))
    peer.call(close, "m")


@pytest.fixture
def clean(peer):
    """Afterwards neither process has a pinned arena, nor a free staging block."""
    yield
    for arenas in (pinned_maps, lambda: peer.call(pinned_maps)):
        wait_until(
            lambda arenas=arenas: collect_both(peer) or not arenas(), "arenas to be unmapped"
        )


def collect_both(peer):
    collect()
    peer.call(collect)


# -- stage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_memory_of_every_allocator_arrives(peer, name):
    reason = unavailable(name)
    if reason is not None:
        pytest.skip(reason)
    import cupy

    host = np.arange(50_000, dtype="f8").reshape(200, 250)
    with using(name):
        whole = cupy.array(host)
    for got, want in ((whole, host), (whole[3::2, ::-3], host[3::2, ::-3])):
        prepared = ready(got)
        pin = memory().pin(got, prepared)
        rung = "copy" if KINDS[name] is HANDLE else "stage"
        assert pin.rung is (None if rung == "copy" else Rung.STAGE)
        peer.call(open_, "m", announce(pin.allocation), *descriptors(pin))
        assert peer.call(load, "x", "m", pin.layout, rung) == rung
        np.testing.assert_array_equal(peer.call(look, "x")[0], want)
        peer.call(settle, "x")
        peer.call(drop, "x")
        peer.call(close, "m")
        pin.release()


def test_several_pools_in_one_process(peer):
    """Blocks of different pools lie side by side; each array has its own pool's allocation."""
    import cupy

    pools = [cupy.cuda.MemoryPool() for _ in range(3)]
    allocators = [pool.malloc for pool in pools]
    names = [name for name in ("rmm pool", "rmm arena") if unavailable(name) is None]
    sources = []
    for turn in range(4):
        for number, allocate in enumerate(allocators):
            with cupy.cuda.using_allocator(allocate):
                sources.append(cupy.full(10_000, 100 * turn + number))
        for number, name in enumerate(names, start=len(allocators)):
            with using(name):
                sources.append(cupy.full(10_000, 100 * turn + number))
    pins = [offer(source) for source in sources]
    places = {pin.allocation for pin, _ in pins}
    assert len(places) <= 4 * len(allocators) + len(names)
    opened = set()
    for number, (pin, announcement) in enumerate(pins):
        mapping = f"m{pin.allocation.id}"
        if mapping not in opened:
            peer.call(open_, mapping, announcement)
            opened.add(mapping)
        peer.call(load, f"x{number}", mapping, pin.layout, "copy")
    for number, source in enumerate(sources):
        np.testing.assert_array_equal(peer.call(look, f"x{number}")[0], source.get())
        peer.call(drop, f"x{number}")
    for pin, _ in pins:
        pin.release()
    for mapping in opened:
        peer.call(close, mapping)


def test_a_pool_of_tens_of_gib_is_one_allocation(peer):
    """Arrays far into it go by its one handle, which is opened once."""
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    room = 40 << 30
    if free < room + (4 << 30):
        pytest.skip(f"{free >> 30} GiB of device memory are free; 44 are wanted")
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        whole = cupy.zeros(room, "u1")
    parts = [whole[at << 30 :][: 1 << 16].view("i8") for at in (0, 7, 23, 39)]
    for number, part in enumerate(parts):
        part[...] = cupy.arange(part.size) + number
    offers = [offer(part) for part in parts]
    assert len({pin.allocation for pin, _ in offers}) == 1
    assert offers[0][0].allocation.nbytes >= room
    assert peer.call(open_, "m", offers[0][1]) >= room
    for number, ((pin, _), part) in enumerate(zip(offers, parts, strict=True)):
        assert pin.layout.offset == [0, 7, 23, 39][number] << 30
        for rung in ("share", "copy"):
            peer.call(load, "x", "m", pin.layout, rung)
            np.testing.assert_array_equal(peer.call(look, "x")[0], part.get())
            peer.call(drop, "x")
        pin.release()
    peer.call(close, "m")


@pytest.mark.parametrize("kind", ["default", "per-thread", "blocking", "non-blocking"])
@pytest.mark.parametrize("allocator", ["cupy managed", "cupy async"])
def test_a_staged_copy_has_what_a_long_kernel_wrote(peer, allocator, kind):
    import cupy

    with using(allocator):
        array = cupy.zeros(1 << 16)
    cupy.cuda.runtime.deviceSynchronize()
    start = time.monotonic()
    spin(array, array, 1.0, 9.0, stream_of(kind))
    prepared = memory().prepare([array])
    assert time.monotonic() - start < 0.1, "prepare waited"
    asyncio.run(prepared.wait())
    pin, announcement = offer(array, prepared)
    array[...] = 1.0  # the staged bytes are a copy: nothing of this is seen
    peer.call(open_, "m", announcement)
    peer.call(load, "x", "m", pin.layout, "stage")
    assert peer.call(look, "x")[0].min() == 9.0
    peer.call(settle, "x")
    peer.call(drop, "x")
    peer.call(close, "m")
    pin.release()


def test_staging_blocks_are_recycled_and_given_back():
    import cupy

    with using("cupy async"):
        array = cupy.zeros(1 << 20)
    cupy.cuda.runtime.deviceSynchronize()
    settle_stage()
    before = cupy.cuda.runtime.memGetInfo()[0]
    addresses = set()
    for _ in range(20):
        pin = memory().pin(array, ready(array))
        addresses.add((pin.allocation.id, pin.layout.offset))
        pin.release()
    assert len(addresses) <= 2
    assert cupy.cuda.runtime.memGetInfo()[0] < before
    settle_stage()
    assert abs(cupy.cuda.runtime.memGetInfo()[0] - before) <= 4 << 20


def settle_stage():
    """Have free staging blocks given back, and wait until they are."""
    memory().collect()
    memory()._devices[0].closer.submit(int).result(20)


def test_staging_stays_within_the_pinned_limit():
    import cupy

    limited = CudaMemory(settings_with(cuda_pinned_limit=4 << 20))
    with using("cupy async"):
        small, large = cupy.zeros(1 << 18), cupy.zeros(1 << 20)
    prepared = limited.prepare([small, large])
    asyncio.run(prepared.wait())
    pin = limited.pin(small, prepared)
    assert pin.rung is Rung.STAGE
    with pytest.raises(Refused) as refused:
        limited.pin(large, prepared)
    assert refused.value.reason is Refusal.NO_MEMORY
    pin.release()
    del pin, prepared
    limited.close()


def settings_with(**changes):
    return replace(Settings.load(), **changes)


# -- host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_by_the_host(peer, clean, layout):
    host, device = fill()
    want, array = LAYOUTS[layout](host), LAYOUTS[layout](device)
    pin = by_host(peer, array)
    got, strides = peer.call(look, "x")
    np.testing.assert_array_equal(got, want)
    assert strides == dense_strides(array.shape, array.strides, 8)
    end_host(peer)
    pin.release()


def test_a_peer_that_opens_handles_gets_handles(peer, clean):
    import cupy

    array = cupy.zeros(1000)
    prepared = ready(array, devices=set(memory().devices()))
    assert not prepared.unproven
    assert not prepared.allocations
    pin = memory().pin(array, prepared)
    assert pin.rung is None
    pin.release()
    prepared = ready(array, devices=NOWHERE)
    assert prepared.unproven == set(memory().devices())
    assert [a.device for a in prepared.allocations] == [""]


@pytest.mark.parametrize("kind", ["default", "per-thread", "blocking", "non-blocking"])
def test_what_is_brought_down_is_finished(peer, clean, kind):
    import cupy

    array = cupy.zeros(1 << 20)
    cupy.cuda.runtime.deviceSynchronize()
    start = time.monotonic()
    spin(array, array, 1.0, 9.0, stream_of(kind))
    prepared = memory().prepare([array], NOWHERE)
    assert time.monotonic() - start < 0.1, "prepare waited"
    with pytest.raises(Refused):
        memory().pin(array, prepared)
    longest = asyncio.run(beside_a_heartbeat(prepared.wait()))
    assert time.monotonic() - start >= 0.9
    assert longest < 0.02, f"the loop stood still for {longest:.3f} s"
    pin = memory().pin(array, prepared)
    open_host(peer, pin)
    peer.call(load, "x", "m", pin.layout, "host")
    assert peer.call(look, "x")[0].min() == 9.0
    end_host(peer)
    pin.release()


def test_slots_are_apart_and_recycled(peer, clean):
    import cupy

    arrays = [cupy.full(100_000, float(i)) for i in range(20)]
    prepared = ready(*arrays, devices=NOWHERE)
    pins = [memory().pin(array, prepared) for array in arrays]
    assert len({pin.allocation for pin in pins}) == 1
    assert len({pin.layout.offset for pin in pins}) == 20
    open_host(peer, pins[0])
    for i, pin in enumerate(pins):
        peer.call(load, f"x{i}", "m", pin.layout, "host")
    for i in range(20):
        assert set(peer.call(look, f"x{i}")[0].tolist()) == {float(i)}
    end_host(peer, *(f"x{i}" for i in range(20)))
    [arena] = memory()._blocks._arenas.values()
    for pin in pins:
        pin.release()
    del pins, pin
    assert not arena.free, "the preparation holds its slots"
    del prepared
    assert arena.free


def test_an_upload_holds_its_slot_and_is_seen_whole_by_later_kernels(peer, clean):
    """The consumer's context is busy; what it imports meanwhile is right all the same."""
    import cupy

    pin = by_host(peer, cupy.full(1 << 20, 3.0))
    assert peer.call(read_behind_kernel, pin.layout) == (3.0, 3.0)
    end_host(peer)
    pin.release()


def read_behind_kernel(layout):
    import cupy

    busy = cupy.zeros(8)
    cupy.cuda.runtime.deviceSynchronize()
    spin(busy, busy, 0.5, 0, cupy.cuda.Stream(non_blocking=True))
    imported = memory().load(held["m"], layout, Rung.HOST)
    assert not imported.done.done()
    seen = cupy.empty_like(imported.array)
    spin(seen, imported.array, 0, 0, cupy.cuda.Stream(non_blocking=True))
    imported.done.result(20)
    cupy.cuda.runtime.deviceSynchronize()
    return float(seen.min()), float(seen.max())


def test_the_limit_of_pinned_memory_is_kept():
    import cupy

    limited = CudaMemory(settings_with(cuda_host_limit=64 << 20))
    first, second = cupy.zeros(7 << 20), cupy.zeros(7 << 20)
    prepared = limited.prepare([first, second], NOWHERE)
    asyncio.run(prepared.wait())
    pin = limited.pin(first, prepared)
    with pytest.raises(Refused) as refused:
        limited.pin(second, prepared)
    assert refused.value.reason is Refusal.NO_MEMORY
    pin.release()
    del pin, prepared, refused
    again = limited.prepare([second], NOWHERE)
    asyncio.run(again.wait())
    limited.pin(second, again).release()
    del again
    limited.close()
    wait_until(lambda: collect() or not pinned_maps(), "the arena to be unmapped")


def test_a_capture_keeps_arrays_from_the_host(peer, clean):
    import cupy

    array = cupy.zeros(8)
    array += 1
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        array += 1
        prepared = ready(array, devices=NOWHERE)
        stream.end_capture()
    with pytest.raises(Refused) as refused:
        memory().pin(array, prepared)
    assert refused.value.reason is Refusal.CAPTURING
    assert memory().disabled is None


def test_a_bad_arena_is_refused(peer):
    bad = Announce("cuda", 1, 0, 1 << 20, "", b"")
    fd = os.memfd_create("not-sealed")
    try:
        with pytest.raises(Failed, match="sealed"):
            peer.call(open_arena, "m", bad, os.getpid(), fd)
    finally:
        os.close(fd)


# -- proof ----------------------------------------------------------------------------------------


def test_the_self_test_passes_where_handles_open_and_not_elsewhere(peer):
    sample = memory().prover.sample(memory().devices()[0]).result(20)
    assert sample is memory().prover.sample(memory().devices()[0]).result(20)
    assert peer.call(examine, memory().devices()[0], sample.nbytes, sample.handle) == sample.digest
    assert peer.call(examine, memory().devices()[0], sample.nbytes, b"short") == b""
    assert peer.call(examine, memory().devices()[0], 1 << 40, sample.handle) == b""
    assert memory().prover.examine("", sample.nbytes, sample.handle).result(20) == b""  # its own
