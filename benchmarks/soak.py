"""Mixed workflows while workers are killed, stopped, retired and restarted; then, what is left.

    python benchmarks/soak.py --minutes 20
    python benchmarks/soak.py --minutes 5 --memory cuda --workers 2     # CuPy, one GPU

A scheduler and ``dask worker`` processes are started as users start them. Workflows run one after
another, each on new data, and their exact results are compared with NumPy's. Meanwhile, at random
times, one worker is struck: killed (in half of the cases while a child that it forked lives on),
stopped for a while, retired and replaced, or restarted. Every so often the strikes pause, all data
is dropped, and nothing of the plugin may be left on any worker.

Standard output takes one JSON object a line, told apart by ``kind``: ``environment`` first, a
``check`` at every pause, ``figures`` last:

``results``, ``wrong``, ``errors``, ``stuck``
    Workflows that ended; of those, with another result than NumPy's; that raised; and that did not
    end within two minutes, or left a task on the scheduler.
``transfers``, ``bytes``
    Arrays that crossed by handle, and their nominal bytes. At least: what a worker counted since it
    was last asked dies with it.
``kills``, ``strikes``
    SIGKILLs, and all strikes by name.
``leaked``
    What did not go in 30 seconds, summed over all pauses, by kind: leases, pinned bytes, arrays
    held, mappings, outgoing transfers that Dask counts, memfds, and descriptors. These are sockets
    and pidfds of the plugin: beyond those that its live peers need, and at the end any at all.
``folders``
    Socket folders in the end that no later set-up would sweep.
``rss_mib``, ``gpu_used_mib``
    Of the largest worker, and of the whole GPU, at the first and at the last pause.

The exit status is 0 if nothing was wrong, stuck or leaked. The package may be installed or in
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, Worker, get_client, secede
from transfers import commit, cpu, describe_gpu, gpu_driver, versions

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.channel import sweep

LIMIT = 120
"""Seconds after which a workflow, or a worker that shall start, is stuck."""
SETTLE = 30
"""Seconds in which everything that nobody holds must be gone."""
LEAKS = (
    "leases", "pinned_bytes", "holding", "mappings", "outgoing", "memfds", "descriptors",
)  # fmt: skip
SIDE = 1024
CHUNK = 256


# -- on the workers -------------------------------------------------------------------------------


def to_device(block: np.ndarray) -> Any:
    """A NumPy block in the memory of the first GPU."""
    import cupy

    return cupy.asarray(block)


def to_host(block: Any) -> np.ndarray:
    """Any block in NumPy."""
    return block.get() if hasattr(block, "get") else np.asarray(block)


def overwrite(block: Any) -> Any:
    """Write into what was received, which is nobody else's."""
    block *= 2
    block += 1
    return block


def fail(block: Any) -> Any:
    """Fail with the input in the traceback."""
    raise ValueError(f"a task that fails on purpose, with {block.nbytes} bytes")


def checksum(block: Any) -> int:
    """Sum of all elements."""
    return int(block.sum())


def nested(block: Any) -> int:
    """Have another worker read what this task received."""
    secede()
    client = get_client()
    future = client.scatter(to_host(block[::2]), hash=False)
    return int(client.submit(checksum, future, pure=False).result())


def fork() -> int:
    """A child that keeps all that its parent has open."""
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


def look(dask_worker: Worker) -> dict[str, int]:
    """What of the plugin is in this process."""
    import gc
    import re

    import psutil

    gc.collect()
    found = Counter({"memfds": 0, "descriptors": 0})
    with open("/proc/net/unix") as table:
        sockets = {line.split()[6] for line in table if line.split()[4] == "0005"}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            socket = re.fullmatch(r"socket:\[(\d+)\]", target)
            found["memfds"] += target.startswith("/memfd:dask-gpuipc")
            found["descriptors"] += "pidfd" in target or bool(socket and socket[1] in sockets)
    with open("/proc/self/maps") as maps:
        found["memfds"] += sum("/memfd:dask-gpuipc" in line for line in maps)
    found["outgoing"] = dask_worker.transfer_outgoing_count
    found["rss"] = psutil.Process().memory_info().rss
    return dict(found)


