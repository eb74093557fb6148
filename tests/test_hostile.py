"""Hostile and broken input: refused, counted, and nothing for anybody else (invariant 21).

One consumer and one producer talk nonsense to an endpoint's two sides, made from true messages by
flipping, cutting and repeating bytes. Another consumer and producer are well behaved: what they
hold and lend must stay as it is, throughout.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    addresses,
    arrays,
    client,
    cluster,
    make,
    move,
    same,
    shared,
)
from distributed import Client, Worker

from dask_gpuipc.errors import Failure, OpenFailed, WireError
from dask_gpuipc.exporter import Exporter
from dask_gpuipc.importer import Importer
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.stats import Statistics
from dask_gpuipc.testing import poisoned_arenas
from dask_gpuipc.wire import (
    WIRE_VERSION,
    Advertisement,
    Announce,
    Answer,
    Ask,
    Closed,
    Descriptor,
    Evicted,
    Held,
    Hello,
    Leave,
    Message,
    Nack,
    Probe,
    Proof,
    Release,
    Withdraw,
    decode,
    decode_message,
    encode,
    encode_message,
)

__all__ = ["client", "cluster", "shared"]

PAGE = 4096
THEM = Advertisement(
    WIRE_VERSION, "good", "scheduler", 1, 1, "boot", ("ns",), "/x/s", b"token", ("host",), ()
)


class Wire:
    """In place of a channel: hands announcements over, forgets the rest."""

    usable = True

    def __init__(self, importer: Importer | None = None, producer: Any = None) -> None:
        self.importer, self.producer = importer, producer

    def send(self, message: Message, fds: Any = ()) -> None:
        if self.importer is not None:
            self.importer.receive(self.producer, message, tuple(map(os.dup, fds)))

    def post(self, message: Message) -> None:
        pass

    def drain(self) -> None:
        pass


class Both:
    """An exporter and an importer, with good arrays between them and an evil peer of each."""

    def __init__(self) -> None:
        self.memory, self.far = HostMemory(arena_size=16 * PAGE), HostMemory(arena_size=PAGE)
        self.stats = Statistics()
        self.importer = Importer("good", [self.far], self.stats, wake=lambda: None)
        self.exporter = Exporter(
            "producer", [self.memory], Statistics(), min_bytes={"host": 1, "cuda": 1}
        )
        producer = self.importer.attach("producer")
        wire: Any = Wire(self.importer, producer)
        producer.channel = wire
        self.good = self.exporter.attach(THEM, wire, set())
        silent: Any = Wire()
        self.evil_consumer = self.exporter.attach(replace(THEM, peer="evil"), silent, set())
        self.evil_producer = self.importer.attach("evil")
        self.evil_producer.channel = silent
        self.sources = [np.full(PAGE // 8, i) for i in range(8)]
        self.received: list[Any] = []
        self.descriptors: list[bytes] = []
        self.transfer()

    def transfer(self) -> None:
        transfer = self.exporter.begin(self.good)
        for source in self.sources:
            descriptor = transfer.export(source)
            self.descriptors.append(encode(descriptor))
            self.received.append(self.importer.load(descriptor))
        self.exporter.granted(transfer)

    def check(self) -> None:
        for i, array in enumerate(self.received):
            assert (array == i % 8).all()
        assert self.exporter.holds("good") == len(self.received)
        assert len(self.importer.attach("producer").held) == len(self.received)

    def close(self) -> None:
        self.received.clear()
        self.importer.flush()
        self.exporter.died("good")
        self.exporter.died("evil")
        self.importer.died(self.importer.attach("producer"))
        self.importer.died(self.evil_producer)
        assert self.exporter.leases == self.exporter.pinned_bytes == self.importer.holding == 0
        assert self.exporter.close()
        assert self.importer.close()
        self.importer.clear()
        self.memory.close()
        self.far.close()
        assert not self.memory._arenas


@pytest.fixture
def both() -> Iterator[Both]:
    with poisoned_arenas():
        both = Both()
        yield both
        both.close()


def mutated(rng: random.Random, data: bytes) -> bytes:
    """With one to three bytes or runs of bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        kind, i = rng.random(), rng.randrange(len(changed) + 1)
        if kind < 0.7 and changed:
            changed[i % len(changed)] ^= 1 << rng.randrange(8)
        elif kind < 0.85:
            del changed[i : i + rng.randint(1, 4)]
        else:
            changed[i:i] = changed[i : i + 4]
    return bytes(changed)


LEASES = tuple(range(20))
PLACE = ("host", 1, 0)
FROM_CONSUMERS: list[Message] = [
    Release(LEASES),
    Answer(1, LEASES),
    Answer(2, ()),
    Nack(3, Failure.STALE, *PLACE),
    Evicted(*PLACE),
    Held((), last=True),
    Proof("host", "", b"x"),
    Leave("good"),
    Closed("good"),
]
FROM_PRODUCERS: list[Message] = [
    Announce(*PLACE, 16 * PAGE, "", b""),
    Withdraw(*PLACE),
    Ask(1),
    Leave("producer"),
    Probe("host", "", 100, b"handle"),
]
STRAY: list[Message] = [Hello(b"token", "producer", "good", 1, 1), Release((1,))]


