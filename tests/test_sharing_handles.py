"""IPCMemoryHandle between real processes, on host memory: ``a`` is the source, others open."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import unittest.mock
import warnings

import numpy as np
import pytest
import sharing_peers as at
from helpers import child, wait_until

import dask_gpuipc
from dask_gpuipc import sharing
from dask_gpuipc.errors import HandleClosed, SourceGone
from dask_gpuipc.sharing import fetching
from dask_gpuipc.sharing import node as nodes
from dask_gpuipc.sharing.desk import Reply, Visit, Want


@pytest.fixture(scope="module")
def processes():
    with child(daemon=False) as a, child(daemon=False) as b, child() as c:
        yield a, b, c


@pytest.fixture
def peers(processes):
    with at.session(*processes):
        yield processes


@pytest.fixture
def pair(peers):
    return peers[:2]


def share(a, b, value=1, name="x"):
    """An array of ``a``, and its handle ``h`` in both."""
    a.call(at.make, name, value)
    b.call(at.keep, "h", a.call(at.handle_of, name, "h"))


# -- open ---------------------------------------------------------------------------------------


def test_another_process_opens_what_was_shared(pair):
    a, b = pair
    share(a, b, 7)
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(at.values, "y") == [7]
    assert b.call(at.traffic, "received") == {"share": 1}
    assert a.call(at.holders, "h") == (b.pid,)


VIEWS = {
    "whole": lambda x: x,
    "strided": lambda x: x[::3, 1::2],
    "transposed": lambda x: x.T,
    "reversed": lambda x: x[::-1, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one element": lambda x: x[3, 4],
    "scalar": lambda x: x[3, 4].reshape(()),
    "structured": lambda x: x.view([("p", "i4"), ("q", "f4")]),
    "fortran": np.asfortranarray,
}


def put_view(name, kind):
    at.here[name] = np.asarray(VIEWS[kind](np.arange(2000.0).reshape(40, 50)))


def equals(name, kind):
    expected = np.asarray(VIEWS[kind](np.arange(2000.0).reshape(40, 50)))
    array = at.here[name]
    return (
        array.shape == expected.shape
        and array.dtype == expected.dtype
        and array.tobytes() == expected.tobytes()
    )


@pytest.mark.parametrize("kind", VIEWS)
def test_views_arrive_as_they_are(pair, kind):
    a, b = pair
    a.call(put_view, "x", kind)
    b.call(at.keep, "h", a.call(at.handle_of, "x", "h"))
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(equals, "y", kind)


def empty_handle(name):
    at.here[name] = sharing.get_ipc_handle(np.zeros((0, 3), "f4"))
    return at.here[name]


def shape_and_dtype(name):
    return at.here[name].shape, str(at.here[name].dtype)


def test_an_array_without_elements_is_opened_without_its_source(pair):
    a, b = pair
    handle = a.call(empty_handle, "h")
    a.call(at.drop, "h")
    b.call(at.keep, "h", handle)
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(shape_and_dtype, "y") == ((0, 3), "float32")


def test_opened_twice_it_is_the_same_memory(pair):
    a, b = pair
    share(a, b)
    b.call(at.open_, "h", "y")
    b.call(at.keep, "copy of h", b.call(at.give, "h"))
    assert b.call(at.open_, "copy of h", "z") == ""
    assert b.call(at.same_memory, "y", "z")
    assert a.call(at.held) == (1, 0)  # one lease, not two
    b.call(at.fill, "y", 9)
    assert b.call(at.values, "z") == [9]


def test_a_write_stays_with_its_writer(peers):
    a, b, c = peers
    share(a, b, 1)
    c.call(at.keep, "h", a.call(at.give, "h"))
    b.call(at.open_, "h", "y")
    c.call(at.open_, "h", "y")
    b.call(at.fill, "y", 5)
    assert (a.call(at.values, "x"), c.call(at.values, "y")) == ([1], [1])
    assert b.call(at.values, "y") == [5]


def open_in_threads(handle, count):
    from concurrent.futures import ThreadPoolExecutor

    copies = [pickle.loads(pickle.dumps(at.here[handle])) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        arrays = list(pool.map(lambda h: h.open(), copies))
    at.here["opened"] = arrays
    return len({array.__array_interface__["data"][0] for array in arrays})


def test_threads_that_open_at_once_open_once(pair):
    a, b = pair
    share(a, b)
    assert b.call(open_in_threads, "h", 8) == 1
    assert a.call(at.held) == (1, 0)


# -- with, close --------------------------------------------------------------------------------


def with_open(handle):
    with at.here[handle].open() as array:
        return int(array.sum()), at.held()


def with_handle(handle):
    with at.here[handle] as array:
        return int(array[0])


def test_with_closes_the_handle(pair):
    a, b = pair
    share(a, b, 2)
    assert b.call(with_open, "h") == (10000, (0, 1))
    a.until(at.nothing_held)
    assert a.call(at.holders, "h") == ()
    assert b.call(at.open_, "h", "y").startswith("HandleClosed")


def test_the_handle_itself_works_with_with_on_both_sides(pair):
    a, b = pair
    share(a, b, 2)
    assert b.call(with_handle, "h") == 2
    assert a.call(with_handle, "h") == 2


def test_closing_leaves_the_array_to_those_that_refer_to_it(pair):
    a, b = pair
    share(a, b, 4)
    b.call(at.open_, "h", "y")
    b.call(at.close, "h")
    assert b.call(at.values, "y") == [4]
    assert a.call(at.held) == (1, 0)
    b.call(at.drop, "y")
    a.until(at.nothing_held)


def keep_view(name, as_):
    at.here[as_] = at.here[name][10:20]


def test_a_view_keeps_the_lease(pair):
    a, b = pair
    share(a, b, 4)
    b.call(at.open_, "h", "y")
    b.call(keep_view, "y", "v")
    b.call(at.drop, "h", "y")
    assert a.call(at.held) == (1, 0)
    assert b.call(at.values, "v") == [4]
    b.call(at.drop, "v")
    a.until(at.nothing_held)


def open_without_keeping_the_handle(handle):
    at.here["y"] = pickle.loads(pickle.dumps(at.here[handle])).open()


def test_the_array_outlives_a_handle_that_nobody_kept(pair):
    a, b = pair
    share(a, b, 4)
    b.call(open_without_keeping_the_handle, "h")
    assert b.call(at.values, "y") == [4]
    b.call(at.drop, "y")  # by reference count alone: no cycle holds it
    a.until(at.nothing_held)


def drop_without_collecting(name):
    import gc

    gc.disable()
    try:
        del at.here[name]
        return at.held()
    finally:
        gc.enable()


def test_no_cycle_holds_a_lease(pair):
    a, b = pair
    share(a, b, 4)
    b.call(open_without_keeping_the_handle, "h")
    b.call(drop_without_collecting, "y")
    a.until(at.nothing_held)


def wait_closed(handle, timeout):
    return at.here[handle].wait_closed(timeout)


def test_the_source_is_told_when_the_other_side_closes(pair):
    a, b = pair
    share(a, b)
    b.call(at.open_, "h", "y")
    assert a.call(wait_closed, "h", 0.0) is False
    a.start(wait_closed, "h", 20.0)
    b.call(at.drop, "h", "y")
    assert a.finish() is True


def test_use_after_close_and_a_source_that_is_gone_are_different_errors(pair):
    a, b = pair
    share(a, b)
    b.call(at.keep, "closed here", b.call(at.give, "h"))
    b.call(at.close, "closed here")
    assert b.call(at.open_, "closed here", "y").startswith("HandleClosed")
    a.call(at.close, "h")
    assert "given it up" in b.call(at.open_, "h", "y")
    assert b.call(at.open_, "h", "y").startswith("SourceGone")


def test_a_closed_handle_is_not_pickled():
    handle = sharing.get_ipc_handle(np.arange(5))
    handle.close()
    with pytest.raises(HandleClosed):
        pickle.dumps(handle)
    sharing.stop()


def test_a_handle_that_died_in_its_source_opens_nothing(pair):
    a, b = pair
    share(a, b)
    a.call(at.drop, "h", "x")
    wait_until(lambda: a.call(at.shelf) == 0)
    assert b.call(at.open_, "h", "y").startswith("SourceGone")


def test_the_handle_keeps_its_array_alive_in_the_source(pair):
    a, b = pair
    share(a, b, 3)
    a.call(at.drop, "x")
    b.call(at.open_, "h", "y")
    assert b.call(at.values, "y") == [3]


# -- the exporting process ------------------------------------------------------------------------


def in_the_source():
    array = np.arange(10)
    handle = sharing.get_ipc_handle(array)
    copy = pickle.loads(pickle.dumps(handle))
    same = (handle.open() is array, copy.open() is array)
    with copy as again:
        same += (again is array,)
    other = pickle.loads(pickle.dumps(handle))
    handle.close()
    with pytest.raises(SourceGone, match="has closed its handle"):
        other.open()
    return same


def test_in_its_source_a_handle_gives_the_original_array(pair):
    assert pair[0].call(in_the_source) == (True, True, True)


def only_its_source_knows(handle):
    for ask in (lambda h: h.holders, lambda h: h.wait_closed(0)):
        with pytest.raises(ValueError, match="only its source"):
            ask(at.here[handle])


def test_only_the_source_knows_the_holders(pair):
    a, b = pair
    share(a, b)
    b.call(only_its_source_knows, "h")


# -- types ----------------------------------------------------------------------------------------


def subclass_handle(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at.here[name] = sharing.get_ipc_handle(np.ma.masked_array(np.ones(2000), mask=True))
    [warning] = caught
    assert warning.filename == __file__
    return at.here[name], str(warning.message)


def test_a_subclass_is_warned_of_and_arrives_as_the_base_type(pair):
    a, b = pair
    handle, warning = a.call(subclass_handle, "h")
    assert warning == "MaskedArray is shared as ndarray: only its elements travel"
    b.call(at.keep, "h", handle)
    b.call(at.open_, "h", "y")
    assert b.call(at.type_of, "y") == "OpenedArray"
    assert b.call(at.values, "y") == [1.0]


def derived_types(name):
    array = at.here[name]
    assert isinstance(array, np.ndarray)
    derived = (array + 1, array.sum(), np.sqrt(array), pickle.loads(pickle.dumps(array)))
    return [type(d).__name__ for d in derived]


def test_what_is_computed_from_an_opened_array_is_plain(pair):
    a, b = pair
    share(a, b)
    b.call(at.open_, "h", "y")
    assert b.call(derived_types, "y") == ["ndarray", "int64", "ndarray", "ndarray"]


def share_opened_again(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at.here["again"] = sharing.get_ipc_handle(at.here[name])
    return at.here["again"]


def test_what_was_opened_can_be_shared_further(peers):
    a, b, c = peers
    share(a, b, 6)
    b.call(at.open_, "h", "y")
    c.call(at.keep, "h", b.call(share_opened_again, "y"))
    assert c.call(at.open_, "h", "z") == ""
    a.call(at.drop, "x", "h")
    b.call(at.drop, "y", "h")
    assert c.call(at.values, "z") == [6]


@pytest.mark.parametrize("what", [[1, 2], 3.0, "text", np.array([None, {}])])
def test_what_is_no_array_of_bytes_is_a_type_error(what):
    with pytest.raises(TypeError):
        sharing.get_ipc_handle(what)
    sharing.stop()


def test_the_package_offers_it_lazily():
    assert dask_gpuipc.get_ipc_handle is sharing.get_ipc_handle
    assert dask_gpuipc.IPCMemoryHandle is sharing.IPCMemoryHandle
    assert dask_gpuipc.sharing is sharing


def modules_loaded():
    import subprocess

    code = "import dask_gpuipc.sharing, sys; print(*{m.split('.')[0] for m in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.split()


def test_it_imports_neither_distributed_nor_cupy():
    assert not {"distributed", "cupy", "cuda", "tornado"} & set(modules_loaded())


# -- deaths ---------------------------------------------------------------------------------------


def test_a_source_that_was_killed_is_gone(pair):
    _, b = pair
    with at.helper_child(b.call(at.directory)) as a:
        share(a, b, 8)
        b.call(at.keep, "unopened", a.call(at.handle_of, "x", "h2"))
        b.call(at.open_, "h", "y")
        a.kill()
    assert b.call(at.values, "y") == [8]  # the kernel keeps what is open
    said = b.call(at.open_, "unopened", "z")
    assert said == f"SourceGone: process {a_pid(said)}, which had the memory, has ended"


def a_pid(text):
    return text.split("process ")[1].split(",")[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_holder_holds_no_more(pair, number):
    a, b = pair
    with at.helper_child(b.call(at.directory)) as c:
        share(a, c)
        c.call(at.open_, "h", "y")
        assert a.call(at.holders, "h") == (c.pid,)
        c.signal(number)
        c.process.join(20)
    a.until(at.nothing_held)
    assert a.call(at.holders, "h") == ()


def test_a_stopped_source_does_not_answer_in_time_and_then_does(pair):
    a, b = pair
    share(a, b, 2)
    a.signal(signal.SIGSTOP)
    try:
        assert b.call(at.open_, "h", "y", 0.2).startswith("NotAnswering")
    finally:
        a.signal(signal.SIGCONT)
    assert b.call(at.open_, "h", "y") == ""
    assert b.call(at.values, "y") == [2]


def test_a_source_killed_while_it_is_asked(pair):
    _, b = pair
    with at.helper_child(b.call(at.directory)) as a:
        share(a, b, 8)
        a.signal(signal.SIGSTOP)
        b.call(open_in_thread, "h")
        a.kill()
        assert b.call(finish_open).startswith("SourceGone")


def open_in_thread(handle):
    """Begin to open a handle; return once the source has been asked."""
    asked = threading.Event()

    class Watched(Visit):
        def receive_bytes(self):
            asked.set()
            return super().receive_bytes()

    def run():
        with unittest.mock.patch.object(fetching, "Visit", Watched):
            at.here["said"] = at.open_(handle, "y")

    at.here["thread"] = threading.Thread(target=run)
    at.here["thread"].start()
    assert asked.wait(20)


def finish_open():
    at.here.pop("thread").join()
    return at.here["said"]


@contextlib.contextmanager
def killed_at_the_end(pid):
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_source_with_a_forked_child_alive(pair):
    _, b = pair
    with at.helper_child(b.call(at.directory), daemon=False) as a:
        share(a, b, 8)
        # It has the listening socket too, in which the visitor will wait.
        with killed_at_the_end(a.call(fork_holding, "x")):
            a.signal(signal.SIGSTOP)
            b.call(open_in_thread, "h")
            a.kill()
            assert b.call(finish_open).startswith("SourceGone")


def visit_without_an_outcome(handle):
    ticket = at.here[handle]._ticket
    visit = at.here["visit"] = Visit(ticket.address, 20)
    visit.send(Want(ticket.key, ticket.kind))
    visit.send(nodes.node().endpoint("host").advertisement)
    return visit.receive(Reply).verdict.value


def test_a_visitor_killed_in_mid_visit_with_a_forked_child_alive(pair):
    a, b = pair
    with at.helper_child(b.call(at.directory), daemon=False) as c:
        share(a, c)
        assert c.call(visit_without_an_outcome, "h") == "granted"
        with killed_at_the_end(c.call(fork_holding, "h")):
            assert a.call(wait_closed, "h", 0.0) is False
            c.kill()
            assert a.call(wait_closed, "h", 20.0) is True
            a.until(at.nothing_held)


def test_a_stopped_holder_keeps_its_lease(pair):
    a, b = pair
    share(a, b, 3)
    b.call(at.open_, "h", "y")
    b.signal(signal.SIGSTOP)
    try:
        a.call(at.drop, "x", "h")
        a.call(at.make, "other", 9, 500_000)
        assert a.call(at.held) == (1, 0)
    finally:
        b.signal(signal.SIGCONT)
    assert b.call(at.values, "y") == [3]


# -- forks ----------------------------------------------------------------------------------------


def open_value(handle):
    with at.here[handle] as array:
        return int(array[0]), at.held()


def test_a_forked_child_opens_its_parents_handle(pair):
    a, b = pair
    share(a, b, 5)
    assert a.call(at.in_a_fork, open_value, "h") == (5, (0, 1))
    a.until(at.nothing_held)


def test_a_forked_child_opens_what_its_parent_had_opened(pair):
    a, b = pair
    share(a, b, 5)
    b.call(at.open_, "h", "y")
    assert b.call(at.in_a_fork, open_value, "h")[0] == 5
    b.call(at.drop, "y", "h")
    a.until(at.nothing_held)


def tell_and_wait(parents, pipe, name):
    parents.close()
    try:
        pipe.recv()
        pipe.send(int(np.asarray(at.here[name]).max()))
        pipe.recv()
    except EOFError:  # the parent was killed
        signal.pause()


def fork_holding(name):
    import multiprocessing as mp

    mine, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=tell_and_wait, args=(mine, theirs, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    at.here["fork"] = (process, mine)
    return process.pid


def ask_fork():
    _, pipe = at.here["fork"]
    pipe.send(None)
    return pipe.recv()


def end_fork():
    process, pipe = at.here.pop("fork")
    pipe.send(None)
    process.join()
    pipe.close()
    process.close()


def test_what_a_forked_child_inherited_stays_leased_until_it_ends(pair):
    a, b = pair
    share(a, b, 5)
    b.call(at.open_, "h", "y")
    b.call(fork_holding, "y")
    b.call(at.drop, "y", "h")
    a.call(at.drop, "x", "h")
    assert a.call(at.held) == (1, 0)
    a.call(at.make, "z", 77)
    b.call(at.keep, "h", a.call(at.handle_of, "z", "h"))
    b.call(at.open_, "h", "z")  # would have had the freed slot
    assert b.call(ask_fork) == 5
    b.call(end_fork)
    b.call(at.drop, "z", "h")
    a.until(at.nothing_held)


# -- stop -----------------------------------------------------------------------------------------


def stop_is_refused():
    from dask_gpuipc.errors import StillOpen

    with pytest.raises(StillOpen, match="other processes hold 1 arrays"):
        sharing.stop(0.0)


def test_stop_waits_for_holders(pair):
    a, b = pair
    share(a, b)
    b.call(at.open_, "h", "y")
    a.call(stop_is_refused)
    assert b.call(at.values, "y") == [1]


def test_after_stop_it_begins_anew(pair):
    a, b = pair
    for value in (1, 2):
        share(a, b, value)
        b.call(at.open_, "h", "y")
        assert b.call(at.values, "y") == [value]
        b.call(at.drop, "y", "h")
        a.until(at.nothing_held)
        a.call(sharing.stop)
        b.call(sharing.stop)


def test_closed_is_shown():
    array = np.arange(5)
    handle = sharing.get_ipc_handle(array)
    assert repr(handle).endswith("host (5,) int64: open>")
    handle.close()
    handle.close()
    assert handle.closed
    with pytest.raises(HandleClosed):
        handle.open()
    sharing.stop()
