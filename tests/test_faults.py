"""Whatever fails, the task completes, and the next transfer works (invariants 3, 8 and 21).

Faults are injected at every step of dumps, loads and the channel. The fixtures ``faulty`` and
``shared`` check after each test that all leases have ended, that no worker counts an outgoing
transfer, and that nothing is left of the plugin.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    Gate,
    addresses,
    arrays,
    calls,
    client,
    cluster,
    errors,
    failed,
    faulty,
    make,
    move,
    nothing_held,
    open_gates,
    refused,
    same,
    shared,
    total,
    until,
)
from distributed import Client, Worker, wait
from distributed.comm.core import CommClosedError
from distributed.comm.tcp import TCP
from distributed.protocol.serialize import register_serialization_family

import dask_gpuipc
from dask_gpuipc import serialize
from dask_gpuipc.errors import ChannelBroken, ChannelFull, Failure, OpenFailed, Refusal, Refused
from dask_gpuipc.testing import Fault, ManualClock
from dask_gpuipc.wire import Descriptor, decode, encode

__all__ = ["client", "cluster", "errors", "faulty", "shared"]

Register = Callable[..., Client]
Errors = Callable[[], list[str]]

OFFLOADED = 2 << 20
"""Elements of an array of 16 MiB: an answer with two is written on Dask's offload thread."""


def transfer(client: Client, seed: int) -> None:
    """An array that one worker made arrives on another as it was."""
    a, b, _ = addresses(client)
    source = client.submit(make, LARGE, seed, workers=[a], pure=False)
    assert move(client, source, b, same, LARGE, seed).result(timeout=30)


def sum_of_sums(xs: list[np.ndarray]) -> int:
    return int(sum(x.sum() for x in xs))


def transfer_many(client: Client, count: int, seed: int) -> None:
    """Several arrays of one worker cross in one answer."""
    a, b, _ = addresses(client)
    sources = [client.submit(make, LARGE, seed + i, workers=[a], pure=False) for i in range(count)]
    wait(sources)
    found = client.submit(sum_of_sums, sources, workers=[b], pure=False).result(timeout=30)
    assert found == sum_of_sums([make(LARGE, seed + i) for i in range(count)])


def check_next_goes_as_bytes(client: Client, errors: Errors, reason: str, seed: int = 0) -> None:
    """One array does, for a reason that is counted; an array after it goes by handle."""
    before = arrays(client, "sent", "share")
    transfer(client, seed)
    assert refused(client, reason) == arrays(client, "sent", "bytes") == 1
    assert arrays(client, "sent", "share") == before
    transfer(client, seed + 1)
    assert arrays(client, "sent", "share") == arrays(client, "received", "share") == before + 1
    assert errors() == []


# -- the producer ---------------------------------------------------------------------------------

oops = partial(ZeroDivisionError, "oops")
stale = partial(OpenFailed, Failure.STALE)
no_memory = partial(OpenFailed, Failure.NO_MEMORY)

EXPORTING = {
    "pin refuses": (
        "not_exportable",
        Fault("pin", 1, error=partial(Refused, Refusal.NOT_EXPORTABLE)),
    ),
    "pin breaks": ("error", Fault("pin", 2, error=oops)),
    "pin breaks when done": ("error", Fault("pin", 3, error=oops, after=True)),
    "pin has an OSError": ("error", Fault("pin", 4, error=OSError)),
    "pin has no memory": ("error", Fault("pin", 5, error=MemoryError)),
    "pin gives nonsense": ("error", Fault("pin", 6, change=lambda pin: pin.release())),
    "pin_copies breaks": ("error", Fault("pin_copies", 7, error=oops)),
    "handle refuses": ("no_memory", Fault("handle", 1, error=partial(Refused, Refusal.NO_MEMORY))),
    "handle breaks": ("error", Fault("handle", 2, error=oops)),
    "handle has an OpenFailed": ("error", Fault("handle", 3, error=stale)),
}
"""What goes wrong in one transfer after the other, and the reason that is counted."""
ANNOUNCING = {
    "it would block": ("channel_full", Fault("send Announce", 1, error=partial(ChannelFull, ""))),
    "it is broken": ("peer_left", Fault("send Announce", 2, error=partial(ChannelBroken, ""))),
    "it breaks": ("error", Fault("send Announce", 3, error=oops)),
}


