"""What a report holds, and how it is put together from the workers' numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dask.utils import format_bytes

from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.explain import Explanation, explain
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.stats import OTHERS, Timing, Traffic

RUNGS: Final = tuple(rung.value for rung in Rung)
"""In the order of the ladder; the last one is no handle."""
HANDLES: Final = RUNGS[:-1]
ELSEWHERE: Final = "elsewhere"
"""Clients, the scheduler, and workers that are forgotten."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker: who it is, what it holds, what is held of it."""

    address: str
    name: str
    host: str
    state: str
    memories: tuple[str, ...]
    leases: int
    pinned_bytes: int
    holding: int
    mappings: int
    mapped_bytes: int
    opens: int
    hits: int

    @property
    def enabled(self) -> bool:
        """Whether it shares anything."""
        return self.state == "enabled"


@dataclass(frozen=True, slots=True)
class Pair:
    """What one worker sent to another: traffic by rung. Arrays below min-bytes are not in it."""

    source: str
    target: str
    rungs: Mapping[str, Traffic]

    def bytes(self, *rungs: str) -> int:
        """Bytes that went by these rungs."""
        return sum(self.rungs[r].bytes for r in rungs if r in self.rungs)


@dataclass(frozen=True, slots=True)
class Cause:
    """A refusal or a failure: how often, on how many workers, and what it means."""

    reason: str
    count: int
    workers: int
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Pace:
    """What one way takes, as measured between two workers of this cluster."""

    latency: float
    """Seconds, of a small chunk."""
    bandwidth: float
    """Bytes per second, beyond that."""

    def seconds(self, transfers: int, nbytes: int) -> float:
        """What so many transfers of so many bytes in all would take, one after the other."""
        return transfers * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Paces:
    """Both ways, measured in turn on the same chunks between the same two workers."""

    handle: Pace
    bytes: Pace


@dataclass(frozen=True, slots=True)
class Saving:
    """Time in transfers of one memory: by handle, and what the same take as bytes.

    Both are estimates by the same two paces. What the transfers really took, ``timing.seconds``,
    also has in it what the workers did meanwhile, so it is not set against an estimate.
    """

    memory: str
    timing: Timing
    paces: Paces | None
    """None where they were not measured."""

    @property
    def handle_seconds(self) -> float | None:
        """Estimate of what these transfers take by handle."""
        return None if self.paces is None else self._by(self.paces.handle)

    @property
    def bytes_seconds(self) -> float | None:
        """Estimate of what they take as bytes."""
        return None if self.paces is None else self._by(self.paces.bytes)

    @property
    def seconds(self) -> float | None:
        """Estimate of the time saved; below zero where handles are slower."""
        if self.handle_seconds is None or self.bytes_seconds is None:
            return None
        return self.bytes_seconds - self.handle_seconds

    def _by(self, pace: Pace) -> float:
        return pace.seconds(self.timing.transfers, self.timing.bytes)


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What the workers of a cluster sent each other by handle, what not, and why.

    Made by `dask_gpuipc.report`. Shows itself as tables, in a notebook as HTML; all that it shows
    is in its fields, and as plain numbers in `to_dict`.
    """

    workers: tuple[WorkerRow, ...]
    pairs: tuple[Pair, ...]
    refused: tuple[Cause, ...]
    failed: tuple[Cause, ...]
    savings: tuple[Saving, ...]
    notes: tuple[str, ...] = field(default=())
    """What could not be found out, and why."""

    @property
    def totals(self) -> Mapping[str, Traffic]:
        """Traffic by rung between workers, in the order of the ladder."""
        return total(pair.rungs for pair in self.pairs if pair.target != ELSEWHERE)

    @property
    def handle_bytes(self) -> int:
        """Bytes that went by handle."""
        return sum(traffic.bytes for rung, traffic in self.totals.items() if rung in HANDLES)

    @property
    def handle_fraction(self) -> float | None:
        """Part of the bytes between workers that went by handle; None where nothing moved.

        Of arrays of at least ``gpuipc.min-bytes``.
        """
        moved = sum(traffic.bytes for traffic in self.totals.values())
        return self.handle_bytes / moved if moved else None

    @property
    def hit_rate(self) -> float | None:
        """How many of the allocations that chunks lay in were found open; None without any."""
        opens = sum(worker.opens for worker in self.workers)
        hits = sum(worker.hits for worker in self.workers)
        return hits / (opens + hits) if opens + hits else None

    @property
    def headline(self) -> str:
        """Whether it is on, what went by handle and what is held, in one line."""
        enabled = sum(worker.enabled for worker in self.workers)
        fraction = self.handle_fraction
        moved = sum(traffic.bytes for traffic in self.totals.values())
        went = (
            "nothing moved between workers"
            if fraction is None
            else f"{percent(fraction)} of {format_bytes(moved)} by handle"
        )
        leases = sum(worker.leases for worker in self.workers)
        pinned = sum(worker.pinned_bytes for worker in self.workers)
        held = f"{leases} leases on {format_bytes(pinned)}" if leases else "nothing held"
        return f"{enabled} of {len(self.workers)} workers enabled, {went}, {held}"

    def __repr__(self) -> str:
        return f"<Report: {self.headline}>"

    def __str__(self) -> str:
        from dask_gpuipc.reports.text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from dask_gpuipc.reports.html import as_html

        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers only."""
        plain = asdict(self)
        plain["savings"] = [
            {
                **asdict(saving),
                "handle_seconds": saving.handle_seconds,
                "bytes_seconds": saving.bytes_seconds,
                "seconds": saving.seconds,
            }
            for saving in self.savings
        ]
        return {
            **plain,
            "totals": {rung: asdict(traffic) for rung, traffic in self.totals.items()},
            "handle_fraction": self.handle_fraction,
            "hit_rate": self.hit_rate,
        }


