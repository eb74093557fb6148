"""The kill matrix: one cell is a victim, a step of a transfer at which it is struck, and how.

A `Site` is a scheduler in a process of its own and three nannies. In a cell ``a`` sends two arrays
to ``b``; a gate holds the transfer at the step; the victim is struck; the gate opens. Then the
result must be what plain Dask gives, the next transfers must go by handle, and nothing may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import dask
import psutil
from cluster_fixtures import left_in_process
from distributed import Client, Nanny, Worker, rpc
from distributed.core import Status
from distributed.protocol.pickle import dumps
from helpers import until

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.channel import sweep
from dask_gpuipc.config import Settings
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.memory.host import Arena
from dask_gpuipc.testing import Fault, FaultyMemory, Gate, Keeper, poisoned_arenas

LIMIT: Final = 60.0
ELEMENTS: Final = 1 << 17

STEPS: Final = {
    "before the offer": "producer",
    "while the producer copies": "producer",
    "between the offer and the write": "producer",
    "before the OK": "consumer",
    "after the OK": "consumer",
    "while the array is held": "",
    "while releases are queued": "consumer",
}
"""And who is held there."""
KILLS: Final = ("SIGKILL", "SIGKILL, its forked child lives")
ENDS: Final = (*KILLS, "SIGSTOP and SIGCONT", "clean close")
ACTIONS: Final = {
    "producer": (*ENDS, "nanny restart", "retire_workers"),
    "consumer": (*ENDS, "nanny restart", "retire_workers"),
    "scheduler": ENDS,
}


@dataclass(frozen=True)
class Cell:
    victim: str
    step: str
    action: str

    def __str__(self) -> str:
        return f"{self.victim}: {self.action}, {self.step}"


def cells() -> list[Cell]:
    return [
        Cell(victim, step, action)
        for victim, actions in ACTIONS.items()
        for action in actions
        for step in STEPS
    ]


# -- in the workers -------------------------------------------------------------------------------


class StepPlugin(GPUIPCPlugin):
    """The plugin with a gate at one step, and poison in all that is recycled."""

    def __init__(self, step: str, path: str, transfer: str = "auto") -> None:
        super().__init__(transfer=transfer)
        self.arguments = step, path, transfer
        self.step, self.path = step, path
        self._stack = contextlib.ExitStack()

    def __reduce__(self) -> Any:
        return type(self), self.arguments

    def make_memories(self, settings: Settings) -> list[Memory]:
        gate = Gate(self.path)
        self._stack.enter_context(poisoned_arenas())
        if self.step == "while the producer copies":
            self._stack.enter_context(held_copies(gate))
        return [FaultyMemory(m, *faults(self.step, gate)) for m in super().make_memories(settings)]

    async def teardown(self, worker: Worker) -> None:
        await super().teardown(worker)
        self._stack.close()


def faults(step: str, gate: Gate) -> list[Fault]:
    """Those of the second transfer; the first one goes before, and has one array."""
    return {
        "before the offer": [Fault("pin", first=2, hold=gate)],
        "between the offer and the write": [Fault("pin", first=3, hold=gate)],
        "before the OK": [Fault("load", first=3, hold=gate)],
        "while releases are queued": [
            Fault("fence", times=None, change=partial(passes_after, gate))
        ],
    }.get(step, [])


def passes_after(gate: Gate, fence: Future[None] | None) -> Future[None]:
    """A fence that passes when the gate opens too; the event loop runs on meanwhile."""
    both: Future[None] = Future()

    def wait() -> None:
        gate.wait(LIMIT)
        if fence is not None:
            fence.result(LIMIT)
        both.set_result(None)

    threading.Thread(target=wait, daemon=True).start()
    return both


def held_copies(gate: Gate) -> Any:
    write = Arena.write

    def held(self: Arena, *args: Any) -> None:
        gate.wait(LIMIT)
        write(self, *args)

    return mock.patch.object(Arena, "write", held)


def library() -> Any:
    """NumPy; in the workers of a `Site` for CuPy, that."""
    return importlib.import_module(os.environ.get("KILL_CELLS_LIBRARY", "numpy"))


def make(seed: int, count: int = 2) -> list[Any]:
    return [library().arange(ELEMENTS, dtype="i8") * (i + 3) + seed for i in range(count)]


def follow(xs: list[Any], gate: Gate | None = None) -> list[Any]:
    """Views of what was received, and something of its own."""
    if gate is not None:
        gate.wait(LIMIT)
    return [xs[0][::2], xs[1][5:], xs[0] + xs[1]]


def total(xs: list[Any]) -> list[int]:
    return [int(x.sum()) for x in xs]


def fork() -> int:
    """A child that keeps all that its parent has open."""
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


def fork_scheduler(dask_scheduler: Any) -> int:
    return fork()


def tasks_of_scheduler(dask_scheduler: Any) -> list[str]:
    return [repr(task) for task in dask_scheduler.tasks.values()]


def state_of(dask_worker: Worker) -> dict[str, Any]:
    """All that must come back to nothing, with the plugin on."""
    gc.collect()
    plugin = dask_worker.plugins["gpuipc"]
    snapshot = plugin.snapshot().to_dict()
    names = ("leases", "pinned_bytes", "holding", "mappings", "mapped_bytes")
    found = {name: snapshot[name] for name in names if snapshot[name]}
    if dask_worker.transfer_outgoing_count:
        found["transfer_outgoing_count"] = dask_worker.transfer_outgoing_count
    memfds = [line for line in left_in_process() if "memfd" in line]
    if memfds:
        found["memfds"] = memfds
    return found


def handles_of(dask_worker: Worker) -> int:
    sent = dask_worker.plugins["gpuipc"].snapshot().sent
    return sum(traffic.arrays for rung, traffic in sent.items() if rung != "bytes")


async def comes(condition: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
    """Ask again and again until it is so."""
    deadline = time.monotonic() + LIMIT
    while not await condition():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.01)


# -- the site -------------------------------------------------------------------------------------


class Site:
    """A scheduler process, three workers under nannies, and a client. Used on one event loop."""

    NAMES: Final = ("producer", "consumer", "third")

    def __init__(self, directory: str, library: str = "numpy") -> None:
        self.directory = directory
        self.library = library
        self.nannies: dict[str, Nanny] = {}
        self.stack = contextlib.AsyncExitStack()

    async def start(self) -> Site:
        self.stack.enter_context(
            dask.config.set(
                {
                    "distributed.comm.timeouts.connect": "5s",
                    "distributed.scheduler.active-memory-manager.start": False,
                }
            )
        )
        self.file = os.path.join(self.directory, f"scheduler-{os.urandom(4).hex()}.json")
        self.scheduler = subprocess.Popen(  # noqa: ASYNC220 -- returns at once
            [
                *(sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0"),
                *("--dashboard-address", ":0", "--scheduler-file", self.file),
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "DASK_LOGGING__DISTRIBUTED": "error",
            },
        )
        self.address = await until(self._scheduler_address, "the scheduler", LIMIT)
        await asyncio.gather(*map(self.add, self.NAMES))
        self.client = await Client(self.address, asynchronous=True, timeout=1)
        return self

    def _scheduler_address(self) -> str | None:
        try:
            with open(self.file) as file:
                return json.load(file)["address"]
        except (FileNotFoundError, json.JSONDecodeError):
            return None  # not there, or half written

    async def add(self, name: str) -> None:
        self.nannies[name] = await Nanny(
            self.address,
            nthreads=2,
            memory_limit="4GB",
            local_directory=self.directory,
            silence_logs=60,
            env={
                # all that is sent and received is, on a thread of its own: it can be held there
                "DASK_DISTRIBUTED__COMM__OFFLOAD": "1",
                "DASK_GPUIPC__HOST__ARENA_SIZE": "4 MiB",
                "DASK_GPUIPC__SOCKET_DIRECTORY": self.directory,
                "KILL_CELLS_LIBRARY": self.library,
            },
        )

    def at(self, name: str) -> str:
        """Address of a worker."""
        address = self.nannies[name].worker_address
        assert address is not None
        return address

    def pid(self, name: str) -> int:
        pid = self.scheduler.pid if name == "scheduler" else self.nannies[name].pid
        assert pid
        return pid

    async def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a worker, past the scheduler."""
        async with rpc(self.at(name)) as worker:
            answer = await worker.run(function=dumps(function), args=dumps(args))
        assert answer["status"] == "OK", answer
        return answer["result"]

    async def until(self, name: str, function: Callable[..., Any], wanted: Any) -> None:
        """Call a function in a worker until its result is the wanted one."""
        seen = []

        async def check() -> bool:
            seen[:] = [await self.call(name, function)]
            return seen == [wanted]

        await comes(check, lambda: f"{function} of the {name}: {seen}")

    async def status(self, address: str) -> str | None:
        """Of a worker, as the scheduler sees it."""
        workers = (await self.client.scheduler.identity(n_workers=-1))["workers"]
        return workers[address]["status"] if address in workers else None

    async def restore(self) -> None:
        """Have three workers again."""
        for name in self.NAMES:
            if self.nannies[name].status != Status.running:
                await self.nannies[name].close()
                await self.add(name)
        await comes(self._is_whole, lambda: "three workers")

    async def _is_whole(self) -> bool:
        """Whether the scheduler has three running workers, and they are those of the nannies."""
        workers = (await self.client.scheduler.identity(n_workers=-1))["workers"]
        running = {address for address, w in workers.items() if w["status"] == "running"}
        return running == workers.keys() == {self.nannies[n].worker_address for n in self.NAMES}

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.scheduler.send_signal(signal.SIGCONT)
        if self.scheduler.poll() is not None:
            self.client._timeout = 0  # do not look for it
        await self.client.close(timeout=0)
        for nanny in self.nannies.values():
            await nanny.close()
        self.scheduler.terminate()
        self.scheduler.wait(20)
        await self.stack.aclose()


