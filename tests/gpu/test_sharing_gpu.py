"""Sharing without Dask on a GPU: handles, events, messages, keys and `Pool`, between processes.

``a`` is the source, ``b`` and ``c`` open. The scenarios of PyTorch's tests of sharing CUDA tensors
are among these, written anew: events of either side, several consumers, sending on, empty arrays,
rebuilding after release, and a producer that ended.
"""

from __future__ import annotations

import gc

import pytest
import sharing_peers as at
from cuda_peer import spin, warm_up
from helpers import child
from test_sharing_messages import link, receive, send

from dask_gpuipc import sharing
from dask_gpuipc.errors import MemoryUnavailable, Refusal, Refused
from dask_gpuipc.sharing.node import node

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def processes():
    with child(daemon=False) as a, child() as b, child() as c:
        for process in (a, b, c):
            process.call(warm_up)
        yield a, b, c


@pytest.fixture
def peers(processes):
    with at.session(*processes):
        yield processes


# -- what either process does ---------------------------------------------------------------------


def make(name, value, count=5000):
    import cupy

    at.here[name] = cupy.full(count, value, "f8")


def values(name):
    return sorted(set(at.here[name].get().ravel().tolist()))


def fill(name, value):
    import cupy

    at.here[name][...] = value
    cupy.cuda.runtime.deviceSynchronize()


def share(a, b, value=1.0, name="x"):
    a.call(make, name, value)
    b.call(at.keep, "h", a.call(at.handle_of, name, "h"))


def write_slowly(name, value, seconds=0.5):
    """Begin to write into an array, on a stream that blocks nothing; do not wait."""
    import cupy

    zeros = at.here["zeros"] = cupy.zeros_like(at.here[name])
    cupy.cuda.runtime.deviceSynchronize()
    at.here["stream"] = cupy.cuda.Stream(non_blocking=True)
    spin(at.here[name], zeros, seconds, value, at.here["stream"])


# -- handles --------------------------------------------------------------------------------------


def put_view(name, kind):
    import cupy

    whole = at.here["whole"] = cupy.arange(2000.0).reshape(40, 50)
    at.here[name] = VIEWS[kind](whole)


VIEWS = {
    "whole": lambda x: x,
    "strided": lambda x: x[::3, 1::2],
    "offset": lambda x: x[7:, 3:],
    "transposed": lambda x: x.T,
    "reversed": lambda x: x[::-1, ::-1],
}


def as_bytes(name):
    array = at.here[name]
    return array.shape, array.strides, array.get().tobytes()


@pytest.mark.parametrize("kind", VIEWS)
def test_views_open_as_they_are(peers, kind):
    a, b, _ = peers
    a.call(put_view, "x", kind)
    b.call(at.keep, "h", a.call(at.handle_of, "x", "h"))
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(as_bytes, "y") == a.call(as_bytes, "x")


def test_it_is_the_same_memory_for_all(peers):
    a, b, c = peers
    share(a, b, 1.0)
    c.call(at.keep, "h", a.call(at.give, "h"))
    for peer in (b, c):
        assert peer.call(at.open_, "h", "y") == ""
    b.call(fill, "y", 5.0)
    assert (a.call(values, "x"), c.call(values, "y")) == ([5.0], [5.0])
    a.call(fill, "x", 6.0)
    assert b.call(values, "y") == [6.0]


def pointers(*names):
    return len({at.here[name].data.ptr for name in names})


def test_opened_twice_it_is_one_mapping(peers):
    a, b, _ = peers
    share(a, b)
    b.call(at.open_, "h", "y")
    b.call(at.keep, "copy", b.call(at.give, "h"))
    b.call(at.open_, "copy", "z")
    assert b.call(pointers, "y", "z") == 1
    assert a.call(at.held) == (1, 0)


def test_what_was_launched_is_finished_when_it_is_opened(peers):
    a, b, _ = peers
    share(a, b)
    a.call(write_slowly, "x", 3.0)
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(values, "y") == [3.0]


def read_slowly_and_drop(name, seconds):
    import cupy

    out = at.here["out"] = cupy.empty_like(at.here[name])
    cupy.cuda.runtime.deviceSynchronize()
    at.here["stream"] = cupy.cuda.Stream(non_blocking=True)
    spin(out, at.here.pop(name), seconds, 0.0, at.here["stream"])


def test_memory_is_held_until_the_importers_kernels_end(peers):
    a, b, _ = peers
    share(a, b, 4.0)
    b.call(at.open_, "h", "y")
    b.call(at.close, "h")
    b.call(read_slowly_and_drop, "y", 2.0)
    assert a.call(at.held) == (1, 0)
    a.until(at.nothing_held)
    assert b.call(values, "out") == [4.0]


