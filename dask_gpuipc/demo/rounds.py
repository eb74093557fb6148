"""One run of the job on one cluster, and what moved between its workers meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from dask.utils import format_bytes
from distributed import Client, KilledWorker, wait

import dask_gpuipc
from dask_gpuipc.demo.errors import DemoError
from dask_gpuipc.demo.workflow import analyse

if TYPE_CHECKING:
    import dask.array as da

Traffic = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Transfers:
    """Entries of the workers' ``transfer_incoming_log``, added up.

    One transfer is one answer to a worker's request for chunks: `count` of them brought `nbytes`
    bytes, `large_nbytes` of them in chunks at or above min-bytes, and took `seconds` in all.
    """

    count: int = 0
    nbytes: int = 0
    large_nbytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Transfers) -> Transfers:
        return Transfers(
            self.count + other.count,
            self.nbytes + other.nbytes,
            self.large_nbytes + other.large_nbytes,
            self.seconds + other.seconds,
        )

    @classmethod
    def of_log(cls, log: list[dict[str, Any]], min_bytes: int) -> Self:
        """Add up the log's entries."""
        sizes = [nbytes for entry in log for nbytes in entry["keys"].values()]
        return cls(
            count=len(log),
            nbytes=sum(sizes),
            large_nbytes=sum(nbytes for nbytes in sizes if nbytes >= min_bytes),
            seconds=sum(entry["duration"] for entry in log),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One run: wall clock, what moved, and the result."""

    seconds: float
    transfers: Transfers
    result: npt.NDArray[np.float64]

    def to_dict(self) -> dict[str, float]:
        """Return the numbers, without the result."""
        moved = self.transfers
        return {
            "seconds": self.seconds,
            "transfers": moved.count,
            "transfer_s": moved.seconds,
            "moved_bytes": moved.nbytes,
            "large_bytes": moved.large_nbytes,
        }

    def describe(self) -> str:
        """Return a line for people."""
        moved = format_bytes(self.transfers.nbytes)
        return f"{self.seconds:.2f} s, {moved} moved in {self.transfers.count} transfers"


@dataclass(slots=True)
class Side:
    """One cluster and the rounds it ran.

    Parameters
    ----------
    name : str
        ``plain`` or ``plugin``.
    client : Client
    image : dask.array.Array
        The same graph for all sides.
    min_bytes : int
        Chunks of at least this many bytes count as large.
    """

    name: str
    client: Client
    image: da.Array
    min_bytes: int
    rounds: list[Round] = field(default_factory=list)

    def load(self) -> None:
        """Make the image's chunks on the workers, where they stay."""
        self.image = self.client.persist(self.image)
        with self.client.as_current():
            wait(self.image)

    def run(self) -> Round:
        """Run the job once, from the image in the workers' memory to the result here."""
        self._logs()
        job = analyse(self.image)
        start = time.perf_counter()
        result = self._result(job)
        seconds = time.perf_counter() - start
        return Round(seconds, self._moved(), result)

    def count(self) -> Round:
        """Run the job once and keep the round."""
        self.rounds.append(self.run())
        return self.rounds[-1]

    def _result(self, job: da.Array) -> npt.NDArray[np.float64]:
        try:
            result: npt.NDArray[np.float64] = self.client.compute(job).result()
        except MemoryError as error:
            raise DemoError(f"out of memory, {error}; ask for a smaller --size") from error
        except KilledWorker as error:
            raise DemoError(
                f"worker processes died, perhaps for lack of memory: {error}"
            ) from error
        return result

    def _moved(self) -> Transfers:
        logs = self._logs()
        return sum((Transfers.of_log(log, self.min_bytes) for log in logs), Transfers())

    def _logs(self) -> list[list[dict[str, Any]]]:
        return list(self.client.run(take_transfer_log).values())


@dataclass(frozen=True, slots=True)
class PluginCounts:
    """`dask_gpuipc.statistics` of a cluster, added up over its workers."""

    states: list[str]
    sent: Traffic
    received: Traffic
    refused: Mapping[str, int]

    @classmethod
    def read(cls, client: Client) -> Self:
        """Return the counts up to now."""
        workers = dask_gpuipc.statistics(client).values()
        return cls(
            states=sorted({worker["state"] for worker in workers}),
            sent=_sum_traffic([worker["sent"] for worker in workers]),
            received=_sum_traffic([worker["received"] for worker in workers]),
            refused=_sum_counts([worker["refused"] for worker in workers]),
        )

    def since(self, before: PluginCounts) -> PluginCounts:
        """Return what was counted after ``before``."""
        return PluginCounts(
            states=self.states,
            sent=_less_traffic(self.sent, before.sent),
            received=_less_traffic(self.received, before.received),
            refused=_less_counts(self.refused, before.refused),
        )


def take_transfer_log(dask_worker: Any) -> list[dict[str, Any]]:
    """Empty a worker's log of received transfers; runs on the worker.

    The log keeps a limited number of entries (``distributed.admin.low-level-log-length``, 1000):
    a round of this job makes a tenth of that on a worker.
    """
    log = list(dask_worker.transfer_incoming_log)
    dask_worker.transfer_incoming_log.clear()
    return log


def _sum_counts(parts: list[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for part in parts for name in part})
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _sum_traffic(parts: list[Traffic]) -> dict[str, dict[str, int]]:
    rungs = sorted({rung for part in parts for rung in part})
    return {rung: _sum_counts([part[rung] for part in parts if rung in part]) for rung in rungs}


def _less_counts(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    rest = {name: n - before.get(name, 0) for name, n in after.items()}
    return {name: n for name, n in rest.items() if n}


def _less_traffic(after: Traffic, before: Traffic) -> dict[str, dict[str, int]]:
    rest = {rung: _less_counts(traffic, before.get(rung, {})) for rung, traffic in after.items()}
    return {rung: traffic for rung, traffic in rest.items() if traffic}
