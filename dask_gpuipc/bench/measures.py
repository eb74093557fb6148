"""All measures: each runs its rounds on every side in turn, and gives figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Final

from dask.utils import format_bytes

from dask_gpuipc.bench import remote
from dask_gpuipc.bench.clusters import Side
from dask_gpuipc.bench.record import (
    PARTS,
    BenchError,
    ConsumerFigures,
    LoopFigures,
    ManyFigures,
    PairFigures,
    SizeFigures,
)

Tell = Callable[[str], None]

TIMES: Final = ("transfer", "with_read", "wall")
FIRSTS: Final = 3
"""Rounds of each size in which the allocation is opened anew, at least."""
CHUNK: Final = 64 << 20
"""Bytes of the chunk that several workers fetch, and of those that move while loops are watched."""
SMALL: Final = (1 << 10, 16 << 10, 64 << 10)
"""Bytes of the arrays of which there are many."""
ACROSS: Final = 256 << 20
"""Bytes of the chunks between two GPUs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every measure needs to know."""

    sides: Sequence[Side]
    memory: str
    rounds: int
    warm_up: int
    tell: Tell

    def turns(self, rounds: int | None = None) -> Iterator[tuple[int, Side]]:
        """Each side in each round, the warm-up's included; each goes first as often as others."""
        for number in range(self.warm_up + (self.rounds if rounds is None else rounds)):
            turn = number % len(self.sides)
            for side in [*self.sides[turn:], *self.sides[:turn]]:
                yield number, side


# -- sizes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Round:
    """One chunk, from its making to its end: seconds."""

    times: dict[str, float]
    parts: dict[str, float]
    again: float
    opened: bool
    by_handle: bool


@dataclass(slots=True)
class _Rounds:
    repeated: list[_Round] = field(default_factory=list)
    first: list[_Round] = field(default_factory=list)


def one_size(plan: Plan, nbytes: int) -> list[SizeFigures]:
    """All rounds of one size: chunks in memory that is mapped already, and in new allocations."""
    plan.tell(f"{format_bytes(nbytes)}")
    rounds = {side.name: _Rounds() for side in plan.sides}
    for number, side in plan.turns():
        done = _one_round(plan, side, nbytes, number)
        if number >= plan.warm_up:
            rounds[side.name].repeated.append(done)
    with_plugin = [side for side in plan.sides if side.has_plugin]
    for number in range(min(plan.rounds, FIRSTS)):
        for side in with_plugin:
            side.client.run(remote.forget, plan.memory)
            done = _one_round(plan, side, nbytes, number)
            if done.opened:
                rounds[side.name].first.append(done)
    return [_figures(name, nbytes, found) for name, found in rounds.items()]


def _one_round(plan: Plan, side: Side, nbytes: int, number: int) -> _Round:
    home, away, other = side.workers["source-0"], *side.consumers[:2]
    source = side.submit(home, remote.make, plan.memory, nbytes, number)
    _wait(source)
    before = _metered(side, home, away)
    opens = side.statistics(away).get("opens", 0)
    begin = time.perf_counter()
    total, seconds, copy = side.submit(away, remote.read, source, plan.memory).result()
    wall = time.perf_counter() - begin
    _agree(side, total, remote.total(nbytes, number))
    transfer = side.run(away, remote.transfer_of, source.key)
    after = _metered(side, home, away)
    again, rung = side.run(other, remote.ask, source.key, home, plan.memory)
    release = side.run(other, remote.drop)
    parts = {name: after[name] - before[name] for name in after}
    parts |= {"wire": max(0.0, transfer - sum(parts.values())), "copy": copy, "release": release}
    opened = side.statistics(away).get("opens", 0) > opens
    key = source.key
    del source
    side.wait_dropped(key)
    times = {"transfer": transfer, "with_read": transfer + copy + seconds, "wall": wall}
    return _Round(times, parts, again, opened, rung != "bytes")


