"""What an importer knows of one peer: what it announced, what is open of it, what is held."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dask_gpuipc.channel import Channel
from dask_gpuipc.errors import Failure, OpenFailed, WireError
from dask_gpuipc.memory.base import Mapping as OpenMapping
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.wire import Announce, Descriptor

MAX_REMEMBERED: Final = 16384
"""Numbers of loaded leases and barred transfers remembered for each producer."""


class Recent:
    """The last numbers of a rising sequence; everything older counts as present."""

    def __init__(self, size: int = MAX_REMEMBERED) -> None:
        self._size = size
        self._order: deque[int] = deque()
        self._set: set[int] = set()
        self._floor = 0

    def __contains__(self, number: int) -> bool:
        return number <= self._floor or number in self._set

    def add(self, number: int) -> None:
        """Remember a number."""
        if number in self._set:
            return
        self._set.add(number)
        self._order.append(number)
        if len(self._order) > self._size:
            oldest = self._order.popleft()
            self._set.discard(oldest)
            self._floor = max(self._floor, oldest)


@dataclass(eq=False)
class Entry:
    """One announced allocation, and its mapping once it was opened."""

    announcement: Announce
    fds: tuple[int, ...]
    uses: int = 0
    loaded: bool = False
    """Whether an array was ever loaded; until then its descriptor is on its way."""
    last_use: float = 0.0
    withdrawn: bool = False
    mapping: OpenMapping | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def place(self) -> tuple[str, int, int]:
        """Memory, allocation, generation."""
        a = self.announcement
        return (a.memory, a.allocation, a.generation)


@dataclass(eq=False)
class Producer:
    """What the importer knows of one peer. Guarded by the importer's lock."""

    peer: str
    channel: Channel | None = None
    entries: dict[tuple[str, int, int], Entry] = field(default_factory=dict)
    held: dict[int, tuple[int, Entry]] = field(default_factory=dict)
    transfers: dict[int, set[int]] = field(default_factory=dict)
    loaded: Recent = field(default_factory=Recent)
    barred: Recent = field(default_factory=Recent)
    dead: bool = False
    left: bool = False

    def __repr__(self) -> str:
        state = "dead" if self.dead else "left" if self.left else "here"
        return f"<Producer {self.peer[:8]} {state}: {len(self.held)} held>"


@dataclass(frozen=True, slots=True)
class IdleLimits:
    """How many mappings of one memory may be open without an array in them, and for how long."""

    count: int = 64
    seconds: float = 60.0


def close_entry(entry: Entry) -> None:
    """Close its mapping, and descriptors that were not used yet. Idempotent."""
    with entry.lock:
        mapping, entry.mapping = entry.mapping, None
        fds, entry.fds = entry.fds, ()
    close_fds(fds)
    if mapping is not None:
        mapping.close()


def close_fds(fds: Sequence[int]) -> None:
    """Close all of them."""
    for fd in fds:
        os.close(fd)


def check_inside(descriptor: Descriptor, announcement: Announce) -> None:
    """Raise `OpenFailed` if any byte of an array lies outside of its allocation."""
    try:
        low, high = descriptor.layout.extent()
        Rung(descriptor.rung)
    except (WireError, ValueError) as error:
        raise OpenFailed(Failure.MALFORMED, str(error)) from error
    if low < 0 or high > announcement.nbytes:
        raise OpenFailed(
            Failure.OUT_OF_BOUNDS,
            f"bytes {low} to {high} of an allocation of {announcement.nbytes}",
        )
