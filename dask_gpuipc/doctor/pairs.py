"""Has workers fetch chunks from each other, and times each way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from distributed import Client

from dask_gpuipc.doctor.record import PairResult
from dask_gpuipc.probe import Fetched, ProbeError, Way, chunk, fetch
from dask_gpuipc.reports.gather import worker_statistics
from dask_gpuipc.terminal import Progress

PATIENCE: Final = 8.0
"""Seconds in which two GPUs prove themselves to each other; until then chunks go by the host."""
HANDLE: Final = "handle"
SIZES: Final = {"host": 64 * 2**20, "cuda": 256 * 2**20}
"""Bytes of the chunks, by memory."""


async def examine_pair(
    client: Client,
    memory: str,
    source: str,
    target: str,
    *,
    wanted: str = HANDLE,
    nbytes: int | None = None,
    plain: bool = True,
) -> PairResult:
    """One pair, one way; ``plain`` has it fetched as bytes too, in turn.

    ``wanted`` is the rung that the workers are set to. It is waited for while GPUs prove
    themselves to each other.
    """
    result = PairResult(source, target, memory)
    try:
        before = await _refused(client, source)
        size = nbytes or SIZES[memory]
        async with chunk(client, memory, size, source) as future:
            await _until_proven(client, future.key, result, wanted)
            ways = (Way.HANDLE, Way.BYTES) if plain else (Way.HANDLE,)
            fetched = await fetch(client, future.key, source, target, ways)
        after = await _refused(client, source)
    except ProbeError as error:
        return replace(result, error=str(error))
    found: dict[str, Fetched] = dict(zip((wanted, "bytes"), fetched, strict=False))
    new = {reason for reason, count in after.items() if count > before.get(reason, 0)}
    return replace(result, ways=found, reasons=tuple(sorted(new - {"named_serializers"})))


async def _until_proven(client: Client, key: Any, pair: PairResult, wanted: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while pair.memory == "cuda" and wanted in ("copy", "share"):
        (once,) = await fetch(client, key, pair.source, pair.target, (Way.HANDLE,), times=1)
        if once.rung == wanted or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.1)


async def _refused(client: Client, worker: str) -> dict[str, int]:
    answers = await client.run(worker_statistics, workers=[worker], on_error="return")
    answer = answers.get(worker)
    if not isinstance(answer, dict):
        raise ProbeError(f"{worker} does not answer: {answer!r}")
    refused: dict[str, int] = answer["refused"]
    return refused


def neighbours(numbers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Memory, source and target of each two workers of one node that share such memory."""
    return [
        (memory, source, target)
        for source, mine in numbers.items()
        for target, theirs in numbers.items()
        if source != target and mine["node"] == theirs["node"]
        for memory in sorted({*mine["memories"]} & {*theirs["memories"]})
    ]


async def examine_pairs(
    client: Client,
    pairs: Sequence[tuple[str, str, str]],
    progress: Progress,
    *,
    wanted: str = HANDLE,
    nbytes: int | None = None,
    plain: bool = True,
) -> list[PairResult]:
    """All these pairs, one after the other, so that none is in another's way."""
    results = []
    for memory, source, target in pairs:
        progress.step(f"{memory}, {wanted}: {source} to {target}")
        results.append(
            await examine_pair(
                client, memory, source, target, wanted=wanted, nbytes=nbytes, plain=plain
            )
        )
    return results


def merged(results: Sequence[PairResult]) -> tuple[PairResult, ...]:
    """One result for each pair and memory, with all its ways."""
    found: dict[tuple[str, str, str], PairResult] = {}
    for one in results:
        place = (one.memory, one.source, one.target)
        before = found.get(place, PairResult(one.source, one.target, one.memory))
        found[place] = replace(
            before,
            ways={**before.ways, **one.ways},
            reasons=tuple(sorted({*before.reasons, *one.reasons})),
            error=before.error or one.error,
        )
    return tuple(found.values())
