"""Two endpoints in two real processes, without Dask: transfers, their failures, and deaths.

``a`` produces and ``b`` consumes. The functions under "what either process does" run in those
processes, on the event loop of their endpoint; the tests call them through pipes and see the rest
of the world as the product does, by sockets, descriptors and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
from helpers import Child, child, descriptors_used_up, wait_until

from dask_gpuipc.config import Settings
from dask_gpuipc.endpoint import Endpoint
from dask_gpuipc.errors import Failure, OpenFailed, Refusal, Refused, WireError
from dask_gpuipc.exporter import Exporter
from dask_gpuipc.importer import Importer, collecting_failures
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.producers import IdleLimits, Producer
from dask_gpuipc.serialize import loads
from dask_gpuipc.stats import Statistics
from dask_gpuipc.testing import Fault, FaultyMemory, ManualClock, faulty_channels, leak_check
from dask_gpuipc.wire import (
    WIRE_VERSION,
    Advertisement,
    Announce,
    Answer,
    Ask,
    Descriptor,
    Evicted,
    Held,
    Hello,
    Layout,
    Nack,
    Release,
    Welcome,
    Withdraw,
    decode,
    encode,
    encode_message,
)

MIB = 1 << 20

# -- what either process does --------------------------------------------------------------------

here: dict[str, Any] = {}
"""Of a child process: its endpoint, arrays, transfers."""


@dataclass(frozen=True)
class Options:
    directory: str
    arena_size: int = MIB
    settings: tuple[tuple[str, Any], ...] = ()
    faults: tuple[Fault, ...] = ()
    channel_faults: tuple[Fault, ...] = ()


def begin(options: Options) -> Advertisement:
    stack = contextlib.ExitStack()
    stack.enter_context(leak_check(ignore=["asyncio_"]))
    stack.enter_context(faulty_channels(*options.channel_faults))
    memory = FaultyMemory(HostMemory(options.arena_size), *options.faults)
    settings = replace(
        Settings.load(min_bytes=1), socket_directory=options.directory, **dict(options.settings)
    )
    endpoint = Endpoint(settings, [memory], "scheduler")
    here.update(
        endpoint=endpoint,
        memory=memory,
        arrays={},
        transfers={},
        consumer=None,
        stack=stack,
        left=[],
    )
    endpoint.on_producer_left = here["left"].append
    return endpoint.advertisement


async def end() -> None:
    """Stop; everything has to come to its end by itself, and leave nothing."""
    endpoint = here["endpoint"]
    endpoint.stop()
    assert await endpoint.wait_closed(20), repr(endpoint)
    stack = here.pop("stack")
    here.clear()
    del endpoint
    stack.close()


def make(name: str, value: int, count: int = 5000) -> None:
    here["arrays"][name] = np.full(count, value, "i4")


async def connect(them: Advertisement) -> Refusal | None:
    try:
        here["consumer"] = await here["endpoint"].consumer(them)
    except Refused as refused:
        return refused.reason
    return None


def offer(*names: str) -> tuple[int, list[Any]]:
    """Open a transfer and export arrays into it; its number, their descriptors or refusals."""
    transfer = here["endpoint"].exporter.begin(here["consumer"])
    here["transfers"][transfer.number] = transfer
    return transfer.number, [export(transfer.number, name) for name in names]


def export(number: int, name: str) -> Any:
    try:
        return encode(here["transfers"][number].export(here["arrays"][name]))
    except Refused as refused:
        return refused.reason


def granted(number: int) -> None:
    here["endpoint"].exporter.granted(here["transfers"][number])


def failed(number: int) -> None:
    here["endpoint"].exporter.failed(here["transfers"][number])


def load(name: str, data: bytes) -> Failure | None:
    try:
        here["arrays"][name] = here["endpoint"].importer.load(decode(Descriptor, data))
    except OpenFailed as error:
        return error.reason
    return None


def value_of(name: str) -> int:
    """The value that all elements of an array have."""
    [value] = set(here["arrays"][name].tolist())
    return value


def drop(*names: str) -> None:
    for name in names or [*here["arrays"]]:
        del here["arrays"][name]


def look(*names: str) -> Any:
    """Numbers of the endpoint's snapshot."""
    snapshot = here["endpoint"].snapshot("enabled").to_dict()
    found = [snapshot[name] for name in names]
    return found[0] if len(found) == 1 else found


def is_(name: str, value: Any) -> bool:
    return look(name) == value


def counted(what: str, reason: str, number: int = 1) -> bool:
    return look(what).get(reason, 0) == number


def collect() -> None:
    here["endpoint"].collect()


def nothing() -> None:
    """The loop has come round: what was in a socket has been read."""


def break_channels() -> None:
    """End all connections of this process below its channels."""
    for channel in here["endpoint"]._channels:
        channel._sock.shutdown(socket.SHUT_RDWR)


def send_raw(packet: bytes) -> None:
    for channel in here["endpoint"]._channels:
        channel._sock.send(packet)


def usable_channels() -> int:
    return sum(channel.usable for channel in here["endpoint"]._channels)


# -- the tests' side -----------------------------------------------------------------------------


