"""NumPy arrays in multiprocessing messages: nothing is freed early, nothing kept for ever.

Most tests have ``a`` send to ``b`` over a connection; arrays of 20000 bytes go as handles.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import unittest.mock
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import sharing_peers as at
from helpers import child, wait_until

from dask_gpuipc import sharing
from dask_gpuipc.errors import ConfigError, GPUIPCError, Refusal, Refused
from dask_gpuipc.sharing import carriers, post, segments
from dask_gpuipc.sharing.node import node

STRATEGIES = ["descriptor", "name"]


@pytest.fixture(scope="module")
def processes():
    with child(daemon=False) as a, child() as b, child() as c:
        yield a, b, c


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return request.param


@pytest.fixture
def peers(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", str(tmp_path))
    with at.session(*processes):
        for process in processes:
            process.call(put_segments_into, str(tmp_path))
        yield processes
    assert not at.segments_left()


def put_segments_into(folder):
    """Into one of the test's own: other tests may be running on this machine."""
    segments.FOLDER = folder


# -- what either process does -------------------------------------------------------------------


def listen(directory):
    at.here["listener"] = Listener(os.path.join(directory, f"l{os.getpid()}"), "AF_UNIX")
    return at.here["listener"].address


def connect(address, options):
    sharing.init_reductions(min_bytes=4096, **options)
    at.here["out"] = Client(address)


def accept():
    at.here["in"] = at.here.pop("listener").accept()


def link(a, b, strategy="descriptor"):
    """A connection for messages from ``a`` to ``b``."""
    address = b.call(listen, b.call(at.directory))
    a.call(connect, address, {"strategy": strategy})
    b.call(accept)


def send(*which):
    for name in which:
        at.here["out"].send(at.here[name])


def receive(*which):
    """What arrived, or the error's name and text."""
    for name in which:
        assert at.here["in"].poll(20), f"{name} did not come"
        try:
            at.here[name] = at.here["in"].recv()
        except GPUIPCError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def handles_only(b, count):
    assert b.call(at.traffic, "received") == ({"share": count} if count else {})


# -- it works -------------------------------------------------------------------------------------


