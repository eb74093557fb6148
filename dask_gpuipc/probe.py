"""One chunk between two workers of a running cluster, timed: by handle, and as bytes.

A key of its own is computed on one worker; the other asks for it as `Worker.gather_dep` does, with
the same rpc and the same serializers, some times in a row, and drops what it gets. So what is timed
is what a task's input takes. The workers' other work is only in its way, not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any, Final

from distributed import Client, Future, Worker
from distributed.worker import get_data_from_worker

from dask_gpuipc.comm import PLAIN
from dask_gpuipc.importer import collecting_failures
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.stats import collecting_arrivals

LIMIT: Final = 20.0
"""Seconds that a busy worker has, to make a chunk or to answer."""
LIBRARIES: Final = {"host": "numpy", "cuda": "cupy"}
STEP: Final = 7


class Way(StrEnum):
    """How a chunk is asked for."""

    HANDLE = "handle"
    """As workers ask each other; it comes by the best rung that works."""
    BYTES = "bytes"


class ProbeError(Exception):
    """A chunk could not be made or fetched; the text says why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One way between two workers.

    ``seconds`` is the median from asking to having the array; ``rung`` tells how the last one came,
    and ``right`` whether all had the right values.
    """

    nbytes: int
    seconds: float
    rung: str
    right: bool
    failed: str = ""
    """Why the handle did not open, where it did not."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


@contextlib.asynccontextmanager
async def chunk(
    client: Client, memory: str, nbytes: int, worker: str
) -> AsyncIterator[Future[Any]]:
    """Within, a worker has a chunk of such memory and size; its key is the future's.

    Raises
    ------
    ProbeError
        It was not made in time, or not at all.
    """
    future = client.submit(
        make,
        memory,
        nbytes,
        workers=[worker],
        allow_other_workers=False,
        pure=False,
        priority=1000,
    )
    try:
        try:
            error = await future.exception(timeout=LIMIT)
        except TimeoutError as late:
            raise ProbeError(f"{worker} is busy: it began no new task in {LIMIT:.0f} s") from late
        if future.status != "finished":
            raise ProbeError(
                f"{worker} could not make {nbytes} bytes of {memory} memory: "
                f"{error or future.status!r}"
            )
        yield future
    finally:
        future.release()


async def fetch(
    client: Client,
    key: Any,
    source: str,
    target: str,
    ways: Sequence[Way] = (Way.HANDLE, Way.BYTES),
    times: int = 3,
) -> tuple[Fetched, ...]:
    """Have ``target`` fetch a chunk from ``source``, once to warm up and then so many times.

    Several ways take turns, so that what else the workers do is in the way of each alike.

    Raises
    ------
    ProbeError
        The worker that has it did not answer in time, or is gone.
    """
    answers = await client.run(
        _fetch,
        key,
        source,
        [way.value for way in ways],
        times,
        workers=[target],
        on_error="return",
    )
    answer = answers.get(target, ProbeError(f"{target} is gone"))
    if isinstance(answer, BaseException):
        raise ProbeError(f"{target} could not ask {source}: {answer!r}") from answer
    return tuple(Fetched(**one) for one in answer)


def make(memory: str, nbytes: int, first: int = 0) -> Any:
    """A chunk whose values tell where they should be."""
    library = importlib.import_module(LIBRARIES[memory])
    chunk = library.arange(first, first + nbytes // 8, dtype="i8")
    chunk *= STEP
    return chunk


def is_right(array: Any) -> bool:
    """Whether a received chunk has its values; reads all of them, on the device."""
    library = importlib.import_module(type(array).__module__.partition(".")[0])
    return bool((array == library.arange(array.size, dtype="i8") * STEP).all())


async def _fetch(
    key: Any, source: str, ways: Sequence[str], times: int, dask_worker: Worker
) -> list[dict[str, Any]]:
    rounds = [
        [await _once(key, source, way == Way.BYTES, dask_worker) for way in ways]
        for _ in range(times + 1)
    ]
    return [_summed_up(answers) for answers in zip(*rounds, strict=True)]


def _summed_up(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        **answers[-1],
        "right": all(answer["right"] for answer in answers),
        "seconds": median(answer["seconds"] for answer in answers[1:]),
    }


async def _once(key: Any, source: str, plain: bool, worker: Worker) -> dict[str, Any]:
    with collecting_failures() as failed, collecting_arrivals() as arrived:
        begin = time.perf_counter()
        value = await ask(key, source, plain, worker)
        taken = {"seconds": time.perf_counter() - begin}
    if value is None:
        reason = str(failed[0]) if failed else "the chunk is not there any more"
        return {**taken, "nbytes": 0, "rung": "", "right": False, "failed": reason}
    rungs = Counter({rung: n for (_, rung), n in arrived.items()})
    rung = rungs.most_common(1)[0][0] if rungs else Rung.BYTES.value
    right = await asyncio.to_thread(is_right, value)
    return {**taken, "nbytes": int(value.nbytes), "rung": rung, "right": right, "failed": ""}


async def ask(key: Any, source: str, plain: bool, worker: Worker) -> Any:
    """What a worker gets for a key of another one, as a task's input; None if it is not there."""
    async with asyncio.timeout(LIMIT):
        while True:
            response = await get_data_from_worker(
                rpc=worker.rpc,
                keys=[key],
                worker=source,
                who=worker.address,
                deserializers=PLAIN if plain else None,
            )
            if response["status"] == "OK":
                return response["data"].get(key)
            await asyncio.sleep(0.05)  # it has as many answers under way as it may