def _metered(side: Side, home: str, away: str) -> dict[str, float]:
    if not side.has_plugin:
        return dict.fromkeys(("readiness", "export", "import"), 0.0)
    sent, received = (side.run(worker, remote.metered) for worker in (home, away))
    return {**sent, "import": received["import"]}


def _figures(side: str, nbytes: int, rounds: _Rounds) -> SizeFigures:
    every = rounds.repeated
    return SizeFigures(
        side=side,
        nbytes=nbytes,
        repeated=_medians([one.times for one in every]),
        first=_medians([one.times for one in rounds.first]),
        parts={name: median(one.parts[name] for one in every) for name in PARTS},
        again=median(one.again for one in every),
        by_handle=sum(one.by_handle for one in every),
        rounds=len(every),
        all={name: [one.times[name] for one in every] for name in TIMES},
    )


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in TIMES} if rows else {}


def copies(plan: Plan, sizes: Sequence[int]) -> dict[int, float]:
    """By size, the seconds of one copy on the second worker."""
    first = plan.sides[0]
    away = first.workers["target-0"]
    return {n: first.submit(away, remote.copy_once, plan.memory, n).result() for n in sizes}


# -- several consumers, several arrays ------------------------------------------------------------


def consumers(plan: Plan, largest: int) -> list[ConsumerFigures]:
    """One chunk that 1 to N workers fetch at the same time."""
    nbytes = min(CHUNK, largest)
    figures: list[ConsumerFigures] = []
    for count in range(1, len(plan.sides[0].consumers) + 1):
        plan.tell(f"{count} consumers of {format_bytes(nbytes)}")
        found: dict[str, list[tuple[float, float]]] = {side.name: [] for side in plan.sides}
        for number, side in plan.turns():
            seconds, held, _ = _fetched_by(plan, side, nbytes, count, number)
            if number >= plan.warm_up:
                found[side.name].append((seconds, held))
        for side in plan.sides:
            seconds, held = (median(column) for column in zip(*found[side.name], strict=True))
            shared = _shared_by(plan, side, nbytes, count)
            figures.append(ConsumerFigures(side.name, count, nbytes, seconds, held, shared))
    return figures


def _shared_by(plan: Plan, side: Side, nbytes: int, count: int) -> int:
    """Bytes that the exporter's arenas take once so many have a chunk, and none had before."""
    home = side.workers["source-0"]
    side.run(home, remote.forget, plan.memory)
    return _fetched_by(plan, side, nbytes, count, 0)[2] if side.has_plugin else 0


def _fetched_by(
    plan: Plan, side: Side, nbytes: int, count: int, number: int
) -> tuple[float, float, int]:
    home, targets = side.workers["source-0"], side.consumers[:count]
    source = side.submit(home, remote.make, plan.memory, nbytes, number)
    _wait(source)
    answers = side.client.run(remote.ask, source.key, home, plan.memory, workers=targets)
    pinned = side.statistics(home).get("pinned_bytes", 0)
    shared = side.run(home, remote.shared_bytes)
    side.client.run(remote.drop, workers=targets)
    key = source.key
    del source
    side.wait_dropped(key)
    return max(seconds for seconds, _ in answers.values()), pinned / nbytes, shared


def many(plan: Plan, count: int, largest: int) -> list[ManyFigures]:
    """One task whose inputs are many small arrays of another worker."""
    figures = []
    for nbytes in [n for n in SMALL if n <= largest]:
        plan.tell(f"{count} arrays of {format_bytes(nbytes)}")
        found: dict[str, list[tuple[float, float]]] = {side.name: [] for side in plan.sides}
        for number, side in plan.turns():
            done = _many_once(plan, side, nbytes, count)
            if number >= plan.warm_up:
                found[side.name].append(done)
        for name, rows in found.items():
            transfer, wall = (median(column) for column in zip(*rows, strict=True))
            figures.append(ManyFigures(name, count, nbytes, transfer, wall))
    return figures


