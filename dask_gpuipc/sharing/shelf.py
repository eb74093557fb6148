"""The shelf: what this process gives out, to whom, and who has it now."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask_gpuipc.errors import NotPermitted, SourceGone

Who = tuple[int, int]
"""A process by pid and start time, which no other process ever has."""


@dataclass(eq=False, slots=True)
class Entry:
    """One array or event that others may ask for. Guarded by its shelf's lock."""

    key: bytes
    kind: str
    obj: Any
    once: bool = False
    """Whether the first who gets it is the last: it was put into a message."""
    payload: bytes = b""
    release: Callable[[], None] | None = None
    """Called once, when ``obj`` is given up."""
    allowed: set[Who] | None = None
    """None is every process of this user."""
    readonly: bool = False
    withdrawn: bool = False
    visits: int = 0
    holders: Counter[int] = field(default_factory=Counter)
    """Leases by pid."""

    def __repr__(self) -> str:
        state = "withdrawn" if self.withdrawn else "open"
        return f"<Entry {self.kind} {state}: held by {dict(self.holders)}>"


class Claim:
    """One visit to an entry, or one lease on it; counted until `end`."""

    __slots__ = ("_pid", "_shelf", "entry")

    def __init__(self, shelf: Shelf, entry: Entry, pid: int | None) -> None:
        self.entry = entry
        self._shelf: Shelf | None = shelf
        self._pid = pid

    def lease(self, pid: int) -> Claim:
        """Count a lease of a process besides the visit."""
        assert self._shelf is not None
        return self._shelf.hold(self.entry, pid)

    def end(self) -> None:
        """Count it no more. Idempotent, on any thread."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.ended(self.entry, self._pid)


class Shelf:
    """Entries by key. Thread-safe; its lock is a leaf."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Shelf: {len(self._entries)} entries>"

    def add(self, kind: str, obj: Any, *, key: bytes = b"", **more: Any) -> Entry:
        """Put something on the shelf, under a key that nobody can guess."""
        entry = Entry(key or secrets.token_bytes(16), kind, obj, **more)
        with self._changed:
            self._entries[entry.key] = entry
        return entry

    def find(self, key: bytes) -> Entry | None:
        """The entry that others would get."""
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """All that others would get."""
        with self._changed:
            return list(self._entries.values())

    def enter(self, key: bytes, who: Who) -> Claim:
        """Begin a visit; `SourceGone` or `NotPermitted`."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None:
                raise SourceGone("the process that had the memory has given it up")
            if entry.allowed is not None and who not in entry.allowed:
                raise NotPermitted(f"process {who[0]} is not among those that may open it")
            entry.visits += 1
        return Claim(self, entry, None)

    def hold(self, entry: Entry, pid: int) -> Claim:
        """Count a lease."""
        with self._changed:
            entry.holders[pid] += 1
        return Claim(self, entry, pid)

    def ended(self, entry: Entry, pid: int | None) -> None:
        """A claim is over."""
        with self._changed:
            if pid is None:
                entry.visits -= 1
            else:
                entry.holders[pid] -= 1
                if not entry.holders[pid]:
                    del entry.holders[pid]
            give_up = self._given_up(entry)
            self._changed.notify_all()
        _call(give_up)

    def withdraw(self, entry: Entry) -> None:
        """Let nobody else have it; who has it keeps it. Idempotent."""
        with self._changed:
            entry.withdrawn = True
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            give_up = self._given_up(entry)
            self._changed.notify_all()
        _call(give_up)

    def allow(self, entry: Entry, who: set[Who]) -> None:
        """Restrict an entry to these, or widen its list by them."""
        with self._changed:
            entry.allowed = (entry.allowed or set()) | who

    def wait(self, entry: Entry, timeout: float) -> bool:
        """Wait until nobody has it, for so many seconds; return whether nobody has."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while entry.holders or entry.visits:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def holders(self, entry: Entry) -> tuple[int, ...]:
        """Pids of the processes that have it."""
        with self._changed:
            return tuple(sorted(entry.holders))

    @staticmethod
    def _given_up(entry: Entry) -> list[Any]:
        """What to let go of, outside the lock: a withdrawn entry's array once no visit needs it."""
        if not entry.withdrawn or entry.visits:
            return []
        gone = [entry.release, entry.obj]
        entry.release = entry.obj = None
        return gone


def _call(given_up: list[Any]) -> None:
    if given_up:
        given_up.pop()  # a snapshot's view, before its slot
        (release,) = given_up
        if release is not None:
            release()
