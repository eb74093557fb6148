"""The consumer side: announcements, mappings, arrays and their releases.

An allocation of another process is opened at most once here, however many arrays lie in it, and
cached; it is closed when no array of it lives and it has been idle. Each array that shares memory
holds a lease until the root of its buffer dies; then its release is queued, fenced and sent.

Locks: `Importer._lock` guards the tables and is never held over a call into a memory or a channel;
each entry's own lock makes an open happen once. The finalizer takes neither, since the garbage
collector may run it anywhere: it only appends to a queue.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from dask_gpuipc.channel import Channel
from dask_gpuipc.errors import Failure, OpenFailed
from dask_gpuipc.memory.base import Imported, Memory, Rung
from dask_gpuipc.memory.base import Mapping as OpenMapping
from dask_gpuipc.producers import (
    Entry,
    IdleLimits,
    Producer,
    check_inside,
    close_entry,
    close_fds,
)
from dask_gpuipc.stats import Statistics
from dask_gpuipc.wire import (
    MAX_LEASES,
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
    Welcome,
    Withdraw,
)

logger = logging.getLogger("distributed.gpuipc")

MAX_ANNOUNCED: Final = 4096
"""Announcements kept; the longest idle one is evicted beyond it."""
ON_ITS_WAY: Final = 60.0
"""Seconds that an announcement waits, at least, for the first descriptor that names it."""
OPENING: Final = 0.5
"""Seconds that a load waits, at most, for another thread that is opening the same allocation."""

failures: ContextVar[list[OpenFailed] | None] = ContextVar("gpuipc_failures", default=None)
"""Set while somebody stands ready to ask again as bytes; see `collecting_failures`."""

_importers: weakref.WeakValueDictionary[str, Importer] = weakref.WeakValueDictionary()


def importer_of(consumer: str) -> Importer:
    """The importer that a descriptor names; several workers may live in one process."""
    importer = _importers.get(consumer)
    if importer is None:
        raise OpenFailed(Failure.UNKNOWN_CONSUMER, f"no endpoint {consumer[:8]!r} in this process")
    return importer


@contextlib.contextmanager
def collecting_failures() -> Iterator[list[OpenFailed]]:
    """Within, a failed load is noted in the list instead of raised, and gives None."""
    found: list[OpenFailed] = []
    token = failures.set(found)
    try:
        yield found
    finally:
        failures.reset(token)


class Importer:
    """Mappings and held leases of one endpoint. Thread-safe.

    Parameters
    ----------
    peer : str
        This endpoint's id, by which descriptors find it.
    wake : callable
        Takes no argument, may be called from any thread and from finalizers; has `flush` called
        soon on the loop.
    idle : mapping
        `IdleLimits` by memory.
    """

    def __init__(
        self,
        peer: str,
        memories: Sequence[Memory],
        stats: Statistics,
        wake: Callable[[], None],
        *,
        idle: Mapping[str, IdleLimits] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self._memories = {m.kind: m for m in memories}
        self._stats = stats
        self._wake = wake
        self._idle = idle or {}
        self._clock = clock
        self._lock = threading.Lock()
        self._producers: dict[str, Producer] = {}
        self._ended: deque[tuple[Producer, int, str]] = deque()
        self._owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._closed = False
        self._cleared = False
        _importers[peer] = self

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<Importer {self.peer[:8]}: {sum(len(p.held) for p in self._producers.values())} "
                f"held, {len(self._producers)} producers>"
            )

    @property
    def holding(self) -> int:
        """Leases of others that arrays here hold."""
        with self._lock:
            return sum(len(p.held) for p in self._producers.values())

    @property
    def producers(self) -> int:
        """Peers that are attached."""
        return len(self._producers)

    def mappings(self) -> tuple[int, int]:
        """Number and bytes of the allocations that are open."""
        with self._lock:
            open_now = [
                e.mapping.nbytes
                for p in self._producers.values()
                for e in p.entries.values()
                if e.mapping is not None
            ]
        return len(open_now), sum(open_now)

    # -- peers ------------------------------------------------------------------------------------

    def attach(self, peer: str) -> Producer:
        """Begin with a producer, or go on with it; the caller sets its channel."""
        with self._lock:
            return self._producers.setdefault(peer, Producer(peer))

    def connect(self, producer: Producer, channel: Channel) -> None:
        """Welcome a producer on a new channel, and tell what is held, as releases may be lost.

        In this order: at its Welcome a producer announces and answers, and another thread may load
        from the answer before this one goes on. It must find the channel to drain.
        """
        with self._lock:
            producer.channel = channel
            held = list(producer.held)
        channel.post(Welcome(self.peer))
        for i in range(0, max(len(held), 1), MAX_LEASES):
            last = i + MAX_LEASES >= len(held)
            channel.post(Held(tuple(held[i : i + MAX_LEASES]), last))

    def detach(self, producer: Producer, channel: Channel) -> None:
        """The channel ended while the process lives: what is held stays held."""
        with self._lock:
            if producer.channel is channel:
                producer.channel = None
            gone = self._forget(producer)
        self._close(producer, gone)

    def knows(self, peer: str) -> bool:
        """Whether a producer is attached."""
        return peer in self._producers

    def _forget(self, producer: Producer) -> list[Entry]:
        """Forget a producer that comes to no more, and return what is to be closed. Lock held.

        One that merely lost its channel is kept: what it barred must stay barred.
        """
        ended = producer.dead or (producer.left and producer.channel is None)
        if not ended or producer.held:
            return []
        self._producers.pop(producer.peer, None)
        return list(producer.entries.values())

    def died(self, producer: Producer) -> None:
        """A producer's process ended. Arrays in its memory live on; nobody waits for releases."""
        with self._lock:
            producer.dead = True
            producer.channel = None
            self._forget(producer)
            gone = list(producer.entries.values())
            for entry in gone:
                entry.withdrawn = True
            idle = [e for e in gone if not e.uses]
        self._close(producer, idle)

    def receive(self, producer: Producer, message: Message, fds: tuple[int, ...]) -> None:
        """Take a producer's message in; owns the descriptors. On any thread; raises nothing."""
        if not isinstance(message, Announce):
            close_fds(fds)
        match message:
            case Announce():
                self._announced(producer, message, fds)
            case Withdraw(memory, allocation, generation):
                self._withdraw(producer, (memory, allocation, generation))
            case Ask(transfer):
                self._answer(producer, transfer)
            case Probe():
                self._examine(producer, message)
            case Leave():
                producer.left = True
            case _:
                logger.debug("a producer sent %s", type(message).__name__)

    def _announced(self, producer: Producer, announce: Announce, fds: tuple[int, ...]) -> None:
        memory = self._memories.get(announce.memory)
        entry = Entry(announce, fds, last_use=self._clock())
        if memory is None or announce.nbytes <= 0:
            close_fds(fds)
            return
        with self._lock:
            known = producer.entries.get(entry.place)
            if known is None and not self._closed:
                producer.entries[entry.place] = entry
        if known is not None or self._closed:
            close_fds(fds)  # announced again over a new channel
            return
        self._supersede(producer, entry)
        if memory.executor is not None:
            memory.executor.submit(self._open_ahead, memory, entry)

    def _supersede(self, producer: Producer, entry: Entry) -> None:
        """Let go of what the same allocation was before, and of too much."""
        with self._lock:
            old = [
                e
                for e in producer.entries.values()
                if e is not entry and e.place[:2] == entry.place[:2]
            ]
            for e in old:
                e.withdrawn = True
            drop = [e for e in old if not e.uses]
            if len(producer.entries) > MAX_ANNOUNCED:
                idle = [e for e in producer.entries.values() if not e.uses and e is not entry]
                drop += sorted(idle, key=lambda e: e.last_use)[: MAX_ANNOUNCED // 8]
        self._close(producer, drop, forget=True)

    def _open_ahead(self, memory: Memory, entry: Entry) -> None:
        # A failure comes again, and is told, when an array is loaded.
        with contextlib.suppress(OpenFailed):
            self._opened(memory, entry)

    def _withdraw(self, producer: Producer, place: tuple[str, int, int]) -> None:
        with self._lock:
            entry = producer.entries.get(place)
            if entry is None:
                return
            entry.withdrawn = True
            idle = not entry.uses
        if idle:
            self._close(producer, [entry])

    def _answer(self, producer: Producer, transfer: int) -> None:
        """Tell what is held of a transfer; what was not loaded by now never will be."""
        with self._lock:
            producer.barred.add(transfer)
            leases = tuple(producer.transfers.get(transfer, ()))
            channel = producer.channel
        if channel is not None:
            channel.post(Answer(transfer, leases))

    def _examine(self, producer: Producer, probe: Probe) -> None:
        """Tell what is read of a producer's sample, as soon as that is known."""
        memory = self._memories.get(probe.memory)
        prover = memory.prover if memory is not None else None
        if prover is None:
            self._prove(producer, probe, b"")
            return
        seen = prover.examine(probe.device, probe.nbytes, probe.handle)
        seen.add_done_callback(lambda done: self._prove(producer, probe, done.result()))

    def _prove(self, producer: Producer, probe: Probe, digest: bytes) -> None:
        with self._lock:
            channel = producer.channel
        if channel is not None:
            channel.post(Proof(probe.memory, probe.device, digest))

    # -- arrays -----------------------------------------------------------------------------------

    def load(self, descriptor: Descriptor) -> Any:
        """The array of a descriptor.

        Runs on the loop or on any thread; waits for nothing slower than opening a handle.

        Raises
        ------
        OpenFailed
            With the reason, which has been counted and told to the producer. Nothing else.
        """
        try:
            return self._load(descriptor)
        except OpenFailed as failed:
            self._failed(descriptor, failed)
            raise
        except Exception as error:
            # Whatever else loads raised would leave the task pending for ever.
            unforeseen = OpenFailed(Failure.ERROR, repr(error))
            self._failed(descriptor, unforeseen, error)
            raise unforeseen from error

    def _load(self, descriptor: Descriptor) -> Any:
        producer = self._producers.get(descriptor.producer)
        if producer is None:
            raise OpenFailed(Failure.UNKNOWN_PEER, f"no channel to {descriptor.producer[:8]!r}")
        channel = producer.channel
        if channel is not None:
            channel.drain()  # the announcement was sent before the descriptor
        entry = self._take(producer, descriptor)
        memory = self._memories[descriptor.memory]
        try:
            mapping = self._opened(memory, entry)
            imported = memory.load(mapping, descriptor.layout, Rung(descriptor.rung))
            self._watch(producer, descriptor, imported)
        except BaseException:
            entry.withdrawn |= entry.mapping is None  # announced again, it is taken in anew
            self._give_back(producer, [descriptor.lease])
            raise
        self._stats.received(imported.rung.value, descriptor.layout.nbytes, memory.kind)
        return imported.array

    def owners(self) -> list[Any]:
        """The roots of all arrays here that hold a lease; each keeps its lease while it lives."""
        return list(self._owners)

    @property
    def memories(self) -> Sequence[Memory]:
        """The memories here, in the order in which they are asked."""
        return tuple(self._memories.values())

    def memory(self, kind: str) -> Memory:
        """The memory of a kind; raises `OpenFailed` if it is not shared here."""
        memory = self._memories.get(kind)
        if memory is None:
            raise OpenFailed(Failure.MALFORMED, f"{kind!r} memory; here are {list(self._memories)}")
        return memory

    def failed(self, reason: Failure, detail: str) -> None:
        """Count an object that could not be made of what was loaded."""
        self._stats.failed(reason, detail)

    def owned(self, obj: Any, producer: str, other: Callable[[Any], Any] = lambda obj: obj) -> Any:
        """An object without the memory of a producer in it: arrays of it are replaced by copies.

        Looks into lists, tuples and dicts; ``other`` is asked about whatever else is no array.
        Returns the same object if there is nothing to replace.
        """
        if type(obj) in (list, tuple):
            new = [self.owned(x, producer, other) for x in obj]
            changed = any(a is not b for a, b in zip(new, obj, strict=True))
            return type(obj)(new) if changed else obj
        if type(obj) is dict:
            items = {k: self.owned(v, producer, other) for k, v in obj.items()}
            return items if any(items[k] is not obj[k] for k in obj) else obj
        for memory in self._memories.values():
            if memory.accepts(obj):
                return memory.own(obj) if self.lent(memory, obj, producer) else obj
        return other(obj)

    def lent(self, memory: Memory, array: Any, producer: str) -> bool:
        """Whether an array lies in memory of a producer."""
        owner = memory.owner_of(array)
        return owner is not None and self._owners.get(owner) == producer

    def _take(self, producer: Producer, descriptor: Descriptor) -> Entry:
        place = (descriptor.memory, descriptor.allocation, descriptor.generation)
        with self._lock:
            entry = producer.entries.get(place)
            if self._closed:
                raise OpenFailed(Failure.BARRED, "this endpoint has ended")
            if descriptor.transfer in producer.barred:
                raise OpenFailed(Failure.BARRED, f"transfer {descriptor.transfer}")
            if descriptor.lease in producer.loaded:
                raise OpenFailed(Failure.BARRED, f"lease {descriptor.lease} was loaded before")
            if entry is None:
                raise OpenFailed(Failure.EVICTED, f"{place} is not announced")
            check_inside(descriptor, entry.announcement)
            producer.loaded.add(descriptor.lease)
            producer.held[descriptor.lease] = (descriptor.transfer, entry)
            producer.transfers.setdefault(descriptor.transfer, set()).add(descriptor.lease)
            entry.uses += 1
            entry.loaded = True
            return entry

    def _opened(self, memory: Memory, entry: Entry) -> OpenMapping:
        # Another thread may be at it, in a driver that hangs: the event loop may not hang with it.
        if not entry.lock.acquire(timeout=OPENING):
            raise OpenFailed(Failure.BUSY, f"another thread has been opening it for {OPENING} s")
        try:
            if entry.mapping is not None:
                self._stats.hit()
                return entry.mapping
            fds, entry.fds = entry.fds, ()
            entry.mapping = memory.open(entry.announcement, fds)
            self._stats.opened()
            return entry.mapping
        finally:
            entry.lock.release()

    def _watch(self, producer: Producer, descriptor: Descriptor, imported: Imported) -> None:
        end = (producer, descriptor.lease, descriptor.memory)
        if imported.owner is not None:
            self._owners[imported.owner] = producer.peer
            finalizer = weakref.finalize(imported.owner, _ended, self._ended, self._wake, end)
            finalizer.atexit = False
        elif imported.done is not None:
            imported.done.add_done_callback(
                lambda _: self._give_back(producer, [descriptor.lease], tell=True)
            )

    def _failed(
        self, descriptor: Descriptor, failed: OpenFailed, cause: Exception | None = None
    ) -> None:
        """Count a failed load, and tell the producer, which frees the lease.

        Not of a lease that an array here holds (a replayed or forged descriptor named it); and a
        lease that was told of is never loaded again.
        """
        self._stats.failed(failed.reason, failed.detail, cause)
        with self._lock:
            producer = self._producers.get(descriptor.producer)
            if producer is None or descriptor.lease in producer.held:
                return
            producer.loaded.add(descriptor.lease)
            channel = producer.channel
        if channel is not None:
            place = (descriptor.memory, descriptor.allocation, descriptor.generation)
            channel.post(Nack(descriptor.lease, failed.reason, *place))

    # -- releases ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Fence and send the releases that finalizers queued. On the loop's thread."""
        ended: dict[str, list[tuple[Producer, int]]] = {}
        while self._ended:
            producer, lease, kind = self._ended.popleft()
            ended.setdefault(kind, []).append((producer, lease))
        for kind, batch in ended.items():
            fence = self._memories[kind].fence()
            if fence is None:
                self._release(batch)
            else:
                fence.add_done_callback(lambda _, batch=batch: self._release(batch))  # type: ignore[misc]

    def _release(self, batch: Iterable[tuple[Producer, int]]) -> None:
        by_producer: dict[Producer, list[int]] = {}
        for producer, lease in batch:
            by_producer.setdefault(producer, []).append(lease)
        for producer, leases in by_producer.items():
            self._give_back(producer, leases, tell=True)

    def _give_back(self, producer: Producer, leases: list[int], tell: bool = False) -> None:
        now = self._clock()
        unused = []
        with self._lock:
            channel = producer.channel
            for lease in leases:
                transfer, entry = producer.held.pop(lease, (0, None))
                if entry is None:
                    continue
                mine = producer.transfers.get(transfer, set())
                mine.discard(lease)
                if not mine:
                    producer.transfers.pop(transfer, None)
                entry.uses -= 1
                entry.last_use = now
                if entry.withdrawn and not entry.uses:
                    unused.append(entry)
            unused += self._forget(producer)
        if tell and channel is not None:
            for i in range(0, len(leases), MAX_LEASES):
                channel.post(Release(tuple(leases[i : i + MAX_LEASES])))
        self._close(producer, unused)

    # -- mappings ---------------------------------------------------------------------------------

    def trim(self) -> None:
        """Close what has been idle for too long, or is too much."""
        now = self._clock()
        with self._lock:
            producers = list(self._producers.values())
        for producer in producers:
            for kind, limits in self._idle.items():
                self._close(producer, self._overdue(producer, kind, limits, now), forget=True)

    def collect(self) -> None:
        """Close every mapping that no array is in."""
        with self._lock:
            producers = list(self._producers.values())
        for producer in producers:
            for kind in self._memories:
                idle = self._overdue(producer, kind, IdleLimits(0, 0.0), float("inf"))
                self._close(producer, idle, forget=True)

    def _overdue(
        self, producer: Producer, kind: str, limits: IdleLimits, now: float
    ) -> list[Entry]:
        with self._lock:
            unused = [
                e for e in producer.entries.values() if not e.uses and e.announcement.memory == kind
            ]
        idle = sorted((e for e in unused if e.loaded), key=lambda e: e.last_use)
        surplus = max(0, len(idle) - limits.count)
        patience = max(limits.seconds, ON_ITS_WAY)
        return [
            *(e for i, e in enumerate(idle) if i < surplus or now - e.last_use > limits.seconds),
            *(e for e in unused if not e.loaded and now - e.last_use > patience),
        ]

    def _close(self, producer: Producer, entries: list[Entry], forget: bool = False) -> None:
        """Forget entries and close their mappings, each on its memory's executor.

        ``forget`` tells the producer that a handle is gone for good, so that it announces anew.
        """
        for entry in entries:
            with self._lock:
                if entry.uses:
                    continue  # an array was loaded meanwhile
                producer.entries.pop(entry.place, None)
                entry.withdrawn = True
                channel = producer.channel
            if forget and channel is not None:
                channel.post(Evicted(*entry.place))
            memory = self._memories[entry.announcement.memory]
            if memory.executor is None:
                close_entry(entry)
            else:
                memory.executor.submit(close_entry, entry)

    def close(self) -> bool:
        """End for good if nothing is held: nothing will be loaded any more. Whether it did."""
        with self._lock:
            self._closed |= not any(p.held for p in self._producers.values())
        return self._closed

    def clear(self) -> None:
        """Close all mappings of a closed importer, and tell the producers. Idempotent."""
        with self._lock:
            if self._cleared:
                return
            self._cleared = True
            pairs = [(p, list(p.entries.values())) for p in self._producers.values()]
        for producer, entries in pairs:
            self._close(producer, entries)
            if producer.channel is not None:
                producer.channel.post(Closed(self.peer))


def _ended(
    queue: deque[tuple[Producer, int, str]],
    wake: Callable[[], None],
    end: tuple[Producer, int, str],
) -> None:
    # Runs wherever the garbage collector runs: no lock, no call that could need one.
    queue.append(end)
    wake()