class Pair:
    """The producer and the consumer, connected."""

    def __init__(self, a: Child, b: Child, directory: str) -> None:
        self.a, self.b, self.directory = a, b, directory

    def begin(self, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> None:
        self.here = self.a.call(begin, Options(self.directory, **(a or {})))
        self.there = self.b.call(begin, Options(self.directory, **(b or {})))
        assert self.a.call(connect, self.there) is None

    def send(self, *names: str) -> tuple[int, list[bytes]]:
        """Offer arrays that all must go by handle."""
        number, descriptors = self.a.call(offer, *names)
        assert all(isinstance(d, bytes) for d in descriptors), descriptors
        return number, descriptors

    def transfer(self, name: str, value: int = 1, **more: Any) -> bytes:
        """One array, sent, received and granted."""
        self.a.call(make, name, value, *more.values())
        number, [descriptor] = self.send(name)
        assert self.b.call(load, name, descriptor) is None
        self.a.call(granted, number)
        return descriptor

    def all_free(self) -> None:
        self.a.until(is_, "leases", 0)
        assert self.a.call(look, "pinned_bytes") == 0
        assert self.b.call(look, "holding") == 0

    def end(self) -> None:
        self.b.call(drop)
        self.all_free()
        self.b.start(end)
        self.a.call(end)
        self.b.finish()


class Children:
    """Two processes for the whole module; new ones after a test that failed."""

    def __init__(self) -> None:
        self._two: list[Child] = []

    def __call__(self) -> list[Child]:
        if not self._two:
            self._two = [Child(), Child()]
            for one in self._two:
                one.call(nothing)
        return self._two

    def restart(self) -> None:
        for one in self._two:
            one.kill()
        self.close()
        self()

    def close(self) -> None:
        two, self._two = self._two, []
        for one in two:
            one.close()


@pytest.fixture(scope="module")
def children():
    children = Children()
    children()  # before the leak check of the first test
    yield children
    children.close()


@pytest.fixture
def idle_pair(children):
    """Two processes, with no endpoints yet."""
    with tempfile.TemporaryDirectory(prefix="gpuipc-") as directory:
        pair = Pair(*children(), directory)
        try:
            yield pair
            pair.end()
        except BaseException:
            children.restart()
            raise


@pytest.fixture
def pair(idle_pair):
    idle_pair.begin()
    return idle_pair


# -- the plain course ----------------------------------------------------------------------------


def test_an_array_arrives_and_its_lease_ends_with_it(pair):
    pair.a.call(make, "x", 7)
    number, [descriptor] = pair.send("x")
    assert pair.a.call(look, "leases", "pinned_bytes") == [1, 20480]
    assert pair.b.call(load, "x", descriptor) is None
    pair.a.call(granted, number)
    assert pair.b.call(value_of, "x") == 7
    assert pair.b.call(look, "holding", "mappings") == [1, 1]
    pair.a.call(nothing)
    assert pair.a.call(look, "leases") == 1
    pair.b.call(drop, "x")
    pair.all_free()
    assert pair.a.call(look, "sent") == {"share": {"arrays": 1, "bytes": 20000}}
    assert pair.b.call(look, "received") == {"share": {"arrays": 1, "bytes": 20000}}


def test_an_allocation_is_announced_once_and_opened_once(pair):
    for i in range(20):
        pair.transfer(f"x{i}", i)
    assert [pair.b.call(value_of, f"x{i}") for i in range(20)] == list(range(20))
    assert pair.b.call(look, "opens", "hits", "mappings") == [1, 19, 1]
    assert pair.a.call(calls, "handle") == 1


def calls(name: str) -> int:
    return here["memory"].calls[name]


def test_a_view_keeps_the_lease(pair):
    pair.transfer("x", 3)
    pair.b.call(keep_view, "x")
    pair.b.call(drop, "x")
    for process in (pair.b, pair.a):
        process.call(nothing)
    assert pair.a.call(look, "leases") == 1
    assert pair.b.call(value_of, "view") == 3


def keep_view(name: str) -> None:
    here["arrays"]["view"] = here["arrays"][name].reshape(50, -1)[::2].ravel()[3:] * 1
    here["arrays"]["view"] = here["arrays"][name].reshape(50, -1)[::7, 3]


def test_an_array_in_a_cycle_ends_with_the_garbage(pair):
    pair.transfer("x")
    pair.b.call(make_cycle, "x")
    pair.b.call(nothing)
    assert pair.a.call(look, "leases") == 1
    pair.b.call(gc.collect)
    pair.all_free()


def make_cycle(name: str) -> None:
    gc.collect()
    box: list[Any] = [here["arrays"].pop(name)]
    box.append(box)


def test_arrays_that_end_on_many_threads_are_all_released(pair):
    names = [f"x{i}" for i in range(64)]
    for name in names:
        pair.a.call(make, name, 1, 100)
    number, descriptors = pair.send(*names)
    assert pair.b.call(load_and_drop_on_threads, descriptors) == [1] * 64
    pair.a.call(granted, number)
    pair.all_free()


async def load_and_drop_on_threads(descriptors: list[bytes]) -> list[int]:
    together = threading.Barrier(len(descriptors))

    def load_and_drop(data: bytes) -> int:
        together.wait(20)
        return int(here["endpoint"].importer.load(decode(Descriptor, data))[0])

    with ThreadPoolExecutor(len(descriptors)) as pool:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(pool, load_and_drop, d) for d in descriptors)
        )


def test_three_consumers_of_one_array_release_it_apart(pair, short_path):
    with child() as c:
        there = c.call(begin, Options(str(short_path)))
        pair.transfer("x", 5)
        assert pair.a.call(connect, there) is None
        number, [descriptor] = pair.send("x")
        assert c.call(load, "x", descriptor) is None
        pair.a.call(granted, number)
        assert pair.a.call(look, "leases", "pinned_bytes") == [2, 20480], "copied once"
        pair.b.call(drop, "x")
        pair.a.until(is_, "leases", 1)
        assert pair.a.call(connect, pair.there) is None
        pair.transfer("y", 6)
        assert c.call(value_of, "x") == 5
        c.call(drop)
        pair.b.call(drop)
        pair.a.until(is_, "leases", 0)
        c.call(end)


# -- answers that fail ---------------------------------------------------------------------------


def test_lost_ok_frees_what_was_not_opened_and_keeps_what_was(pair):
    for name, value in zip("xyz", (1, 2, 3), strict=True):
        pair.a.call(make, name, value)
    number, (x, y, z) = pair.send("x", "y", "z")
    assert pair.b.call(load, "y", y) is None
    pair.a.call(failed, number)
    pair.a.until(is_, "leases", 1)
    for late in (x, z):
        assert pair.b.call(load, "late", late) is Failure.BARRED
    for value in range(10, 20):  # what was freed is written anew; what is held is not
        pair.transfer("other", value)
        pair.b.call(drop, "other")
    assert pair.b.call(value_of, "y") == 2
    pair.b.call(drop, "y")
    pair.all_free()


def test_lost_ok_of_an_answer_that_was_never_read(pair):
    pair.a.call(make, "x", 1)
    number, [descriptor] = pair.send("x")
    pair.a.call(failed, number)
    pair.all_free()
    assert pair.b.call(load, "x", descriptor) is Failure.BARRED


def test_lost_ok_of_an_answer_that_was_read_and_dropped(pair):
    pair.a.call(make, "x", 1)
    number, [descriptor] = pair.send("x")
    assert pair.b.call(load, "x", descriptor) is None
    pair.b.call(drop, "x")
    pair.a.call(failed, number)
    pair.all_free()


def test_an_export_into_a_cancelled_answer_is_refused(pair):
    pair.a.call(make, "x", 1)
    pair.a.call(make, "y", 2)
    number, _ = pair.send("x")
    pair.a.call(failed, number)
    assert pair.a.call(export, number, "y") is Refusal.TRANSFER_CLOSED
    pair.all_free()
    assert pair.a.call(export, number, "x") is Refusal.TRANSFER_CLOSED
    pair.all_free()
    assert pair.a.call(counted, "refused", "transfer_closed", 2)


def test_an_array_exported_twice_in_one_answer_is_held_once(pair):
    pair.a.call(make, "x", 4)
    number, (_first, second) = pair.send("x", "x")
    assert pair.b.call(load, "x", second) is None
    pair.a.call(granted, number)
    pair.a.until(is_, "leases", 1)
    assert pair.b.call(value_of, "x") == 4
    pair.b.call(drop, "x")
    pair.all_free()


