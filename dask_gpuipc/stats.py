"""Counters, and their frozen snapshot."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.explain import Notices

MAX_PEERS: Final = 256
"""Peers that are counted one by one; beyond it the longest unused ones are summed up."""
OTHERS: Final = ""
"""In place of an address: those, clients, and whoever did not say who it is."""

Arrivals = Counter[tuple[str, str]]
"""Bytes that arrived by handle, by memory and rung."""

arrivals: ContextVar[Arrivals | None] = ContextVar("gpuipc_arrivals", default=None)
"""Set while somebody measures; see `collecting_arrivals`."""


@contextlib.contextmanager
def collecting_arrivals() -> Iterator[Arrivals]:
    """Within, what arrives by handle is noted. Threads that Dask deserializes on count too."""
    found: Arrivals = Counter()
    token = arrivals.set(found)
    try:
        yield found
    finally:
        arrivals.reset(token)


T = TypeVar("T", "Traffic", "Timing")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrays and nominal bytes that went by one rung."""

    arrays: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.arrays + other.arrays, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Timing:
    """Answers in which chunks arrived by handle, those bytes, and the seconds from asking on."""

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.transfers + other.transfers,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one worker's plugin did and holds; plain numbers, see `dask_gpuipc.statistics`."""

    state: str
    memories: list[str]
    sent: Mapping[str, Traffic] = field(default_factory=dict)
    received: Mapping[str, Traffic] = field(default_factory=dict)
    sent_to: Mapping[str, Mapping[str, Traffic]] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    leases: int = 0
    pinned_bytes: int = 0
    holding: int = 0
    mappings: int = 0
    mapped_bytes: int = 0
    opens: int = 0
    hits: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers only."""
        plain: dict[str, Any] = _plain({f: getattr(self, f) for f in self.__slots__})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return asdict(value) if isinstance(value, (Traffic, Timing)) else value


class Statistics:
    """Counters of one endpoint. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.notices = Notices()
        self._sent: dict[str, Traffic] = {}
        self._received: dict[str, Traffic] = {}
        self._sent_to: dict[str, dict[str, Traffic]] = {}
        self._timings: dict[str, Timing] = {}
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._opens = 0
        self._hits = 0

    def sent(self, rung: str, nbytes: int, to: str = OTHERS) -> None:
        """One array left by this rung (``bytes``: it could have gone by handle)."""
        with self._lock:
            _add(self._sent, rung, Traffic(1, nbytes))
            peer = self._sent_to.pop(to, {})
            self._sent_to[to] = peer  # the longest unused one is the first
            _add(peer, rung, Traffic(1, nbytes))
            if len(self._sent_to) > MAX_PEERS:
                self._sum_up()

    def _sum_up(self) -> None:
        first = next(peer for peer in self._sent_to if peer != OTHERS)
        others = self._sent_to.setdefault(OTHERS, {})
        for rung, traffic in self._sent_to.pop(first).items():
            _add(others, rung, traffic)

    def received(self, rung: str, nbytes: int, memory: str = "") -> None:
        """One array of a memory arrived by this rung."""
        with self._lock:
            _add(self._received, rung, Traffic(1, nbytes))
            arrived = arrivals.get()
            if arrived is not None:
                arrived[memory, rung] += nbytes

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count what is within as one transfer, if chunks arrive by handle in it.

        The time goes to the memory that most bytes were of.
        """
        begin = time.perf_counter()
        with collecting_arrivals() as arrived:
            yield
        if arrived:
            (memory, _), _ = arrived.most_common(1)[0]
            timing = Timing(1, arrived.total(), time.perf_counter() - begin)
            with self._lock:
                _add(self._timings, memory, timing)

    def refused(self, reason: Refusal, detail: str = "", error: Exception | None = None) -> None:
        """One array, or one request, was declined; the log is told of a cause once."""
        with self._lock:
            self._refused[reason.value] += 1
        self.notices.tell(reason, detail, error)

    def failed(self, reason: Failure, detail: str = "", error: Exception | None = None) -> None:
        """One descriptor could not be imported; the log is told of a cause once."""
        with self._lock:
            self._failed[reason.value] += 1
        self.notices.tell(reason, detail, error)

    def opened(self) -> None:
        """A mapping was opened."""
        with self._lock:
            self._opens += 1

    def hit(self) -> None:
        """A mapping was found open."""
        with self._lock:
            self._hits += 1

    def snapshot(self, **more: Any) -> Snapshot:
        """The counters now, with what the other rooms add."""
        with self._lock:
            return Snapshot(
                sent=dict(self._sent),
                received=dict(self._received),
                sent_to={peer: dict(rungs) for peer, rungs in self._sent_to.items()},
                timings=dict(self._timings),
                refused=dict(self._refused),
                failed=dict(self._failed),
                opens=self._opens,
                hits=self._hits,
                **more,
            )


def _add(totals: dict[str, T], name: str, more: T) -> None:
    totals[name] = totals[name] + more if name in totals else more
