"""The time of a NumPy array in a pipe of multiprocessing, pickled and as a handle.

    python benchmarks/messages.py [--sizes 64KiB,1MiB,128MiB] [--rounds 30]

One process sends an array over a pipe, another one sums it and sends the sum back; the ways take
turns. One line of JSON for what was run, and one for each size and way, with the median, least and
most in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from dask.utils import format_bytes, parse_bytes

from dask_gpuipc import sharing

WAYS: dict[str, dict[str, Any]] = {
    "pickled": {"min_bytes": 1 << 50},
    "descriptor": {"min_bytes": 1},
    "name": {"min_bytes": 1, "strategy": "name"},
}


def sum_all(connection: Connection) -> None:
    """Answer each array with its sum, until None comes."""
    while (array := connection.recv()) is not None:
        connection.send(float(array.sum()))


def measure(connection: Connection, size: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by way."""
    array = np.ones(max(1, size // 8))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):  # the first is not counted: it starts threads and makes arenas
        for way, options in WAYS.items():
            sharing.init_reductions(**options)
            start = time.perf_counter()
            connection.send(array)
            total = connection.recv()
            times[way].append(1000 * (time.perf_counter() - start))
            assert total == array.size
    return {way: found[1:] for way, found in times.items()}


def setting() -> dict[str, Any]:
    """What was run, and on what."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="64KiB,1MiB,4MiB,16MiB,128MiB")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(json.dumps(setting()), flush=True)
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=sum_all, args=(theirs,))
    process.start()
    for size in map(parse_bytes, options.sizes.split(",")):
        for way, times in measure(mine, size, options.rounds).items():
            found = {
                "size": format_bytes(size),
                "way": way,
                "median_ms": round(statistics.median(times), 2),
                "least_ms": round(min(times), 2),
                "most_ms": round(max(times), 2),
            }
            print(json.dumps(found), flush=True)
    mine.send(None)
    process.join()


if __name__ == "__main__":
    main()
