"""A real exporter and a real importer over links that a machine delivers, breaks and makes anew.

In one process and on one thread, so that hypothesis can put their steps in any order: answers that
are lost or read late, messages under way while the link breaks, leases that end meanwhile, deaths.
Host memory is poisoned when it is recycled. At every moment each array that the consumer has reads
as it should; at the end nothing is left.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dask_gpuipc.consumers import Consumer
from dask_gpuipc.errors import (
    ChannelBroken,
    ChannelFull,
    Failure,
    OpenFailed,
    Refusal,
    Refused,
)
from dask_gpuipc.exporter import Exporter
from dask_gpuipc.importer import Importer
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.producers import Producer
from dask_gpuipc.stats import Statistics
from dask_gpuipc.testing import ManualClock, poisoned_arenas
from dask_gpuipc.transfer import Transfer
from dask_gpuipc.wire import WIRE_VERSION, Advertisement, Descriptor, Message

PAGE = 4096
THEM = Advertisement(
    WIRE_VERSION, "c", "scheduler", 1, 1, "boot", ("ns",), "/x/s", b"token", ("host",), ()
)


class End:
    """One end of a link, in place of a channel: what arrives waits until it is delivered.

    As with a socket: what was sent before the other side ended it can still be read, then comes
    end of file; what waits here when this side ends is lost.
    """

    def __init__(self) -> None:
        self.usable = True
        self.full = False
        self.inbox: deque[tuple[Message, tuple[int, ...]]] = deque()
        self.ended = False
        self.other: End
        self.receive: Any = None
        self.on_broken: Any = None

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        if not self.usable or not self.other.usable:
            raise ChannelBroken("the link is broken")
        if self.full:
            raise ChannelFull("the link is full")
        self.other.inbox.append((message, tuple(map(os.dup, fds))))

    def post(self, message: Message) -> None:
        if self.usable and self.other.usable:
            self.other.inbox.append((message, ()))

    @property
    def waits(self) -> bool:
        """Whether there is something to be delivered."""
        return self.usable and (bool(self.inbox) or self.ended)

    def deliver(self, count: int = 1) -> None:
        """So many messages, or the end of file."""
        for _ in range(count):
            if self.inbox:
                message, fds = self.inbox.popleft()
                self.receive(message, fds)
            elif self.waits:
                self.usable = False
                self.on_broken(self)

    def drain(self) -> None:
        while self.waits:
            self.deliver()

    def close(self) -> None:
        """This side ends it."""
        for _, fds in self.inbox:
            for fd in fds:
                os.close(fd)
        self.inbox.clear()
        self.usable = False
        self.other.ended = True


def link() -> tuple[End, End]:
    one, other = End(), End()
    one.other, other.other = other, one
    return one, other


@dataclass
class Answer:
    """One answer to a request, as the two sides see it."""

    transfer: Transfer
    descriptors: list[tuple[Descriptor, int]] = field(default_factory=list)
    """And the value that the array is full of."""
    producer: str = "open"
    """open, granted or failed."""
    consumer: str = "not read"
    """not read, or read: then OK is on its way."""


@dataclass
class Source:
    value: int
    array: np.ndarray = field(repr=False)


class Protocol(RuleBasedStateMachine):
    """Rules named as what happens."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(poisoned_arenas())
        self.values = itertools.count(1)
        self.peers = itertools.count(1)
        self.clock = ManualClock()
        self.sources: list[Source] = []
        self.answers: list[Answer] = []
        self.arrays: list[tuple[int, np.ndarray]] = []
        self.dialled: tuple[End, set[int]] | None = None
        self.dead: list[tuple[Exporter, HostMemory]] = []
        self.begin_producer()
        self.begin_consumer()

    # -- the two sides --------------------------------------------------------------------------

    def begin_producer(self) -> None:
        self.memory = HostMemory(arena_size=4 * PAGE)
        self.exporter = Exporter(
            f"p{next(self.peers)}",
            [self.memory],
            Statistics(),
            min_bytes={"host": 1, "cuda": 1},
            pinned_limits={"host": 12 * PAGE},
        )

    def begin_consumer(self) -> None:
        self.them = replace(THEM, peer=f"c{next(self.peers)}")
        self.far_memory = HostMemory(arena_size=PAGE)
        self.importer = Importer(
            self.them.peer, [self.far_memory], Statistics(), wake=lambda: None, clock=self.clock
        )
        self.consumer: Consumer | None = None
        self.old: list[End] = []
        self.near: End | None = None  # of the producer
        self.far: End | None = None
        self.connect()

    @property
    def up(self) -> bool:
        return self.near is not None and self.near.usable

    @property
    def producer(self) -> Producer:
        return self.importer.attach(self.exporter.peer)

    def connect(self) -> None:
        self.dial()
        self.attach()

    def dial(self) -> None:
        """The consumer accepts; the producer has not heard of it yet."""
        granted = self.exporter.granted_to(self.them.peer)
        near, far = link()
        producer = self.producer
        far.receive = partial(self.importer.receive, producer)
        far.on_broken = partial(self.importer.detach, producer)
        self.importer.connect(producer, far)
        if self.far is not None:
            self.old.append(self.far)
        self.far = far
        self.dialled = near, granted

    def attach(self) -> None:
        assert self.dialled is not None
        self.near, granted = self.dialled
        self.dialled = None
        peer = self.them.peer

        def receive(message: Message, fds: tuple[int, ...]) -> None:
            assert not fds
            self.exporter.receive(peer, message)

        self.near.receive, self.near.on_broken = receive, lambda end: None
        self.consumer = self.exporter.attach(self.them, self.near, granted)

    # -- answers --------------------------------------------------------------------------------

    def some(self, data: Any, **states: str) -> Answer:
        return data.draw(st.sampled_from(self.which(**states)))

    def which(self, **states: str) -> list[Answer]:
        return [a for a in self.answers if all(getattr(a, k) == v for k, v in states.items())]

    @precondition(lambda self: len(self.sources) < 6)
    @rule(count=st.integers(1, 3))
    def makes_arrays(self, count: int) -> None:
        for _ in range(count):
            value = next(self.values)
            self.sources.append(Source(value, np.full(PAGE // 8, value)))

    @precondition(lambda self: len(self.sources) > 2)
    @rule()
    def drops_an_array(self) -> None:
        del self.sources[0]

    @precondition(lambda self: self.up and self.sources and len(self.answers) < 12)
    @rule(data=st.data())
    def answers_a_request(self, data: Any) -> None:
        assert self.consumer is not None
        self.answers.append(Answer(self.exporter.begin(self.consumer)))
        self.export(self.answers[-1], data)

    @precondition(lambda self: self.answers and self.sources)
    @rule(data=st.data())
    def exports_more(self, data: Any) -> None:
        """Into an answer that is open, was cancelled meanwhile, or is serialized again."""
        self.export(data.draw(st.sampled_from(self.answers)), data)

    def export(self, answer: Answer, data: Any) -> None:
        source = data.draw(st.sampled_from(self.sources))
        try:
            descriptor = answer.transfer.export(source.array)
        except Refused as refused:
            reason = refused.reason
            assert reason in (
                Refusal.TRANSFER_CLOSED,
                Refusal.PEER_LEFT,
                Refusal.CHANNEL_FULL,
                Refusal.BUDGET,
                Refusal.DENIED,
            )
            return
        assert answer.producer == "open"
        if answer.consumer == "not read":
            answer.descriptors.append((descriptor, source.value))

    @precondition(lambda self: self.which(consumer="not read"))
    @rule(data=st.data())
    def the_answer_is_read(self, data: Any) -> None:
        """In time, or after the producer has given it up."""
        answer = self.some(data, consumer="not read")
        answer.consumer = "read"
        for descriptor, value in answer.descriptors:
            self.load(descriptor, value)

    def load(self, descriptor: Descriptor, value: int) -> None:
        try:
            array = self.importer.load(descriptor)
        except OpenFailed as failed:
            if failed.reason not in (Failure.BARRED, Failure.EVICTED, Failure.UNKNOWN_PEER):
                raise
            return
        self.arrays.append((value, array))

    @precondition(lambda self: any(a.descriptors for a in self.which(consumer="read")))
    @rule(data=st.data())
    def a_descriptor_is_replayed(self, data: Any) -> None:
        """Nothing that was read once is ever read again."""
        answer = self.some(data, consumer="read")
        for descriptor, _ in answer.descriptors:
            with pytest.raises(OpenFailed):
                self.importer.load(descriptor)

    @precondition(lambda self: self.which(producer="open", consumer="read"))
    @rule(data=st.data())
    def ok_arrives(self, data: Any) -> None:
        answer = self.some(data, producer="open", consumer="read")
        answer.producer = "granted"
        self.exporter.granted(answer.transfer)
        self.exporter.failed(answer.transfer)  # as comm.py always does at the end

    @precondition(lambda self: self.which(producer="open"))
    @rule(data=st.data())
    def the_answer_fails(self, data: Any) -> None:
        answer = self.some(data, producer="open")
        answer.producer = "failed"
        self.exporter.failed(answer.transfer)

    @precondition(lambda self: self.which(consumer="read"))
    @rule()
    def answers_are_forgotten(self) -> None:
        done = [a for a in self.which(consumer="read") if a.producer != "open"]
        self.answers = [a for a in self.answers if a not in done]

    # -- arrays that were received --------------------------------------------------------------

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), flush=st.booleans())
    def an_array_dies(self, data: Any, flush: bool) -> None:
        del self.arrays[data.draw(st.integers(0, len(self.arrays) - 1))]
        if flush:
            self.importer.flush()

    @precondition(lambda self: self.importer._ended)
    @rule()
    def releases_are_flushed(self) -> None:
        self.importer.flush()

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def an_array_is_written_into(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.arrays) - 1))
        value, (_, array) = next(self.values), self.arrays[index]
        array[:] = value
        self.arrays[index] = value, array

    @precondition(lambda self: self.importer.mappings()[0])
    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.importer.trim()

    @precondition(lambda self: self.memory._arenas)
    @rule()
    def memory_is_collected(self) -> None:
        for allocation in self.memory.collect():
            self.exporter.withdraw("host", allocation.id, allocation.generation)

    # -- the link -------------------------------------------------------------------------------

    @precondition(lambda self: self.near is not None and self.near.waits)
    @rule(count=st.integers(1, 4))
    def the_producer_reads(self, count: int) -> None:
        assert self.near is not None
        self.near.deliver(count)

    @precondition(lambda self: self.far is not None and self.far.waits)
    @rule(count=st.integers(1, 4))
    def the_consumer_reads(self, count: int) -> None:
        assert self.far is not None
        self.far.deliver(count)

    @precondition(lambda self: any(end.waits for end in self.old))
    @rule(data=st.data())
    def the_consumer_reads_an_old_link(self, data: Any) -> None:
        """What was sent before it was lost may be read after the next one was made."""
        data.draw(st.sampled_from([end for end in self.old if end.waits])).deliver()

    @precondition(lambda self: self.up)
    @rule(full=st.booleans())
    def the_link_is_full_or_not(self, full: bool) -> None:
        assert self.near is not None
        self.near.full = full

    @precondition(lambda self: self.up)
    @rule()
    def the_consumer_loses_the_link(self) -> None:
        """As after a message that makes no sense; the producer sees end of file some time later."""
        far = self.far
        assert far is not None
        if far.usable:
            far.close()
            self.importer.detach(self.producer, far)

    @precondition(lambda self: self.up)
    @rule()
    def the_producer_loses_the_link(self) -> None:
        assert self.near is not None
        self.near.close()

    def the_producer_reads_the_end(self) -> None:
        assert self.near is not None
        self.near.drain()

    @precondition(lambda self: not self.up and self.dialled is None)
    @rule()
    def the_producer_dials(self) -> None:
        self.dial()

    @precondition(lambda self: self.dialled is not None)
    @rule()
    def the_dial_succeeds(self) -> None:
        self.attach()

    # -- deaths ---------------------------------------------------------------------------------

    @precondition(lambda self: self.arrays)
    @rule()
    def the_consumer_dies(self) -> None:
        """And another takes its place."""
        self.drop_links()
        for answer in self.which(producer="open"):
            answer.producer = "failed"
            self.exporter.failed(answer.transfer)
        self.exporter.died(self.them.peer)
        assert self.exporter.leases == 0
        self.arrays.clear()
        self.answers.clear()
        self.end_consumer()
        self.begin_consumer()

    @precondition(lambda self: self.arrays)
    @rule()
    def the_producer_dies(self) -> None:
        """What was received lives on; another takes its place."""
        old = self.producer
        if self.far is not None:
            self.far.drain()  # a dead process's last words are read
        self.drop_links()
        self.importer.died(old)
        self.answers.clear()
        self.sources.clear()
        self.dead.append((self.exporter, self.memory))  # nobody recycles its memory
        self.begin_producer()
        self.connect()

    def drop_links(self) -> None:
        for end in (*self.old, self.near, self.far, self.dialled[0] if self.dialled else None):
            if end is not None:
                end.close()
        self.near = self.far = self.dialled = None
        self.old.clear()

    def end_producer(self) -> None:
        assert self.exporter.leases == self.exporter.pinned_bytes == 0, repr(self.exporter)
        assert self.exporter.close()
        self.memory.close()
        assert not self.memory._arenas

    def end_consumer(self) -> None:
        self.importer.flush()
        if self.importer.holding:
            gc.collect()
            self.importer.flush()
        assert self.importer.holding == 0
        assert self.importer.close()
        self.importer.clear()
        self.far_memory.close()

    # -- what must always hold ------------------------------------------------------------------

    @invariant()
    def every_array_reads_as_it_should(self) -> None:
        for value, array in self.arrays:
            assert (array == value).all(), (value, set(array.tolist()))

    @invariant()
    def what_is_held_is_pinned(self) -> None:
        held = set(self.producer.held)
        assert held <= set(self.exporter._ledger._leases), "freed though it is held"

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.exporter.pinned_bytes <= 12 * PAGE

    def teardown(self) -> None:
        """All comes to its end by itself: nothing is left on either side."""
        for answer in self.which(producer="open"):
            self.exporter.failed(answer.transfer)
        self.every_array_reads_as_it_should()
        self.arrays.clear()
        self.importer.flush()
        self.settle()
        if self.exporter.holds(self.them.peer) and not self.up:  # the endpoint dials again, if so
            if self.dialled is None:
                self.dial()
            self.attach()
            self.settle()
        assert self.exporter.leases == self.exporter.pinned_bytes == 0, repr(self.exporter)
        self.drop_links()
        self.importer.died(self.producer)
        self.exporter.died(self.them.peer)
        self.end_consumer()
        self.end_producer()
        for exporter, memory in self.dead:
            for peer in [*exporter._ledger._by_peer]:
                exporter.died(peer)
            memory.close()
        self.stack.close()

    def settle(self) -> None:
        for end in (self.near, self.far) * 3:
            if end is not None and end.receive is not None:
                end.drain()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.stress