def percent(fraction: float) -> str:
    """Such as ``99.9 %``; never ``100 %`` where something is missing."""
    if fraction < 1:
        fraction = min(fraction, 0.999)
    return f"{fraction:.0%}" if fraction in (0, 1) else f"{fraction:.1%}"


def total(parts: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    """Traffic by rung of several, in the order of the ladder."""
    found: defaultdict[str, Traffic] = defaultdict(Traffic)
    for part in parts:
        for rung, traffic in part.items():
            found[rung] += traffic
    return {rung: found[rung] for rung in RUNGS if rung in found}


def worker_row(address: str, name: str, host: str, numbers: Mapping[str, Any]) -> WorkerRow:
    """One worker, of its numbers; those that it does not tell are zero."""
    counts = ("leases", "pinned_bytes", "holding", "mappings", "mapped_bytes", "opens", "hits")
    return WorkerRow(
        address,
        name,
        host,
        numbers["state"],
        tuple(numbers.get("memories", ())),
        *(numbers.get(count, 0) for count in counts),
    )


def pairs(numbers: Mapping[str, Mapping[str, Any]]) -> tuple[Pair, ...]:
    """What each worker sent to whom; ``numbers`` are those of `dask_gpuipc.statistics`."""
    return tuple(
        Pair(
            source,
            ELSEWHERE if target == OTHERS else target,
            {rung: Traffic(**traffic) for rung, traffic in rungs.items()},
        )
        for source, mine in numbers.items()
        for target, rungs in sorted(mine.get("sent_to", {}).items())
    )


def causes(
    numbers: Mapping[str, Mapping[str, Any]], which: type[Refusal | Failure]
) -> tuple[Cause, ...]:
    """Refusals or failures of all workers, the most frequent first."""
    field = "refused" if which is Refusal else "failed"
    counts: Counter[str] = Counter()
    workers: Counter[str] = Counter()
    for mine in numbers.values():
        counts.update(mine.get(field, {}))
        workers.update(mine.get(field, {}).keys())
    return tuple(
        Cause(reason, count, workers[reason], _explained(which, reason))
        for reason, count in counts.most_common()
    )


def _explained(which: type[Refusal | Failure], reason: str) -> Explanation:
    try:
        return explain(which(reason))
    except ValueError:  # a worker with a later version of this package
        return Explanation("not known to the version that is installed here", "install one version")


def savings(
    numbers: Mapping[str, Mapping[str, Any]], paces: Mapping[str, Paces]
) -> tuple[Saving, ...]:
    """Time in transfers of all workers, by memory."""
    found: defaultdict[str, Timing] = defaultdict(Timing)
    for mine in numbers.values():
        for memory, timing in mine.get("timings", {}).items():
            found[memory] += Timing(**timing)
    return tuple(Saving(memory, found[memory], paces.get(memory)) for memory in sorted(found))
