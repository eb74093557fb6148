"""Real clusters for tests: worker processes, and a check that nothing is left in them.

``cluster`` is one LocalCluster of three worker processes for a whole module. ``client`` is plain
Dask on it. ``shared`` registers the plugin for one test; afterwards all leases must end by
themselves, and once the plugin is unregistered no worker process may hold a descriptor, a mapping
or a folder of it. ``faulty`` registers a plugin whose parts fail as told, and checks the same.
``errors`` tells what the workers logged as errors.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import logging
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.config import Settings
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.testing import Fault, FaultyMemory, faulty_channels

LARGE = 1 << 17
"""Elements of an int64 array of 1 MiB, well above min-bytes."""
WORKERS: dict[str, Any] = {
    "n_workers": 3,
    "threads_per_worker": 2,
    "dashboard_address": ":0",
    "memory_limit": "4GB",
    "silence_logs": 40,
}


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Poll until a condition holds; fail with its last value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:.0f} s; last value {value!r}")
        time.sleep(0.02)


def make(n: int = LARGE, seed: int = 0) -> np.ndarray:
    """Integers that tell where they should be."""
    return np.arange(n, dtype="i8") * 7 + seed


def same(x: Any, n: int, seed: int) -> bool:
    return bool(np.array_equal(x, make(n, seed)))


def total(client: Client, name: str) -> int:
    return sum(s[name] for s in dask_gpuipc.statistics(client).values())


def arrays(client: Client, direction: str, rung: str) -> int:
    """Arrays that the whole cluster sent or received by a rung."""
    found = dask_gpuipc.statistics(client).values()
    return sum(s[direction].get(rung, {"arrays": 0})["arrays"] for s in found)


def moved(client: Client) -> Counter[str]:
    """Bytes that the whole cluster sent, by rung."""
    found: Counter[str] = Counter()
    for stats in dask_gpuipc.statistics(client).values():
        for rung, traffic in stats["sent"].items():
            found[rung] += traffic["bytes"]
    return found


def refused(client: Client, reason: str) -> int:
    return sum(s["refused"].get(reason, 0) for s in dask_gpuipc.statistics(client).values())


def failed(client: Client, reason: str) -> int:
    return sum(s["failed"].get(reason, 0) for s in dask_gpuipc.statistics(client).values())


def addresses(client: Client) -> list[str]:
    return sorted(client.scheduler_info(n_workers=-1)["workers"])


def outgoing(dask_worker: Worker) -> int:
    return dask_worker.transfer_outgoing_count


def left_in_process(dask_worker: Worker | None = None) -> list[str]:
    """Descriptors, mappings and folders of the package that a process still has."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "dask-gpuipc" in target or "pidfd" in target:
            found.append(target)
    with open("/proc/self/maps") as maps:
        found += [line.split()[-1] for line in maps if "dask-gpuipc" in line]
    with open("/proc/net/unix") as table:
        sockets = [line.split()[-1] for line in table if PREFIX in line]
    found += [path for path in sockets if f"-{os.getpid()}-" in path]
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    found += glob.glob(f"{base}/{PREFIX}-*-{os.getpid()}-*")
    return found


PREFIX = "dask-gpuipc"


def collect_garbage() -> None:
    gc.collect()


def nothing_held(client: Client) -> Callable[[], bool]:
    """Whether no lease is left, after the garbage that tracebacks make is collected."""

    def check() -> bool:
        client.run(collect_garbage)
        stats = dask_gpuipc.statistics(client).values()
        return not any(s["leases"] or s["pinned_bytes"] or s["holding"] for s in stats)

    return check


def unregister(client: Client) -> None:
    """Take the plugin off all workers, if it is there."""
    states = {s["state"] for s in dask_gpuipc.statistics(client).values()}
    if states != {"disabled: not registered"}:
        client.unregister_worker_plugin("gpuipc")