# -- a cell ---------------------------------------------------------------------------------------


@dataclass
class Struck:
    """A cell while it runs."""

    site: Site
    cell: Cell
    keeper: Keeper
    child: int | None = None

    async def strike(self) -> None:
        """Do to the victim what the cell says, with the gate closed; open it in time."""
        action = self.cell.action
        if action in KILLS:
            await self.kill()
        elif action == "SIGSTOP and SIGCONT":
            await self.stop_and_continue()
        elif self.cell.victim == "scheduler":
            self.site.scheduler.send_signal(signal.SIGINT)
            await self.gone(self.site.scheduler.pid)
            self.keeper.let_go()
        else:
            await self.leave(action)

    async def kill(self) -> None:
        site, victim = self.site, self.cell.victim
        pid = site.pid(victim)
        address = None if victim == "scheduler" else site.at(victim)
        os.kill(pid, signal.SIGKILL)
        await self.gone(pid)
        self.keeper.let_go()
        if self.child is not None:
            await self.outlived_by_a_child(pid, self.child)
        if address is not None:
            await self.is_not(address, "running")

    async def is_not(self, address: str, status: str) -> None:
        """The scheduler has heard that a worker's status is another."""

        async def check() -> bool:
            return await self.site.status(address) != status

        await comes(check, lambda: f"another status of {address} than {status}")

    async def gone(self, pid: int) -> None:
        def ended() -> bool:
            if pid == self.site.scheduler.pid:
                return self.site.scheduler.poll() is not None
            try:
                return psutil.Process(pid).status() == "zombie"
            except psutil.NoSuchProcess:
                return True

        await until(ended, f"the end of the {self.cell.victim}", LIMIT)

    async def outlived_by_a_child(self, pid: int, child: int) -> None:
        """The child keeps its parent's sockets; leases of the dead end all the same."""
        if self.cell.victim == "consumer":
            await self.site.until("producer", partial(has_consumer, pid), False)
        os.kill(child, signal.SIGKILL)  # until then plain Dask waits for its connections

    async def stop_and_continue(self) -> None:
        pid = self.site.pid(self.cell.victim)
        os.kill(pid, signal.SIGSTOP)
        try:
            self.keeper.let_go()
            if self.cell.victim == "scheduler":
                await self.site.until("producer", outgoing, 0)
            else:
                others = [n for n in self.site.NAMES if n != self.cell.victim]
                for seed in range(3):
                    await send(self.site, *others, seed=100 + seed)
                    await send(self.site, *others[::-1], seed=200 + seed)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def leave(self, action: str) -> None:
        site, name = self.site, self.cell.victim
        address, nanny = site.at(name), site.nannies[name]
        if action == "clean close":
            leaving: Any = nanny.close()
        elif action == "nanny restart":
            leaving = nanny.restart()
        else:
            leaving = site.client.retire_workers([address], close_workers=True)
        task = asyncio.ensure_future(leaving)
        await self.is_not(address, "running")
        self.keeper.let_go()
        await task
        if action == "retire_workers":
            await until(lambda: nanny.status == Status.closed, f"the {name} to close", LIMIT)


