"""CUDA memory between two real processes (invariants 14, 15, 18, 22 of the design)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from cuda_peer import (
    announce,
    close,
    close_behind_kernel,
    drop,
    fence_behind_kernel,
    in_thread,
    load,
    load_during_capture,
    load_into_used_block,
    load_without_room,
    look,
    memory,
    offer,
    open_,
    ready,
    reexport,
    settle,
    spin,
    stream_of,
    write,
)

from dask_gpuipc.errors import Refusal, Refused
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.memory.cuda.copying import dense_strides

pytestmark = pytest.mark.gpu

STRUCTURE = np.dtype([("a", "<i4"), ("b", "<f8", (2,)), ("c", "S3")])
LAYOUTS = {
    "C": lambda a: a,
    "F": lambda a: a.T,
    "strided": lambda a: a[::2, 1::3],
    "negative": lambda a: a[::-1, ::-2],
    "block": lambda a: a[3:90, 20:60],
    "block of F": lambda a: a[3:90, 20:60].T,
    "broadcast row": lambda a: np_broadcast(a[:1], (7, 100)),
    "broadcast column": lambda a: np_broadcast(a[:, :1], (200, 7)),
    "three axes": lambda a: a.reshape(20, 10, 100).transpose(2, 0, 1)[:, ::3],
    "offset": lambda a: a[57:],
    "one element": lambda a: a[3:4, 5:6],
    "0-d": lambda a: a[3, 5, ...],
}


def np_broadcast(array, shape):
    if isinstance(array, np.ndarray):
        return np.broadcast_to(array, shape)
    import cupy

    return cupy.broadcast_to(array, shape)


def fill(shape=(200, 100), seed=0):
    """Equal arrays in host and device memory, the second a slice of a larger pool block."""
    import cupy

    host = np.arange(np.prod(shape), dtype="f8").reshape(shape) + seed
    return host, cupy.asarray(host)


def transfer(peer, array, rung, prepared=None):
    """Import an array in the peer as ``x`` from a mapping ``m``; the exporter's pin."""
    pin, announcement = offer(array, prepared)
    peer.call(open_, "m", announcement)
    assert peer.call(load, "x", "m", pin.layout, rung) == rung
    return pin


def end(peer, pin):
    peer.call(drop, "x")
    peer.call(close, "m")
    pin.release()


def refusal(array, prepared):
    with pytest.raises(Refused) as refused:
        memory().pin(array, prepared)
    return refused.value.reason


# -- layouts and dtypes -------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["share", "copy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(peer, layout, rung):
    host, device = fill()
    want, array = LAYOUTS[layout](host), LAYOUTS[layout](device)
    pin = transfer(peer, array, rung)
    got, strides = peer.call(look, "x")
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype
    if rung == "copy":
        assert strides == dense_strides(array.shape, array.strides, 8)
        peer.call(settle, "x")
    else:
        assert strides == array.strides
    end(peer, pin)


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", "f4", "c16", "u8", "bfloat16", "structure"])
def test_dtypes_as_a_strided_copy(peer, dtype):
    import cupy

    if dtype == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    dtype = STRUCTURE if dtype == "structure" else np.dtype(dtype)
    host = np.frombuffer(np.random.default_rng(3).bytes(60 * dtype.itemsize), dtype)
    if dtype == "?":
        host = np.arange(60) % 3 == 0
    block = cupy.asarray(np.frombuffer(host.tobytes(), "u1"))
    array = cupy.ndarray((6, 5), dtype, block.data, (dtype.itemsize * 10, dtype.itemsize * 2))
    want = np.ndarray((6, 5), dtype, host, 0, array.strides)
    pin = transfer(peer, array, "copy")
    got, _ = peer.call(bytes_of, "x")
    assert got == want.tobytes()
    end(peer, pin)


def bytes_of(name):
    import cupy
    from cuda_peer import held

    array = held[name].array
    return cupy.ndarray((array.nbytes,), "u1", array.data).get().tobytes(), array.dtype.str


# -- allocations ----------------------------------------------------------------------------------


def test_two_arrays_of_one_block_are_one_allocation(peer):
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        block = cupy.empty(1 << 20, "u1")
        del block  # the pool now hands out parts of it
        first, second = cupy.full(100, 1.0), cupy.full(100, 2.0)
    prepared = ready(first, second)
    a, b = memory().pin(first, prepared), memory().pin(second, prepared)
    assert a.allocation == b.allocation
    assert a.allocation.nbytes == 1 << 20
    assert a.layout.offset != b.layout.offset
    assert a.nbytes == b.nbytes == 800
    peer.call(open_, "m", announce(a.allocation))
    peer.call(load, "x", "m", a.layout, "share")
    peer.call(load, "y", "m", b.layout, "share")
    assert peer.call(look, "x")[0].max() == 1.0
    assert peer.call(look, "y")[0].min() == 2.0
    peer.call(drop, "x", "y")
    peer.call(close, "m")
    a.release()
    b.release()