# -- descriptors that are not right --------------------------------------------------------------


def load_again(name: str, data: bytes, **changes: Any) -> Failure | None:
    return load(name, encode(replace(decode(Descriptor, data), **changes)))


def test_a_replayed_descriptor_is_refused_and_frees_nothing(pair):
    descriptor = pair.transfer("x", 1)
    assert pair.b.call(load, "again", descriptor) is Failure.BARRED
    pair.b.call(nothing)
    pair.a.call(nothing)
    leases = pair.a.call(look, "leases")
    for value in range(10, 14):
        pair.transfer("other", value)
    assert (pair.b.call(value_of, "x"), leases) == (1, 1)


def test_a_descriptor_replayed_after_its_array_died_is_refused(pair):
    descriptor = pair.transfer("x", 1)
    pair.b.call(drop, "x")
    pair.all_free()
    assert pair.b.call(load, "again", descriptor) is Failure.BARRED
    pair.all_free()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"producer": "nobody"}, Failure.UNKNOWN_PEER),
        ({"memory": "gpu"}, Failure.EVICTED),
        ({"allocation": 99}, Failure.EVICTED),
        ({"generation": 1}, Failure.EVICTED),
        ({"rung": "teleport"}, Failure.MALFORMED),
        ({"layout": {"shape": (5000, 2)}}, Failure.MALFORMED),
        ({"layout": {"shape": (0,)}}, Failure.MALFORMED),
        ({"layout": {"dtype": "=O"}}, Failure.MALFORMED),
        ({"layout": {"dtype": "@unheard_of"}}, Failure.MALFORMED),
        ({"layout": {"dtype": "=<f8"}}, Failure.MALFORMED),
        ({"layout": {"offset": MIB - 4}}, Failure.OUT_OF_BOUNDS),
        ({"layout": {"offset": -1}}, Failure.OUT_OF_BOUNDS),
        ({"layout": {"strides": (-4,)}}, Failure.OUT_OF_BOUNDS),
        ({"layout": {"shape": (2**62,), "strides": (2**62,)}}, Failure.OUT_OF_BOUNDS),
        ({"layout": {"shape": (2**62,), "strides": (4,)}}, Failure.OUT_OF_BOUNDS),
    ],
    ids=str,
)
def test_a_forged_descriptor_is_refused_with_its_reason(pair, changes, reason):
    pair.a.call(make, "x", 1, MIB // 4)
    number, [descriptor] = pair.send("x")
    assert pair.b.call(load_forged, descriptor, changes) is reason
    assert pair.b.call(counted, "failed", reason.value)
    pair.a.call(failed, number)
    pair.all_free()
    assert pair.b.call(look, "mappings") <= 1


def load_forged(data: bytes, changes: dict[str, Any]) -> Failure | None:
    descriptor = decode(Descriptor, data)
    if "layout" in changes:
        changes = {"layout": replace(descriptor.layout, **changes["layout"])}
    return load("forged", encode(replace(descriptor, **changes)))


def test_a_forged_descriptor_does_not_end_the_lease_that_it_names(pair):
    descriptor = pair.transfer("x", 1)
    assert pair.b.call(load_forged, descriptor, {"allocation": 99}) is not None
    pair.b.call(nothing)
    pair.a.call(nothing)
    assert pair.a.call(look, "leases") == 1


def test_another_endpoints_descriptor_is_refused(pair):
    from dask_gpuipc.serialize import loads

    header = {"descriptor": encode(replace(DESCRIPTOR, consumer="somebody else"))}
    for bad, reason in (
        (header, Failure.UNKNOWN_CONSUMER),
        ({}, Failure.UNREADABLE),
        ({"descriptor": b"nonsense"}, Failure.UNREADABLE),
        ({"descriptor": "text"}, Failure.UNREADABLE),
    ):
        with pytest.raises(OSError, match=reason.value):
            loads(bad, [])


# -- announcements that are gone -----------------------------------------------------------------


def test_an_evicted_announcement_is_made_anew(pair):
    pair.transfer("x", 1)
    pair.b.call(drop, "x")
    pair.all_free()
    pair.b.call(collect)
    pair.b.call(nothing)
    assert pair.b.call(look, "mappings") == 0
    pair.transfer("y", 2)
    assert pair.b.call(value_of, "y") == 2
    assert pair.b.call(look, "opens", "failed") == [2, {}]


def test_a_descriptor_that_crosses_an_eviction_is_sent_again(pair):
    pair.transfer("x", 1)
    pair.b.call(drop, "x")
    pair.all_free()
    pair.a.call(make, "y", 2)
    number, [descriptor] = pair.send("y")
    pair.b.call(collect)
    assert pair.b.call(load, "y", descriptor) is Failure.EVICTED
    pair.a.until(is_, "leases", 0)
    pair.a.call(failed, number)
    for value in (3, 4):
        pair.transfer("y", value)
        assert pair.b.call(value_of, "y") == value
    assert pair.a.call(look, "refused") == {}


def test_the_producers_freed_memory_is_let_go(pair):
    pair.transfer("x", 1)
    pair.b.call(drop, "x")
    pair.all_free()
    assert pair.b.call(look, "mappings") == 1
    pair.a.call(collect)
    pair.b.until(is_, "mappings", 0)
    pair.transfer("y", 2)


def test_what_the_producer_withdraws_is_kept_while_an_array_lives(pair):
    pair.transfer("x", 1)
    pair.b.call(receive_withdraw)
    assert pair.b.call(value_of, "x") == 1
    assert pair.b.call(look, "mappings") == 1
    pair.b.call(drop, "x")
    pair.b.until(is_, "mappings", 0)


def receive_withdraw() -> None:
    importer = here["endpoint"].importer
    [producer] = importer._producers.values()
    for place in list(producer.entries):
        importer.receive(producer, Withdraw(*place), ())


def test_a_stale_handle_denies_its_allocation_and_no_other(idle_pair):
    stale = Fault("open", error=partial(OpenFailed, Failure.STALE))
    idle_pair.begin(b={"faults": (stale,)})
    pair = idle_pair
    pair.a.call(make, "x", 1)
    number, [descriptor] = pair.send("x")
    assert pair.b.call(load, "x", descriptor) is Failure.STALE
    pair.a.until(is_, "leases", 0)
    pair.a.call(failed, number)
    assert pair.a.call(offer, "x")[1] == [Refusal.DENIED]
    pair.all_free()
    pair.a.call(make, "large", 2, MIB)  # has an arena of its own
    number, [descriptor] = pair.send("large")
    assert pair.b.call(load, "large", descriptor) is None
    pair.a.call(granted, number)
    pair.b.call(drop)
    pair.a.until(is_, "leases", 0)
    pair.a.call(collect)
    pair.transfer("x", 3)  # in a new arena, under a new name
    assert pair.b.call(value_of, "x") == 3


@pytest.mark.parametrize("times", [2, 3])
def test_an_address_that_is_still_open_is_tried_again_a_few_times(idle_pair, times):
    busy = Fault("open", times=times, error=partial(OpenFailed, Failure.BUSY))
    idle_pair.begin(b={"faults": (busy,)})
    pair = idle_pair
    pair.a.call(make, "x", 1)
    for _ in range(times):
        number, [descriptor] = pair.send("x")
        assert pair.b.call(load, "x", descriptor) is Failure.BUSY
        pair.a.until(is_, "leases", 0)
        pair.a.call(failed, number)
    if times == 3:
        assert pair.a.call(offer, "x")[1] == [Refusal.DENIED]
    else:
        pair.transfer("x", 1)


def test_a_failed_load_gives_its_lease_back(idle_pair):
    full = Fault("load", error=partial(OpenFailed, Failure.NO_MEMORY))
    idle_pair.begin(b={"faults": (full,)})
    pair = idle_pair
    pair.a.call(make, "x", 1)
    number, [descriptor] = pair.send("x")
    assert pair.b.call(load, "x", descriptor) is Failure.NO_MEMORY
    pair.all_free()
    pair.a.call(failed, number)
    pair.transfer("y", 2)
    assert pair.a.call(look, "refused") == {}, "bad luck denies nothing"


def test_an_unforeseen_error_in_a_load_is_an_open_failed(idle_pair):
    idle_pair.begin(b={"faults": (Fault("load", error=partial(ZeroDivisionError, "oops")),)})
    pair = idle_pair
    pair.a.call(make, "x", 1)
    number, [descriptor] = pair.send("x")
    assert pair.b.call(load, "x", descriptor) is Failure.ERROR
    pair.all_free()
    pair.a.call(failed, number)


def test_a_consumer_short_of_descriptors_for_a_moment_gets_handles_later(pair):
    pair.a.call(make, "x", 1)
    assert pair.b.call(use_up_descriptors) is None
    number, [descriptor] = pair.send("x")
    pair.b.call(nothing)
    assert isinstance(pair.b.call(load, "x", descriptor), Failure)
    pair.b.call(free_descriptors)
    pair.a.call(failed, number)
    pair.all_free()
    for _ in range(2):
        number, [descriptor] = pair.a.call(offer, "x")
        outcome = (
            descriptor if isinstance(descriptor, Refusal) else pair.b.call(load, "x", descriptor)
        )
        pair.a.call(failed, number)
        pair.a.call(nothing)
    assert outcome is None


def use_up_descriptors() -> None:
    here["short"] = descriptors_used_up()
    here["short"].__enter__()


def free_descriptors() -> None:
    here.pop("short").__exit__(None, None, None)


# -- limits --------------------------------------------------------------------------------------


def test_beyond_the_budget_it_is_refused_until_there_is_room(idle_pair):
    idle_pair.begin(a={"settings": (("pinned_limit", 50_000),)})
    pair = idle_pair
    pair.transfer("x", 1)
    pair.transfer("y", 2)
    pair.a.call(make, "z", 3)
    number, [refused] = pair.a.call(offer, "z")
    assert refused is Refusal.BUDGET
    pair.a.call(failed, number)
    assert pair.a.call(look, "leases", "pinned_bytes") == [2, 40960]
    assert pair.a.call(look, "sent")["bytes"] == {"arrays": 1, "bytes": 20000}
    number, [again] = pair.a.call(offer, "x")  # its bytes are pinned already
    assert isinstance(again, bytes)
    pair.a.call(failed, number)
    pair.a.until(is_, "leases", 2)
    pair.b.call(drop, "x")
    pair.a.until(is_, "leases", 1)
    pair.transfer("z", 3)
    assert pair.a.call(counted, "refused", "budget")


def test_what_is_too_small_or_no_array_is_refused(idle_pair):
    idle_pair.begin(a={"settings": (("min_bytes", {"host": 1000, "cuda": 1}),)})
    pair = idle_pair
    pair.a.call(make, "small", 1, 249)
    pair.a.call(make, "enough", 1, 250)
    pair.a.call(put, "text", "x" * 100_000)
    pair.a.call(put, "objects", np.array([{}] * 1000, dtype=object))
    number, (small, enough, text, objects) = pair.a.call(
        offer, "small", "enough", "text", "objects"
    )
    assert isinstance(enough, bytes)
    assert (small, text, objects) == (
        Refusal.TOO_SMALL,
        Refusal.UNSUPPORTED_TYPE,
        Refusal.UNSUPPORTED_DTYPE,
    )
    pair.a.call(failed, number)
    assert pair.a.call(look, "refused") == {"too_small": 1, "unsupported_dtype": 1}


def put(name: str, value: Any) -> None:
    here["arrays"][name] = value


class Awkward:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("the file is closed")


def test_an_object_whose_size_cannot_be_had_is_refused(pair):
    pair.a.call(put, "awkward", Awkward())
    number, [refused] = pair.a.call(offer, "awkward")
    assert refused is Refusal.UNSUPPORTED_TYPE
    pair.a.call(failed, number)


@pytest.mark.parametrize("call", ["pin", "handle"])
def test_a_memory_that_fails_leaves_no_lease(idle_pair, call):
    faults = (
        Fault(call, error=partial(ZeroDivisionError, "oops")),
        Fault(call, first=2, error=partial(Refused, Refusal.NO_MEMORY), after=True),
    )
    idle_pair.begin(a={"faults": faults})
    pair = idle_pair
    pair.a.call(make, "x", 1)
    for reason in (Refusal.ERROR, Refusal.NO_MEMORY):
        number, [refused] = pair.a.call(offer, "x")
        assert refused is reason
        pair.a.call(granted, number)
        pair.all_free()
    pair.transfer("x", 2)


def test_a_channel_that_would_block_refuses_and_recovers(idle_pair):
    idle_pair.begin(a={"arena_size": 4096})  # each array is an allocation, each is announced
    pair = idle_pair
    pair.b.signal(signal.SIGSTOP)
    names = [f"x{i}" for i in range(600)]
    for name in names:
        pair.a.call(make, name, 1, 10)
    number, outcomes = pair.a.call(offer, *names)
    full = [outcome for outcome in outcomes if outcome is Refusal.CHANNEL_FULL]
    assert 0 < len(full) < 600
    assert pair.a.call(look, "leases") == 600 - len(full)
    pair.b.signal(signal.SIGCONT)
    pair.a.call(failed, number)
    pair.all_free()
    pair.transfer("y", 2)
    assert pair.b.call(value_of, "y") == 2


# -- who may be a peer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scheduler": "another"}, Refusal.OTHER_SCHEDULER),
        ({"boot_id": "another"}, Refusal.OTHER_NODE),
        ({"namespaces": ("ipc:[1]", "mnt:[1]", "pid:[1]", "user:[1]")}, Refusal.OTHER_NAMESPACE),
        ({"namespaces": ()}, Refusal.OTHER_NAMESPACE),
        ({"memories": ("cuda",)}, Refusal.NO_COMMON_MEMORY),
        ({"memories": ()}, Refusal.NO_COMMON_MEMORY),
        ({"token": b"wrong"}, Refusal.DIAL_FAILED),
        ({"start_time": 1}, Refusal.DIAL_FAILED),
        ({"socket_path": "/nowhere/s"}, Refusal.DIAL_FAILED),
        ({"pid": 1}, Refusal.DIAL_FAILED),
    ],
    ids=str,
)
def test_a_mismatch_is_refused_with_its_reason(pair, changes, reason):
    strange = replace(pair.there, peer="strange", **changes)
    assert pair.a.call(connect, strange) is reason
    assert pair.a.call(connect, pair.there) is None
    pair.transfer("x", 1)