@pytest.mark.timeout(1800)
class TestProtocolForLong(Protocol.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=60, deadline=None)


class Directed(Protocol):
    """Steps in an order that is rarely drawn."""

    def answer(self) -> Answer:
        """One array, exported, read, and gone again, while the OK is still on its way."""
        self.makes_arrays(1)
        assert self.consumer is not None
        answer = Answer(self.exporter.begin(self.consumer), consumer="read")
        self.answers.append(answer)
        descriptor = answer.transfer.export(self.sources[-1].array)
        self.consumer_loses_the_link_in_between()
        self.load(descriptor, self.sources[-1].value)
        self.arrays.clear()
        self.importer.flush()
        return answer

    def consumer_loses_the_link_in_between(self) -> None:
        assert self.far is not None
        self.far.drain()  # the announcement
        self.the_consumer_loses_the_link()


@pytest.mark.parametrize("ok", ["before the dial", "during the dial", "after the dial"])
def test_a_release_that_is_lost_before_its_ok_arrives(ok):
    machine = Directed()
    answer = machine.answer()
    order = [
        partial(machine.exporter.granted, answer.transfer),
        machine.the_producer_reads_the_end,
        machine.dial,
        machine.attach,
    ]
    grant = order.pop(0)
    order.insert({"before the dial": 1, "during the dial": 2, "after the dial": 3}[ok], grant)
    answer.producer = "granted"
    for step in order:
        step()
    machine.teardown()


def test_of_an_array_that_was_described_twice_the_unread_lease_ends():
    """One value that msgpack cannot take has all of a message serialized again."""
    machine = Directed()
    machine.makes_arrays(1)
    assert machine.consumer is not None
    [source] = machine.sources
    answer = Answer(machine.exporter.begin(machine.consumer), consumer="read")
    answer.transfer.export(source.array)
    machine.load(answer.transfer.export(source.array), source.value)
    machine.exporter.granted(answer.transfer)
    machine.settle()
    assert machine.exporter.leases == 1, "the one that is held"
    machine.every_array_reads_as_it_should()
    machine.teardown()