def check_nothing_left(client: Client) -> None:
    """All leases end; after the plugin is gone, no worker process has anything of it."""
    until(nothing_held(client), "leases, pins and holdings of all workers to end")
    assert not any(client.run(outgoing).values())
    unregister(client)
    until(
        lambda: not any(client.run(left_in_process).values()),
        f"worker processes to be clean: {client.run(left_in_process)}",
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # The active memory manager drops redundant replicas at its own times: of two that a test has
    # made different on purpose it may keep either.
    config = {"distributed.scheduler.active-memory-manager.start": False}
    with dask.config.set(config), LocalCluster(**WORKERS) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(3, timeout=60)
        yield client
        client.run(collect_garbage)


@pytest.fixture
def shared(client: Client) -> Iterator[Client]:
    client.register_worker_plugin(GPUIPCPlugin())
    states = {s["state"] for s in dask_gpuipc.statistics(client).values()}
    assert states == {"enabled"}, states
    yield client
    check_nothing_left(client)


def move(client: Client, source: Any, to: str, function: Any = None, *args: Any) -> Any:
    """Run a function of a future on another worker; the future of its result."""
    future = client.submit(function or identity, source, *args, workers=[to], pure=False)
    wait(future)
    return future


def identity(x: Any) -> Any:
    return x


# -- things that go wrong in workers --------------------------------------------------------------


class FaultyPlugin(GPUIPCPlugin):
    """The plugin with memories and channels that fail as told; each worker counts for itself.

    ``settings`` are those of the memories; they are changed after everything else.
    """

    def __init__(self, memory: Any = (), channel: Any = (), settings: Any = None) -> None:
        super().__init__()
        self.faults: tuple[Any, ...] = (memory, channel, settings or {})
        self._stack = contextlib.ExitStack()

    def __reduce__(self) -> Any:
        return FaultyPlugin, self.faults

    def make_memories(self, settings: Settings) -> list[Memory]:
        made = super().make_memories(replace(settings, **self.faults[2]))
        return [FaultyMemory(m, *self.faults[0]) for m in made]

    async def setup(self, worker: Worker) -> None:
        self._stack.enter_context(faulty_channels(*self.faults[1]))
        await super().setup(worker)

    async def teardown(self, worker: Worker) -> None:
        await super().teardown(worker)
        self._stack.close()


@pytest.fixture
def faulty(client: Client) -> Iterator[Callable[..., Client]]:
    """Registers a `FaultyPlugin` made of its arguments; afterwards nothing may be left."""

    def register(*memory: Fault, channel: Any = (), settings: Any = None) -> Client:
        client.register_worker_plugin(FaultyPlugin(memory, channel, settings))
        states = {s["state"] for s in dask_gpuipc.statistics(client).values()}
        assert states == {"enabled"}, states
        return client

    yield register
    open_gates(client)
    check_nothing_left(client)
    client.run(close_gates)


def calls(client: Client, worker: str, name: str) -> int:
    """How often a method of a `FaultyPlugin`'s first memory was called on a worker."""
    return client.run(_calls, name, workers=[worker])[worker]


def _calls(name: str, dask_worker: Worker) -> int:
    return dask_worker.plugins["gpuipc"].endpoint.memories[0].calls[name]


@dataclass(frozen=True)
class Gate:
    """What a `Fault` holds a call with: an event of the process that it is used in, by its name."""

    name: str

    def wait(self, timeout: float) -> bool:
        return _gates[self.name].wait(timeout)


_gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def open_gates(client: Client, *names: str) -> None:
    """Let go of what these gates hold, or all of them, on all workers; later ones pass these."""
    client.run(let_go, *names)


def let_go(*names: str) -> None:
    """As `open_gates`, in this process."""
    for name in names or [*_gates]:
        _gates[name].set()


def close_gates() -> None:
    """Of this process, after a test."""
    _gates.clear()


class _Listener(logging.Handler):
    """Keeps the errors that a worker logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.name}: {self.format(record)}")


_LOGGERS = ("", "distributed")  # the second does not propagate
_listeners: list[_Listener] = []


def _listen() -> None:
    _listeners.append(_Listener())
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(_listeners[-1])


def _heard() -> list[str]:
    return _listeners[-1].texts


def _stop_listening() -> None:
    listener = _listeners.pop()
    for name in _LOGGERS:
        logging.getLogger(name).removeHandler(listener)


@pytest.fixture
def errors(client: Client) -> Iterator[Callable[[], list[str]]]:
    """What the workers have logged as errors since the test began."""
    client.run(_listen)
    yield lambda: [text for texts in client.run(_heard).values() for text in texts]
    client.run(_stop_listening)