def test_an_array_that_cannot_be_exported_goes_as_bytes(faulty: Register, errors: Errors) -> None:
    client = faulty(
        *(fault for _, fault in EXPORTING.values()),
        channel=[fault for _, fault in ANNOUNCING.values()],
    )
    expected: Counter[str] = Counter()
    for what, (reason, _) in {**EXPORTING, **ANNOUNCING}.items():
        expected[reason] += 1
        transfer(client, 1)
        assert refused(client, reason) == expected[reason], what
        assert arrays(client, "sent", "bytes") == expected.total(), what
    assert arrays(client, "sent", "share") == 0
    transfer(client, 2)
    assert arrays(client, "sent", "share") == arrays(client, "received", "share") == 1
    assert errors() == []


def test_of_several_arrays_only_the_one_that_fails_goes_as_bytes(
    faulty: Register, errors: Errors
) -> None:
    client = faulty(Fault("pin", first=2, error=oops))
    transfer_many(client, 3, 1)
    assert arrays(client, "sent", "share") == 2
    assert arrays(client, "sent", "bytes") == refused(client, "error") == 1
    assert errors() == []


# -- the consumer ---------------------------------------------------------------------------------

IMPORTING = {
    "open finds it stale": ("stale", Fault("open", 1, error=stale)),
    "open has no room": ("no_memory", Fault("open", 2, error=no_memory)),
    "open breaks": ("error", Fault("open", 3, error=oops)),
    "open breaks when done": ("error", Fault("open", 4, error=MemoryError, after=True)),
    "open has an OSError": ("error", Fault("open", 5, error=OSError)),
    "open has a Refused": ("error", Fault("open", 6, error=partial(Refused, Refusal.ERROR))),
    "load finds it stale": ("stale", Fault("load", 1, error=stale)),
    "load has no room": ("no_memory", Fault("load", 2, error=no_memory)),
    "load breaks": ("error", Fault("load", 3, error=oops)),
    "load breaks when done": ("error", Fault("load", 4, error=oops, after=True)),
    "load gives nonsense": ("error", Fault("load", 5, change=lambda imported: None)),
}


def test_an_array_that_cannot_be_imported_comes_as_bytes_at_once(
    faulty: Register, errors: Errors
) -> None:
    client = faulty(*(fault for _, fault in IMPORTING.values()))
    expected: Counter[str] = Counter()
    for what, (reason, _) in IMPORTING.items():
        expected[reason] += 1
        transfer(client, 1)
        assert failed(client, reason) == expected[reason], what
        assert refused(client, "named_serializers") == expected.total(), what
        until(nothing_held(client), f"the nacked lease to end: {what}")
        dask_gpuipc.collect(client)  # the allocation goes, and what it was denied for
    assert arrays(client, "received", "share") == 0
    transfer(client, 2)
    assert arrays(client, "received", "share") == 1
    assert errors() == []


def test_an_allocation_that_failed_is_denied_until_it_goes(
    faulty: Register, errors: Errors
) -> None:
    client = faulty(Fault("open", error=stale))
    transfer(client, 1)
    transfer(client, 2)
    assert refused(client, "denied") == refused(client, "named_serializers") == 1
    assert arrays(client, "sent", "bytes") == 2
    dask_gpuipc.collect(client)
    transfer(client, 3)
    assert arrays(client, "received", "share") == 1
    assert errors() == []


