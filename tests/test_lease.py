"""The ledger: each of its numbered cases, and any order of events against a model of the world."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_gpuipc.errors import Refusal
from dask_gpuipc.lease import (
    Answered,
    Ask,
    Failed,
    Granted,
    Ledger,
    Offered,
    Opened,
    PeerDied,
    Refuse,
    Released,
    Unpin,
)
from dask_gpuipc.wire import MAX_LEASES

EMPTY = "<Ledger: 0 leases, 0 blocks, 0 bytes, 0 transfers>"


def ledger_with(*leases: int, transfer: int = 1, peer: str = "a", **options: Any) -> Ledger:
    """A transfer in which these leases are offered, each on a block of 100 bytes of its own."""
    ledger = Ledger(**options)
    assert ledger.handle(Opened(transfer, peer)) == []
    for number in leases:
        assert offer(ledger, number, transfer=transfer) == []
    return ledger


def offer(ledger: Ledger, number: int, transfer: int = 1, **changes: Any) -> list[Any]:
    values = {"block": f"block {number}", "nbytes": 100, "source": f"array {number}", **changes}
    return ledger.handle(Offered(transfer, number, f"pin {number}", **values))


def pins(*numbers: int) -> set[Unpin]:
    return {Unpin(f"pin {number}") for number in numbers}


# -- the plain course ----------------------------------------------------------------------------


def test_offered_granted_released():
    ledger = ledger_with(1, 2)
    assert (len(ledger), ledger.pinned_bytes, ledger.held_by("a")) == (2, 200, 2)
    assert ledger.handle(Granted(1)) == []
    assert ledger.handle(Released("a", (1,))) == [Unpin("pin 1")]
    assert ledger.pinned_bytes == 100
    assert ledger.handle(Released("a", (2,))) == [Unpin("pin 2")]
    assert repr(ledger) == EMPTY


def test_an_empty_answer_leaves_nothing():
    for end in (Granted(1), Failed(1)):
        ledger = ledger_with()
        assert ledger.handle(end) == []
        assert repr(ledger) == EMPTY


def test_a_failure_after_the_grant_changes_nothing():
    ledger = ledger_with(1)
    ledger.handle(Granted(1))
    assert ledger.handle(Failed(1)) == []
    assert len(ledger) == 1


# -- the numbered cases of lease.py --------------------------------------------------------------


def test_case_1_lost_ok_asks_and_frees_what_was_not_opened():
    ledger = ledger_with(1, 2, 3)
    assert ledger.handle(Failed(1)) == [Ask("a", 1)]
    assert ledger.disputed("a") == [1]
    assert ledger.disputed("b") == []
    assert set(ledger.handle(Answered("a", 1, (2,)))) == pins(1, 3)
    assert ledger.disputed("a") == []
    assert len(ledger) == 1, "what the consumer holds stays pinned"
    assert ledger.handle(Released("a", (2,))) == [Unpin("pin 2")]
    assert repr(ledger) == EMPTY


def test_case_1_a_grant_that_comes_after_the_failure_settles_nothing():
    ledger = ledger_with(1)
    ledger.handle(Failed(1))
    assert ledger.handle(Granted(1)) == []
    assert ledger.disputed("a") == [1]
    assert ledger.handle(Answered("a", 1, ())) == [Unpin("pin 1")]
    assert repr(ledger) == EMPTY


def test_case_1_an_answer_frees_nothing_of_another_transfer():
    ledger = ledger_with(1)
    ledger.handle(Opened(2, "a"))
    offer(ledger, 2, transfer=2)
    ledger.handle(Failed(1))
    assert ledger.handle(Answered("a", 1, (1, 2))) == []
    assert ledger.handle(Failed(2)) == [Ask("a", 2)]
    assert ledger.handle(Answered("a", 2, ())) == [Unpin("pin 2")]


def test_case_1_released_before_the_answer_leaves_no_dispute():
    ledger = ledger_with(1, 2)
    ledger.handle(Failed(1))
    assert set(ledger.handle(Released("a", (1, 2)))) == pins(1, 2)
    assert ledger.disputed("a") == []
    assert ledger.handle(Answered("a", 1, ())) == []
    assert repr(ledger) == EMPTY


def test_case_2_a_late_offer_into_a_cancelled_answer_is_handed_back():
    ledger = ledger_with(1)
    ledger.handle(Failed(1))
    for _ in range(2):
        late = offer(ledger, 2)
        assert late == [Refuse(2, Refusal.TRANSFER_CLOSED), Unpin("pin 2")]
        ledger.handle(Answered("a", 1, ()))
    assert repr(ledger) == EMPTY


def test_case_2_a_late_offer_after_the_grant_is_handed_back():
    ledger = ledger_with(1)
    ledger.handle(Granted(1))
    assert offer(ledger, 2) == [Refuse(2, Refusal.TRANSFER_CLOSED), Unpin("pin 2")]
    assert len(ledger) == 1


def test_case_3_an_array_offered_twice_is_disputed_though_granted():
    ledger = ledger_with(1)
    offer(ledger, 2, source="array 1", block="block 1")
    assert ledger.pinned_bytes == 100, "one block is charged once"
    assert ledger.handle(Granted(1)) == [Ask("a", 1)]
    assert ledger.handle(Failed(1)) == [], "asked once"
    assert ledger.handle(Answered("a", 1, (2,))) == [Unpin("pin 1")]
    assert ledger.pinned_bytes == 100
    assert ledger.handle(Released("a", (2,))) == [Unpin("pin 2")]
    assert repr(ledger) == EMPTY


@pytest.mark.parametrize(
    "stray",
    [
        Released("a", (99,)),
        Released("b", (1,)),
        Released("nobody", (1,)),
        Answered("a", 1, ()),
        Answered("a", 99, ()),
        Answered("b", 1, ()),
        Granted(99),
        Failed(99),
        PeerDied("nobody"),
    ],
    ids=repr,
)
def test_case_4_what_is_unknown_early_or_anothers_is_harmless(stray):
    ledger = ledger_with(1)
    assert ledger.handle(stray) == []
    assert (len(ledger), ledger.pinned_bytes) == (1, 100)
    assert ledger.handle(Granted(1)) == []


def test_case_4_a_release_is_legal_before_the_grant_and_ends_it():
    ledger = ledger_with(1, 2)
    assert ledger.handle(Released("a", (1, 1))) == [Unpin("pin 1")]
    assert ledger.handle(Released("a", (1,))) == []
    assert ledger.handle(Granted(1)) == []
    assert len(ledger) == 1, "the grant did not bring it back"


def test_case_4_an_answer_does_not_bring_a_released_lease_back():
    ledger = ledger_with(1, 2)
    ledger.handle(Failed(1))
    ledger.handle(Released("a", (1,)))
    assert ledger.handle(Answered("a", 1, (1, 2, 99))) == []
    assert len(ledger) == 1
    assert ledger.handle(Released("a", (1, 2))) == [Unpin("pin 2")]
    assert repr(ledger) == EMPTY


def test_case_5_death_frees_whatever_the_state():
    ledger = ledger_with(1, transfer=1)
    for transfer, number in ((2, 2), (3, 3)):
        ledger.handle(Opened(transfer, "a"))
        offer(ledger, number, transfer=transfer)
    ledger.handle(Opened(4, "b"))
    offer(ledger, 4, transfer=4)
    ledger.handle(Granted(1))
    ledger.handle(Failed(2))
    assert set(ledger.handle(PeerDied("a"))) == pins(1, 2, 3)
    assert (len(ledger), ledger.held_by("b"), ledger.disputed("a")) == (1, 1, [])
    assert offer(ledger, 5, transfer=3)[0] == Refuse(5, Refusal.TRANSFER_CLOSED)
    assert ledger.handle(PeerDied("a")) == []


# -- the budget ----------------------------------------------------------------------------------


def test_an_offer_beyond_the_budget_is_refused():
    ledger = ledger_with(1, 2, limit=250)
    assert not ledger.fits(100)
    assert offer(ledger, 3) == [Refuse(3, Refusal.BUDGET), Unpin("pin 3")]
    assert offer(ledger, 4, block="block 2") == [], "its bytes are pinned already"
    assert ledger.pinned_bytes == 200
    ledger.handle(Released("a", (1,)))
    assert offer(ledger, 5) == []


def test_each_account_has_its_own_limit():
    ledger = ledger_with(limits={"host": 150, "cuda": None})
    assert offer(ledger, 1, account="host") == []
    assert offer(ledger, 2, account="host")[0] == Refuse(2, Refusal.BUDGET)
    assert offer(ledger, 3, account="cuda", nbytes=1 << 40) == []
    assert ledger.pinned_bytes == 100 + (1 << 40)


def test_a_transfer_has_no_more_leases_than_one_message_can_name():
    ledger = ledger_with(*range(MAX_LEASES))
    refused = offer(ledger, MAX_LEASES)
    assert refused[0] == Refuse(MAX_LEASES, Refusal.TRANSFER_FULL)
    assert len(ledger) == MAX_LEASES


# -- any order -----------------------------------------------------------------------------------

PEERS = ("a", "b", "c")
ARRAYS = {"x": 40, "y": 60, "z": 200}
LIMITS = {"host": 240, "cuda": 100}


@dataclass
class World:
    """One lease as it really is: what was sent, who has it, what is still under way."""

    peer: str
    transfer: int
    array: str
    account: str
    claimed: bool = True
    """Neither released, nor denied by an answer that arrived, nor the peer dead."""
    loaded: bool = False
    held: bool = False


@dataclass
class Message:
    """What a consumer has sent and the producer not yet read."""

    event: Any
    frees: set[int] = field(default_factory=set)


class AnyOrder(RuleBasedStateMachine):
    """Producer's events and consumers' messages in any order, with strays among them.

    The model knows no states of leases: it plays the consumers, and asks of the ledger only that
    it never frees what a consumer may still read, and frees all else at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(limits=LIMITS)
        self.numbers = itertools.count(1)
        self.leases: dict[int, World] = {}
        self.status: dict[int, str] = {}
        """Of a transfer: open, disputed, barred (the consumer has answered), over."""
        self.peer_of: dict[int, str] = {}
        self.outbox: dict[str, list[Message]] = {}
        self.unpinned: Counter[int] = Counter()
        self.refused: set[int] = set()

    @initialize()
    def begin(self) -> None:
        self.outbox = {peer: [] for peer in PEERS}

    def tell(self, event: Any) -> list[Any]:
        actions = self.ledger.handle(event)
        for action in actions:
            if isinstance(action, Unpin):
                self.unpinned[action.pin] += 1
        return [action for action in actions if not isinstance(action, Unpin)]

    def of(self, transfer: int) -> dict[int, World]:
        return {n: w for n, w in self.leases.items() if w.transfer == transfer}

    def charged(self, account: str) -> int:
        live = {w.array for w in self.leases.values() if w.claimed and w.account == account}
        return sum(ARRAYS[array] for array in live)

    # the producer

    @rule(peer=st.sampled_from(PEERS))
    def open(self, peer: str) -> None:
        number = next(self.numbers)
        assert self.tell(Opened(number, peer)) == []
        self.status[number], self.peer_of[number] = "open", peer

    @precondition(lambda self: "open" in self.status.values())
    @rule(data=st.data(), array=st.sampled_from([*ARRAYS]), account=st.sampled_from([*LIMITS]))
    def offers(self, data: Any, array: str, account: str) -> None:
        self.offer(data.draw(st.sampled_from(self.transfers("open"))), array, account)

    @precondition(lambda self: self.transfers("disputed", "barred", "over"))
    @rule(data=st.data())
    def offers_late(self, data: Any) -> None:
        ended = self.transfers("disputed", "barred", "over")
        self.offer(data.draw(st.sampled_from(ended)), "x", "host")

    def transfers(self, *status: str) -> list[int]:
        return [t for t, s in self.status.items() if s in status]

    def offer(self, transfer: int, array: str, account: str) -> None:
        number, nbytes = next(self.numbers), ARRAYS[array]
        known = any(
            w.claimed and (w.array, w.account) == (array, account) for w in self.leases.values()
        )
        fits = known or self.charged(account) + nbytes <= LIMITS[account]
        block = (account, array)
        told = self.tell(Offered(transfer, number, number, block, nbytes, block, account))
        if self.status[transfer] == "open" and fits:
            assert told == []
            self.leases[number] = World(self.peer_of[transfer], transfer, array, account)
        else:
            closed = self.status[transfer] != "open"
            reason = Refusal.TRANSFER_CLOSED if closed else Refusal.BUDGET
            assert told == [Refuse(number, reason)]
            self.refused.add(number)

    @precondition(lambda self: "open" in self.status.values())
    @rule(data=st.data(), good=st.booleans())
    def end(self, data: Any, good: bool) -> None:
        """The answer ends. With an OK, the consumer has read all of it."""
        transfer = data.draw(st.sampled_from(self.transfers("open")))
        mine = self.of(transfer)
        arrays = Counter((w.array, w.account) for w in mine.values())
        doubled = any(count > 1 for count in arrays.values())
        if good:
            for world in mine.values():
                # of an array that was offered twice, the consumer may have seen either or both
                if not doubled or data.draw(st.booleans()):
                    self.load(world)
        told = self.tell(Granted(transfer) if good else Failed(transfer))
        disputed = (doubled or not good) and any(w.claimed for w in mine.values())
        assert told == ([Ask(self.peer_of[transfer], transfer)] if disputed else [])
        self.status[transfer] = "disputed" if disputed else "over"
        if good:
            assert self.tell(Failed(transfer)) == []  # what comm.py always does at the end

    # the consumers

    @staticmethod
    def load(world: World) -> None:
        if not world.loaded:
            world.loaded = world.held = True

    def loadable(self) -> list[int]:
        return [
            n
            for n, w in self.leases.items()
            if not w.loaded and w.claimed and self.status[w.transfer] in ("open", "disputed")
        ]

    @precondition(lambda self: self.loadable())
    @rule(data=st.data())
    def loads(self, data: Any) -> None:
        self.load(self.leases[data.draw(st.sampled_from(self.loadable()))])

    @precondition(lambda self: self.loadable())
    @rule(data=st.data())
    def cannot_open(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self.loadable()))
        world = self.leases[number]
        world.loaded = True
        self.outbox[world.peer].append(Message(Released(world.peer, (number,)), {number}))

    @precondition(lambda self: any(w.held for w in self.leases.values()))
    @rule(data=st.data())
    def drops(self, data: Any) -> None:
        peer = data.draw(st.sampled_from(sorted({w.peer for w in self.leases.values() if w.held})))
        held = [n for n, w in self.leases.items() if w.held and w.peer == peer]
        batch = data.draw(st.sets(st.sampled_from(held), min_size=1))
        for number in batch:
            self.leases[number].held = False
        self.outbox[peer].append(Message(Released(peer, tuple(batch)), batch))

    @precondition(lambda self: "disputed" in self.status.values())
    @rule(data=st.data())
    def answers(self, data: Any) -> None:
        self.answer(data.draw(st.sampled_from(self.transfers("disputed"))))

    def answer(self, transfer: int) -> None:
        self.status[transfer] = "barred"
        peer, mine = self.peer_of[transfer], self.of(transfer)
        held = tuple(n for n, w in self.leases.items() if w.held and w.peer == peer)
        self.outbox[peer].append(Message(Answered(peer, transfer, held), mine.keys() - set(held)))

    @rule(peer=st.sampled_from(PEERS))
    def arrives(self, peer: str) -> None:
        if self.outbox[peer]:
            message = self.outbox[peer].pop(0)
            assert self.tell(message.event) == []
            for number in message.frees:
                self.leases[number].claimed = False
            if isinstance(message.event, Answered):
                self.status[message.event.transfer] = "over"

    @rule(peer=st.sampled_from(PEERS))
    def dies(self, peer: str) -> None:
        assert self.tell(PeerDied(peer)) == []
        self.outbox[peer].clear()
        for transfer, owner in self.peer_of.items():
            if owner == peer:
                self.status[transfer] = "over"
        for world in self.leases.values():
            if world.peer == peer:
                world.claimed = world.held = False

    # strays

    @rule(data=st.data(), peer=st.sampled_from([*PEERS, "stranger"]))
    def releases_what_is_not_its_own(self, data: Any, peer: str) -> None:
        numbers = st.sampled_from([0, *self.leases]) if self.leases else st.just(0)
        drawn = data.draw(st.lists(numbers, max_size=4))
        strays = [n for n in drawn if n not in self.leases or self.leases[n].peer != peer]
        assert self.tell(Released(peer, tuple(strays))) == []

    @precondition(lambda self: any(not w.claimed for w in self.leases.values()))
    @rule(data=st.data())
    def releases_again(self, data: Any) -> None:
        number = data.draw(st.sampled_from([n for n, w in self.leases.items() if not w.claimed]))
        assert self.tell(Released(self.leases[number].peer, (number, number))) == []

    @precondition(lambda self: self.status)
    @rule(data=st.data(), peer=st.sampled_from([*PEERS, "stranger"]))
    def answers_unasked(self, data: Any, peer: str) -> None:
        transfer = data.draw(st.sampled_from([0, *self.status]))
        asked = self.status.get(transfer) in ("disputed", "barred")
        if not asked or self.peer_of[transfer] != peer:
            assert self.tell(Answered(peer, transfer, ())) == []

    @precondition(lambda self: self.status)
    @rule(data=st.data())
    def ends_again(self, data: Any) -> None:
        transfer = data.draw(st.sampled_from([0, *self.status]))
        if self.status.get(transfer) != "open":
            assert self.tell(Granted(transfer)) == []
            assert self.tell(Failed(transfer)) == []

    # what must always hold

    @invariant()
    def nothing_is_freed_early_and_nothing_kept(self) -> None:
        free = {n for n, w in self.leases.items() if not w.claimed} | self.refused
        assert set(self.unpinned) == free
        assert not any(w.held for w in self.leases.values() if not w.claimed)

    @invariant()
    def each_pin_is_released_once(self) -> None:
        assert not [n for n, count in self.unpinned.items() if count != 1]

    @invariant()
    def the_budget_holds(self) -> None:
        for account, limit in LIMITS.items():
            assert self.charged(account) <= limit
        assert self.ledger.pinned_bytes == sum(map(self.charged, LIMITS))

    @invariant()
    def the_numbers_are_right(self) -> None:
        claimed = Counter(w.peer for w in self.leases.values() if w.claimed)
        assert len(self.ledger) == claimed.total()
        for peer in PEERS:
            assert self.ledger.held_by(peer) == claimed[peer]
            asked = {
                w.transfer
                for w in self.leases.values()
                if w.peer == peer
                and w.claimed
                and self.status[w.transfer] in ("disputed", "barred")
            }
            assert set(self.ledger.disputed(peer)) == asked

    def teardown(self) -> None:
        """Let everything come to its end: then the ledger is empty."""
        for transfer, status in self.status.items():
            if status == "open":
                told = self.tell(Failed(transfer))
                self.status[transfer] = "disputed" if told else "over"
        for transfer, status in [*self.status.items()]:
            if status == "disputed":
                self.answer(transfer)
        for number, world in self.leases.items():
            if world.held:
                world.held = False
                message = Message(Released(world.peer, (number,)), {number})
                self.outbox[world.peer].append(message)
        for peer, messages in self.outbox.items():
            for _ in range(len(messages)):
                self.arrives(peer)
        self.nothing_is_freed_early_and_nothing_kept()
        self.each_pin_is_released_once()
        assert repr(self.ledger) == EMPTY


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@pytest.mark.stress
class TestManyOrders(AnyOrder.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)
