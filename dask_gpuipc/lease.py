"""The ledger: who holds a claim on which pin.

A pure state machine. Events go in, actions come out, and the caller carries them out; there is no
clock, lock or I/O in here, so every order of events can be tested. The caller holds one lock around
`Ledger.handle`.

A lease is OFFERED when its descriptor is made, GRANTED when the consumer said OK to the answer that
held it, and gone when it was released. It is never brought back: what is not in the ledger is free.
Nothing is freed by time.

The cases that shape it:

1. *Lost OK.* The answer failed after an offer, and the consumer may or may not have read it: the
   transfer becomes disputed, the consumer is asked, and what it did not open is freed.
2. *Cancelled answer, export still running* on the offload thread: the transfer is closed, so a late
   offer is refused and its pin handed back.
3. *dumps twice for one message* (one value that msgpack cannot take): two leases for one array, of
   which one is never seen by the consumer: an array offered twice makes the transfer disputed even
   if it was answered OK.
4. *Release duplicated, early, unknown, from another peer*: harmless.
5. *The peer's process ended*: all of its leases are free, disputed ones too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dask_gpuipc.errors import Refusal
from dask_gpuipc.wire import MAX_LEASES


class LeaseState(Enum):
    """States of a lease in the ledger; a released lease is not in it."""

    OFFERED = "offered"
    GRANTED = "granted"


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer to ``peer`` begins."""

    transfer: int
    peer: str


@dataclass(frozen=True, slots=True)
class Offered:
    """An array is about to be described in the answer.

    ``pin`` is this lease's alone; ``block`` names the bytes, which are charged once however many
    leases are on them; ``source`` tells arrays apart.
    """

    transfer: int
    lease: int
    pin: Hashable
    block: Hashable
    nbytes: int
    source: Hashable
    account: str = ""
    """The kind of memory, whose limit the bytes count against."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The consumer said OK."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer ended without an OK: an error, or a cancellation."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The consumer told which leases of a disputed transfer it holds."""

    peer: str
    transfer: int
    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The consumer will not read these again."""

    peer: str
    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The consumer's process has ended."""

    peer: str


Event = Opened | Offered | Granted | Failed | Answered | Released | PeerDied

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unpin:
    """The lease that this pin was for is over."""

    pin: Hashable


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the consumer what became of this transfer."""

    peer: str
    transfer: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The offer was not taken; its pin is handed back by an `Unpin`."""

    lease: int
    reason: Refusal


Action = Unpin | Ask | Refuse


@dataclass(slots=True)
class _Transfer:
    peer: str
    open: bool = True
    doubled: bool = False
    leases: set[int] = field(default_factory=set)
    sources: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class _Block:
    account: str
    nbytes: int
    leases: int = 0


@dataclass(slots=True)
class _Lease:
    peer: str
    pin: Hashable
    block: Hashable
    transfer: int
    state: LeaseState = LeaseState.OFFERED