def test_a_reused_address_is_a_new_generation(peer):
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.full(8 << 20, 1.0)
        pin, old = offer(array)
        address, allocation = array.data.ptr, pin.allocation
        pin.release()
        del pin, array
        pool.free_all_blocks()
        array = cupy.full(8 << 20, 2.0)
    if array.data.ptr != address:
        pytest.skip("the driver gave another address")
    pin, new = offer(array)
    assert pin.allocation.id == allocation.id
    assert pin.allocation.generation != allocation.generation
    assert allocation in memory().trim()
    with pytest.raises(Refused, match="not pinned"):
        memory().handle(allocation)
    # The driver opens the old handle too, and gives the memory that is there now: nothing but the
    # lease keeps a consumer from reading what it was not sent (seen with driver 580).
    peer.call(open_, "old", old)
    peer.call(load, "seen", "old", pin.layout, "copy")
    assert peer.call(look, "seen")[0].min() == 2.0
    peer.call(drop, "seen")
    peer.call(close, "old")
    peer.call(open_, "m", new)
    peer.call(load, "x", "m", pin.layout, "copy")
    assert peer.call(look, "x")[0].min() == 2.0
    end(peer, pin)


def test_an_array_without_bytes_is_refused():
    import cupy

    array = cupy.zeros((0, 3))
    assert refusal(array, ready(array)) is Refusal.TOO_SMALL


# -- private or not -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rung", "seen"), [("copy", 1.0), ("share", 5.0)])
def test_writing_into_an_import(peer, rung, seen):
    import cupy

    array = cupy.ones(1000)
    pin = transfer(peer, array, rung)
    peer.call(write, "x", 5.0)
    assert float(array.max()) == seen
    end(peer, pin)


def test_an_import_is_exported_as_a_copy(peer):
    host, array = fill((1000,))
    pin = transfer(peer, array, "share")
    layout, announcement = peer.call(reexport, "x", 3)
    assert announcement.handle != memory().handle(pin.allocation).payload
    mapping = memory().open(announcement, ())
    imported = memory().load(mapping, layout, Rung.COPY)
    np.testing.assert_array_equal(imported.array.get(), host[::3])
    imported.done.result(5)
    mapping.close()
    peer.call(drop, "view", "pin")
    end(peer, pin)


def test_a_copy_without_room_is_shared(peer):
    host, array = fill()
    pin, announcement = offer(array)
    peer.call(open_, "m", announcement)
    assert peer.call(load_without_room, "x", "m", pin.layout) == "share"
    np.testing.assert_array_equal(peer.call(look, "x")[0], host)
    end(peer, pin)


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["share", "copy"])
@pytest.mark.parametrize("kind", ["default", "per-thread", "blocking", "non-blocking"])
def test_nothing_is_offered_before_it_is_finished(peer, kind, rung):
    import cupy

    array = cupy.zeros(1 << 16)
    cupy.cuda.runtime.deviceSynchronize()
    start = time.monotonic()
    spin(array, array, 1.0, 9.0, stream_of(kind))
    prepared = memory().prepare([array])
    assert time.monotonic() - start < 0.1, "prepare waited"
    assert refusal(array, prepared) is Refusal.NOT_READY
    longest = asyncio.run(beside_a_heartbeat(prepared.wait()))
    assert time.monotonic() - start >= 0.9
    assert longest < 0.02, f"the loop stood still for {longest:.3f} s"
    pin = transfer(peer, array, rung, prepared)
    assert peer.call(look, "x")[0].min() == 9.0
    end(peer, pin)


async def beside_a_heartbeat(waiting):
    """Await something; the longest time that the loop stood still meanwhile, in seconds."""
    task = asyncio.ensure_future(waiting)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last - 0.001), now
    await task
    return longest


def test_only_what_was_waited_for_is_offered():
    import cupy

    array, other = cupy.zeros(8), cupy.zeros(8)
    assert refusal(array, None) is Refusal.NOT_READY
    assert refusal(array, ready(other)) is Refusal.NOT_READY
    assert memory().prepare([]) is None


def test_a_cancelled_wait_offers_nothing():
    import cupy

    array = cupy.zeros(8)
    spin(array, array, 0.3, 1.0, cupy.cuda.Stream(non_blocking=True))
    prepared = memory().prepare([array])

    async def cancelled():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await prepared.wait()

    asyncio.run(cancelled())
    assert refusal(array, prepared) is Refusal.NOT_READY
    cupy.cuda.runtime.deviceSynchronize()


def test_a_fence_waits_for_the_kernel_that_reads_an_import(peer):
    import cupy

    pin = transfer(peer, cupy.zeros(1 << 16), "share")
    made, passed = peer.call(fence_behind_kernel, "x", 1.0)
    assert made < 0.1
    assert passed >= 0.9
    peer.call(close, "m")
    pin.release()


def test_a_close_waits_for_an_idle_moment_and_nobody_waits_for_it(peer):
    import cupy

    pin = transfer(peer, cupy.zeros(1 << 16), "share")
    peer.call(drop, "x")
    called, launched, closed = peer.call(close_behind_kernel, "m", 1.0)
    assert called < 0.02
    assert launched < 0.02
    assert closed >= 0.9
    pin.release()


