"""dask-cuda's own benchmarks, `local_cupy` and `local_cupy_map_overlap`, by transport.

    python benchmarks/local_cupy.py                    # two workers on one GPU
    python benchmarks/local_cupy.py --gpu 0,1 1,0      # one on each of two

Wants dask-cuda, and distributed-ucxx for the mode ``ucx``. What runs is the `bench_once` of
`local_cupy`, and the seconds are the ones it measures; `map_overlap` is the other module's, written
anew since CuPy 14 lacks a module that it imports. As in `transfers.py` each mode has a cluster of
its own; all are alive at once, and take turns run by run, so that what the machine does meanwhile
falls on all of them alike.

Modes that would take minutes (``plain``, by tcp) have fewer runs: ``--slow-runs``.

Standard output takes one JSON object a line: ``environment`` first, then by operation one
``measure`` for each mode (``took_s`` of each run and their median) and one ``ratio`` for each other
mode, of medians, to ``plain`` and to ``ucx``: above 1, the mode is the faster one. Progress and
a table go to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import statistics
import sys
import time
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, wait
from transfers import MODES, Side, cluster, environment

OPERATIONS: dict[str, dict[str, int]] = {
    "transpose_sum": {"size": 16_000, "chunk_size": 4_000},
    "dot": {"size": 16_000, "chunk_size": 4_000},
    "svd": {"size": 4_000_000, "chunk_size": 500_000, "second_size": 100},
    "col_mask": {"size": 200_000_000, "chunk_size": 20_000_000},
    "slice": {"size": 16_000, "chunk_size": 4_000},
    "sum": {"size": 16_000, "chunk_size": 4_000},
    "fft": {"size": 16_000, "chunk_size": 4_000},
    "map_overlap": {"size": 16_000, "chunk_size": 4_000, "kernel_size": 1},
}


def mean_filter(block: Any, shape: tuple[int, ...]) -> Any:
    """The mean of each cell's surroundings."""
    from cupyx.scipy.ndimage import convolve

    kernel = np.full_like(block, 1.0 / np.prod(shape), shape=shape)
    return convolve(block, kernel)


def overlap_once(client: Client, given: argparse.Namespace) -> float:
    """What `bench_once` of `local_cupy_map_overlap` does; CuPy 14 lacks what that imports."""
    cupy = importlib.import_module("cupy")
    random = da.random.RandomState(RandomState=cupy.random.RandomState)
    x = random.random((given.size, given.size), chunks=given.chunk_size).persist()
    wait(x)
    kernel = 2 * (2 * given.kernel_size + 1,)
    result = x.map_overlap(mean_filter, given.kernel_size, shape=kernel)
    start = time.perf_counter()
    wait(client.persist(result))
    return time.perf_counter() - start


def run_once(side: Side, operation: str) -> float:
    """Seconds of one run of an operation on one cluster."""
    sizes = {"second_size": 0, **OPERATIONS[operation]}
    given = argparse.Namespace(type="gpu", backend="dask", operation=operation, **sizes)
    with side.client.as_current():
        if operation == "map_overlap":
            return overlap_once(side.client, given)
        bench = importlib.import_module("dask_cuda.benchmarks.local_cupy")
        return float(bench.bench_once(side.client, given)["took"])


def measure(sides: list[Side], operation: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one operation on all sides in turn; the lines to print."""
    took: dict[str, list[float]] = {side.mode: [] for side in sides}
    for number in range(options.warm_up + options.runs):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            if side.mode != "plain" or number < options.warm_up + options.slow_runs:
                took[side.mode].append(run_once(side, operation))
    counted = {mode: seconds[options.warm_up :] for mode, seconds in took.items()}
    medians = {mode: statistics.median(seconds) for mode, seconds in counted.items()}
    lines: list[dict[str, Any]] = [
        {
            "kind": "measure",
            "operation": operation,
            "mode": mode,
            "median_s": round(medians[mode], 4),
            "took_s": [round(one, 4) for one in seconds],
        }
        for mode, seconds in counted.items()
    ]
    for mode in medians:
        others = {
            f"to_{other}": round(medians[other] / medians[mode], 3)
            for other in ("plain", "ucx")
            if other in medians and other != mode
        }
        lines.append({"kind": "ratio", "operation": operation, "mode": mode, **others})
    return lines


def tell(line: dict[str, Any]) -> None:
    """Print one line for programs, and of a measure one for people."""
    print(json.dumps(line), flush=True)
    if line["kind"] == "measure":
        row = f"{line['operation']:<14} {line['mode']:<13} {line['median_s'] * 1e3:>9.1f} ms"
        print(f"{row}  {len(line['took_s'])} runs", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="dask-cuda's own benchmarks, by transport.")
    add = parser.add_argument
    modes = [mode for mode in MODES if mode != "plugin-host"]
    add("--mode", nargs="+", choices=modes, default=modes, help=f"default: {' '.join(modes)}")
    add("--operation", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    add("--runs", type=int, default=10, help="counted runs; default: 10")
    add("--slow-runs", type=int, default=3, help="of the mode plain; default: 3")
    add("--warm-up", type=int, default=2, help="runs before them; default: 2")
    add("--gpu", nargs="+", default=["0"],
        help="CUDA_VISIBLE_DEVICES of both workers, or of each; default: 0")  # fmt: skip
    options = parser.parse_args()
    for package in ("dask_cuda", *(["distributed_ucxx"] if "ucx" in options.mode else [])):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed")
    options.memory, options.memory_limit, options.rounds = "cuda", 0, options.runs
    return options


def main() -> None:
    """Start the clusters and go through the operations."""
    options = arguments()
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(cluster(mode, options)) for mode in options.mode]
        tell(environment(sides[0], options))
        for operation in options.operation:
            for line in measure(sides, operation, options):
                tell(line)


if __name__ == "__main__":
    main()