class Ledger:
    """Leases, transfers and pins of one exporter.

    Not thread-safe: the exporter holds its lock around every call.

    Parameters
    ----------
    limit : int or None
        Bytes that may be pinned at once in one account; None is without limit.
    limits : mapping, optional
        Limits of single accounts, instead of that.
    """

    def __init__(
        self, limit: int | None = None, limits: Mapping[str, int | None] | None = None
    ) -> None:
        self.limit = limit
        self._limits = limits or {}
        self._pinned: Counter[str] = Counter()
        self._blocks: dict[Hashable, _Block] = {}
        self._leases: dict[int, _Lease] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._by_peer: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return (
            f"<Ledger: {len(self._leases)} leases, {len(self._blocks)} blocks, "
            f"{self.pinned_bytes} bytes, {len(self._transfers)} transfers>"
        )

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned, in all accounts."""
        return self._pinned.total()

    def fits(self, nbytes: int, account: str = "") -> bool:
        """Whether a new block of this size is within the account's limit."""
        limit = self._limits.get(account, self.limit)
        return limit is None or self._pinned[account] + nbytes <= limit

    def held_by(self, peer: str) -> int:
        """Number of leases that a peer has."""
        return len(self._by_peer.get(peer, ()))

    def granted_to(self, peer: str) -> set[int]:
        """Leases that a peer has said OK to."""
        mine = self._by_peer.get(peer, ())
        return {n for n in mine if self._leases[n].state is LeaseState.GRANTED}

    def disputed(self, peer: str) -> list[int]:
        """Transfers of a peer that wait for its answer (to ask again on a new channel)."""
        return [t for t, s in self._transfers.items() if s.peer == peer and not s.open]

    def handle(self, event: Event) -> list[Action]:
        """Take one event in; return what has to be done about it."""
        match event:
            case Opened(transfer, peer):
                self._transfers[transfer] = _Transfer(peer)
                return []
            case Offered():
                return self._offered(event)
            case Granted(transfer):
                return self._granted(transfer)
            case Failed(transfer):
                return self._failed(transfer)
            case Answered():
                return self._answered(event)
            case Released(peer, leases):
                return self._release(peer, leases)
            case PeerDied(peer):
                return self._died(peer)

    def _offered(self, event: Offered) -> list[Action]:
        transfer = self._transfers.get(event.transfer)
        reason = self._objection(transfer, event)
        if reason is not None or transfer is None:
            reason = reason or Refusal.TRANSFER_CLOSED
            return [Refuse(event.lease, reason), Unpin(event.pin)]
        block = self._blocks.get(event.block)
        if block is None:
            block = self._blocks[event.block] = _Block(event.account, event.nbytes)
            self._pinned[event.account] += event.nbytes
        block.leases += 1
        transfer.doubled |= event.source in transfer.sources
        transfer.sources.add(event.source)
        transfer.leases.add(event.lease)
        self._leases[event.lease] = _Lease(transfer.peer, event.pin, event.block, event.transfer)
        self._by_peer.setdefault(transfer.peer, set()).add(event.lease)
        return []

    def _objection(self, transfer: _Transfer | None, event: Offered) -> Refusal | None:
        if transfer is None or not transfer.open:
            return Refusal.TRANSFER_CLOSED
        if len(transfer.leases) >= MAX_LEASES:
            return Refusal.TRANSFER_FULL
        if event.block not in self._blocks and not self.fits(event.nbytes, event.account):
            return Refusal.BUDGET
        return None

    def _granted(self, number: int) -> list[Action]:
        transfer = self._transfers.get(number)
        if transfer is None or not transfer.open:
            return []
        if transfer.doubled:
            return self._failed(number)
        del self._transfers[number]
        for lease in transfer.leases & self._leases.keys():
            self._leases[lease].state = LeaseState.GRANTED
        return []

    def _failed(self, number: int) -> list[Action]:
        transfer = self._transfers.get(number)
        if transfer is None or not transfer.open:
            return []
        transfer.open = False
        transfer.sources.clear()
        if not transfer.leases & self._leases.keys():
            del self._transfers[number]
            return []
        return [Ask(transfer.peer, number)]

    def _answered(self, event: Answered) -> list[Action]:
        transfer = self._transfers.get(event.transfer)
        if transfer is None or transfer.open or transfer.peer != event.peer:
            return []
        del self._transfers[event.transfer]
        held = transfer.leases & set(event.leases)
        for lease in held & self._leases.keys():
            self._leases[lease].state = LeaseState.GRANTED
        return self._release(event.peer, tuple(transfer.leases - held))

    def _release(self, peer: str, leases: tuple[int, ...]) -> list[Action]:
        actions: list[Action] = []
        for number in leases:
            lease = self._leases.get(number)
            if lease is None or lease.peer != peer:
                continue
            del self._leases[number]
            self._forget(peer, number, lease.transfer)
            self._discharge(lease.block)
            actions.append(Unpin(lease.pin))
        return actions

    def _forget(self, peer: str, number: int, transfer: int) -> None:
        mine = self._by_peer[peer]
        mine.discard(number)
        if not mine:
            del self._by_peer[peer]
        offered = self._transfers.get(transfer)
        if offered is not None and not offered.open and not offered.leases & self._leases.keys():
            del self._transfers[transfer]

    def _discharge(self, key: Hashable) -> None:
        block = self._blocks[key]
        block.leases -= 1
        if not block.leases:
            del self._blocks[key]
            self._pinned[block.account] -= block.nbytes

    def _died(self, peer: str) -> list[Action]:
        actions = self._release(peer, tuple(self._by_peer.get(peer, ())))
        for number, transfer in list(self._transfers.items()):
            if transfer.peer == peer:
                del self._transfers[number]
        return actions