def gpu_used() -> int:
    """Bytes of the GPU that anybody uses, once CuPy's pool here has given back what it can."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def tasks(dask_scheduler: Any) -> int:
    """Tasks that the scheduler knows."""
    return len(dask_scheduler.tasks)


# -- workflows ------------------------------------------------------------------------------------


class Workflows:
    """Each returns what Dask found and what NumPy says; called by turns, in random order."""

    def __init__(self, client: Client, gpu: bool, rng: random.Random) -> None:
        self.client = client
        self.gpu = gpu
        self.rng = rng

    def all(self) -> list[Callable[[], tuple[Any, Any]]]:
        """In random order."""
        arrays = [partial(self.array, function) for function in ARRAYS]
        others = [self.fan_out, self.chain, self.cancelled, self.failed, self.published]
        every = [*arrays, *others, self.from_within]
        self.rng.shuffle(every)
        return every

    def numbers(self) -> np.ndarray:
        """New data: nothing that is left of an old workflow can pass for it."""
        seed = self.rng.getrandbits(32)
        return np.random.default_rng(seed).integers(0, 1000, (SIDE, SIDE))

    def chunked(self, whole: np.ndarray) -> Any:
        """The same on the workers, in CuPy if asked for."""
        x = da.from_array(whole, chunks=CHUNK)
        return x.map_blocks(to_device, dtype=x.dtype) if self.gpu else x

    def value(self, future: Any) -> Any:
        """Wait for a future's result, for so long."""
        return future.result(timeout=LIMIT)

    def array(self, function: Callable[[Any], Any]) -> tuple[Any, Any]:
        """One of `ARRAYS`."""
        whole = self.numbers()
        expression = function(self.chunked(whole))
        found = self.client.compute(expression.map_blocks(to_host, dtype="i8"), retries=20)
        return self.value(found), np.asarray(function(whole))

    def source(self, whole: np.ndarray) -> Any:
        """A future of the whole array on some worker."""
        source = self.client.submit(np.array, whole, pure=False, retries=20)
        if self.gpu:
            source = self.client.submit(to_device, source, pure=False, retries=20)
        return source

    def fan_out(self) -> tuple[Any, Any]:
        """One chunk to all workers."""
        whole = self.numbers()
        source = self.source(whole)
        futures = [self.away(checksum, source, to=i) for i in range(8)]
        return [self.value(f) for f in futures], [int(whole.sum())] * 8

    def away(self, function: Any, *inputs: Any, to: int) -> Any:
        """Run on one worker, or on any if that one has gone."""
        workers = sorted(self.client.scheduler_info(n_workers=-1)["workers"])
        return self.client.submit(
            function,
            *inputs,
            workers=workers[to % len(workers)] if workers else None,
            allow_other_workers=bool(workers),
            pure=False,
            retries=20,
        )

    def chain(self) -> tuple[Any, Any]:
        """What was received is written into, and handed on."""
        whole = self.numbers()
        future = self.source(whole)
        for i in range(6):
            future = self.away(overwrite if i % 2 else np.negative, future, to=i)
        found = self.client.submit(to_host, future, pure=False, retries=20)
        want = whole
        for i in range(6):
            want = want * 2 + 1 if i % 2 else -want
        return self.value(found), want

    def cancelled(self) -> tuple[Any, Any]:
        """Futures that are cancelled on their way, and others of the same source that are not."""
        whole = self.numbers()
        source = self.source(whole)
        futures = [self.away(checksum, source, to=i) for i in range(8)]
        self.client.cancel(futures[::2])
        return [self.value(f) for f in futures[1::2]], [int(whole.sum())] * 4

    def failed(self) -> tuple[Any, Any]:
        """Tasks that fail with their input in the traceback."""
        whole = self.numbers()
        source = self.source(whole)
        failing = self.client.submit(fail, source, pure=False)
        total = self.away(checksum, source, to=1)
        error = failing.exception(timeout=LIMIT)
        return [type(error).__name__, self.value(total)], ["ValueError", int(whole.sum())]

    def published(self) -> tuple[Any, Any]:
        """A published and persisted array, read twice."""
        whole = self.numbers()
        self.client.publish_dataset(soak=self.chunked(whole).persist(retries=20))
        try:
            x = self.client.get_dataset("soak")
            sums = [x.sum(axis=i).map_blocks(to_host, dtype="i8") for i in (0, 1)]
            found = [self.value(self.client.compute(s, retries=20)) for s in sums]
        finally:
            self.client.unpublish_dataset("soak")
        return found, [whole.sum(axis=0), whole.sum(axis=1)]

    def from_within(self) -> tuple[Any, Any]:
        """A task that submits a task."""
        whole = self.numbers()
        future = self.away(nested, self.source(whole), to=1)
        return self.value(future), int(whole[::2].sum())


