"""One cluster for each side: a scheduler and workers, started as users start them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from distributed import Client

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.bench import remote
from dask_gpuipc.bench.record import BenchError
from dask_gpuipc.demo.clusters import interrupts_held
from dask_gpuipc.worker_plugin import NAME

SIDES: Final = ("plain", "plugin", "plugin-copy", "plugin-share", "plugin-host", "ucx")
# Of two replicas of a chunk the active memory manager drops one, perhaps the measured source.
SETTINGS: Final = {"DASK_DISTRIBUTED__SCHEDULER__ACTIVE_MEMORY_MANAGER__START": "False"}
PATIENCE: Final = 120.0
"""Seconds for a cluster to start, and for a dropped chunk to be gone."""


def default_sides(memory: str) -> tuple[str, ...]:
    """All that can be compared here."""
    mine = ("plugin",) if memory == "host" else ("plugin-copy", "plugin-share")
    return ("plain", *mine, *(("ucx",) if has_ucx() else ()))


def has_ucx() -> bool:
    """Whether workers can be started with it."""
    return importlib.util.find_spec("distributed_ucxx") is not None


@dataclass(frozen=True, slots=True)
class Side:
    """One cluster; its workers by name: ``source-0``, ``target-0``, ``consumer-1``, ..."""

    name: str
    client: Client
    workers: Mapping[str, str]

    @property
    def has_plugin(self) -> bool:
        """Whether handles can cross at all."""
        return self.name.startswith("plugin")

    @property
    def consumers(self) -> list[str]:
        """Addresses of the workers that may fetch one chunk: the first target and the others."""
        others = [a for name, a in self.workers.items() if name.startswith("consumer")]
        return [self.workers["target-0"], *others]

    def statistics(self, worker: str) -> Mapping[str, Any]:
        """Of one worker; nothing without the plugin."""
        return dask_gpuipc.statistics(self.client)[worker] if self.has_plugin else {}

    def run(self, worker: str, function: Any, *arguments: Any) -> Any:
        """Call a function on a worker, beside its tasks."""
        return self.client.run(function, *arguments, workers=[worker])[worker]

    def submit(self, worker: str, function: Any, *arguments: Any) -> Any:
        """Have a task run on a worker; its future."""
        return self.client.submit(
            function, *arguments, workers=[worker], allow_other_workers=False, pure=False
        )

    def wait_dropped(self, key: str) -> None:
        """Wait until all workers forgot a chunk, and nothing is pinned for anybody."""
        until(lambda: not any(self.client.run(remote.has_key, key).values()), f"{key} is gone")
        if self.has_plugin:
            until(self._nothing_pinned, "leases end")

    def _nothing_pinned(self) -> bool:
        return not any(w["leases"] for w in dask_gpuipc.statistics(self.client).values())


@contextlib.contextmanager
def cluster(
    name: str, workers: Mapping[str, Mapping[str, str]], memory_limit: int
) -> Iterator[Side]:
    """A scheduler and workers with such environments; with the plugin if the side has it.

    Raises
    ------
    BenchError
        They do not start.
    """
    protocol = "ucx" if name == "ucx" else "tcp"
    more = {"DASK_GPUIPC__CUDA__IPC": "False"} if name == "plugin-host" else {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file, log = Path(folder, "scheduler.json"), Path(folder, "log")
        common = ("--scheduler-file", str(file), "--protocol", protocol, "--no-dashboard")
        with interrupts_held():
            local = ("--host", "127.0.0.1") if protocol == "tcp" else ()
            stack.enter_context(_started("dask_scheduler", *common, *local, "--port", "0", log=log))
            for worker, environment in workers.items():
                options = ("--nthreads", "1", "--memory-limit", str(memory_limit), "--no-nanny")
                place = ("--name", worker, "--local-directory", folder)
                stack.enter_context(
                    _started(
                        *("dask_worker", *common, *local, *options, *place),
                        log=log,
                        environment={**environment, **more},
                    )
                )
        until(file.exists, f"the scheduler of {name} starts", log)
        client = stack.enter_context(
            Client(scheduler_file=str(file), timeout=PATIENCE, set_as_default=False)
        )
        until(lambda: _there(client) == set(workers), f"the workers of {name} start", log)
        if name.startswith("plugin"):
            _, _, transfer = name.partition("-")
            known = transfer if transfer in ("copy", "share") else None
            client.register_plugin(GPUIPCPlugin(transfer=known), name=NAME)
        found = client.scheduler_info(n_workers=-1)["workers"]
        yield Side(name, client, {str(w["name"]): address for address, w in found.items()})


def _there(client: Client) -> set[str]:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return {str(worker["name"]) for worker in workers}


@contextlib.contextmanager
def _started(
    program: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    command = [sys.executable, "-m", f"distributed.cli.{program}", *arguments]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **SETTINGS, **(environment or {})},
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Callable[[], Any], what: str, log: Path | None = None) -> None:
    """Wait for a condition; `BenchError` with what was waited for if it does not come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            said = log.read_text(errors="replace")[-2000:] if log else ""
            raise BenchError(f"waited {PATIENCE:.0f} s in vain: {what}\n{said}".rstrip())
        time.sleep(0.005)