def has_consumer(pid: int, dask_worker: Worker) -> bool:
    """Whether a process is known as a consumer, or holds leases."""
    exporter = dask_worker.plugins["gpuipc"].endpoint.exporter
    known = {consumer.peer: consumer.them.pid for consumer in exporter.consumers()}
    return pid in known.values() or not exporter._ledger._by_peer.keys() <= known.keys()


def outgoing(dask_worker: Worker) -> int:
    return dask_worker.transfer_outgoing_count


async def send(site: Site, source: str, to: str, seed: int, count: int = 1) -> None:
    """A transfer from one worker to another, which must be right."""
    options = {"allow_other_workers": False, "pure": False}
    x = site.client.submit(make, seed, count, workers=[site.at(source)], **options)
    y = site.client.submit(total, x, workers=[site.at(to)], **options)
    assert await result_of(y) == total(make(seed, count))


async def run_cell(site: Site, cell: Cell, plugin: bool = True) -> str:
    """What the workflow gave: ``result``, or the name of the error; asserts all the rest."""
    path = os.path.join(site.directory, f"gate-{os.urandom(4).hex()}")
    if plugin:
        # CuPy: shared, or no lease would last as long as its array
        transfer = "auto" if site.library == "numpy" else "share"
        await site.client.register_plugin(StepPlugin(cell.step, path, transfer))
    await send(site, "producer", "consumer", seed=1)
    with Keeper(path) as keeper:
        struck = Struck(site, cell, keeper)
        if cell.action == KILLS[1]:
            struck.child = await fork_in(site, cell.victim)
        outcome = await workflow(struck)
    if cell.victim == "scheduler" and cell.action != "SIGSTOP and SIGCONT":
        await check_all_gone(site)
        return outcome
    await site.restore()
    if plugin:
        await check_site(site)
    return outcome