def test_another_wire_version_is_refused_before_it_is_read():
    from dask_gpuipc.comm import parse_advertisement

    fields = msgpack.unpackb(encode(ADVERTISEMENT))
    assert parse_advertisement(msgpack.packb(fields)) == ADVERTISEMENT
    later = msgpack.packb([WIRE_VERSION + 1, *fields[1:], "a new field"])
    with pytest.raises(WireError, match=f"wire version {WIRE_VERSION + 1}"):
        parse_advertisement(later)


def test_the_own_process_is_no_peer(pair):
    assert pair.a.call(connect, pair.here) is Refusal.SAME_PROCESS


def test_many_answers_at_once_dial_once(idle_pair):
    pair = idle_pair
    pair.here = pair.a.call(begin, Options(pair.directory))
    pair.there = pair.b.call(begin, Options(pair.directory))
    assert pair.a.call(connect_at_once, pair.there, 20) == 1
    assert pair.b.call(usable_channels) == 1
    assert pair.a.call(connect, pair.there) is None
    assert pair.b.call(usable_channels) == 1


async def connect_at_once(them: Advertisement, count: int) -> int:
    """Ask many times at once, and cancel some of those who ask."""
    endpoint = here["endpoint"]
    asking = [asyncio.ensure_future(endpoint.consumer(them)) for _ in range(count)]
    await asyncio.sleep(0)
    for task in asking[:3]:
        task.cancel()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(f, asyncio.CancelledError) for f in found[:3])
    return len({id(f) for f in found[3:]})


