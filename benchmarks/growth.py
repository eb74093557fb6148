"""What the plugin costs as more is shared, more workers register, and nothing happens.

    python benchmarks/growth.py [--leases 100000] [--arrays 1000] [--rounds 10] [--idle 60]

One JSON object a line, told apart by ``kind``; times in microseconds unless the name says else.

``environment``
    The command, the commit, versions and hardware.
``ledger``, ``exporter``
    One transfer of one array, from its begin to its release, with ``few`` and with ``many`` leases
    alive; medians of rounds that take turns, and their ratio. ``ledger`` is the state machine,
    ``exporter`` all that a producer does: host memory, announcement, lease, a real channel.
    ``bytes_per_lease`` is what Python allocated for the leases that were added, by their number.
``register``
    Seconds in which a plugin is registered and unregistered on workers that have imported it, and
    the same for one that does nothing.
``idle``
    Share of a core that a worker uses, plain and with the plugin after it has sent and received,
    at the same time; ``difference`` in per cent of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import socket
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
from distributed import Client, LocalCluster, WorkerPlugin
from transfers import commit, cpu, versions

from dask_gpuipc import GPUIPCPlugin, lease
from dask_gpuipc.channel import Channel
from dask_gpuipc.consumers import Consumer
from dask_gpuipc.exporter import Exporter
from dask_gpuipc.lease import Ledger
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.stats import Statistics
from dask_gpuipc.wire import WIRE_VERSION, Advertisement, Release

BATCH = 500
"""Transfers that are timed together."""
AT_ONCE = 100
"""Leases of one transfer of those that live on."""
NBYTES = 8192
PEER = "consumer"


# -- leases ---------------------------------------------------------------------------------------


class LedgerAlone:
    """The state machine, with numbers for pins."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._transfers = itertools.count(1)
        self._leases = itertools.count(1)

    def hold(self, arrays: int, leases: int) -> None:
        """Have so many leases granted, spread over so many arrays."""
        for start in range(0, leases, AT_ONCE):
            self._offer(range(start, min(start + AT_ONCE, leases)), arrays)

    def once(self) -> None:
        """One transfer of one array, from its begin to its release."""
        self.ledger.handle(lease.Released(PEER, self._offer(range(1), 1)))

    def _offer(self, numbers: range, arrays: int) -> tuple[int, ...]:
        transfer = next(self._transfers)
        offered = tuple(next(self._leases) for _ in numbers)
        self.ledger.handle(lease.Opened(transfer, PEER))
        for number, name in zip(numbers, offered, strict=True):
            block = ("host", 1, 0, number % arrays * NBYTES, NBYTES)
            self.ledger.handle(lease.Offered(transfer, name, name, block, NBYTES, number, "host"))
        self.ledger.handle(lease.Granted(transfer))
        return offered

    def close(self) -> None:
        """Nothing is held outside of Python."""