async def fork_in(site: Site, victim: str) -> int:
    if victim == "scheduler":
        return await site.client.run_on_scheduler(fork_scheduler)
    return await site.call(victim, fork)


async def workflow(struck: Struck) -> str:
    """Send, hold, strike, finish."""
    site, cell, keeper = struck.site, struck.cell, struck.keeper
    a, b, c = map(site.at, site.NAMES)
    there = {"allow_other_workers": True, "pure": False}
    gate = Gate(keeper.path) if cell.step == "after the OK" else None
    x = site.client.submit(make, 7, workers=[a], **there)
    y = site.client.submit(follow, x, gate, workers=[b], **there)
    z = site.client.submit(total, y, workers=[c], **there)
    last = [total, y]
    if cell.step in ("while the array is held", "while releases are queued"):
        assert await result_of(z) == total(follow(make(7)))
    if cell.step == "while releases are queued":
        last = [lambda: total(follow(make(7)))]
        del x, y
    if STEPS[cell.step]:
        held = await until(keeper.arrived, f"{cell.step}: nobody came", LIMIT)
        assert held == site.pid(STEPS[cell.step])
    await struck.strike()
    try:
        if z.status == "finished":
            z = site.client.submit(*last, workers=[c], **there)
        result = await result_of(z)
    except (AssertionError, TimeoutError):
        raise
    except Exception as error:
        if cell.victim != "scheduler":
            raise
        return type(error).__name__  # is compared with plain Dask's
    assert result == total(follow(make(7)))
    return "result"