def pass_time(seconds: float, dask_worker: Worker) -> None:
    clock = ManualClock(time.monotonic())
    clock.advance(seconds)
    for consumer in dask_worker.plugins["gpuipc"].endpoint.exporter._consumers.values():
        consumer._clock = clock


def test_bad_luck_denies_when_it_is_repeated_and_for_a_while(
    faulty: Register, errors: Errors
) -> None:
    client = faulty(Fault("open", error=no_memory, times=3))
    for seed in range(4):
        transfer(client, seed)
        assert failed(client, "no_memory") == min(seed + 1, 3)
    assert refused(client, "denied") == 1
    client.run(pass_time, 20)
    transfer(client, 5)
    assert arrays(client, "received", "share") == 1
    assert errors() == []


@pytest.mark.parametrize(
    ("call", "settings"), [("load", {}), ("open", {"host_arena_size": 1})], ids=["load", "open"]
)
def test_of_several_handles_one_fails(
    faulty: Register, errors: Errors, call: str, settings: dict[str, Any]
) -> None:
    """Those after it are read too, none of the answer is kept, and all come as bytes."""
    client = faulty(Fault(call, first=2, error=no_memory), settings=settings)
    transfer_many(client, 3, 1)
    assert arrays(client, "sent", "share") == 3
    assert arrays(client, "received", "share") == 2
    assert failed(client, "no_memory") == 1
    assert refused(client, "named_serializers") == arrays(client, "sent", "bytes") == 3
    until(nothing_held(client), "the leases of the answer to end")
    transfer_many(client, 3, 10)
    assert arrays(client, "received", "share") == 5
    assert errors() == []


def test_an_announcement_that_is_lost_is_made_again(faulty: Register, errors: Errors) -> None:
    client = faulty(channel=[Fault("send Announce", skip=True)])
    transfer(client, 1)
    assert failed(client, "evicted") == refused(client, "named_serializers") == 1
    transfer(client, 2)
    assert arrays(client, "received", "share") == 1
    assert errors() == []


# -- descriptors that are not right ---------------------------------------------------------------


def forged(descriptor: bytes, **changes: Any) -> bytes:
    return encode(replace(decode(Descriptor, descriptor), **changes))


def moved(descriptor: bytes, offset: int) -> bytes:
    return forged(descriptor, layout=replace(decode(Descriptor, descriptor).layout, offset=offset))


GARBAGE: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "nothing": ("unreadable", lambda d: None),
    "text": ("unreadable", lambda d: d.hex()),
    "nonsense": ("unreadable", lambda d: b"nonsense"),
    "cut short": ("unreadable", lambda d: d[:-1]),
    "too long": ("unreadable", lambda d: d + b"\x00"),
    "oversized": ("unreadable", lambda d: bytes(200_000)),
    "another rung": ("malformed", lambda d: forged(d, rung="teleport")),
    "another producer": ("unknown_peer", lambda d: forged(d, producer="nobody")),
    "another allocation": ("evicted", lambda d: forged(d, allocation=99)),
    "before the allocation": ("out_of_bounds", lambda d: moved(d, -1)),
    "beyond the allocation": ("out_of_bounds", lambda d: moved(d, 1 << 40)),
}


def spoil(name: str) -> None:
    """Have the next descriptor that this worker makes spoilt."""

    def dumps(x: Any) -> tuple[dict[str, Any], list[bytes]]:
        header, frames = serialize.dumps(x)
        serialize.register()
        return {"descriptor": GARBAGE[name][1](header["descriptor"])}, frames

    register_serialization_family(serialize.FAMILY, dumps, serialize.loads)


def test_a_descriptor_that_is_not_right_is_refused_and_its_array_comes_as_bytes(
    shared: Client,
) -> None:
    producer = addresses(shared)[:1]
    expected: Counter[str] = Counter()
    for name, (reason, _) in GARBAGE.items():
        expected[reason] += 1
        shared.run(spoil, name, workers=producer)
        transfer(shared, 1)
        assert failed(shared, reason) == expected[reason], name
        assert refused(shared, "named_serializers") == expected.total(), name
        if reason == "out_of_bounds":
            dask_gpuipc.collect(shared)  # the allocation goes, and what it was denied for
    transfer(shared, 2)
    assert arrays(shared, "received", "share") == 1


