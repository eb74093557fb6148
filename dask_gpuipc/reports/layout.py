"""How a report is laid out, for text and HTML alike: labels of workers, the matrix, the lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dask_gpuipc.reports.record import ELSEWHERE, HANDLES, RUNGS, Pair, Report, WorkerRow

LARGEST: Final = 12
"""Workers up to which pairs are a matrix; of more, the busiest pairs are a list."""
BUSIEST: Final = 24


@dataclass(frozen=True, slots=True)
class Field:
    """One cell of the matrix: bytes by handle and in all; None in ``moved`` is the diagonal."""

    handles: int
    moved: int | None

    @property
    def fraction(self) -> float | None:
        """Part that went by handle; None where nothing moved."""
        return self.handles / self.moved if self.moved else None


def ordered(report: Report) -> list[WorkerRow]:
    """Workers by host, then by name, numbers by value."""
    return sorted(report.workers, key=lambda w: (w.host, *_natural(w.name), w.address))


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 62, name)


def labels(workers: Sequence[WorkerRow]) -> Mapping[str, str]:
    """Short names by address: Dask's, where they are unique and not addresses themselves."""
    names = Counter(worker.name for worker in workers)
    short = {
        worker.address: worker.name
        if worker.name and names[worker.name] == 1 and "://" not in worker.name
        else worker.address.partition("://")[2]
        for worker in workers
    }
    return {ELSEWHERE: ELSEWHERE, **short}


def label(names: Mapping[str, str], address: str) -> str:
    """The short name of an address; workers that have gone have none."""
    return names.get(address) or f"{address.partition('://')[2] or address} (gone)"


def matrix(
    report: Report, workers: Sequence[WorkerRow], largest: int | None = LARGEST
) -> list[list[Field]] | None:
    """Rows are senders, columns are receivers; None with more workers than fit."""
    if largest is not None and len(workers) > largest:
        return None
    sent = {(pair.source, pair.target): pair for pair in report.pairs}
    addresses = [worker.address for worker in workers]
    return [[_field(sent.get((a, b)), a == b) for b in addresses] for a in addresses]


def _field(pair: Pair | None, diagonal: bool) -> Field:
    if pair is None:
        return Field(0, None if diagonal else 0)
    return Field(pair.bytes(*HANDLES), pair.bytes(*RUNGS))


def busiest(report: Report) -> list[Pair]:
    """Pairs by the bytes that went between them, the most first."""
    between = [pair for pair in report.pairs if pair.target != ELSEWHERE]
    return sorted(between, key=lambda pair: -pair.bytes(*RUNGS))[:BUSIEST]