def original():
    import cupy

    array = cupy.arange(5)
    handle = sharing.get_ipc_handle(array)
    return handle.open() is array


def test_in_its_source_a_handle_gives_the_original_array(peers):
    assert peers[0].call(original)


def open_in_fork(handle):
    try:
        at.here[handle].open()
    except MemoryUnavailable as error:
        return str(error)
    return "opened"


def test_in_a_forked_process_the_error_says_spawn(peers):
    a, b, _ = peers
    share(b, a)
    said = a.call(at.in_a_fork, open_in_fork, "h")
    assert "forked after CUDA was initialised" in said
    assert "spawn" in said


def refusal(make_array):
    try:
        sharing.get_ipc_handle(make_array())
    except Refused as refused:
        return refused.reason
    return None


def managed():
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        return cupy.ones(5000)


def opened():
    return at.here["y"]


def test_what_cannot_be_shared_is_refused_when_the_handle_is_made(peers):
    a, b, _ = peers
    assert a.call(refusal, managed) is Refusal.NOT_EXPORTABLE
    share(a, b)
    b.call(at.open_, "h", "y")
    assert b.call(refusal, opened) is Refusal.IMPORTED


def test_a_killed_holder_holds_no_more(peers):
    a, b, _ = peers
    with at.helper_child(b.call(at.directory)) as c:
        share(a, c)
        assert c.call(at.open_, "h", "y") == ""
        assert a.call(at.held) == (1, 0)
        c.kill()
    a.until(at.nothing_held)


def test_an_exporter_that_was_killed_is_gone_for_others(peers):
    _, b, c = peers
    with at.helper_child(b.call(at.directory)) as a:
        share(a, b, 7.0)
        c.call(at.keep, "h", a.call(at.give, "h"))
        b.call(at.open_, "h", "y")
        a.kill()
    assert c.call(at.open_, "h", "y").startswith("SourceGone")
    assert b.call(values, "y") == [7.0]  # as was observed; the documentation does not promise it


def protocols(name):
    import cupy

    array = at.here[name]
    interface = array.__cuda_array_interface__
    by_dlpack = cupy.from_dlpack(array)
    same = (interface["data"][0] == array.data.ptr, by_dlpack.data.ptr == array.data.ptr)
    return same, interface["version"], array.__dlpack_device__()[0]


def test_an_opened_array_gives_both_protocols(peers):
    a, b, _ = peers
    share(a, b)
    b.call(at.open_, "h", "y")
    assert b.call(protocols, "y") == ((True, True), 3, 2)


def through_torch(name):
    import torch

    tensor = torch.from_dlpack(at.here[name])
    total = float(tensor.sum())
    tensor += 1
    torch.cuda.synchronize()
    return total, values(name)


def test_pytorch_takes_an_opened_array(peers):
    pytest.importorskip("torch")
    a, b, _ = peers
    share(a, b, 2.0)
    b.call(at.open_, "h", "y")
    assert b.call(through_torch, "y") == (10000.0, [3.0])
    assert a.call(values, "x") == [3.0]


# -- events ---------------------------------------------------------------------------------------


def make_event(name):
    import cupy

    event = cupy.cuda.Event(disable_timing=True, interprocess=True)
    at.here[name] = sharing.IPCEventHandle(event)
    at.here["event"] = event
    return at.here[name]


def open_event(name):
    at.here["event"] = at.here[name].open()


def record():
    at.here["event"].record(at.here["stream"])


def copy_after_event(name):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(at.here["event"])
    with stream:
        copy = at.here[name].copy()
    stream.synchronize()
    return sorted(set(copy.get().tolist()))


def event_pair(a, b):
    share(a, b, 1.0)
    assert b.call(at.open_, "h", "x") == ""
    b.call(at.keep, "e", a.call(make_event, "e"))
    b.call(open_event, "e")


@pytest.mark.parametrize("writer", ["source", "other"])
def test_an_event_orders_the_work_of_two_processes(peers, writer):
    a, b, _ = peers
    event_pair(a, b)
    one, other = (a, b) if writer == "source" else (b, a)
    one.call(write_slowly, "x", 3.0)
    one.call(record)
    assert other.call(copy_after_event, "x") == [3.0]


def drop_event():
    at.here.pop("event")
    at.here.pop("e").close()


def event_done():
    at.here["event"].synchronize()
    return at.here["event"].done


def test_an_event_lives_while_others_use_it(peers):
    a, b, _ = peers
    event_pair(a, b)
    a.call(write_slowly, "x", 3.0)
    a.call(record)
    a.call(drop_event)
    assert b.call(event_done)


def plain_event():
    import cupy

    with pytest.raises(ValueError, match="interprocess=True"):
        sharing.IPCEventHandle(cupy.cuda.Event())


def test_an_event_for_one_process_is_an_error(peers):
    peers[0].call(plain_event)