def test_what_arrives_is_what_was_sent(peers, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(at.make, "x", 7)
    a.call(send, "x")
    assert b.call(receive, "y") == ""
    assert (b.call(at.values, "y"), b.call(at.type_of, "y")) == ([7], "ndarray")
    handles_only(b, 1 if strategy == "descriptor" else 0)
    b.call(at.drop, "y")
    a.until(at.nothing_kept)


KINDS = {
    "c": lambda: np.arange(3000.0).reshape(50, 60),
    "fortran": lambda: np.asfortranarray(np.arange(3000.0).reshape(50, 60)),
    "strided": lambda: np.arange(12000.0).reshape(100, 120)[::2, ::2],
    "reversed": lambda: np.arange(3000.0)[::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(60.0), (50, 60)),
    "structured": lambda: np.zeros(1000, [("p", "i4"), ("q", "f8", (2,))]),
    "text": lambda: np.array(["abc", "de"] * 2000),
    "times": lambda: np.arange(3000).astype("M8[s]"),
    "read-only": lambda: np.frombuffer(bytes(range(256)) * 100, "u1"),
}


def send_kind(kind):
    at.here["out"].send(KINDS[kind]())


def differs_from_pickle(name, kind):
    """What about an array is not as plain multiprocessing delivers it."""
    import pickle

    array, plain = at.here[name], pickle.loads(pickle.dumps(KINDS[kind]()))
    array[...] = array  # it can be written
    aspects = ("shape", "dtype", "strides", "flags.writeable", "flags.f_contiguous", "tobytes()")
    return [a for a in aspects if eval(f"array.{a} != plain.{a}", {"array": array, "plain": plain})]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_arrive_as_by_pickle(peers, kind, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(send_kind, kind)
    assert b.call(receive, "y") == ""
    assert b.call(differs_from_pickle, "y", kind) == []
    handles_only(b, 1 if strategy == "descriptor" else 0)


def send_big_endian():
    at.here["out"].send(np.arange(3000, dtype=">i4"))


def big_endian(name):
    return str(at.here[name].dtype), at.here[name].tolist() == list(range(3000))


def test_the_order_of_bytes_stays_where_pickle_would_change_it(peers, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(send_big_endian)
    assert b.call(receive, "y") == ""
    assert b.call(big_endian, "y") == (">i4", True)


def send_others():
    out = at.here["out"]
    for other in (
        np.zeros((0, 5)),
        np.ones(3),
        np.array([None] * 5000),
        np.ma.masked_array([1, 2]),
    ):
        out.send(other)


def received_others():
    arrays = [at.here[n] for n in ("e", "s", "o", "m")]
    return [(type(x).__name__, x.shape, str(x.dtype)) for x in arrays]


def test_what_is_empty_small_or_no_plain_array_goes_as_before(peers, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(send_others)
    b.call(receive, "e", "s", "o", "m")
    assert b.call(received_others) == [
        ("ndarray", (0, 5), "float64"),
        ("ndarray", (3,), "float64"),
        ("ndarray", (5000,), "object"),
        ("MaskedArray", (2,), "int64"),
    ]
    assert a.call(at.shelf) == 0


def send_nested():
    x = np.full(5000, 3, "i4")
    at.here["out"].send({"a": [x, (x, "text")], "b": x[::2]})


def nested():
    message = at.here["y"]
    first, (second, text) = message["a"]
    assert first is second  # as pickle keeps what is one
    return text, int(first.sum()), message["b"].shape


def test_arrays_deep_in_a_message(peers, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(send_nested)
    assert b.call(receive, "y") == ""
    assert b.call(nested) == ("text", 15000, (2500,))
    b.call(at.drop, "y")
    a.until(at.nothing_kept)


def send_and_change():
    x = np.full(5000, 1, "i4")
    at.here["out"].send(x)
    x[:] = 2
    at.here["out"].send(x)


def test_a_message_has_the_bytes_of_its_moment(peers, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(send_and_change)
    b.call(receive, "y", "z")
    assert (b.call(at.values, "y"), b.call(at.values, "z")) == ([1], [2])


def test_a_receiver_writes_into_its_own(peers, strategy):
    a, b, c = peers
    for peer in (b, c):
        link(a, peer, strategy)
        a.call(at.make, "x", 1)
        a.call(send, "x")
        peer.call(receive, "y")
    b.call(at.fill, "y", 5)
    assert (a.call(at.values, "x"), c.call(at.values, "y")) == ([1], [1])


def test_several_receivers_of_one_array(peers):
    a, b, c = peers
    a.call(at.make, "x", 4)
    for peer in (b, c):
        link(a, peer)
        a.call(send, "x", "x")
        peer.call(receive, "y", "z")
    a.call(at.drop, "x")
    assert [p.call(at.values, n) for p in (b, c) for n in ("y", "z")] == [[4]] * 4
    assert a.call(at.held) == (4, 0)
    b.call(at.drop, "y", "z")
    c.call(at.drop, "y")
    a.until(held_are, 1)
    c.call(at.drop, "z")
    a.until(at.nothing_kept)


def held_are(count):
    return at.held()[0] == count


def pass_on(name):
    at.here["out"].send(at.here[name])


def test_a_receiver_passes_it_on(peers, strategy):
    a, b, c = peers
    link(a, b, strategy)
    link(b, c, strategy)
    a.call(at.make, "x", 6)
    a.call(send, "x")
    b.call(receive, "y")
    b.call(pass_on, "y")
    b.call(at.drop, "y")
    a.call(at.drop, "x")
    a.until(at.nothing_kept)
    assert c.call(receive, "z") == ""
    assert c.call(at.values, "z") == [6]
    c.call(at.drop, "z")
    b.until(at.nothing_kept)


def test_a_view_keeps_what_was_received(peers):
    a, b, _ = peers
    link(a, b)
    a.call(at.make, "x", 6)
    a.call(send, "x")
    b.call(receive, "y")
    b.call(keep_view, "y", "v")
    b.call(at.drop, "y")
    assert a.call(at.held) == (1, 0)
    assert b.call(at.values, "v") == [6]


def keep_view(name, as_):
    at.here[as_] = at.here[name][100:110]


def many(count):
    for i in range(count):
        at.here["out"].send(np.full(5000, i, "i4"))


def receive_many(count):
    return [int(at.here["in"].recv().max()) for _ in range(count)]


def test_memory_is_used_again(peers):
    a, b, _ = peers
    link(a, b)
    a.start(many, 200)
    assert b.call(receive_many, 200) == list(range(200))
    a.finish()
    a.until(at.nothing_kept)
    assert a.call(arenas) == 1


def arenas():
    return int(repr(node().endpoint("host").memories[0]).split()[1])


# -- its own messages, copies of messages ---------------------------------------------------------


def to_oneself(strategy):
    sharing.init_reductions(min_bytes=4096, strategy=strategy)
    mine, theirs = mp.Pipe(duplex=False)
    x = np.full(5000, 3, "i4")
    theirs.send(x)
    y = mine.recv()
    mine.close()
    theirs.close()
    assert not np.shares_memory(x, y)
    return int(y.sum()), at.held()


def test_a_process_receives_from_itself(peers, strategy):
    a, *_ = peers
    assert a.call(to_oneself, strategy) == (15000, (0, 0))
    a.until(at.nothing_kept)


def pickled(value):
    sharing.init_reductions(min_bytes=4096)
    return bytes(ForkingPickler.dumps(np.full(5000, value, "i4")))


def load_twice(data):
    first, second = ForkingPickler.loads(data), ForkingPickler.loads(data)
    same = first is second
    del first, second
    return same


def load(data):
    try:
        return int(ForkingPickler.loads(data).max())
    except GPUIPCError as error:
        return f"{type(error).__name__}: {error}"


def test_a_message_read_twice_is_one_array_and_then_gone(peers):
    a, b, _ = peers
    data = a.call(pickled, 3)
    assert b.call(load_twice, data) is True
    a.until(at.nothing_held)
    assert b.call(load, data).startswith("SourceGone")
    a.until(at.nothing_kept)


def test_what_was_pickled_by_hand_waits_for_its_reader(peers):
    a, b, _ = peers
    data = a.call(pickled, 3)
    assert a.call(at.look, 5) == 1
    assert b.call(load, data) == 3


# -- what is never received -----------------------------------------------------------------------


def unread(strategy, make):
    """Send into something that is then dropped; what is kept before and after."""
    sharing.init_reductions(min_bytes=4096, strategy=strategy)
    close = make(np.full(5000, 3, "i4"))
    before = at.look(3)
    close()
    return before, at.look(2), at.shelf(), at.slots(), at.segments_left()


def into_a_queue(x):
    queue = mp.get_context("spawn").Queue()
    queue.put(x)
    queue.put([x, x[::2]])
    wait_until(lambda: at.on_the_way() == 3, "the queue's thread")

    def close():
        queue.close()
        queue.join_thread()

    return close


def into_a_simple_queue(x):
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(x)
    return queue.close


def into_a_pipe(x):
    mine, theirs = mp.Pipe()
    mine.send(x)
    mine.close()
    return theirs.close


@pytest.mark.parametrize("make", [into_a_queue, into_a_simple_queue, into_a_pipe])
def test_a_message_that_is_never_read_is_kept_while_it_can_be(peers, strategy, make):
    a, *_ = peers
    before, *after = a.call(unread, strategy, make)
    assert before > 0
    assert after == [0, 0, 0, []]


def test_it_is_let_go_by_itself(peers):
    a, b, _ = peers
    link(a, b)
    a.call(at.make, "x", 1)
    a.call(send, "x")
    assert a.call(at.on_the_way) == 1
    b.call(close_in)
    a.until(at_rest)


def close_in():
    at.here.pop("in").close()


def at_rest():
    return at.on_the_way() == 0 and at.shelf() == 0


def test_a_reader_that_is_killed_before_it_reads(peers, strategy):
    a, b, _ = peers
    with at.helper_child(b.call(at.directory)) as c:
        c.call(put_segments_into, segments.FOLDER)
        link(a, c, strategy)
        a.call(at.make, "x", 1)
        a.call(send, "x")
        c.kill()
    assert a.call(at.look, 2) == 0
    assert (a.call(at.shelf), a.call(at.slots), at.segments_left()) == (0, 0, [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_receiver_killed_by_a_signal_holds_no_more(peers, number):
    a, b, _ = peers
    with at.helper_child(b.call(at.directory)) as c:
        c.call(put_segments_into, segments.FOLDER)
        link(a, c)
        a.call(at.make, "x", 1)
        a.call(send, "x")
        assert c.call(receive, "y") == ""
        assert a.call(at.held) == (1, 0)
        c.signal(number)
        wait_until(lambda: not c.process.is_alive())
    a.until(at.nothing_kept)


def test_a_stopped_reader_is_waited_for(peers, strategy):
    a, b, _ = peers
    link(a, b, strategy)
    a.call(at.make, "x", 1)
    a.call(send, "x")
    b.signal(signal.SIGSTOP)
    try:
        assert a.call(at.look, 5) == 1
    finally:
        b.signal(signal.SIGCONT)
    assert b.call(receive, "y") == ""
    assert b.call(at.values, "y") == [1]


class Bad:
    def __reduce__(self):
        raise ValueError("not to be pickled")


def send_with_something_bad(strategy):
    sharing.init_reductions(min_bytes=4096, strategy=strategy)
    mine, theirs = mp.Pipe(duplex=False)
    with pytest.raises(ValueError, match="not to be pickled"):
        theirs.send([np.ones(5000), Bad()])
    mine.close()
    theirs.close()
    post._post.look()
    return at.on_the_way(), at.shelf(), at.slots(), at.segments_left()


def test_a_message_that_cannot_be_pickled_keeps_nothing(peers, strategy):
    a, *_ = peers
    assert a.call(send_with_something_bad, strategy) == (0, 0, 0, [])


def fail_to_start(strategy):
    sharing.init_reductions(min_bytes=4096, strategy=strategy)
    spawn = mp.get_context("spawn")
    with pytest.raises(ValueError, match="not to be pickled"):
        spawn.Process(target=print, args=(np.ones(5000), Bad())).start()
    return at.look(2), at.shelf(), at.slots(), at.segments_left()


def test_a_process_that_does_not_start_keeps_nothing(peers, strategy):
    a, *_ = peers
    assert a.call(fail_to_start, strategy) == (0, 0, 0, [])


# -- senders that end -----------------------------------------------------------------------------


def test_what_an_ended_sender_had_sent_can_be_received(peers, strategy):
    _, b, _ = peers
    with child() as c:
        c.call(at.begin, b.call(at.directory))
        c.call(put_segments_into, segments.FOLDER)
        link(c, b, strategy)
        c.call(at.make, "x", 9)
        c.call(send, "x", "x")
    assert len(at.segments_left()) == 2
    assert b.call(receive, "y", "z") == ""
    assert not at.segments_left()
    assert (b.call(at.values, "y"), b.call(at.values, "z")) == ([9], [9])
    b.call(at.fill, "y", 1)
    assert b.call(at.values, "z") == [9]


def test_what_a_killed_sender_had_sent(peers, strategy):
    _, b, _ = peers
    with at.helper_child(b.call(at.directory)) as c:
        c.call(put_segments_into, segments.FOLDER)
        link(c, b, strategy)
        c.call(at.make, "x", 9)
        c.call(send, "x")
        c.kill()
    said = b.call(receive, "y")
    if strategy == "descriptor":  # its memory ended with it
        assert said.startswith("SourceGone: process")
    else:
        assert (said, b.call(at.values, "y")) == ("", [9])


def test_what_nobody_can_read_is_not_kept_at_the_end(peers, strategy):
    _, b, _ = peers
    with child() as c:
        c.call(at.begin, b.call(at.directory))
        c.call(put_segments_into, segments.FOLDER)
        link(c, b, strategy)
        c.call(at.make, "x", 9)
        c.call(send, "x")
        b.call(close_in)
    sharing.sweep()
    assert not at.segments_left()


def test_what_dead_processes_left_is_swept_and_nothing_else(peers):
    a, b, c = peers
    with at.helper_child(b.call(at.directory)) as d:
        d.call(put_segments_into, segments.FOLDER)
        for peer in (b, c):
            link(d, peer, "name")
            d.call(at.make, "x", 9)
            d.call(send, "x")
        before = at.segments_left()
        assert len(before) == 2
        assert a.call(sharing.sweep) == []  # their maker lives
        d.kill()
    assert a.call(sharing.sweep) == []  # b and c can receive them
    c.call(close_in)
    [swept] = a.call(sharing.sweep)
    assert {swept, *at.segments_left()} == set(before)
    assert b.call(receive, "y") == ""
    assert b.call(at.values, "y") == [9]


def test_files_of_others_are_not_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", str(tmp_path))
    names = ["dask-gpuipc-" + "0" * 32, "dask-gpuipc-" + "1" * 32, "other", "dask-gpuipc-x"]
    for name in names:
        (tmp_path / name).write_bytes(b"short" if name.endswith("0") else bytes(8192))
    if os.geteuid() == 0:
        os.chown(tmp_path / names[0], 65534, 65534)
    assert sharing.sweep() == []
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def dead_header(**changes):
    import dataclasses

    return dataclasses.replace(segments.Header.here(), pid=2**22 + 5, **changes)


def test_segments_of_another_pid_namespace_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", str(tmp_path))
    mine, theirs = (tmp_path / ("dask-gpuipc-" + digit * 32) for digit in "01")
    mine.write_bytes(dead_header().pack())
    theirs.write_bytes(dead_header(namespace=1).pack())
    assert sharing.sweep() == [str(mine)]


def test_a_segment_that_is_not_what_the_message_says_is_refused(tmp_path, monkeypatch):
    from dask_gpuipc.errors import OpenFailed, SourceGone
    from dask_gpuipc.wire import Layout

    monkeypatch.setattr(segments, "FOLDER", str(tmp_path))
    key = bytes(16)
    segments.create(key, np.zeros(8000, "u1"))
    for layout in (Layout(0, "=<f8", 8, (5000,), (8,)), Layout(8, "=<f8", 8, (10,), (-8,))):
        with pytest.raises(OpenFailed, match="bytes"):
            segments.adopt(key, layout)
    assert segments.adopt(key, Layout(0, "=<f8", 8, (1000,), (8,))).sum() == 0
    with pytest.raises(SourceGone):
        segments.adopt(key, Layout(0, "=<f8", 8, (1000,), (8,)))
    os.symlink("/etc/passwd", tmp_path / f"dask-gpuipc-{key.hex()}")
    with pytest.raises(SourceGone, match="Too many levels"):
        segments.adopt(key, Layout(0, "=<f8", 8, (1000,), (8,)))


# -- the last rung --------------------------------------------------------------------------------


def refuse_handles():
    endpoint = node().endpoint("host")

    async def consumer(them):
        raise Refused(Refusal.DIAL_FAILED, "as told")

    endpoint.consumer = consumer


def test_what_cannot_go_by_handle_comes_as_bytes(peers):
    a, b, _ = peers
    link(a, b)
    a.call(refuse_handles)
    a.call(at.make, "x", 5, 200_000)  # several packets
    a.call(send, "x")
    assert b.call(receive, "y") == ""
    assert b.call(at.values, "y") == [5]
    b.call(at.drop, "y")
    a.until(at.nothing_kept)
    handles_only(b, 0)


def fail_to_open():
    from dask_gpuipc.errors import Failure, OpenFailed

    endpoint = node().endpoint("host")
    patch = unittest.mock.patch.object(
        endpoint.importer, "load", side_effect=OpenFailed(Failure.NO_MEMORY)
    )
    patch.start()
    at.here["patch"] = patch


def stop_failing():
    at.here.pop("patch").stop()


def test_what_cannot_be_opened_comes_as_bytes(peers):
    a, b, _ = peers
    link(a, b)
    b.call(fail_to_open)
    a.call(at.make, "x", 5)
    a.call(send, "x")
    assert b.call(receive, "y") == ""
    b.call(stop_failing)
    assert b.call(at.values, "y") == [5]
    a.until(at.nothing_kept)


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"strategy": "file"}, "must be 'descriptor' or 'name'"), ({"min_bytes": "x"}, "min_bytes")],
)
def test_wrong_arguments_are_errors_and_change_nothing(arguments, text):
    before = ForkingPickler._extra_reducers.get(np.ndarray)
    with pytest.raises(ConfigError, match=text):
        sharing.init_reductions(**arguments)
    assert ForkingPickler._extra_reducers.get(np.ndarray) is before


def initialised_often():
    for _ in range(3):
        sharing.init_reductions(min_bytes=4096)
    return ForkingPickler.dump.__qualname__, ForkingPickler.__init__.__module__


def test_it_is_idempotent(peers):
    a, *_ = peers
    assert a.call(initialised_often)[0] == "watch_messages.<locals>.dump"
    data = a.call(pickled, 3)
    assert len(data) < 1000
    assert peers[1].call(load, data) == 3


def sizes():
    sharing.init_reductions(min_bytes=40_000)
    below = len(ForkingPickler.dumps(np.ones(4_999)))
    above = len(ForkingPickler.dumps(np.ones(5_000)))
    return below, above


def test_arrays_below_the_size_are_pickled(peers):
    a, *_ = peers
    below, above = a.call(sizes)
    assert below > 39_000
    assert above < 1000


PROGRAM = """
import numpy, pickle
from multiprocessing.reduction import ForkingPickler
import dask_gpuipc.sharing
print(len(ForkingPickler.dumps(numpy.ones(10**6))) > 8 * 10**6)
"""


def test_it_is_opt_in():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


# -- carriers -------------------------------------------------------------------------------------


def alive(carrier):
    from dask_gpuipc import process

    return carrier in carriers.readable({carrier}, process.start_time(os.getpid()))


def test_a_pipe_can_be_read_while_somebody_has_its_reading_end():
    r, w = os.pipe()
    carrier = carriers.carrier_of(w)
    assert carrier.kind is carriers.Kind.PIPE
    assert alive(carrier)
    with subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=[r], stdin=-1) as other:
        os.close(r)
        assert alive(carrier)
        other.communicate(b"\n")
    assert not alive(carrier)
    os.close(w)


def test_a_socket_is_known_by_its_other_end():
    import socket

    mine, theirs = socket.socketpair()
    carrier = carriers.carrier_of(mine.fileno())
    assert carrier == carriers.Carrier(carriers.Kind.SOCKET, os.fstat(theirs.fileno()).st_ino)
    mine.close()
    assert alive(carrier)
    theirs.close()
    assert not alive(carrier)


def test_a_process_that_is_a_zombie_reads_nothing():
    with subprocess.Popen(["sleep", "60"]) as other:
        carrier = carriers.carrier_to(other.pid)
        assert alive(carrier)
        other.kill()
        wait_until(lambda: not alive(carrier))
        assert Path(f"/proc/{other.pid}").exists()  # nobody has waited for it yet


def test_what_is_no_pipe_is_unknown(tmp_path):
    os.mkfifo(tmp_path / "named")
    fd = os.open(tmp_path / "named", os.O_RDWR)
    with open(tmp_path / "file", "wb") as file:
        assert carriers.carrier_of(file.fileno()) == carriers.UNKNOWN
    assert carriers.carrier_of(fd) == carriers.UNKNOWN
    os.close(fd)
    assert alive(carriers.UNKNOWN)


def test_a_process_that_hides_its_descriptors_counts_as_a_reader(monkeypatch):
    r, w = os.pipe()
    carrier = carriers.carrier_of(w)
    os.close(r)
    with subprocess.Popen(["sleep", "60"]) as other:
        real = carriers._open_for_reading

        def hidden(pid):
            if pid == other.pid:
                raise PermissionError
            return real(pid)

        monkeypatch.setattr(carriers, "_open_for_reading", hidden)
        assert alive(carrier)
        other.kill()
    assert not alive(carrier)
    os.close(w)


def test_threads_do_not_see_each_others_parcels(peers):
    a, b, _ = peers
    link(a, b)
    assert a.call(send_from_two_threads) == 0
    b.call(receive_many, 40)
    a.until(at.nothing_kept)


def send_from_two_threads():
    lock = threading.Lock()

    def run(value):
        for _ in range(20):
            data = ForkingPickler.dumps(np.full(5000, value, "i4"))
            with lock:
                at.here["out"].send_bytes(data)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(p.carrier == carriers.UNKNOWN for p in post._post._parcels)
