"""From options to outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import psutil

from dask_gpuipc.bench import measures, remote, setting
from dask_gpuipc.bench.clusters import SIDES, Side, cluster, default_sides, has_ucx
from dask_gpuipc.bench.measures import Plan
from dask_gpuipc.bench.record import BenchError, Options, Outcome
from dask_gpuipc.config import parse_min_bytes
from dask_gpuipc.doctor import machine
from dask_gpuipc.doctor.examine import visible


def run_bench(options: Options, tell: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measure everything, on clusters that are started for it.

    Parameters
    ----------
    options : Options
    tell : callable
        Called with each line of progress.

    Raises
    ------
    BenchError
        Something that was asked for is not here, does not start or does not fit; or what arrived
        was not what was sent.
    """
    gpus = machine.gpus()
    memory = options.memory or ("cuda" if gpus else "host")
    names = options.sides or default_sides(memory)
    _check(memory, gpus, names, options)
    sizes = setting.sizes(memory, options.max_size)
    workers = _workers(gpus if memory == "cuda" else [], options.consumers)
    # 0 is none: the CUDA libraries alone take what a limit would be sized by.
    limit = 0 if memory == "cuda" else psutil.virtual_memory().total
    with ExitStack() as stack:
        tell(f"starting {len(names)} clusters of {len(workers)} workers: {', '.join(names)}")
        sides = [stack.enter_context(cluster(name, workers, limit)) for name in names]
        plan = Plan(sides, memory, options.rounds, options.warm_up, tell)
        for side in sides:
            _touch(side, memory, sizes[-1])
        return Outcome(
            setting=setting.describe(memory),
            options={
                **asdict(options),
                "memory": memory,
                "sides": list(names),
                "max_size": sizes[-1],
                "min_bytes": parse_min_bytes(None)[memory],
                "workers": list(workers),
            },
            sizes=tuple(one for nbytes in sizes for one in measures.one_size(plan, nbytes)),
            copies=measures.copies(plan, sizes),
            consumers=tuple(measures.consumers(plan, sizes[-1])),
            many=tuple(measures.many(plan, options.many, sizes[-1])),
            loops=tuple(measures.loops(plan, sizes[-1], options.load_seconds)),
            pairs=tuple(measures.pairs(plan, len(gpus) if memory == "cuda" else 0, sizes[-1])),
        )


def _check(memory: str, gpus: list[str], names: tuple[str, ...], options: Options) -> None:
    if memory == "cuda" and not gpus:
        raise BenchError("--memory cuda wants cupy and a GPU; `dask gpuipc doctor` says what is")
    if "ucx" in names and not has_ucx():
        raise BenchError("side ucx wants the package distributed-ucxx-cu12 or -cu13")
    if unknown := set(names) - set(SIDES):
        raise BenchError(f"no such side: {', '.join(unknown)}; there are {', '.join(SIDES)}")
    if options.max_size is not None and (options.max_size < 1024 or options.max_size % 8):
        raise BenchError("--max-size must be at least 1 KiB, and a multiple of 8 bytes")


def _workers(gpus: list[str], consumers: int) -> dict[str, Mapping[str, str]]:
    """Environments by name: two for each GPU, or two, and the consumers beside the first target."""
    names: dict[str, Mapping[str, str]] = {}
    for number in range(max(1, len(gpus))):
        for side in ("source", "target"):
            names[f"{side}-{number}"] = visible(gpus, number)
    for number in range(1, consumers):
        names[f"consumer-{number}"] = visible(gpus, 0)
    return names


def _touch(side: Side, memory: str, largest: int) -> None:
    futures: list[Any] = [
        side.submit(worker, remote.touch, memory, largest if name.endswith("-0") else 1 << 20)
        for name, worker in side.workers.items()
    ]
    for future in futures:
        future.result()