# -- messages -------------------------------------------------------------------------------------


def test_an_array_in_a_message_is_the_senders_memory(peers):
    a, b, _ = peers
    link(a, b)
    a.call(make, "x", 2.0)
    a.call(send, "x")
    assert b.call(receive, "y") == ""
    b.call(fill, "y", 5.0)
    assert a.call(values, "x") == [5.0]
    b.call(at.drop, "y")
    a.until(at.nothing_held)


def test_what_was_launched_is_finished_when_it_is_received(peers):
    a, b, _ = peers
    link(a, b)
    a.call(make, "x", 2.0)
    a.call(write_slowly, "x", 3.0)
    a.call(send, "x")
    a.call(at.drop, "x")
    assert b.call(receive, "y") == ""
    assert b.call(values, "y") == [3.0]


def test_several_consumers(peers):
    a, b, c = peers
    a.call(make, "x", 2.0)
    for peer in (b, c):
        link(a, peer)
        a.call(send, "x")
        assert peer.call(receive, "y") == ""
    b.call(fill, "y", 4.0)
    assert c.call(values, "y") == [4.0]
    b.call(at.drop, "y")
    c.call(at.drop, "y")
    a.until(at.nothing_held)


def test_sent_on_it_is_a_copy(peers):
    a, b, c = peers
    link(a, b)
    link(b, c)
    a.call(make, "x", 2.0)
    a.call(send, "x")
    b.call(receive, "y")
    b.call(at.keep_as, "y", "x")
    b.call(send, "x")
    assert c.call(receive, "z") == ""
    a.call(fill, "x", 9.0)
    assert (b.call(values, "y"), c.call(values, "z")) == ([9.0], [2.0])


def test_empty_arrays_arrive(peers):
    a, b, _ = peers
    link(a, b)
    a.call(make, "x", 0.0, 0)
    a.call(send, "x")
    assert b.call(receive, "y") == ""
    assert b.call(as_bytes, "y")[0] == (0,)
    assert a.call(at.shelf) == 0


def test_rebuilt_after_it_was_released(peers):
    a, b, _ = peers
    link(a, b)
    a.call(make, "x", 2.0)
    for value in (2.0, 3.0):
        a.call(fill, "x", value)
        a.call(send, "x")
        assert b.call(receive, "y") == ""
        assert b.call(values, "y") == [value]
        b.call(at.drop, "y")
        a.until(at.nothing_held)


def test_a_message_of_a_killed_producer_is_an_error_and_not_garbage(peers):
    _, b, _ = peers
    with at.helper_child(b.call(at.directory)) as c:
        c.call(warm_up)
        link(c, b)
        c.call(make, "x", 2.0)
        c.call(send, "x")
        c.kill()
    assert b.call(receive, "y").startswith("SourceGone")


def test_a_producer_that_ends_waits_for_what_it_sent(peers):
    _, b, _ = peers
    with child() as c:
        c.call(at.begin, b.call(at.directory))
        c.call(warm_up)
        link(c, b)
        c.call(make, "x", 2.0)
        c.call(send, "x")
        c.end()
        assert b.call(receive, "y") == ""
    assert b.call(values, "y") == [2.0]  # as was observed


def send_event_and_array():
    import cupy

    event = cupy.cuda.Event(disable_timing=True, interprocess=True)
    event.record(at.here["stream"])
    at.here["x"], at.here["pair"] = event, (event, at.here["x"])
    at.here["out"].send(at.here["pair"])


def wait_and_look(name):
    event, array = at.here.pop(name)
    event.synchronize()
    return sorted(set(array.get().tolist()))


def test_events_travel_in_messages(peers):
    a, b, _ = peers
    link(a, b)
    a.call(make, "x", 2.0)
    a.call(write_slowly, "x", 3.0)
    a.call(send_event_and_array)
    assert b.call(receive, "y") == ""
    assert b.call(wait_and_look, "y") == [3.0]


# -- keys -----------------------------------------------------------------------------------------


def key_of(name):
    return sharing.export_key(at.here[name])


def open_key(key, as_):
    at.here[as_] = sharing.open_key(key)


def close_key(key):
    sharing.close_key(key)


def cannot_be_protected(key):
    with pytest.raises(ValueError, match=r"sharing\.Pool"):
        sharing.set_attributes(key, readonly=True)


def test_by_key(peers):
    a, b, _ = peers
    a.call(make, "x", 2.0)
    key = a.call(key_of, "x")
    a.call(cannot_be_protected, key)
    b.call(open_key, key, "y")
    assert b.call(values, "y") == [2.0]
    b.call(at.drop, "y")
    b.call(close_key, key)
    a.call(close_key, key)


# -- pool -----------------------------------------------------------------------------------------


