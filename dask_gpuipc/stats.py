"""Counters, and their frozen snapshot."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dask_gpuipc.errors import Failure, Refusal


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrays and nominal bytes that went by one rung."""

    arrays: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.arrays + other.arrays, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one worker's plugin did and holds; plain numbers, see `dask_gpuipc.statistics`."""

    state: str
    memories: list[str]
    sent: Mapping[str, Traffic] = field(default_factory=dict)
    received: Mapping[str, Traffic] = field(default_factory=dict)
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
        plain = asdict(self)
        for name in ("sent", "received"):
            plain[name] = {rung: asdict(t) for rung, t in getattr(self, name).items()}
        return plain


class Statistics:
    """Counters of one endpoint. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, Traffic] = {}
        self._received: dict[str, Traffic] = {}
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._opens = 0
        self._hits = 0

    def sent(self, rung: str, nbytes: int) -> None:
        """One array left by this rung (``bytes``: it could have gone by handle)."""
        with self._lock:
            self._sent[rung] = self._sent.get(rung, Traffic()) + Traffic(1, nbytes)

    def received(self, rung: str, nbytes: int) -> None:
        """One array arrived by this rung."""
        with self._lock:
            self._received[rung] = self._received.get(rung, Traffic()) + Traffic(1, nbytes)

    def refused(self, reason: Refusal) -> None:
        """One array, or one request, was declined."""
        with self._lock:
            self._refused[reason.value] += 1

    def failed(self, reason: Failure) -> None:
        """One descriptor could not be imported."""
        with self._lock:
            self._failed[reason.value] += 1

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
                refused=dict(self._refused),
                failed=dict(self._failed),
                opens=self._opens,
                hits=self._hits,
                **more,
            )