def test_a_failed_dial_is_remembered_for_a_while(idle_pair):
    idle_pair.begin(a={"settings": (("dial_timeout", 0.05), ("dial_again", 3600.0))})
    pair = idle_pair
    with child() as c:
        there = c.call(begin, Options(pair.directory))
        c.signal(signal.SIGSTOP)
        assert pair.a.call(connect, there) is Refusal.DIAL_FAILED
        c.signal(signal.SIGCONT)
        assert pair.a.call(connect, there) is Refusal.DIAL_FAILED
        assert pair.a.call(forget_failed_dials) == 1
        assert pair.a.call(connect, there) is None
        assert pair.a.call(connect, pair.there) is None
        c.call(end)


def forget_failed_dials() -> int:
    """An hour goes by."""
    dials = here["endpoint"]._failed_dials
    for peer in dials:
        dials[peer] -= 3601
    return len(dials)


def test_a_stranger_with_a_true_token_and_a_false_start_time_is_refused(pair):
    pair.transfer("x", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(20)
        stranger.connect(pair.there.socket_path)
        stranger.send(
            encode_message(Hello(pair.there.token, "me", pair.there.peer, os.getpid(), 1))
        )
        assert stranger.recv(1000) == b""
    pair.transfer("y", 2)
    assert pair.b.call(value_of, "x") == 1


# -- channels that break -------------------------------------------------------------------------


def test_a_broken_channel_is_dialled_again_and_releases_arrive(pair):
    pair.transfer("x", 1)
    pair.b.call(break_channels)
    pair.a.until(redialled)
    pair.b.call(drop, "x")
    pair.all_free()
    pair.transfer("y", 2)
    assert pair.b.call(value_of, "y") == 2


def redialled() -> bool:
    """Whether the channel to the consumer has been broken, and is a new one now."""
    seen, now = here.setdefault("seen", here["consumer"].channel), here["consumer"].channel
    return now is not seen and now.usable


def test_a_release_while_the_channel_is_down_arrives_later(pair):
    with child() as c:
        there = c.call(begin, Options(pair.directory))
        assert pair.a.call(connect, there) is None
        for name, value in (("x", 1), ("y", 2)):
            pair.a.call(make, name, value)
            number, [descriptor] = pair.send(name)
            assert c.call(load, name, descriptor) is None
            pair.a.call(granted, number)
        pair.a.call(redialled)
        c.call(break_channels_and_drop, "x")
        pair.a.until(redialled)
        for one in (c, pair.a) * 3:
            one.call(nothing)
        leases = pair.a.call(look, "leases")
        c.kill()  # whatever is left ends now
        pair.a.until(is_, "leases", 0)
        assert leases == 1


def break_channels_and_drop(name: str) -> None:
    break_channels()
    for channel in list(here["endpoint"]._channels):
        channel.drain()
    drop(name)
    here["endpoint"].importer.flush()


def test_a_question_that_was_lost_is_asked_again(idle_pair):
    idle_pair.begin(a={"channel_faults": (Fault("post Ask", skip=True),)})
    pair = idle_pair
    pair.a.call(make, "x", 1)
    number, _ = pair.send("x")
    pair.a.call(failed, number)
    pair.a.call(nothing)
    assert pair.a.call(look, "leases") == 1
    pair.a.call(lift_channel_faults)
    pair.b.call(break_channels)
    pair.all_free()


def lift_channel_faults() -> None:
    from dask_gpuipc import endpoint
    from dask_gpuipc.channel import Channel

    endpoint.Channel = Channel  # begin() restores it


MALFORMED = {
    "nonsense": b"nonsense",
    "another version": msgpack.packb([WIRE_VERSION + 1, 5, 1]),
    "cut short": encode_message(Answer(1, (1, 2)))[:-1],
    "oversized": bytes(150_000),
    "nested deep": b"\x92\x01" + b"\x91" * 1000 + b"\x00",
    "empty": b"",
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("sender", ["producer", "consumer"])
def test_a_malformed_message_ends_the_channel_and_nothing_else(pair, packet, sender):
    pair.transfer("x", 1)
    pair.a.call(redialled)
    (pair.a if sender == "producer" else pair.b).call(send_raw, packet)
    pair.a.until(redialled)  # dialled again, since a lease lives
    assert pair.b.call(value_of, "x") == 1
    pair.transfer("y", 2)
    assert pair.b.call(value_of, "y") == 2
    pair.b.call(drop)
    pair.all_free()


STRAY = [
    Answer(1, (1, 2, 3)),
    Answer(99, ()),
    Release(tuple(range(50, 60))),
    Nack(99, Failure.STALE, "host", 99, 0),
    Nack(99, Failure.EVICTED, "nothing", -1, -1),
    Evicted("host", 99, 0),
    Announce("host", 1, 0, 4096, "", b""),
    Ask(1),
    Hello(b"", "", "", 1, 1),
]


def test_messages_that_make_no_sense_change_nothing(pair):
    pair.transfer("x", 1)
    for message in STRAY:
        for sender in (pair.a, pair.b):
            sender.call(send_raw, encode_message(message))
    for one in (pair.a, pair.b) * 2:
        one.call(nothing)
    assert pair.a.call(look, "leases") == 1
    assert pair.b.call(value_of, "x") == 1
    assert pair.a.call(usable_channels) == pair.b.call(usable_channels) == 1
    pair.b.call(drop)
    pair.all_free()


# -- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child alive"])
@pytest.mark.parametrize("moment", ["offered", "loaded", "granted", "disputed"])
def test_when_the_consumer_is_killed_all_its_leases_end(idle_pair, moment, forked):
    idle_pair.begin(a={"settings": (("dial_timeout", 0.2),)})
    pair = idle_pair
    with child() as c:
        there = c.call(begin, Options(pair.directory))
        assert pair.a.call(connect, there) is None
        grandchild = c.call(fork) if forked else None
        pair.a.call(make, "x", 1)
        number, [descriptor] = pair.send("x")
        if moment == "disputed":
            c.signal(signal.SIGSTOP)
            pair.a.call(failed, number)
        elif moment != "offered":
            assert c.call(load, "x", descriptor) is None
            if moment == "granted":
                pair.a.call(granted, number)
        assert pair.a.call(look, "leases") == 1
        c.signal(signal.SIGKILL)
        pair.a.until(is_, "leases", 0)
        assert pair.a.call(look, "pinned_bytes") == 0
        if moment in ("offered", "loaded"):
            pair.a.call(granted, number)  # it never knew
            pair.a.call(failed, number)
        assert pair.a.call(connect, there) is Refusal.DIAL_FAILED
        if grandchild is not None:
            os.kill(grandchild, signal.SIGKILL)
        assert pair.a.call(connect, pair.there) is None
        pair.transfer("y", 2)


def fork() -> int:
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child alive"])
def test_when_the_producer_is_killed_its_arrays_live_on(pair, forked):
    with child() as c:
        c.call(begin, Options(pair.directory))
        assert c.call(connect, pair.there) is None
        c.call(make, "x", 1)
        c.call(make, "y", 2)
        grandchild = c.call(fork) if forked else None
        number, (x, y) = c.call(offer, "x", "y")
        assert pair.b.call(load, "x", x) is None
        c.call(granted, number)
        c.signal(signal.SIGKILL)
        pair.b.until(producer_is_dead, 1)
        assert pair.b.call(value_of, "x") == 1
        assert pair.b.call(load, "y", y) is None, "it was finished, and its memory is mapped here"
        assert pair.b.call(value_of, "y") == 2
        pair.b.call(drop)
        pair.b.until(producer_is_dead, 0)
        assert pair.b.call(look, "holding", "mappings") == [0, 0]
        if grandchild is not None:
            os.kill(grandchild, signal.SIGKILL)
    pair.transfer("z", 3)


def producer_is_dead(count: int) -> bool:
    return sum(p.dead for p in here["endpoint"].importer._producers.values()) == count


def test_what_a_killed_producer_had_announced_can_still_be_read(pair):
    with child() as c:
        c.call(begin, Options(pair.directory))
        assert c.call(connect, pair.there) is None
        c.call(make, "x", 1)
        _, [x] = c.call(offer, "x")
        c.signal(signal.SIGKILL)
        wait_until(lambda: c.process.exitcode is not None)
        outcome = pair.b.call(load, "x", x)
        if outcome is None:  # it came before the news of the death did
            assert pair.b.call(value_of, "x") == 1
            pair.b.call(drop, "x")
        else:
            assert outcome is Failure.UNKNOWN_PEER
        pair.b.until(producer_is_dead, 0)


def test_a_stopped_consumer_keeps_its_leases_and_what_it_reads(pair):
    pair.transfer("x", 1)
    pair.b.signal(signal.SIGSTOP)
    for value in range(10, 60):
        pair.a.call(make, "other", value)
        number, [_] = pair.a.call(offer, "other")
        pair.a.call(failed, number)
    leases = pair.a.call(look, "leases")
    assert leases == 51, "nothing is freed by time"
    pair.b.signal(signal.SIGCONT)
    pair.a.until(is_, "leases", 1)
    assert pair.b.call(value_of, "x") == 1
    pair.b.call(drop, "x")
    pair.all_free()


def test_a_stopped_producer_changes_nothing_for_the_consumer(pair):
    pair.transfer("x", 1)
    pair.a.signal(signal.SIGSTOP)
    assert pair.b.call(value_of, "x") == 1
    pair.b.call(drop, "x")
    pair.b.call(nothing)
    pair.a.signal(signal.SIGCONT)
    pair.all_free()


# -- leaving -------------------------------------------------------------------------------------


def stop() -> None:
    here["endpoint"].stop()


def is_closed() -> bool:
    return here["endpoint"].closed


def test_a_consumer_that_leaves_gets_nothing_more_and_keeps_what_it_has(pair):
    pair.transfer("x", 1)
    pair.b.call(stop)
    pair.a.until(consumer_left)
    pair.a.call(make, "y", 2)
    assert pair.a.call(offer, "y")[1] == [Refusal.PEER_LEFT]
    assert pair.a.call(connect, pair.there) is Refusal.PEER_LEFT
    assert (pair.b.call(value_of, "x"), pair.b.call(is_closed)) == (1, False)
    pair.b.call(drop, "x")
    pair.b.until(is_closed)
    pair.all_free()


def consumer_left() -> bool:
    return here["consumer"].left


def test_peers_that_come_and_go_leave_nothing(pair):
    def once():
        pair.transfer("x", 1)
        pair.b.call(drop)
        pair.all_free()
        pair.b.call(end)
        pair.there = pair.b.call(begin, Options(pair.directory))
        assert pair.a.call(connect, pair.there) is None
        assert pair.b.call(connect, pair.here) is None
        pair.a.until(one_channel_each_way)
        return pair.a.call(peers_and_watches)

    first = once()
    assert [once() for _ in range(3)] == [first] * 3


def one_channel_each_way() -> bool:
    return len(here["endpoint"]._channels) == 2


def peers_and_watches() -> list[int]:
    endpoint = here["endpoint"]
    return [
        len(endpoint.exporter.consumers()),
        len(endpoint.importer._producers),
        len(endpoint._watches),
    ]


def test_leases_of_a_consumer_that_has_left_end_though_it_never_loaded_them(pair):
    pair.a.call(make, "x", 1)
    number, [descriptor] = pair.send("x")
    pair.b.call(stop)
    pair.all_free()
    assert isinstance(pair.b.call(load, "x", descriptor), Failure)
    pair.a.call(failed, number)


def test_a_producer_that_leaves_keeps_its_pins_until_they_are_released(pair):
    pair.transfer("x", 1)
    pair.transfer("y", 2)
    pair.a.call(stop)
    pair.b.until(told_of_leaving)
    assert pair.b.call(look_left) == [pair.here.peer]
    assert pair.a.call(offer, "x")[1] == [Refusal.STOPPING]
    assert pair.a.call(connect, pair.there) is Refusal.STOPPING
    assert not pair.a.call(is_closed)
    assert pair.b.call(copy_what_is_owned, pair.here.peer) == [1, 2]
    pair.a.until(is_closed)
    pair.all_free()


def told_of_leaving() -> bool:
    return bool(here["left"])


def look_left() -> list[str]:
    return here["left"]


def copy_what_is_owned(producer: str) -> list[int]:
    importer, arrays = here["endpoint"].importer, here["arrays"]
    mine = np.zeros(3)
    nested = {"x": [arrays.pop("x"), mine], "y": (arrays.pop("y")[3:], "text")}
    own = importer.owned(nested, producer)
    assert importer.owned(own, producer) is own, "what is one's own is left as it is"
    assert importer.owned(nested, "another producer") is nested
    assert own["x"][1] is mine
    return [int(own["x"][0][0]), int(own["y"][0][0])]


# -- the importer alone, by a manual clock -------------------------------------------------------

ADVERTISEMENT = Advertisement(
    WIRE_VERSION, "peer", "scheduler", 1, 1, "boot", ("ns",), "/x/s", b"token", ("host",), ()
)
DESCRIPTOR = Descriptor(
    "producer", "consumer", 1, 1, "share", "host", 1, 0, Layout(0, "=<i4", 4, (1000,), (4,))
)


class Told:
    """In place of a channel: notes what is posted."""

    usable = True

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def post(self, message: Any) -> None:
        self.messages.append(message)

    def drain(self) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class Alone:
    """An importer and a memory of this process that exports to it."""

    def __init__(self, *faults: Fault, **limits: Any) -> None:
        self.clock, self.told = ManualClock(), Told()
        self.memory = FaultyMemory(HostMemory(arena_size=4096), *faults)
        self.importer = Importer(
            "consumer",
            [self.memory],
            Statistics(),
            self.wake,
            idle={"host": IdleLimits(**limits)},
            clock=self.clock,
        )
        self.producer = self.importer.attach("producer")
        self.producer.channel = self.told
        self.leases = 0
        self.pins: list[Any] = []

    def wake(self) -> None:
        """As the loop would; but flush is called by the tests."""

    def announce(self, value: int, count: int = 1000) -> Descriptor:
        """Pin an array in an arena of its own, and announce it."""
        pin = self.memory.inner.pin(np.full(count, value, "i4"), None)
        self.pins.append(pin)
        place = pin.allocation
        fds = tuple(os.dup(fd) for fd in self.memory.inner.handle(place).fds)
        announcement = Announce("host", place.id, place.generation, place.nbytes, "", b"")
        self.importer.receive(self.producer, announcement, fds)
        return self.describe(pin)

    def describe(self, pin: Any) -> Descriptor:
        self.leases += 1
        place = pin.allocation
        return replace(
            DESCRIPTOR,
            lease=self.leases,
            transfer=self.leases,
            allocation=place.id,
            generation=place.generation,
            layout=pin.layout,
        )

    def load(self, descriptor: Descriptor) -> Any:
        return self.importer.load(descriptor)

    def flush(self) -> None:
        gc.collect()
        self.importer.flush()

    def trim(self, seconds: float) -> int:
        """Let time pass and trim; how many mappings are open."""
        self.clock.advance(seconds)
        self.importer.trim()
        return self.importer.mappings()[0]

    def close(self) -> None:
        self.flush()
        for pin in self.pins:
            pin.release()
        assert self.importer.close(), repr(self.importer)
        self.importer.clear()
        self.memory.close()


@pytest.fixture
def alone():
    with contextlib.closing(Alone(count=3, seconds=10.0)) as alone:
        yield alone


def test_a_mapping_is_closed_when_it_was_idle_for_long_enough(alone):
    array = alone.load(alone.announce(1))
    assert alone.trim(100) == 1, "an array lives in it"
    del array
    alone.flush()
    assert len(alone.told.of(Release)) == 1
    assert alone.trim(9.9) == 1
    assert alone.told.of(Evicted) == []
    assert alone.trim(0.2) == 0
    assert alone.told.of(Evicted) == [Evicted("host", 1, 0)]


def test_use_makes_a_mapping_young_again(alone):
    alone.announce(1)
    for _ in range(5):
        array = alone.load(alone.describe(alone.pins[0]))
        assert alone.trim(8) == 1
        del array
        alone.flush()
    assert alone.trim(11) == 0


def test_of_too_many_idle_mappings_the_oldest_are_closed(alone):
    for value in range(8):
        alone.load(alone.announce(value))
        alone.flush()
        alone.trim(0.1)
    assert alone.importer.mappings() == (3, 3 * 4096)
    assert [e.allocation for e in alone.told.of(Evicted)] == [1, 2, 3, 4, 5]


def test_mappings_with_arrays_do_not_count_as_idle(alone):
    arrays = [alone.load(alone.announce(value)) for value in range(8)]
    assert alone.trim(1000) == 8
    assert [int(a[0]) for a in arrays] == list(range(8))
    del arrays
    alone.flush()
    assert alone.trim(0) == 3


def test_collect_closes_what_is_idle_at_once(alone):
    kept = alone.load(alone.announce(1))
    alone.load(alone.announce(2))
    alone.flush()
    alone.importer.collect()
    assert alone.importer.mappings()[0] == 1
    assert kept[0] == 1
    del kept


def test_announcements_are_bounded(alone, monkeypatch):
    monkeypatch.setattr("dask_gpuipc.importer.MAX_ANNOUNCED", 16)
    held = alone.load(alone.announce(0))
    for value in range(1, 100):
        alone.announce(value)
    assert len(alone.producer.entries) <= 17
    assert held[0] == 0
    [last] = [alone.load(alone.describe(pin)) for pin in alone.pins[-1:]]
    assert last[0] == 99
    del held, last


def test_an_announcement_that_is_never_loaded_does_not_stay(alone):
    alone.announce(1)
    alone.trim(1000)
    assert len(alone.producer.entries) == 0


def test_of_an_answer_with_many_allocations_none_is_evicted_before_it_is_loaded(alone):
    with ThreadPoolExecutor(1) as opener, opening_ahead(alone, opener):
        descriptors = [alone.announce(value) for value in range(8)]
        opener.submit(int).result(20)  # they are open
        assert alone.trim(0.1) == 8
        assert [int(alone.load(d)[0]) for d in descriptors] == list(range(8))
        alone.flush()
        alone.trim(0.1)
        opener.submit(int).result(20)
        assert alone.importer.mappings()[0] == 3


@contextlib.contextmanager
def opening_ahead(alone, opener):
    """As CUDA memory does: opens and closes run on a thread."""
    alone.memory.executor = opener
    try:
        yield
    finally:
        alone.memory.executor = None


def test_a_new_generation_replaces_the_old_one(alone):
    old = alone.announce(1)
    array = alone.load(old)
    pin = alone.memory.inner.pin(np.full(1000, 2, "i4"), None)
    alone.pins.append(pin)
    fds = tuple(os.dup(fd) for fd in alone.memory.inner.handle(pin.allocation).fds)
    reused = Announce("host", old.allocation, 1, 4096, "", b"")
    alone.importer.receive(alone.producer, reused, fds)
    new = alone.load(replace(alone.describe(pin), allocation=old.allocation, generation=1))
    assert (array[0], new[0]) == (1, 2)
    assert alone.importer.mappings()[0] == 2
    del array
    alone.flush()
    assert alone.importer.mappings()[0] == 1, "nothing is in the old one any more"
    del new


def test_an_allocation_that_many_threads_load_at_once_is_opened_once():
    go = threading.Event()
    hold = Fault("open", hold=go)
    with contextlib.closing(Alone(hold)) as alone, ThreadPoolExecutor(16) as pool:
        first = alone.announce(5)
        descriptors = [first, *(alone.describe(alone.pins[0]) for _ in range(15))]
        loading = [pool.submit(alone.load, d) for d in descriptors]
        wait_until(lambda: alone.memory.calls["open"] == 1)
        go.set()
        arrays = [future.result(20) for future in loading]
        assert alone.memory.calls["open"] == 1
        assert [int(a.sum()) for a in arrays] == [5000] * 16
        del arrays, loading


@pytest.mark.parametrize(
    "announcement",
    [
        Announce("gpu", 9, 0, 4096, "", b""),
        Announce("host", 9, 0, 0, "", b""),
        Announce("host", 9, 0, -5, "", b""),
        Announce("host", 1, 0, 4096, "", b""),
    ],
    ids=["unknown memory", "no bytes", "less than none", "known already"],
)
def test_descriptors_of_an_announcement_that_is_not_kept_are_closed(alone, announcement):
    alone.announce(1)
    reader, writer = os.pipe()
    alone.importer.receive(alone.producer, announcement, (reader,))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    os.close(writer)


def test_a_batch_of_releases_is_sent_together(alone):
    alone.announce(1)
    arrays = [alone.load(alone.describe(alone.pins[0])) for _ in range(100)]
    del arrays
    alone.flush()
    [release] = alone.told.of(Release)
    assert sorted(release.leases) == list(range(2, 102))


def test_a_channel_that_goes_in_the_middle_of_a_load_is_an_open_failed(alone):
    class Going(Producer):
        """Its channel goes after some looks at it, as another thread's detach makes it."""

        def __init__(self, looks):
            super().__init__("producer")
            self.looks = looks

        @property
        def channel(self):
            self.looks -= 1
            return Told() if self.looks >= 0 else None

        @channel.setter
        def channel(self, channel):
            self.looks = 0

    for looks in range(6):
        going = alone.importer._producers["producer"] = Going(looks)
        going.looks = looks
        with pytest.raises(OpenFailed) as caught:
            alone.load(DESCRIPTOR)
        assert caught.value.reason is Failure.EVICTED, f"after {looks} looks"


def test_a_failure_that_was_noted_keeps_no_array_of_its_message(alone):
    first, second = (alone.announce(value) for value in range(2))
    spoilt = replace(second, allocation=99)

    def message():
        """Read as Dask does: what was loaded is in the frame that loads the next."""
        array = loads({"descriptor": encode(first)}, [])
        nothing = loads({"descriptor": encode(spoilt)}, [])
        return array, nothing

    with collecting_failures() as noted:
        array, nothing = message()
    died = weakref.ref(array)
    gc.disable()
    try:
        del array
        assert (nothing, died()) == (None, None)
    finally:
        gc.enable()
    assert [str(failed.reason) for failed in noted] == ["evicted"]


def test_an_answer_that_is_over_keeps_no_array():
    """Though a timer that was made in it has a copy of its context variables."""
    memory = FaultyMemory(HostMemory())
    exporter = Exporter("p", [memory], Statistics(), min_bytes={"host": 1, "cuda": 1})
    arrays = [np.zeros(10)]
    died = weakref.ref(arrays[0])
    transfer = exporter.begin(None, {"host": Prepared(arrays)}, Refusal.OTHER_NODE)
    exporter.granted(transfer)
    exporter.failed(transfer)
    del arrays
    assert died() is None
    memory.close()


@dataclass(frozen=True)
class Prepared:
    arrays: list[Any]

    async def wait(self) -> None:
        """They are finished."""


def test_a_transfer_with_no_consumer_only_counts_why():
    stats = Statistics()
    memory = HostMemory()
    exporter = Exporter("p", [memory], stats, min_bytes={"host": 1, "cuda": 1})
    transfer = exporter.begin(None, reason=Refusal.OTHER_NODE)
    with pytest.raises(Refused) as caught:
        transfer.export(np.zeros(100))
    assert caught.value.reason is Refusal.OTHER_NODE
    exporter.failed(transfer)
    snapshot = stats.snapshot(state="", memories=[])
    assert (snapshot.refused, snapshot.sent["bytes"].arrays) == ({"other_node": 1}, 1)
    memory.close()


def test_at_its_welcome_a_producer_finds_its_channel_known(alone):
    seen = []

    class New(Told):
        def post(self, message):
            seen.append((type(message), alone.producer.channel is self))

    alone.importer.connect(alone.producer, New())
    assert seen == [(Welcome, True), (Held, True)]  # another thread may load in between