ARRAYS: list[Callable[[Any], Any]] = [
    lambda x: x + x.T,
    lambda x: x @ x.T,
    lambda x: rechunked(x).cumsum(axis=0),
    lambda x: x[::-2, 5:] * 3,
    lambda x: x.sum(axis=0) + x.max(axis=1),
]


def rechunked(x: Any) -> Any:
    """In slabs, where it is chunked at all."""
    return x.rechunk((SIDE, CHUNK // 4)) if isinstance(x, da.Array) else x


# -- the cluster ----------------------------------------------------------------------------------


class Site:
    """A scheduler and workers, processes of their own."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        self.folder = folder
        self.file = Path(folder, "scheduler.json")
        self.log = open(options.log or os.devnull, "ab")  # noqa: SIM115 -- closed in close
        self.processes = [self.start("dask_scheduler", "--port", "0", "--dashboard-address", ":0")]
        until(self.file.exists, "the scheduler to start", LIMIT)
        for _ in range(options.workers):
            self.add_worker()
        self.client = Client(scheduler_file=str(self.file), timeout=LIMIT)
        self.wait_for_workers()

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """One of distributed's programs."""
        command = [sys.executable, "-m", f"distributed.cli.{program}", *arguments]
        gpu = {"CUDA_VISIBLE_DEVICES": self.options.gpu} if self.options.memory == "cuda" else {}
        environment = {
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1000",
            "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
            "DASK_GPUIPC__SOCKET_DIRECTORY": self.folder,
            **gpu,
        }
        return subprocess.Popen(
            [*command, "--scheduler-file", str(self.file)],
            env={**os.environ, **environment},
            stdout=self.log,
            stderr=self.log,
        )

    def add_worker(self) -> None:
        """Start one more."""
        limit = ("--memory-limit", self.options.memory_limit, "--nthreads", "2")
        place = ("--local-directory", self.folder, "--no-dashboard")
        self.processes.append(self.start("dask_worker", *limit, *place))

    def workers(self) -> list[str]:
        """Addresses of those that run."""
        return sorted(self.client.scheduler_info(n_workers=-1)["workers"])

    def wait_for_workers(self) -> None:
        """Until there are as many as there should be, and all of them answer."""

        def are_up() -> bool:
            with contextlib.suppress(OSError, TimeoutError):
                states = dask_gpuipc.statistics(self.client)
                return len(states) == self.options.workers
            return False

        until(are_up, f"{self.options.workers} workers", LIMIT)

    def close(self) -> None:
        """End them all."""
        self.client.close(timeout=10)
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()


def until(condition: Callable[[], Any], what: str, seconds: float) -> None:
    """Wait for a condition; exit with what was waited for if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.05)


# -- strikes --------------------------------------------------------------------------------------


class Striker:
    """Strikes one worker at a time, at random times, on a thread of its own."""

    def __init__(self, site: Site, figures: Figures, rng: random.Random) -> None:
        self.site = site
        self.figures = figures
        self.rng = rng
        self.strikes: list[tuple[str, Callable[[str, int], None]]] = [
            ("kill", self.kill),
            ("kill", self.kill),
            ("kill with a child", self.kill_with_child),
            ("kill with a child", self.kill_with_child),
            ("stop", self.stop),
            ("retire", self.retire),
            ("restart", self.restart),
        ]
        self._paused = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.run)
        self._thread.start()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Within, nobody is struck."""
        with self._paused:
            yield

    def end(self) -> None:
        """Strike no more."""
        self._ended.set()
        self._thread.join()

    def run(self) -> None:
        """Strike until the end."""
        shortest, longest = self.site.options.every
        while not self._ended.wait(self.rng.uniform(shortest, longest)):
            with self._paused:
                if not self._ended.is_set():
                    self.strike()

    def strike(self) -> None:
        """Strike one; if it cannot be reached just now, no one."""
        name, strike = self.rng.choice(self.strikes)
        with contextlib.suppress(OSError, TimeoutError):
            self.figures.count_transfers(self.site.client)
            pids = self.site.client.run(os.getpid)
            address = self.rng.choice(sorted(pids))
            strike(address, pids[address])
            self.figures.strikes[name] += 1
            self.site.wait_for_workers()

    def kill(self, address: str, pid: int) -> None:
        """SIGKILL."""
        os.kill(pid, signal.SIGKILL)
        self.figures.kills += 1

    def kill_with_child(self, address: str, pid: int) -> None:
        """SIGKILL, while a child keeps all that its parent had open, for a while."""
        child = self.site.client.run(fork, workers=[address])[address]
        try:
            self.kill(address, pid)
            self._ended.wait(self.rng.uniform(0, 1))
        finally:
            os.kill(child, signal.SIGKILL)

    def stop(self, address: str, pid: int) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        os.kill(pid, signal.SIGSTOP)
        try:
            self._ended.wait(self.rng.uniform(0.1, 2))
        finally:
            os.kill(pid, signal.SIGCONT)

    def retire(self, address: str, pid: int) -> None:
        """Have it leave, and another come."""
        self.site.client.retire_workers([address], close_workers=True)
        self.site.add_worker()

    def restart(self, address: str, pid: int) -> None:
        """Have its nanny restart it."""
        self.site.client.restart_workers([address], raise_for_error=False)


# -- figures --------------------------------------------------------------------------------------


@dataclass
class Figures:
    """What is told in the end; see the top of this file."""

    results: int = 0
    wrong: int = 0
    errors: int = 0
    stuck: int = 0
    kills: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    leaked: Counter[str] = field(default_factory=Counter)
    folders: int = 0
    rss: list[int] = field(default_factory=list)
    gpu: list[int] = field(default_factory=list)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)

    def count_transfers(self, client: Client) -> None:
        """Ask all workers what they sent so far."""
        for address, stats in dask_gpuipc.statistics(client).items():
            rungs = [traffic for rung, traffic in stats["sent"].items() if rung != "bytes"]
            arrays, nbytes = (sum(r[name] for r in rungs) for name in ("arrays", "bytes"))
            self.sent[address] = max(self.sent.get(address, (0, 0)), (arrays, nbytes))

    def bad(self) -> int:
        """All that should be nothing."""
        leaked = self.leaked.total() + self.folders
        return self.wrong + self.errors + self.stuck + leaked

    def line(self, seconds: float) -> dict[str, Any]:
        """As printed."""
        return {
            "seconds": round(seconds),
            "results": self.results,
            "transfers": sum(arrays for arrays, _ in self.sent.values()),
            "bytes": sum(nbytes for _, nbytes in self.sent.values()),
            "kills": self.kills,
            "strikes": dict(sorted(self.strikes.items())),
            "wrong": self.wrong,
            "errors": self.errors,
            "stuck": self.stuck,
            "leaked": {name: self.leaked[name] for name in LEAKS},
            "folders": self.folders,
            "rss_mib": [n >> 20 for n in (*self.rss[:1], *self.rss[-1:])],
            "gpu_used_mib": [n >> 20 for n in (*self.gpu[:1], *self.gpu[-1:])],
        }


class Soak:
    """One run."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self.site = site
        self.options = options
        self.figures = Figures()
        rng = random.Random(options.seed)
        self.workflows = Workflows(site.client, options.memory == "cuda", rng)
        self.start = time.monotonic()
        self.striker = Striker(site, self.figures, random.Random(rng.random()))

    def run(self) -> None:
        """Work and be struck, with a check now and then, and one at the end."""
        end = self.start + self.options.minutes * 60
        check = self.start
        try:
            while time.monotonic() < end:
                for workflow in self.workflows.all():
                    self.work(workflow)
                    if time.monotonic() > min(end, check + self.options.check_every):
                        break
                with self.striker.pause():
                    self.check()
                check = time.monotonic()
        finally:
            self.striker.end()

    def work(self, workflow: Callable[[], tuple[Any, Any]]) -> None:
        """Run one workflow and judge it."""
        try:
            found, want = workflow()
        except TimeoutError:
            self.figures.stuck += 1
            note(f"stuck: {workflow}")
        except Exception as error:  # noqa: BLE001 -- counted and told
            self.figures.errors += 1
            note(f"{workflow}: {error!r}")
        else:
            self.figures.results += 1
            if not np.array_equal(np.asarray(found), np.asarray(want)):
                self.figures.wrong += 1
                note(f"wrong: {workflow}")

    def check(self) -> None:
        """With nothing running, nothing may be left."""
        self.site.wait_for_workers()
        self.figures.count_transfers(self.site.client)
        left = self.settled()
        self.figures.stuck += left.pop("tasks")
        self.figures.leaked.update(left)
        seen = self.site.client.run(look)
        self.figures.rss.append(max(found["rss"] for found in seen.values()))
        if self.options.memory == "cuda":
            self.figures.gpu.append(max(self.site.client.run(gpu_used).values()))
        line = self.figures.line(time.monotonic() - self.start)
        print(json.dumps({"kind": "check", **line}), flush=True)

    def settled(self) -> Counter[str]:
        """What is left once all that goes by itself has gone."""
        end = time.monotonic() + SETTLE
        while True:
            left = self.left()
            if not left.total() or time.monotonic() > end:
                return left
            time.sleep(0.2)

    def left(self) -> Counter[str]:
        """What is on the workers now."""
        client = self.site.client
        left = Counter({"tasks": client.run_on_scheduler(tasks)})
        dask_gpuipc.collect(client)
        for stats in dask_gpuipc.statistics(client).values():
            for name in ("leases", "pinned_bytes", "holding", "mappings"):
                left[name] += stats[name]
        peers = self.options.workers - 1
        for found in client.run(look).values():
            left["memfds"] += found["memfds"]
            left["outgoing"] += found["outgoing"]
            # to and from each peer a socket and a pidfd, and the listening socket
            left["descriptors"] += max(0, found["descriptors"] - 4 * peers - 1)
        return left

    def finish(self) -> None:
        """Take the plugin off: whatever is left now would stay for good."""
        client = self.site.client
        client.unregister_worker_plugin("gpuipc")
        end = time.monotonic() + SETTLE
        while True:
            seen = client.run(look).values()
            left = Counter({k: sum(s[k] for s in seen) for k in ("memfds", "descriptors")})
            if not left.total() or time.monotonic() > end:
                break
            time.sleep(0.2)
        self.figures.leaked.update(left)

    def tell(self) -> None:
        """Print the last line."""
        line = self.figures.line(time.monotonic() - self.start)
        print(json.dumps({"kind": "figures", **line}), flush=True)


def note(text: str) -> None:
    """A line for people, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# -- command line ---------------------------------------------------------------------------------


def environment(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """What somebody needs to know to repeat this run."""
    gpu = None
    if options.memory == "cuda":
        gpu = site.client.submit(describe_gpu).result()
        gpu["driver"] = gpu_driver()
    return {
        "kind": "environment",
        "command": ["benchmarks/soak.py", *sys.argv[1:]],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "versions": versions(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "cpu": cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "seed": options.seed,
    }


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Mixed workflows while workers are killed; then nothing may be left.",
        epilog="One JSON object a line on standard output; see the top of this file.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=20, help="how long; default: 20")
    add("--memory", choices=("host", "cuda"), default="host", help="NumPy (the default) or CuPy")
    add("--transfer", choices=("auto", "copy", "share"), default="auto", help="of the plugin")
    add("--workers", type=int, default=3, help="default: 3")
    add("--every", type=float, nargs=2, default=(2, 8), metavar="SECONDS",
        help="shortest and longest time between two strikes; default: 2 8")  # fmt: skip
    add("--check-every", type=float, default=60, metavar="SECONDS", help="default: 60")
    add("--memory-limit", default="4GB", help="of each worker; default: 4GB")
    add("--gpu", default="0", help="CUDA_VISIBLE_DEVICES of all workers; default: 0")
    add("--seed", type=int, default=0, help="of data, order and strikes; default: 0")
    add("--log", help="file for what scheduler and workers write; default: nowhere")
    return parser.parse_args()


def main() -> int:
    """Run it; the exit status."""
    options = arguments()
    dask.config.set({"array.rechunk.method": "tasks"})
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        site = Site(options, folder)
        try:
            print(json.dumps(environment(site, options)), flush=True)
            site.client.register_worker_plugin(GPUIPCPlugin(transfer=options.transfer))
            soak = Soak(site, options)
            soak.run()
            soak.finish()
        finally:
            site.close()
        sweep(folder)
        soak.figures.folders = len(list(Path(folder).glob("dask-gpuipc-*")))
        soak.tell()
        return 1 if soak.figures.bad() else 0


if __name__ == "__main__":
    sys.exit(main())