def replay() -> None:
    """Have the next descriptor that this worker makes be the last one again."""
    last: list[Any] = []

    def dumps(x: Any) -> tuple[dict[str, Any], list[bytes]]:
        if last:
            serialize.register()
            return last[0]
        last.append(serialize.dumps(x))
        return last[0]

    register_serialization_family(serialize.FAMILY, dumps, serialize.loads)


def test_a_replayed_descriptor_is_refused(shared: Client) -> None:
    a, b, _ = addresses(shared)
    shared.run(replay, workers=[a])
    first = shared.submit(make, LARGE, 1, workers=[a], pure=False)
    held = move(shared, first, b)
    transfer(shared, 2)
    assert failed(shared, "barred") == refused(shared, "named_serializers") == 1
    transfer(shared, 3)
    assert move(shared, held, b, same, LARGE, 1).result()


# -- answers that are lost, given up or written twice ---------------------------------------------


def lose_ok(told: bool) -> None:
    """Have the connection break where this worker says OK next; whether it notices."""
    write = TCP.write

    async def lossy(self: TCP, msg: Any, *args: Any, **more: Any) -> int:
        if msg != "OK":
            return await write(self, msg, *args, **more)
        TCP.write = write  # type: ignore[method-assign]
        self.abort()
        if told:
            raise CommClosedError("lost in a test")
        return 0

    TCP.write = lossy  # type: ignore[method-assign]


@pytest.mark.parametrize("told", [False, True])
def test_what_a_lost_ok_was_for_is_kept_if_it_is_held_and_freed_if_not(
    shared: Client, errors: Errors, told: bool
) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    shared.run(lose_ok, told, workers=[b])
    held = move(shared, source, b)
    # Dask's own: plain Dask says the same when a connection breaks there.
    assert all("failed during get data" in e or "stream died" in e for e in errors())
    assert arrays(shared, "sent", "share") == 1 + told
    if told:  # Dask's log keeps the traceback, and so the first answer: as under plain Dask
        shared.run(clear_log, workers=[b])
    until(lambda: total(shared, "leases") == total(shared, "holding") == 1, "one lease to be left")
    for seed in range(3):  # would be written to the slot, were it free
        transfer(shared, seed + 10)
    assert move(shared, held, b, same, LARGE, 0).result()


def clear_log(dask_worker: Worker) -> None:
    dask_worker._deque_handler.deque.clear()


def cancel_get_data() -> int:
    """Cancel what answers requests for data on this worker; how many were answering."""
    answering = [task for task in asyncio.all_tasks() if "get_data" in names(task.get_coro())]
    for task in answering:
        task.cancel()
    return len(answering)


def names(coroutine: Any) -> Iterator[str]:
    """Of a coroutine and of all that it waits for."""
    while hasattr(coroutine, "cr_await"):
        yield coroutine.__name__
        coroutine = coroutine.cr_await


def test_an_answer_is_cancelled_while_its_arrays_are_still_exported(
    faulty: Register, errors: Errors
) -> None:
    client = faulty(Fault("pin", first=2, hold=Gate("pin")))
    a, b, _ = addresses(client)
    sources = [client.submit(make, OFFLOADED, seed, workers=[a], pure=False) for seed in range(2)]
    wait(sources)
    result = client.submit(sum_of_sums, sources, workers=[b], pure=False)
    until(lambda: calls(client, a, "pin") == 2, "the second array to be exported")
    assert dask_gpuipc.statistics(client)[a]["leases"] == 1
    assert client.run(cancel_get_data, workers=[a]) == {a: 1}
    until(lambda: not dask_gpuipc.statistics(client)[a]["leases"], "what was offered to be freed")
    open_gates(client, "pin")
    assert result.result(timeout=30) == sum_of_sums([make(OFFLOADED, s) for s in range(2)])
    assert refused(client, "transfer_closed") == 1
    assert arrays(client, "received", "share") == 2
    # The connection was given up: plain Dask says so.
    assert all("Worker stream died" in e for e in errors())


