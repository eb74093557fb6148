"""The source side: pins, offers and their settlement.

A `Transfer` is one answer to one request. While it is open, arrays are exported into it, each under
a lease of its own; then it is granted (the consumer said OK) or failed. The ledger decides; this
module holds the lock around it and carries its actions out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dask_gpuipc import lease
from dask_gpuipc.channel import Channel
from dask_gpuipc.consumers import Consumer, Place
from dask_gpuipc.errors import Failure, Refusal, Refused
from dask_gpuipc.lease import Action, Event, Ledger
from dask_gpuipc.memory.base import Memory, Preparation, Rung
from dask_gpuipc.stats import OTHERS, Statistics
from dask_gpuipc.transfer import Transfer
from dask_gpuipc.wire import (
    Advertisement,
    Answer,
    Ask,
    Closed,
    Descriptor,
    Evicted,
    Held,
    Leave,
    Message,
    Nack,
    Proof,
    Release,
)

logger = logging.getLogger("distributed.gpuipc")


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
                consumer = self._consumers[them.peer] = Consumer(them, channel, self._clock)
        consumer.connect(channel, granted)
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
                self._evicted(peer, (memory, allocation, generation))
            case Proof():
                with contextlib.suppress(KeyError):
                    self._consumers[peer].proved(message)
            case Leave():
                self._left(peer)
            case Closed():
                # A descriptor that is still on its way will be refused there.
                self._left(peer)
                self._handle(lease.PeerDied(peer))
            case _:
                logger.debug("a consumer sent %s", type(message).__name__)

    def _nacked(self, peer: str, nack: Nack) -> None:
        self._evicted(peer, (nack.memory, nack.allocation, nack.generation), nack.reason)
        self._handle(lease.Released(peer, (nack.lease,)))

    def _evicted(self, peer: str, place: Place, failure: Failure | None = None) -> None:
        consumer = self._consumers.get(peer)
        if consumer is not None:
            consumer.evicted(place, failure)

    def _confirmed(self, peer: str, leases: tuple[int, ...], last: bool) -> None:
        consumer = self._consumers.get(peer)
        if consumer is not None:
            lost = consumer.confirm(leases, last)
            if last:
                self._handle(lease.Released(peer, tuple(lost)))

    def _left(self, peer: str) -> None:
        consumer = self._consumers.get(peer)
        if consumer is not None:
            consumer.left = True

    def withdraw(self, kind: str, allocation: int, generation: int) -> None:
        """An allocation is gone: let every peer that knows of it forget it."""
        for consumer in self.consumers():
            consumer.withdraw((kind, allocation, generation))

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
        opens = consumer.opens
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
                consumer.announce(memory, allocation)
        for device in preparation.unproven:
            consumer.probe(memory, device)

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
            consumer.announce(memory, pin.allocation)
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