async def result_of(future: Any) -> Any:
    return await asyncio.wait_for(future.result(), LIMIT)


async def check_site(site: Site) -> None:
    """Handles still cross between all workers; then nothing is left, on any of them."""
    a, b, c = site.NAMES
    for seed, (source, to) in enumerate([(a, b), (b, a), (a, c), (c, b)]):
        before = await site.call(source, handles_of)
        await send(site, source, to, seed=300 + seed, count=3)
        assert await site.call(source, handles_of) == before + 3
    await no_tasks(site)
    for name in site.NAMES:
        await site.until(name, lease_state_of, {})
    await dask_gpuipc.collect(site.client)
    for name in site.NAMES:
        await site.until(name, state_of, {})
    await site.client.unregister_worker_plugin("gpuipc")
    for name in site.NAMES:
        await site.until(name, left_in_process, [])
    check_folders(site)


def lease_state_of(dask_worker: Worker) -> dict[str, Any]:
    found = state_of(dask_worker)
    return {k: v for k, v in found.items() if k in ("leases", "pinned_bytes", "holding")}


async def no_tasks(site: Site) -> None:
    gc.collect()
    tasks = []

    async def check() -> bool:
        tasks[:] = await site.client.run_on_scheduler(tasks_of_scheduler)
        return not tasks

    await comes(check, lambda: f"tasks are left: {tasks}")


async def check_all_gone(site: Site) -> None:
    """The scheduler is gone: the workers end by themselves, and nothing of them stays."""
    for nanny in site.nannies.values():
        await until(partial(ended, nanny), "a worker without a scheduler to end", LIMIT)
    check_folders(site)


def ended(nanny: Nanny) -> bool:
    return nanny.process is None or not nanny.process.is_alive()


def check_folders(site: Site) -> None:
    """No socket folder is left but of killed processes, and those the next set-up sweeps."""
    sweep(site.directory)
    left = [name for name in os.listdir(site.directory) if name.startswith("dask-gpuipc")]
    assert not left, left


@contextlib.contextmanager
def short_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpuipc-kill-") as directory:
        yield directory


class Sites:
    """One site for as many cells as it survives, on one event loop."""

    def __init__(self, directory: str, library: str = "numpy") -> None:
        self.directory = directory
        self.library = library
        self.runner = asyncio.Runner()
        self.runner.get_loop()  # makes the loop, and its sockets, now
        self.site: Site | None = None
        self.plain: dict[Cell, str] = {}

    def run(self, cell: Cell, plugin: bool = True) -> str:
        return self.runner.run(self._run(cell, plugin))

    async def _run(self, cell: Cell, plugin: bool) -> str:
        if self.site is None:
            self.site = await Site(self.directory, self.library).start()
        try:
            outcome = await run_cell(self.site, cell, plugin)
        except BaseException:
            await self._drop()
            raise
        if outcome != "result":
            await self._drop()
        return outcome

    async def _drop(self) -> None:
        site, self.site = self.site, None
        if site is not None:
            await site.close()

    def close(self) -> None:
        self.runner.run(self._drop())
        self.runner.close()
