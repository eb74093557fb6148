"""The source side: pins, offers and their settlement.

A `Transfer` is one answer to one request. While it is open, arrays are exported into it, each under
a lease of its own; then it is granted (the consumer said OK) or failed. The ledger decides; this
module holds the lock around it and carries its actions out.

`current_transfer` tells the serializer which answer it is writing. A context variable reaches the
thread on which Dask serializes large messages.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dask_gpuipc import lease
from dask_gpuipc.channel import Channel
from dask_gpuipc.errors import ChannelError, ChannelFull, Failure, Refusal, Refused
from dask_gpuipc.lease import Action, Event, Ledger
from dask_gpuipc.memory.base import Allocation, Memory, Preparation, Rung, Sample
from dask_gpuipc.stats import OTHERS, Statistics
from dask_gpuipc.wire import (
    Advertisement,
    Announce,
    Answer,
    Ask,
    Closed,
    Descriptor,
    Evicted,
    Held,
    Leave,
    Message,
    Nack,
    Probe,
    Proof,
    Release,
    Withdraw,
)

logger = logging.getLogger("distributed.gpuipc")

current_transfer: ContextVar[Transfer | None] = ContextVar("gpuipc_transfer", default=None)

Place = tuple[str, int, int]
"""Memory, allocation, generation."""

MAX_FAILURES: Final = 3
"""Failures of one allocation by bad luck, after which it is denied for a while."""
DENIED: Final = 10.0
"""Seconds that bad luck is remembered for."""
# What one failed open says about the next: the handle is bad. All else is bad luck.
_DENYING = (Failure.STALE, Failure.OPEN_FAILED, Failure.OUT_OF_BOUNDS, Failure.ERROR)


class Consumer:
    """What the exporter knows of one peer. Fields are guarded by `lock`."""

    def __init__(self, them: Advertisement, channel: Channel) -> None:
        self.peer = them.peer
        self.them = them
        self.channel = channel
        self.lock = threading.Lock()
        self.announced: set[Place] = set()
        self.denied: dict[Place, float] = {}
        """Allocations that failed to open there, and until when they go as bytes."""
        self.failures: Counter[Place] = Counter()
        self.unconfirmed: set[int] = set()
        """Leases that its list of what it holds has not named yet."""
        self.opens = set(them.devices)
        """UUIDs of the GPUs whose handles it opens: said so, or proven."""
        self.probed: dict[str, bytes] = {}
        """By UUID, the digest that proves it; empty until the sample is made."""
        self.left = False

    def __repr__(self) -> str:
        state = "left" if self.left else "here"
        return f"<Consumer {self.peer[:8]} {state}: {len(self.announced)} announced>"


class Transfer:
    """One answer. Exports may run on any thread, also after it has ended (they are refused).

    Parameters
    ----------
    consumer : Consumer or None
        None makes every export a counted refusal with ``reason``.
    to : str
        Name under which its arrays are counted; in Dask the requesting worker's address.
    """

    def __init__(
        self,
        exporter: Exporter,
        number: int,
        consumer: Consumer | None,
        prepared: Mapping[str, Preparation | None],
        reason: Refusal | None,
        to: str = OTHERS,
    ) -> None:
        self._exporter = exporter
        self.number = number
        self.consumer = consumer
        self.channel = None if consumer is None else consumer.channel
        self.prepared = prepared
        self.reason = reason
        self.to = to
        self.settled = False
        """Whether the consumer said OK."""
        self.parts: dict[int, Any] = {}
        """Objects that were taken apart beforehand, by their identity; see `objects`."""

    def __repr__(self) -> str:
        state = f"refused, {self.reason}" if self.reason else f"to {self.consumer!r}"
        return f"<Transfer {self.number} {state}>"

    @property
    def memories(self) -> Sequence[Memory]:
        """The exporter's, in the order in which they are asked."""
        return self._exporter.memories

    def takes(self, obj: Any) -> bool:
        """Whether an object is an array of some memory here."""
        return any(memory.accepts(obj) for memory in self.memories)

    def export(
        self,
        obj: Any,
        *,
        readonly: bool = False,
        ended: Callable[[], None] | None = None,
        source: Hashable | None = None,
        rung: Rung | None = None,
    ) -> Descriptor:
        """A descriptor for an array of any memory; raises `Refused`. See `Exporter.export`."""
        return self._exporter.export(
            self, obj, readonly=readonly, ended=ended, source=source, rung=rung
        )

    def retract(self, descriptors: Iterable[Descriptor]) -> None:
        """End leases whose descriptors will not be sent."""
        self._exporter.retract(descriptors)

    def admit(self) -> Consumer:
        """The consumer, if it may be offered anything now; raises `Refused`, uncounted."""
        return self._exporter.admit(self)

    def min_bytes(self, kind: str) -> int:
        """Bytes below which a buffer of a memory is not worth a handle."""
        return self._exporter.min_bytes(kind)

    def is_large(self, nbytes: int) -> bool:
        """Whether what goes as bytes is large enough for a handle in host memory."""
        return self._exporter.is_large(nbytes)

    def refuse(self, reason: Refusal, nbytes: int, detail: str = "") -> None:
        """`count`, if it is large."""
        self._exporter.refuse(reason, nbytes, self.to, detail)

    def count(self, reason: Refusal, nbytes: int, detail: str = "") -> None:
        """Count what goes as bytes, and why."""
        self._exporter.count(reason, nbytes, self.to, detail)