def test_a_copy_waits_for_who_still_uses_its_block(peer):
    import cupy

    array = cupy.full(1 << 20, 3.0)
    pin, announcement = offer(array)
    peer.call(open_, "m", announcement)
    same, seen = peer.call(load_into_used_block, "m", pin.layout)
    assert same, "the pool gave another block: the test shows nothing"
    assert seen == 7.0
    peer.call(close, "m")
    pin.release()


def test_a_graph_capture_is_left_alone(peer):
    import cupy

    array = cupy.zeros(8)
    array += 1  # loads the kernel before the capture
    pin, announcement = offer(array)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        array += 1
        reason = refusal(array, ready(array))
        graph = stream.end_capture()
    assert reason is Refusal.CAPTURING
    graph.launch(stream)
    stream.synchronize()
    assert float(array.sum()) == 16.0
    assert memory().disabled is None
    peer.call(open_, "m", announcement)
    assert "capture" in peer.call(load_during_capture, "m", pin.layout)
    peer.call(close, "m")
    pin.release()


# -- threads and processes ----------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["share", "copy"])
def test_importing_in_a_thread_without_a_context(peer, rung):
    host, array = fill()
    pin, announcement = offer(array[::2])
    peer.call(in_thread, open_, "m", announcement)
    assert peer.call(in_thread, load, "x", "m", pin.layout, rung) == rung
    np.testing.assert_array_equal(peer.call(look, "x")[0], host[::2])
    end(peer, pin)


def test_exporting_in_a_thread_without_a_context():
    import cupy

    array = cupy.zeros(100)
    pin, announcement = in_thread(offer, array, ready(array))
    assert len(announcement.handle) == 64
    pin.release()


def test_transfers_leave_no_memory_behind(peer):
    import cupy

    def churn(rounds):
        for i in range(rounds):
            block = cupy.cuda.MemoryPointer(cupy.cuda.Memory(4 << 20), 0)
            array = cupy.ndarray((1 << 19,), "f8", block)
            array[...] = i
            pin = transfer(peer, array, ("copy", "share")[i % 2])
            assert float(peer.call(look, "x")[0][-1]) == i
            end(peer, pin)
            del pin, array, block
        memory().collect()
        cupy.cuda.runtime.deviceSynchronize()
        return cupy.cuda.runtime.memGetInfo()[0]

    before = churn(5)
    assert abs(churn(40) - before) <= 4 << 20


PRELUDE = """
import os, sys, time, warnings
from dask_gpuipc.config import Settings
from dask_gpuipc.errors import Refused
from dask_gpuipc.memory.cuda import CudaMemory
memory = CudaMemory(Settings.load())
"""


def run(program: str) -> str:
    """Run a program in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_setup_creates_no_context_and_imports_no_cupy():
    printed = run("""
        from cuda.bindings import driver
        print(driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])[2])
        print("cupy" in sys.modules, len(memory.devices()) > 0, memory.fence(), memory.trim())
        memory.close()
    """)
    assert printed.split() == ["0", "False", "True", "None", "[]"]


def test_a_forked_child_shares_nothing_and_says_why():
    printed = run("""
        import asyncio
        import cupy
        array = cupy.zeros(8)
        prepared = memory.prepare([array])
        asyncio.run(prepared.wait())
        memory.pin(array, prepared).release()
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            try:
                memory.pin(array, prepared)
            except Refused as refused:
                print(refused, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert printed.startswith("disabled")
    assert "spawn" in printed


def test_an_interpreter_ends_quietly_with_a_kernel_running():
    start = time.monotonic()
    run("""
        import cupy
        kernel = cupy.RawKernel('''extern "C" __global__ void spin(unsigned long long ns) {
            unsigned long long start, now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
            do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); }
            while (now - start < ns);
        }''', "spin")
        array = cupy.zeros(8)
        kernel((1,), (1,), (cupy.uint64(2_000_000_000),))
        prepared = memory.prepare([array])
        device = memory._devices[0]
        waiting = device.when(device.mark(), array)
        time.sleep(0.1)
    """)
    assert time.monotonic() - start < 30


def test_a_lost_context_disables_the_memory_visibly():
    printed = run("""
        import asyncio
        import cupy
        array = cupy.zeros(8)
        bad = cupy.RawKernel('extern "C" __global__ void bad(int* p) { *p = 1; }', "bad")
        bad((1,), (1,), (cupy.uint64(8),))
        prepared = memory.prepare([array])
        asyncio.run(prepared.wait())
        try:
            memory.pin(array, prepared)
        except Refused as refused:
            print(refused.reason.value)
        print(memory)
        print(memory.fence())
        sys.stdout.flush()
        os._exit(0)  # CuPy's own finalizers complain about the lost context
    """)
    assert printed.startswith("disabled")
    assert "disabled: " in printed.splitlines()[1]


def make_memory():
    from dask_gpuipc.config import Settings
    from dask_gpuipc.memory.cuda import CudaMemory

    return CudaMemory(Settings.load())


def test_it_is_a_memory():
    testing = pytest.importorskip("dask_gpuipc.testing", reason="not there yet")
    testing.check_memory(make_memory)
