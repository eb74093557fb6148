"""`report`: asks all workers, measures both ways, and puts a `Report` together."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Final

from distributed import Client, Worker

from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.probe import Fetched, ProbeError, chunk, fetch
from dask_gpuipc.reports.gather import worker_statistics
from dask_gpuipc.reports.record import (
    Pace,
    Paces,
    Report,
    WorkerRow,
    causes,
    pairs,
    savings,
    worker_row,
)

SMALL: Final = 2**20
LARGE: Final = 16 * 2**20
"""Bytes of the two chunks by which latency and bandwidth are measured; both above min-bytes."""


def report(client: Client, *, measure: bool = True) -> Any:
    """What the workers sent each other by handle, what not and why, and what it saved.

    Parameters
    ----------
    client : distributed.Client
        If it is asynchronous, the result must be awaited.
    measure : bool
        Measure what chunks take by handle and as bytes, between two of the workers, to estimate
        the time saved. Two chunks, of 1 MiB and of 16 MiB, move there a few times, which takes
        well below a second on idle workers; they show in the numbers of the next report.

    Returns
    -------
    dask_gpuipc.reports.Report
    """
    return client.sync(_report, client, measure)


async def _report(client: Client, measure: bool) -> Report:
    answers = await client.run(_worker_numbers, on_error="return")
    numbers = {address: answer["numbers"] for address, answer in answers.items() if _good(answer)}
    notes: list[str] = []
    paces = await _measure(client, numbers, notes) if measure else {}
    return Report(
        workers=tuple(_row(address, answer) for address, answer in answers.items()),
        pairs=pairs(numbers),
        refused=causes(numbers, Refusal),
        failed=causes(numbers, Failure),
        savings=savings(numbers, paces),
        notes=tuple(notes),
    )


async def _worker_numbers(dask_worker: Worker) -> dict[str, Any]:
    return {
        "name": str(dask_worker.name),
        "host": socket.gethostname(),
        "numbers": await worker_statistics(dask_worker),
    }


def _good(answer: Any) -> bool:
    return not isinstance(answer, BaseException)


def _row(address: str, answer: Any) -> WorkerRow:
    if not _good(answer):
        # Most often the package is not installed there.
        answer = {"name": "", "host": "", "numbers": {"state": f"disabled: {answer!r}"}}
    return worker_row(address, answer["name"], answer["host"], answer["numbers"])


async def _measure(
    client: Client, numbers: Mapping[str, Mapping[str, Any]], notes: list[str]
) -> dict[str, Paces]:
    """For each memory by whose handles something came, between a pair that it came by."""
    paces = {}
    for memory in sorted({m for mine in numbers.values() for m in mine["timings"]}):
        try:
            source, target = _pair_for(memory, numbers)
            paces[memory] = await _paces(client, memory, source, target)
        except ProbeError as error:
            notes.append(f"The pace of {memory} memory was not measured: {error}.")
    return paces


def _pair_for(memory: str, numbers: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    for source, mine in numbers.items():
        for target in mine["sent_to"]:
            theirs = numbers.get(target)
            if theirs and memory in mine["memories"] and memory in theirs["timings"]:
                return source, target
    raise ProbeError("the workers between which chunks went by handle have gone")


async def _paces(client: Client, memory: str, source: str, target: str) -> Paces:
    small, large = [await _both_ways(client, memory, n, source, target) for n in (SMALL, LARGE)]
    return Paces(*map(_pace, small, large))


async def _both_ways(
    client: Client, memory: str, nbytes: int, source: str, target: str
) -> tuple[Fetched, ...]:
    async with chunk(client, memory, nbytes, source) as future:
        return await fetch(client, future.key, source, target, times=5)


def _pace(small: Fetched, large: Fetched) -> Pace:
    beyond = max(large.seconds - small.seconds, 1e-6)
    return Pace(small.seconds, (LARGE - SMALL) / beyond)