class Exporter:
    """Pins and leases of one endpoint. Thread-safe.

    Parameters
    ----------
    peer : str
        This endpoint's id.
    memories : sequence of Memory
        Asked in order which one takes an array.
    min_bytes : mapping
        By memory, the nominal size in bytes below which an array is refused.
    transfer : str
        ``auto``, ``copy`` or ``share``; each memory chooses its rung by it.
    pinned_limits : mapping, optional
        By memory, the bytes pinned at once, at most; None is without limit.
    """

    def __init__(
        self,
        peer: str,
        memories: Sequence[Memory],
        stats: Statistics,
        *,
        min_bytes: Mapping[str, int],
        transfer: str = "auto",
        pinned_limits: Mapping[str, int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.stopping = False
        self._clock = clock
        self._memories = {m.kind: m for m in memories}
        self._stats = stats
        self._min_bytes = min_bytes
        self._smallest = min((min_bytes[kind] for kind in self._memories), default=0)
        self._rungs = {m.kind: m.rung(transfer) for m in memories}
        self._ledger = Ledger(limits=pinned_limits)
        self._lock = threading.Lock()
        self._transfer_numbers = itertools.count(1)
        self._lease_numbers = itertools.count(1)
        self._consumers: dict[str, Consumer] = {}
        self._closed = False

    def __repr__(self) -> str:
        with self._lock:
            return f"<Exporter {self.peer[:8]}: {self._ledger!r}, {len(self._consumers)} consumers>"

    @property
    def leases(self) -> int:
        """Leases that live."""
        with self._lock:
            return len(self._ledger)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned for them."""
        with self._lock:
            return self._ledger.pinned_bytes

    # -- peers ------------------------------------------------------------------------------------

    def granted_to(self, peer: str) -> set[int]:
        """Leases that a peer has said OK to; asked for before its channel is dialled."""
        with self._lock:
            return self._ledger.granted_to(peer)

    def attach(self, them: Advertisement, channel: Channel, granted: set[int]) -> Consumer:
        """Begin with a peer, or go on with it over a new channel.

        ``granted`` is what `granted_to` gave before that was dialled. The peer begins with a list
        of what it holds; the rest of these was released over a channel that broke.
        """
        with self._lock:
            consumer = self._consumers.get(them.peer)
            disputed = self._ledger.disputed(them.peer)
            if consumer is None:
                consumer = self._consumers[them.peer] = Consumer(them, channel)
        with consumer.lock:
            consumer.channel = channel
            consumer.announced.clear()
            consumer.unconfirmed = granted
            consumer.probed.clear()  # an answer may have been lost with the old one
        for transfer in disputed:
            channel.post(Ask(transfer))
        return consumer

    def consumer(self, peer: str) -> Consumer | None:
        """A peer that is attached."""
        return self._consumers.get(peer)

    def consumers(self) -> list[Consumer]:
        """All peers that are attached."""
        with self._lock:
            return list(self._consumers.values())

    def holds(self, peer: str) -> int:
        """Leases that a peer has."""
        with self._lock:
            return self._ledger.held_by(peer)

    def died(self, peer: str) -> None:
        """A peer's process ended: everything that it held is free."""
        with self._lock:
            self._consumers.pop(peer, None)
        self._handle(lease.PeerDied(peer))

    def forget(self, peer: str) -> None:
        """Drop a peer that left and holds nothing any more."""
        with self._lock:
            if not self._ledger.held_by(peer):
                self._consumers.pop(peer, None)

    def receive(self, peer: str, message: Message) -> None:
        """Take a consumer's message in. On any thread; raises nothing."""
        match message:
            case Release(leases):
                self._handle(lease.Released(peer, leases))
            case Answer(transfer, leases):
                self._handle(lease.Answered(peer, transfer, leases))
            case Nack():
                self._nacked(peer, message)
            case Held(leases, last):
                self._confirmed(peer, leases, last)
            case Evicted(memory, allocation, generation):
                self._change(peer, evicted=(memory, allocation, generation))
            case Proof():
                self._proved(peer, message)
            case Leave():
                self._change(peer, left=True)
            case Closed():
                # A descriptor that is still on its way will be refused there.
                self._change(peer, left=True)
                self._handle(lease.PeerDied(peer))
            case _:
                logger.debug("a consumer sent %s", type(message).__name__)

    def _nacked(self, peer: str, nack: Nack) -> None:
        place = (nack.memory, nack.allocation, nack.generation)
        self._change(peer, evicted=place, failure=nack.reason)
        self._handle(lease.Released(peer, (nack.lease,)))

    def _confirmed(self, peer: str, leases: tuple[int, ...], last: bool) -> None:
        consumer = self._consumers.get(peer)
        if consumer is None:
            return
        with consumer.lock:
            consumer.unconfirmed.difference_update(leases)
            if not last:
                return
            lost, consumer.unconfirmed = consumer.unconfirmed, set()
        self._handle(lease.Released(peer, tuple(lost)))

    def _change(
        self,
        peer: str,
        *,
        evicted: Place | None = None,
        failure: Failure | None = None,
        left: bool = False,
    ) -> None:
        consumer = self._consumers.get(peer)
        if consumer is None:
            return
        with consumer.lock:
            consumer.left |= left
            if evicted is not None:
                consumer.announced.discard(evicted)
                if failure is not None:
                    self._deny(consumer, evicted, failure)

    def _deny(self, consumer: Consumer, place: Place, failure: Failure) -> None:
        # Bad luck too must end some time: whoever asks for handles again and again, as
        # Scheduler.replicate does, would do so for ever.
        consumer.failures[place] += 1
        if failure in _DENYING:
            consumer.denied[place] = math.inf
        elif consumer.failures[place] >= MAX_FAILURES:
            del consumer.failures[place]
            consumer.denied.setdefault(place, self._clock() + DENIED)

    def withdraw(self, kind: str, allocation: int, generation: int) -> None:
        """An allocation is gone: let every peer that knows of it forget it."""
        place = (kind, allocation, generation)
        for consumer in self.consumers():
            with consumer.lock:
                known = place in consumer.announced
                consumer.announced.discard(place)
                consumer.denied.pop(place, None)
                consumer.failures.pop(place, None)
            if known:
                consumer.channel.post(Withdraw(*place))

    def close(self) -> bool:
        """End for good if no lease lives: no offer will be taken any more. Whether it did."""
        with self._lock:
            self._closed |= not len(self._ledger)
            return self._closed

    # -- what a peer can open ---------------------------------------------------------------------

    def prepare(self, consumer: Consumer, objects: Iterable[Any]) -> dict[str, Preparation]:
        """Begin to finish the arrays among these for a peer; by memory. Raises nothing.

        What a peer has not been seen to open is proven meanwhile, for later answers.
        """
        objects, prepared = list(objects), {}
        with consumer.lock:
            opens = frozenset(consumer.opens)
        for memory in self._memories.values():
            arrays = [x for x in objects if memory.accepts(x)] if memory.prepares else []
            preparation = memory.prepare(arrays, opens) if arrays else None
            if preparation is not None:
                prepared[memory.kind] = preparation
                self._get_ahead(consumer, memory, preparation)
        return prepared

    def _get_ahead(self, consumer: Consumer, memory: Memory, preparation: Preparation) -> None:
        for allocation in preparation.allocations:
            with contextlib.suppress(Refused):  # it is told when an array is exported
                self._announce(consumer, memory, allocation)
        for device in preparation.unproven:
            self._probe(consumer, memory, device)

    def _probe(self, consumer: Consumer, memory: Memory, device: str) -> None:
        """Have a sample of a device's memory read by a peer, once for each channel to it."""
        prover = memory.prover
        with consumer.lock:
            if prover is None or device in consumer.probed:
                return
            consumer.probed[device] = b""
        sample = prover.sample(device)
        sample.add_done_callback(partial(self._send_probe, consumer, memory.kind, device))

    def _send_probe(self, consumer: Consumer, kind: str, device: str, made: Future[Sample]) -> None:
        error = made.exception()
        if error is not None:
            logger.info("%s cannot be proven to anybody: %s", device, error)
            return
        sample = made.result()
        with consumer.lock:
            consumer.probed[device] = sample.digest
        consumer.channel.post(Probe(kind, device, sample.nbytes, sample.handle))

    def _proved(self, peer: str, proof: Proof) -> None:
        consumer = self._consumers.get(peer)
        if consumer is None:
            return
        with consumer.lock:
            digest = consumer.probed.get(proof.device)
            good = bool(digest) and digest == proof.digest
            if good:
                consumer.opens.add(proof.device)
        logger.info("Process %d can read %s: %s", consumer.them.pid, proof.device, good)

    # -- transfers --------------------------------------------------------------------------------

    def begin(
        self,
        consumer: Consumer | None,
        prepared: Mapping[str, Preparation | None] | None = None,
        reason: Refusal | None = None,
        to: str = OTHERS,
    ) -> Transfer:
        """Open a transfer to a peer, or one that only counts why nothing goes by handle.

        ``to`` is the name under which its arrays are counted.
        """
        number = next(self._transfer_numbers)
        if consumer is not None:
            self._handle(lease.Opened(number, consumer.peer))
        return Transfer(self, number, consumer, prepared or {}, reason, to)

    def granted(self, transfer: Transfer) -> None:
        """The consumer said OK. On the loop, as dialling is.

        A channel that was lost meanwhile may have taken a release with it, of a lease that was not
        granted yet as the next one was dialled: then the consumer is asked, as if OK were lost.
        """
        consumer, channel = transfer.consumer, transfer.channel
        transfer.settled = True
        if channel is None:
            return
        if channel.usable and consumer and consumer.channel is channel:
            self._handle(lease.Granted(transfer.number))
        else:
            self._handle(lease.Failed(transfer.number))

    def failed(self, transfer: Transfer) -> None:
        """The answer ended without an OK. May be called after `granted`, to no effect but one.

        The arrays that were prepared for it are let go of: a timer that was made meanwhile may keep
        the transfer, by its copy of the context variables, for as long as it runs.
        """
        if not transfer.settled and transfer.consumer is not None:
            self._handle(lease.Failed(transfer.number))
        transfer.prepared = {}
        transfer.parts.clear()

    def export(
        self,
        transfer: Transfer,
        obj: Any,
        *,
        readonly: bool = False,
        ended: Callable[[], None] | None = None,
        source: Hashable | None = None,
        rung: Rung | None = None,
    ) -> Descriptor:
        """Pin an array, announce its allocation if need be, and offer a lease on it.

        Parameters
        ----------
        readonly : bool
            The consumer's array cannot be written, where its memory can see to that.
        ended : callable, optional
            Called once when the pin is released, on any thread; also where it ends in a refusal
            after the pin was made.
        source : hashable, optional
            Tells it from others of the transfer, instead of its identity: one that comes twice
            shows that a message was written twice.
        rung : Rung, optional
            Instead of the memory's usual one.

        Raises
        ------
        Refused
            With the reason, which has been counted. Nothing else is ever raised.
        """
        try:
            memory = self._memory_of(obj)
            nbytes = int(obj.nbytes)
            if nbytes < self._min_bytes[memory.kind]:
                raise Refused(Refusal.TOO_SMALL)
        except Refused as refused:
            if refused.reason is not Refusal.UNSUPPORTED_TYPE or self._is_large(obj):
                self._stats.refused(refused.reason, refused.detail)
            raise
        try:
            descriptor = self._export(
                transfer, memory, obj, readonly, ended, source or id(obj), rung
            )
        except Refused as refused:
            self.count(refused.reason, nbytes, transfer.to, refused.detail)
            raise
        except Exception as error:
            # Whatever else dumps raised would leave the task pending for ever.
            self.count(Refusal.ERROR, nbytes, transfer.to, repr(error), error)
            raise Refused(Refusal.ERROR, repr(error)) from error
        self._stats.sent(descriptor.rung, nbytes, transfer.to)
        return descriptor

    @property
    def memories(self) -> Sequence[Memory]:
        """The memories here, in the order in which they are asked."""
        return tuple(self._memories.values())

    def min_bytes(self, kind: str) -> int:
        """Bytes below which arrays of a memory go as bytes."""
        return self._min_bytes.get(kind, self._smallest)

    def retract(self, descriptors: Iterable[Descriptor]) -> None:
        """End leases whose descriptors will not be sent."""
        for descriptor in descriptors:
            self._handle(lease.Released(descriptor.consumer, (descriptor.lease,)))

    def is_large(self, nbytes: int) -> bool:
        """Whether what goes as bytes is large enough for a handle in host memory."""
        return nbytes >= self.min_bytes("host")

    def refuse(self, reason: Refusal, nbytes: int, to: str = OTHERS, detail: str = "") -> None:
        """`count`, if it is large."""
        if self.is_large(nbytes):
            self.count(reason, nbytes, to, detail)

    def count(
        self,
        reason: Refusal,
        nbytes: int,
        to: str = OTHERS,
        detail: str = "",
        error: Exception | None = None,
    ) -> None:
        """Count what goes as bytes, and why."""
        self._stats.refused(reason, detail, error)
        self._stats.sent(Rung.BYTES.value, nbytes, to)

    def _memory_of(self, obj: Any) -> Memory:
        for memory in self._memories.values():
            if memory.accepts(obj):
                return memory
        raise Refused(Refusal.UNSUPPORTED_TYPE, type(obj).__name__)

    def _is_large(self, obj: Any) -> bool:
        try:
            nbytes = obj.nbytes
        except Exception:  # noqa: BLE001 -- somebody's property; what it raises is not our business
            return False
        return isinstance(nbytes, int) and nbytes >= max(self._smallest, 1)

    def _export(
        self,
        transfer: Transfer,
        memory: Memory,
        array: Any,
        readonly: bool,
        ended: Callable[[], None] | None,
        source: Hashable,
        rung: Rung | None,
    ) -> Descriptor:
        consumer = self._admit(transfer, memory, array)
        pin = memory.pin(array, transfer.prepared.get(memory.kind))
        if ended is not None:
            pin.release = partial(_in_turn, pin.release, ended)
        try:
            self._announce(consumer, memory, pin.allocation)
        except BaseException:
            pin.release()
            raise
        number = next(self._lease_numbers)
        self._offer(
            lease.Offered(
                transfer.number,
                number,
                pin,
                (memory.kind, *pin.block),
                pin.nbytes,
                source,
                memory.kind,
            )
        )
        return Descriptor(
            producer=self.peer,
            consumer=consumer.peer,
            transfer=transfer.number,
            lease=number,
            rung=(pin.rung or rung or self._rungs[memory.kind]).value,
            memory=memory.kind,
            allocation=pin.allocation.id,
            generation=pin.allocation.generation,
            layout=replace(pin.layout, writeable=False) if readonly else pin.layout,
        )

    def admit(self, transfer: Transfer) -> Consumer:
        """The consumer of a transfer, if it may be offered anything now; raises `Refused`."""
        consumer = transfer.consumer
        if transfer.reason is not None or consumer is None:
            raise Refused(transfer.reason or Refusal.NO_ADVERTISEMENT)
        if self.stopping:
            raise Refused(Refusal.STOPPING)
        if consumer.left or not consumer.channel.usable:
            raise Refused(Refusal.PEER_LEFT)
        return consumer

    def _admit(self, transfer: Transfer, memory: Memory, array: Any) -> Consumer:
        consumer = self.admit(transfer)
        if memory.kind not in consumer.them.memories:
            raise Refused(Refusal.NO_COMMON_MEMORY, memory.kind)
        if memory.pin_copies(array):  # which would be for nothing without room for it
            with self._lock:
                if not self._ledger.fits(int(array.nbytes), memory.kind):
                    raise Refused(Refusal.BUDGET)
        return consumer

    def _announce(self, consumer: Consumer, memory: Memory, allocation: Allocation) -> None:
        if allocation.device and allocation.device not in consumer.opens:
            raise Refused(Refusal.OTHER_DEVICE, allocation.device)
        place = (memory.kind, allocation.id, allocation.generation)
        with consumer.lock:
            if consumer.denied.get(place, 0.0) > self._clock():
                raise Refused(Refusal.DENIED, f"{memory.kind} allocation {allocation.id}")
            consumer.denied.pop(place, None)
            if place in consumer.announced:
                return
            handle = memory.handle(allocation)
            announcement = Announce(*place, allocation.nbytes, allocation.device, handle.payload)
            try:
                consumer.channel.send(announcement, handle.fds)
            except ChannelFull as error:
                raise Refused(Refusal.CHANNEL_FULL, str(error)) from error
            except ChannelError as error:
                raise Refused(Refusal.PEER_LEFT, str(error)) from error
            consumer.announced.add(place)

    def _offer(self, offer: lease.Offered) -> None:
        refusals = [a for a in self._handle(offer) if isinstance(a, lease.Refuse)]
        for refusal in refusals:
            raise Refused(refusal.reason)

    def _handle(self, event: Event) -> list[Action]:
        with self._lock:
            if self._closed and isinstance(event, lease.Offered):
                actions: list[Action] = [
                    lease.Refuse(event.lease, Refusal.STOPPING),
                    lease.Unpin(event.pin),
                ]
            else:
                actions = self._ledger.handle(event)
        for action in actions:
            match action:
                case lease.Unpin(pin):
                    pin.release()  # type: ignore[attr-defined]
                case lease.Ask(peer, transfer):
                    self._ask(peer, transfer)
        return actions

    def _ask(self, peer: str, transfer: int) -> None:
        consumer = self._consumers.get(peer)
        if consumer is not None:
            consumer.channel.post(Ask(transfer))


def _in_turn(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()