def add_what_msgpack_does_not_take() -> None:
    """Have the next header that this worker makes hold it."""

    def dumps(x: Any) -> tuple[dict[str, Any], list[bytes]]:
        header, frames = serialize.dumps(x)
        serialize.register()
        return {**header, "odd": object()}, frames

    register_serialization_family(serialize.FAMILY, dumps, serialize.loads)


def test_a_message_that_is_written_twice_leaves_no_lease(shared: Client, errors: Errors) -> None:
    """Dask begins a message anew when msgpack does not take something in it."""
    a, b, _ = addresses(shared)
    shared.run(add_what_msgpack_does_not_take, workers=[a])
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)
    until(lambda: total(shared, "leases") == 1, "the lease that was never seen to end")
    assert arrays(shared, "sent", "share") == 2
    assert move(shared, held, b, same, LARGE, 0).result(timeout=30)
    assert arrays(shared, "received", "share") == 1
    assert errors() == []


def test_releases_are_not_lost_with_their_channel(shared: Client, errors: Errors) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)
    shared.run(shut_channels_down, workers=[b])
    del source, held
    until(nothing_held(shared), "the release to arrive")
    transfer(shared, 1)
    assert arrays(shared, "received", "share") == 2
    assert errors() == []


def shut_channels_down(dask_worker: Worker) -> None:
    for channel in dask_worker.plugins["gpuipc"].endpoint._channels:
        channel._sock.shutdown(socket.SHUT_RDWR)


# -- around dumps and loads -----------------------------------------------------------------------


def break_the_next_begin(error: Callable[[], Exception], dask_worker: Worker) -> None:
    """Have this worker fail at its next answer, before there is a transfer."""
    endpoint = dask_worker.plugins["gpuipc"].endpoint

    async def consumer(them: Any) -> None:
        del endpoint.consumer
        raise error()

    endpoint.consumer = consumer


@pytest.mark.parametrize("error", [oops, OSError])
def test_an_answer_that_cannot_be_begun_goes_as_bytes(
    shared: Client, errors: Errors, error: Callable[[], Exception]
) -> None:
    shared.run(break_the_next_begin, error, workers=addresses(shared)[:1])
    check_next_goes_as_bytes(shared, errors, "error")


def prepare_too(dask_worker: Worker) -> None:
    dask_worker.plugins["gpuipc"].endpoint.memories[0].prepares = True


def test_an_answer_that_cannot_be_prepared_goes_as_bytes(faulty: Register, errors: Errors) -> None:
    client = faulty(Fault("prepare", error=oops))
    client.run(prepare_too)
    check_next_goes_as_bytes(client, errors, "error")


# -- Worker.gather --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "error", "attempts"), [("stale", stale, 1), ("no_memory", no_memory, 3)]
)
def test_replicating_does_with_bytes_what_never_works_with_handles(
    faulty: Register, reason: str, error: Callable[[], Exception], attempts: int
) -> None:
    """`Worker.gather` leaves it to the scheduler to try again, which it does without end."""
    client = faulty(Fault("open", error=error, times=None))
    a, *others = addresses(client)
    source = client.submit(make, workers=[a], pure=False)
    wait(source)
    client.replicate([source])
    for worker in others:
        assert move(client, source, worker, same, LARGE, 0).result()
    assert failed(client, reason) == arrays(client, "sent", "share") == 2 * attempts
    assert refused(client, "denied") == arrays(client, "sent", "bytes") == 2