class WholeExporter:
    """An exporter of host memory, and a channel whose other end is only drained."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setblocking(False)
        self._channel = Channel(ours, loop, lambda *_: None, lambda *_: None)
        self._memory = HostMemory()
        self.exporter = Exporter("producer", [self._memory], Statistics(), min_bytes={"host": 1})
        them = Advertisement(
            WIRE_VERSION, PEER, "", 0, 0, "", (), "/", b"", ("host",), ()
        )  # fmt: skip
        self._consumer: Consumer = self.exporter.attach(them, self._channel, set())
        self._held: list[np.ndarray[Any, Any]] = []
        self._one = np.ones(NBYTES, "u1")

    def hold(self, arrays: int, leases: int) -> None:
        """Have so many leases granted, spread over so many arrays."""
        self._held = [np.full(NBYTES, i % 256, "u1") for i in range(arrays)]
        for start in range(0, leases, AT_ONCE):
            transfer = self.exporter.begin(self._consumer)
            for number in range(start, min(start + AT_ONCE, leases)):
                transfer.export(self._held[number % arrays])
            self.exporter.granted(transfer)
        self._drain()

    def once(self) -> None:
        """One transfer of one array, from its begin to its release."""
        transfer = self.exporter.begin(self._consumer)
        descriptor = transfer.export(self._one)
        self.exporter.granted(transfer)
        self.exporter.receive(PEER, Release((descriptor.lease,)))

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = b" "
            while data:
                data, fds, *_ = socket.recv_fds(self._theirs, 1 << 16, 4)
                for fd in fds:
                    os.close(fd)

    def close(self) -> None:
        """End every lease, the channel and the memory."""
        self.exporter.died(PEER)
        self._channel.close()
        self._drain()
        self._theirs.close()
        self._memory.close()


def leases_cost(make: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    """Compare two of the same, with few and with many leases alive, round by round."""
    few, many = make(), make()
    few.hold(few_arrays := min(10, options.arrays), few_arrays)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    many.hold(options.arrays, options.leases)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    times: dict[str, list[float]] = {"few": [], "many": []}
    for number in range(options.rounds + 1):
        sides = [("few", few), ("many", many)]
        for name, side in sides if number % 2 else sides[::-1]:
            took = timed(side.once)
            if number:  # the first one warms up
                times[name].append(took)
    few.close()
    many.close()
    medians = {name: statistics.median(all_of) for name, all_of in times.items()}
    return {
        "leases": {"few": few_arrays, "many": options.leases},
        "arrays": {"few": few_arrays, "many": options.arrays},
        "transfer_us": {name: round(value, 2) for name, value in medians.items()},
        "ratio": round(medians["many"] / medians["few"], 3),
        "bytes_per_lease": round((after - before) / options.leases),
        "all_us": {name: [round(v, 2) for v in all_of] for name, all_of in times.items()},
    }


def timed(call: Callable[[], None]) -> float:
    """Microseconds of one call, over a batch."""
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    return 1e6 * (time.perf_counter() - start) / BATCH


async def exporters_cost(options: argparse.Namespace) -> dict[str, Any]:
    """`leases_cost` of whole exporters, whose channels want a loop."""
    loop = asyncio.get_running_loop()
    return leases_cost(lambda: WholeExporter(loop), options)


# -- workers --------------------------------------------------------------------------------------


class Nothing(WorkerPlugin):
    """Only registered."""

    name = "nothing"


@contextlib.contextmanager
def workers(number: int) -> Iterator[Client]:
    """So many processes of one thread."""
    common: dict[str, Any] = {"dashboard_address": ":0", "silence_logs": 50, "memory_limit": 0}
    with (
        LocalCluster(n_workers=number, threads_per_worker=1, **common) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def register_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Register and unregister in turn, after once to have everything imported."""
    times: dict[str, list[float]] = {}
    plugins: dict[str, Callable[[], WorkerPlugin]] = {"gpuipc": GPUIPCPlugin, "nothing": Nothing}
    with workers(options.workers) as client:
        for number in range(options.rounds + 1):
            for name, make in plugins.items():
                start = time.perf_counter()
                client.register_plugin(make(), name=name)
                middle = time.perf_counter()
                client.unregister_worker_plugin(name)
                end = time.perf_counter()
                if number:
                    times.setdefault(f"{name}_register_s", []).append(middle - start)
                    times.setdefault(f"{name}_unregister_s", []).append(end - middle)
                else:
                    times[f"{name}_first_s"] = [end - start]
    return {
        "workers": options.workers,
        **{name: round(statistics.median(values), 4) for name, values in times.items()},
        "most_s": round(max(map(sum, zip(*_both(times), strict=True))), 4),
    }


def _both(times: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    return times["gpuipc_register_s"], times["gpuipc_unregister_s"]


def idle_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Processor time of idle workers over the same seconds."""
    with workers(2) as plain, workers(2) as plugin:
        plugin.register_plugin(GPUIPCPlugin())
        for client in (plain, plugin):
            exchange(client)
        processes = {
            name: [psutil.Process(pid) for pid in client.run(os.getpid).values()]
            for name, client in {"plain": plain, "plugin": plugin}.items()
        }
        time.sleep(options.settle)  # arenas are given back, and start-up is over
        before = {name: [spent(p) for p in found] for name, found in processes.items()}
        time.sleep(options.idle)
        shares = {
            name: [
                round(100 * (spent(p) - then) / options.idle, 3)
                for p, then in zip(found, before[name], strict=True)
            ]
            for name, found in processes.items()
        }
    difference = statistics.mean(shares["plugin"]) - statistics.mean(shares["plain"])
    return {"seconds": options.idle, "percent": shares, "difference": round(difference, 3)}


def exchange(client: Client) -> None:
    """Have each of two workers fetch chunks of the other."""
    first, second = client.scheduler_info()["workers"]
    for source, target in ((first, second), (second, first)):
        chunks = client.map(np.ones, [1 << 20] * 8, workers=[source], pure=False)
        client.submit(sum_all, chunks, workers=[target], pure=False).result()


def sum_all(chunks: list[np.ndarray[Any, Any]]) -> float:
    """Read all of it."""
    return float(sum(chunk.sum() for chunk in chunks))


def spent(process: psutil.Process) -> float:
    """Seconds of processor time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


# -- command line ---------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What somebody needs to know to repeat this run."""
    return {
        "command": ["benchmarks/growth.py", *sys.argv[1:]],
        "commit": commit(),
        "versions": versions(),
        "cpu": cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="What the plugin costs as more is shared.")
    parser.add_argument("--leases", type=int, default=100_000)
    parser.add_argument("--arrays", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before them")
    parser.add_argument("--only", choices=["ledger", "exporter", "register", "idle"])
    options = parser.parse_args()
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "ledger": lambda: leases_cost(LedgerAlone, options),
        "exporter": lambda: asyncio.run(exporters_cost(options)),
        "register": lambda: register_cost(options),
        "idle": lambda: idle_cost(options),
    }
    print(json.dumps({"kind": "environment", **environment()}), flush=True)
    for name, measure in measures.items():
        if options.only in (None, name):
            print(json.dumps({"kind": name, **measure()}), flush=True)


if __name__ == "__main__":
    main()