def _many_once(plan: Plan, side: Side, nbytes: int, count: int) -> tuple[float, float]:
    home, away = side.workers["source-0"], side.workers["target-0"]
    sources = [side.submit(home, remote.make, plan.memory, nbytes, i) for i in range(count)]
    for source in sources:
        _wait(source)
    since = time.time()
    begin = time.perf_counter()
    total = side.submit(away, remote.read_all, sources).result()
    wall = time.perf_counter() - begin
    _agree(side, total, sum(remote.total(nbytes, i) for i in range(count)) % 2**64)
    transfer = side.run(away, remote.transfers_since, since)
    key = sources[-1].key
    sources.clear()
    del source
    side.wait_dropped(key)
    return transfer, wall


# -- event loops ----------------------------------------------------------------------------------


def loops(plan: Plan, largest: int, seconds: float) -> list[LoopFigures]:
    """How late event loops are, idle and while one worker fetches chunks of another."""
    figures = []
    for side in plan.sides:
        names = {side.workers[name]: name for name in ("source-0", "target-0")}
        for loaded in (False, True):
            plan.tell(f"event loops of {side.name}, {'loaded' if loaded else 'idle'}")
            with ThreadPoolExecutor(1) as beside:
                beats = beside.submit(
                    side.client.run, remote.heartbeat, seconds, workers=list(names)
                )
                moved = _move(plan, side, min(CHUNK, largest), beats) if loaded else 0
                late: dict[str, list[float]] = beats.result()
            figures += [
                LoopFigures(side.name, names[worker], loaded, moved, *_spread(values))
                for worker, values in late.items()
            ]
    return figures


def _move(plan: Plan, side: Side, nbytes: int, until: Future[Any]) -> int:
    """Have chunks move as long as something else is not done; their number."""
    home, away = side.workers["source-0"], side.workers["target-0"]
    moved = 0
    while not until.done():
        source = side.submit(home, remote.make, plan.memory, nbytes, moved)
        side.submit(away, remote.read, source, plan.memory).result()
        moved += 1
    return moved


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), quantiles(values, n=100)[-1], max(values)


# -- pairs of GPUs --------------------------------------------------------------------------------


def pairs(plan: Plan, gpus: int, largest: int) -> list[PairFigures]:
    """One size between each two GPUs, in both directions, and within each."""
    nbytes = min(ACROSS, largest)
    figures = []
    for i, j in [(i, j) for i in range(gpus) for j in range(gpus)] if gpus > 1 else []:
        plan.tell(f"GPU {i} to GPU {j}")
        found: dict[str, list[tuple[float, bool]]] = {side.name: [] for side in plan.sides}
        for number, side in plan.turns():
            home, away = side.workers[f"source-{i}"], side.workers[f"target-{j}"]
            source = side.submit(home, remote.make, plan.memory, nbytes, number)
            _wait(source)
            taken, rung = side.run(away, remote.ask, source.key, home, plan.memory)
            side.run(away, remote.drop)
            key = source.key
            del source
            side.wait_dropped(key)
            if number >= plan.warm_up:
                found[side.name].append((taken, rung != "bytes"))
        for name, rows in found.items():
            taken = median(seconds for seconds, _ in rows)
            handles = sum(by_handle for _, by_handle in rows)
            figures.append(PairFigures(name, f"GPU {i}", f"GPU {j}", nbytes, taken, handles))
    return figures


# -- all ------------------------------------------------------------------------------------------


def _wait(source: Any) -> None:
    error = source.exception()
    if error is not None:
        raise BenchError(f"a chunk could not be made: {error!r}; ask for a smaller --max-size")


def _agree(side: Side, arrived: int, sent: int) -> None:
    if arrived != sent:
        raise BenchError(f"{side.name}: a sum of {arrived} arrived, {sent} was sent")