def fuzz_messages(both: Both, rng: random.Random, count: int) -> int:
    """Feed an evil peer's messages to both sides; how many were records at all."""
    to_exporter = [encode_message(m) for m in FROM_CONSUMERS + STRAY]
    to_importer = [encode_message(m) for m in FROM_PRODUCERS + STRAY]
    understood = 0
    for number in range(count):
        exporting = rng.random() < 0.6
        data = mutated(rng, rng.choice(to_exporter if exporting else to_importer))
        try:
            message = decode_message(data)
        except WireError:
            continue
        understood += 1
        if exporting:
            both.exporter.receive("evil", message)
        else:
            both.importer.receive(both.evil_producer, message, ())
        if number % 1000 == 0:
            both.check()
    return understood


def fuzz_descriptors(both: Both, rng: random.Random, count: int) -> tuple[int, int]:
    """Load mutated descriptors of good arrays; how many were refused, how many gave an array."""
    refused = loaded = 0
    known = [decode(Descriptor, data) for data in both.descriptors]
    for number in range(count):
        # half of them name a lease that was not loaded yet, or they would all be replays
        lease = {"lease": 1000 + number} if rng.random() < 0.5 else {}
        data = encode(replace(rng.choice(known), **lease))
        try:
            descriptor = decode(Descriptor, mutated(rng, data))
        except WireError:
            continue
        try:
            array = both.importer.load(descriptor)
        except OpenFailed:
            refused += 1
        else:
            loaded += 1
            check_inside(both.far, array)
            del array
            both.importer.flush()
        if number % 1000 == 0:
            both.check()
    return refused, loaded


def check_inside(memory: HostMemory, array: np.ndarray) -> None:
    """Every byte that the array can touch is of the pages that were mapped for it."""
    block = memory.owner_of(array)
    assert block is not None
    interface = block.__array_interface__
    start, [size] = interface["data"][0], interface["shape"]
    low, high = np.lib.array_utils.byte_bounds(array)
    assert start <= low <= high <= start + size
    assert size <= 17 * PAGE


def test_100_000_mutated_messages_change_nothing_for_others(both: Both) -> None:
    rng = random.Random(4)
    understood = fuzz_messages(both, rng, 60_000)
    both.check()
    both.transfer()
    refused, loaded = fuzz_descriptors(both, rng, 40_000)
    assert understood > 1000  # something was tried beyond the decoder
    assert refused > 1000
    assert loaded > 100
    assert sum(both.stats.snapshot(state="", memories=[]).failed.values()) == refused, "counted"
    both.check()


LAYOUTS: dict[str, dict[str, Any]] = {
    "an offset beyond the allocation": {"offset": 1 << 40},
    "an offset before it": {"offset": -8},
    "a last element beyond it": {"offset": 16 * PAGE - 8},
    "a negative stride before it": {"strides": (-8,)},
    "a stride that leaves it": {"strides": (1 << 30,)},
    "a shape that overflows 64 bits": {"shape": (1 << 62,), "strides": (8,)},
    "shape times item size wraps to nothing": {"shape": (1 << 61,), "strides": (0,)},
    "two strides for one axis": {"strides": (8, 8)},
    "a negative length": {"shape": (-1,)},
    "another item size than the dtype's": {"itemsize": 1 << 20},
    "a dtype of objects": {"dtype": "=|O8"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_that_leaves_its_allocation_is_refused_and_counted(both: Both, name: str) -> None:
    descriptor = decode(Descriptor, both.descriptors[0])
    forged = replace(descriptor, lease=1000, layout=replace(descriptor.layout, **LAYOUTS[name]))
    with pytest.raises(OpenFailed):
        both.importer.load(forged)
    failed = both.stats.snapshot(state="", memories=[]).failed
    assert sum(failed.values()) == 1
    both.check()


def test_a_peer_cannot_end_another_ones_leases(both: Both) -> None:
    for message in FROM_CONSUMERS:
        both.exporter.receive("evil", message)
    for message in FROM_PRODUCERS:
        both.importer.receive(both.evil_producer, message, ())
    both.check()


# -- strangers on the socket of a running worker --------------------------------------------------


def advertised(dask_worker: Worker) -> tuple[str, int]:
    listener = dask_worker.plugins["gpuipc"].endpoint._listener
    return listener.path, listener.refused


def strangers(path: str, count: int) -> list[socket.socket]:
    """Connections that say nothing, nonsense, and a Hello with the wrong token, by turns."""
    hello = encode_message(Hello(b"guess" * 3 + b"!", "p" * 32, "c" * 32, os.getpid(), 1))
    words = [b"", b"\x00nonsense", hello, hello[:-1]]
    made = []
    for i in range(count):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(path)  # blocks while the backlog is full; with a timeout it would fail
        stranger.settimeout(20)
        with contextlib.suppress(OSError):
            if words[i % 4]:
                stranger.send(words[i % 4])
        made.append(stranger)
    return made


def test_a_flood_of_strangers_changes_nothing(shared: Client) -> None:
    """Neither for channels that are up, nor for one that is dialled meanwhile."""
    a, b, c = addresses(shared)
    first = shared.submit(make, workers=[a], pure=False)
    held = move(shared, first, b)
    path, _ = shared.run(advertised, workers=[b])[b]
    with contextlib.ExitStack() as stack:
        for stranger in strangers(path, 300):
            stack.enter_context(stranger)
        for seed, source in enumerate((a, c)):
            chunk = shared.submit(make, LARGE, seed, workers=[source], pure=False)
            assert move(shared, chunk, b, same, LARGE, seed).result()
            del chunk
        assert move(shared, held, b, same, LARGE, 0).result()
    assert arrays(shared, "received", "share") == 3
    assert arrays(shared, "sent", "bytes") == 0
    assert shared.run(advertised, workers=[b])[b][1] >= 225, "told off, and counted"
