"""Both examinations: of this machine with workers of its own, and of a running cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

from dask_gpuipc import process
from dask_gpuipc.demo.clusters import interrupts_held
from dask_gpuipc.doctor import machine
from dask_gpuipc.doctor.pairs import examine_pairs, merged, neighbours
from dask_gpuipc.doctor.record import Diagnosis, Finding, Level, PairResult
from dask_gpuipc.reports.gather import worker_statistics
from dask_gpuipc.terminal import Progress
from dask_gpuipc.worker_plugin import NAME, GPUIPCPlugin

CUDA_WAYS: Final = (("copy", True), ("share", True), ("host", False))
"""Rungs tried between GPUs, and whether CUDA IPC is on for them."""
ENOUGH: Final = 16
"""GPUs of which each two are tried; a larger machine is not one node."""


def steps(gpus: int) -> int:
    """How many things `examine_machine` does, for a progress bar."""
    return 2 + 2 + len(CUDA_WAYS) * gpus * gpus


def examine_machine(progress: Progress, nbytes: int | None = None) -> Diagnosis:
    """Examine this machine: what it allows, and chunks between processes that are started for it.

    Two processes for each GPU, so that one GPU is also tried with itself; two without any GPU.
    """
    progress.step("looking at the machine")
    gpus = machine.gpus()[:ENOUGH]
    findings = machine.findings()
    progress.step("starting worker processes")
    with _workers(gpus) as client:
        pairs = client.sync(_try_all, client, gpus, progress, nbytes)
    return Diagnosis(socket.gethostname(), machine.versions(), findings, pairs)


async def _try_all(
    client: Client, gpus: Sequence[str], progress: Progress, nbytes: int | None
) -> tuple[PairResult, ...]:
    names = await client.run(_name_of)
    address = {name: worker for worker, name in names.items()}
    results = []
    await client.register_plugin(GPUIPCPlugin(min_bytes=1), name=NAME)
    first, second = (address[f"{place}-0"] for place in ("a", "b"))
    host = [("host", first, second), ("host", second, first)]
    results += await examine_pairs(client, host, progress, wanted="share", nbytes=nbytes)
    pairs = [
        ("cuda", address[f"a-{i}"], address[f"b-{j}"])
        for i in range(len(gpus))
        for j in range(len(gpus))
    ]
    for number, (rung, ipc) in enumerate(CUDA_WAYS if gpus else ()):
        await client.run(_set_ipc, ipc)
        transfer = "share" if rung == "share" else "copy"
        await client.register_plugin(GPUIPCPlugin(transfer=transfer, min_bytes=1), name=NAME)
        results += await examine_pairs(
            client, pairs, progress, wanted=rung, nbytes=nbytes, plain=number == 0
        )
    return tuple(_named(one, names) for one in merged(results))


def _named(result: PairResult, names: Mapping[str, str]) -> PairResult:
    """With the GPUs, or the two processes, in place of addresses that nobody knows."""

    def name(worker: str) -> str:
        side, _, gpu = names[worker].partition("-")
        return f"GPU {gpu}" if result.memory == "cuda" else f"process {side}"

    return replace(result, source=name(result.source), target=name(result.target))


def _set_ipc(on: bool) -> None:
    dask.config.set({"gpuipc.cuda.ipc": on})


def _name_of(dask_worker: Worker) -> str:
    return str(dask_worker.name)


@contextlib.contextmanager
def _workers(gpus: Sequence[str]) -> Iterator[Client]:
    """Two processes ``a-N`` and ``b-N`` for each GPU, which is the first that they see."""
    spec = {
        f"{side}-{number}": {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "memory_limit": 0,
                "silence_logs": logging.CRITICAL,
                "dashboard": False,
                "env": visible(gpus, number),
            },
        }
        for number in range(max(1, len(gpus)))
        for side in ("a", "b")
    }
    scheduler = {
        "cls": Scheduler,
        "options": {"dashboard": False, "host": "127.0.0.1", "dashboard_address": ":0"},
    }
    with contextlib.ExitStack() as stack:
        with interrupts_held():
            cluster = stack.enter_context(
                SpecCluster(spec, scheduler, silence_logs=logging.CRITICAL)
            )
            client = stack.enter_context(Client(cluster, set_as_default=False))
        yield client


def visible(gpus: Sequence[str], first: int) -> dict[str, str]:
    """All GPUs, its own first, as dask-cuda has it."""
    if not gpus or gpus[0].startswith("MIG"):  # a process sees one instance at most
        return {"CUDA_VISIBLE_DEVICES": gpus[first]} if gpus else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join([*gpus[first:], *gpus[:first]])}


# -- a running cluster ----------------------------------------------------------------------------


def examine_cluster(client: Client, progress: Any, nbytes: int | None = None) -> Diagnosis:
    """Examine a running cluster: who shares what, and a chunk between each two workers of a node.

    ``progress`` is called with the number of pairs and gives a context manager of a `Progress`.
    """
    numbers = client.run(_numbers, on_error="return")
    good = {a: n for a, n in numbers.items() if not isinstance(n, BaseException)}
    findings = tuple(_finding(address, answer) for address, answer in sorted(numbers.items()))
    enabled = {a: n for a, n in good.items() if n["state"] == "enabled"}
    pairs = neighbours(enabled)
    with progress(max(1, len(pairs))) as shown:
        results = client.sync(examine_pairs, client, pairs, shown, nbytes=nbytes)
    if not pairs:
        findings = (*findings, _alone())
    address = client.scheduler.address if client.scheduler else ""
    return Diagnosis(str(address), machine.versions(), findings, merged(results))


async def _numbers(dask_worker: Worker) -> dict[str, Any]:
    numbers = await worker_statistics(dask_worker)
    node = f"{process.boot_id()} {process.namespaces()}"
    return {
        "state": numbers["state"],
        "memories": list(numbers["memories"]),
        "node": node,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _finding(address: str, answer: Any) -> Finding:
    if isinstance(answer, BaseException):
        remedy = "install dask-gpuipc where the worker runs"
        return Finding(Level.BAD, address, f"cannot be asked: {answer!r}", "", remedy)
    value = f"{answer['host']}, {', '.join(answer['memories']) or 'no memory'}: {answer['state']}"
    if answer["state"] == "enabled":
        return Finding(Level.GOOD, address, value)
    remedy = "client.register_plugin(GPUIPCPlugin()), or the worker's log"
    return Finding(Level.BAD, address, value, "its chunks go as bytes", remedy)


def _alone() -> Finding:
    return Finding(
        Level.BAD,
        "pairs",
        "no two workers of one node share a kind of memory",
        "nothing was tried",
        "start two workers or more on a node, and register the plugin",
    )