def make_pooled(name, value, count=5000):
    import cupy

    pool = at.here.setdefault("pool", sharing.Pool(slab="8 MiB"))
    with cupy.cuda.using_allocator(pool.malloc):
        at.here[name] = cupy.full(count, value, "f8")


def share_pooled(a, b, value=1.0, name="x"):
    a.call(make_pooled, name, value)
    b.call(at.keep, "h", a.call(at.handle_of, name, "h"))


def test_memory_of_a_pool_is_shared_by_descriptor(peers):
    a, b, _ = peers
    share_pooled(a, b, 3.0)
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(values, "y") == [3.0]
    b.call(fill, "y", 4.0)
    assert a.call(values, "x") == [4.0]


def test_its_importer_survives_its_exporter(peers):
    _, b, _ = peers
    with at.helper_child(b.call(at.directory)) as a:
        share_pooled(a, b, 3.0)
        assert b.call(at.open_, "h", "y") == ""
        a.kill()
    assert b.call(values, "y") == [3.0]
    b.call(fill, "y", 4.0)
    assert b.call(values, "y") == [4.0]


def mappings():
    return node().endpoint("cuda").importer.mappings()[0]


def test_many_arrays_of_one_slab_are_one_mapping(peers):
    a, b, _ = peers
    for i in range(5):
        share_pooled(a, b, float(i), f"x{i}")
        a.call(at.keep_as, "h", f"h{i}")
        assert b.call(at.open_, "h", f"y{i}") == ""
    assert [b.call(values, f"y{i}") for i in range(5)] == [[float(i)] for i in range(5)]
    assert b.call(mappings) == 1


def protect(name):
    at.here["key"] = sharing.export_key(at.here[name])
    sharing.set_attributes(at.here["key"], readonly=True)
    return at.here["key"]


def write_is_a_fault(name):
    import cupy

    try:
        at.here[name][...] = 1.0
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return "written"


def test_a_pools_memory_can_be_given_for_reading_only(peers):
    a, b, _ = peers
    with at.helper_child(b.call(at.directory)) as c:
        a.call(make_pooled, "x", 3.0)
        key = a.call(protect, "x")
        c.call(open_key, key, "y")
        assert c.call(values, "y") == [3.0]
        assert c.call(write_is_a_fault, "y") != "written"
        c.kill()  # its context is lost
    assert a.call(values, "x") == [3.0]
    a.call(close_key, key)


def pooled_sizes():
    """Slabs and bytes of a pool while small, large and no arrays live, and the allocator."""
    import cupy

    from dask_gpuipc.memory.cuda.virtual import SLABS

    gc.collect()
    before, others = cupy.cuda.get_allocator(), len(SLABS)
    pool = sharing.Pool(slab="8 MiB")
    counts = []
    with cupy.cuda.using_allocator(pool.malloc):
        small = [cupy.ones(100) for _ in range(50)]
        counts.append(len(SLABS) - others)
        large = cupy.ones(4 << 20)  # 32 MiB
        counts.append(len(SLABS) - others)
        aligned = all(x.data.ptr % 512 == 0 for x in [*small, large])
        total = sum(float(x.sum()) for x in [*small, large])
    del small, large
    pool.free_all_blocks()
    counts.append(len(SLABS) - others)
    return counts, pool.total_bytes(), aligned, total, cupy.cuda.get_allocator() == before


def test_a_pool_takes_slabs_and_gives_them_back(peers):
    counts, left, aligned, total, same = peers[0].call(pooled_sizes)
    assert counts == [1, 2, 0]
    assert (left, aligned, same) == (0, True, True)
    assert total == 50 * 100 + (4 << 20)


def beyond_the_device():
    import cupy

    pool = sharing.Pool()
    with cupy.cuda.using_allocator(pool.malloc), pytest.raises(MemoryError):
        cupy.empty(1 << 50, "u1")
    with cupy.cuda.using_allocator(pool.malloc):
        return float(cupy.ones(10).sum())


def test_a_pool_without_room_says_so_and_goes_on(peers):
    assert peers[0].call(beyond_the_device) == 10.0


def free_pooled(name):
    at.here.pop(name)
    at.here.pop("h").close()
    at.here["pool"].free_all_blocks()
    return at.here["pool"].total_bytes()


def test_a_slab_that_is_shared_goes_when_the_last_reader_is_gone(peers):
    a, b, _ = peers
    share_pooled(a, b, 3.0)
    b.call(at.open_, "h", "y")
    assert a.call(free_pooled, "x") > 0  # its lease pins it
    assert b.call(values, "y") == [3.0]
    b.call(at.drop, "y", "h")
    a.until(at.nothing_held)
    a.until(free_all)


def free_all():
    at.here["pool"].free_all_blocks()
    return at.here["pool"].total_bytes() == 0
