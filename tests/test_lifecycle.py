"""Registration, late and leaving workers, teardown, failed set-ups (invariants 1, 13, 17, 18)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    WORKERS,
    addresses,
    arrays,
    check_nothing_left,
    client,
    cluster,
    left_in_process,
    make,
    move,
    nothing_held,
    refused,
    same,
    shared,
    total,
    until,
)
from distributed import Client, LocalCluster, Worker, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.config import Settings
from dask_gpuipc.errors import MemoryUnavailable
from dask_gpuipc.memory.base import Memory

__all__ = ["client", "cluster", "shared"]


def workflow(client: Client, seed: int = 0) -> None:
    whole = np.random.default_rng(seed).integers(0, 100, (1024, 1024))
    x = da.from_array(whole, chunks=256)
    np.testing.assert_array_equal(client.compute(x + x.T).result(), whole + whole.T)


def test_registering_twice_changes_the_settings(shared: Client) -> None:
    a, b, _ = addresses(shared)
    first = shared.submit(make, workers=[a], pure=False)
    held = move(shared, first, b)
    shared.register_worker_plugin(GPUIPCPlugin(min_bytes="1 GiB"))
    second = shared.submit(make, LARGE, 1, workers=[a], pure=False)
    assert move(shared, second, b, same, LARGE, 1).result()
    assert arrays(shared, "sent", "share") == 0  # counters are those of the new registration
    assert move(shared, held, b, same, LARGE, 0).result()
    shared.register_worker_plugin(GPUIPCPlugin())
    third = shared.submit(make, LARGE, 2, workers=[a], pure=False)
    assert move(shared, third, b, same, LARGE, 2).result()
    assert arrays(shared, "sent", "share") == 1


def hooks(dask_worker: Worker) -> list[Any]:
    return [
        dask_worker.handlers["get_data"].__module__,
        "gather_dep" in dask_worker.__dict__,
        "gpuipc" in (dask_worker.rpc.connection_args.get("handshake_overrides") or {}),
        dask_worker.rpc.connection_args is dask_worker.connection_args,
        "gpuipc" in dask_worker.metrics,
        hasattr(dask_worker.monitor.get_process_memory, "__wrapped__"),
    ]


def test_every_hook_is_removed(client: Client) -> None:
    before = client.run(hooks)
    client.register_worker_plugin(GPUIPCPlugin())
    during = client.run(hooks)
    workflow(client)
    check_nothing_left(client)
    assert client.run(hooks) == before
    assert all(during[w][1:3] == [True, True] for w in during)


def test_what_was_received_outlives_the_registration(client: Client) -> None:
    """Peers copy what they hold when a producer leaves, and its pins end."""
    a, b, _ = addresses(client)
    client.register_worker_plugin(GPUIPCPlugin())
    source = client.submit(make, workers=[a], pure=False)
    held = move(client, source, b)
    nested = move(client, source, b, lambda x: {"x": [x, x[3:]]})
    assert total(client, "leases") == 1
    client.unregister_worker_plugin("gpuipc")
    until(lambda: not any(client.run(left_in_process).values()), "everything to be given back")
    assert move(client, held, b, same, LARGE, 0).result()
    assert move(client, nested, b, lambda d: same(d["x"][0], LARGE, 0)).result()


def test_unregistered_and_registered_under_load(client: Client) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def load() -> None:
        seed = 0
        try:
            while not stop.is_set():
                workflow(client, seed)
                seed += 1
        except BaseException as error:  # noqa: BLE001 -- told below
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(4):
            client.register_worker_plugin(GPUIPCPlugin())
            until(lambda: arrays(client, "received", "share") > 5 or errors, "handles under load")
            client.unregister_worker_plugin("gpuipc")
    finally:
        stop.set()
        thread.join(60)
    assert not errors, errors
    check_nothing_left(client)


def test_late_restarted_and_leaving_workers() -> None:
    with LocalCluster(**{**WORKERS, "n_workers": 2}) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        workflow(client, 1)
        cluster.scale(4)
        client.wait_for_workers(4, timeout=60)
        workflow(client, 2)
        states = [s["state"] for s in dask_gpuipc.statistics(client).values()]
        assert states == ["enabled"] * 4
        client.restart()
        client.wait_for_workers(4, timeout=60)
        states = [s["state"] for s in dask_gpuipc.statistics(client).values()]
        assert states == ["enabled"] * 4
        kept = client.persist(da.from_array(np.ones((1024, 1024)), chunks=256) + 1)
        wait(kept)
        cluster.scale(2)
        until(lambda: len(addresses(client)) == 2, "two workers to leave")
        assert client.compute(kept.sum()).result() == 2 * 1024 * 1024
        workflow(client, 3)
        del kept
        check_nothing_left(client)


def test_data_survives_the_retirement_of_its_owner() -> None:
    with LocalCluster(**WORKERS) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b, c = addresses(client)
        source = client.submit(make, workers=[a], allow_other_workers=True, pure=False)
        alone = client.submit(make, LARGE, 1, workers=[a], allow_other_workers=True, pure=False)
        held = move(client, source, b)
        view = move(client, source, b, lambda x: x[100:])
        wait(alone)
        client.retire_workers([a], close_workers=True)
        until(lambda: addresses(client) == sorted([b, c]), "the worker to leave")
        assert same(alone.result(), LARGE, 1)
        assert move(client, held, c, same, LARGE, 0).result()
        assert np.array_equal(view.result(), make()[100:])
        del source, alone, held, view
        check_nothing_left(client)


class Unavailable(GPUIPCPlugin):
    """Set-up fails in a way that is foreseen."""

    def make_memories(self, settings: Settings) -> list[Memory]:
        raise MemoryUnavailable("this machine has no memory to share")


class Broken(GPUIPCPlugin):
    """Set-up fails in a way that is not."""

    def make_memories(self, settings: Settings) -> list[Memory]:
        raise ZeroDivisionError("nobody thought of this")


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [(Unavailable, "no memory to share"), (Broken, "nobody thought of this")],
)
def test_a_failed_setup_is_visible_and_the_worker_healthy(
    client: Client, plugin: type[GPUIPCPlugin], reason: str
) -> None:
    before = client.run(hooks)
    client.register_worker_plugin(plugin())
    assert client.run(hooks) == before
    for stats in dask_gpuipc.statistics(client).values():
        assert stats["state"].startswith("disabled: ")
        assert reason in stats["state"]
    workflow(client)
    check_nothing_left(client)


def test_a_socket_directory_that_does_not_serve_is_told() -> None:
    env = {**os.environ, "DASK_GPUIPC__SOCKET_DIRECTORY": "/nonexistent"}
    code = """
import asyncio
from dask_gpuipc.config import Settings
from dask_gpuipc.endpoint import Endpoint
from dask_gpuipc.memory.host import HostMemory
async def main():
    try:
        Endpoint(Settings.load(), [HostMemory()], "scheduler")
    except Exception as error:
        print(type(error).__name__, error)
asyncio.run(main())
"""
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith("ConfigError gpuipc.socket-directory '/nonexistent'")


def test_preload(tmp_path: Path) -> None:
    """``dask worker --preload dask_gpuipc``, as processes that users start."""
    scheduler_file = tmp_path / "scheduler.json"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    start = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0"]
    processes = [
        subprocess.Popen(
            [*start, "--no-dashboard", "--scheduler-file", str(scheduler_file)], env=env
        )
    ]
    try:
        until(scheduler_file.exists, "the scheduler")
        worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1"]
        options = ["--no-dashboard", "--preload", "dask_gpuipc", "--memory-limit", "4GB"]
        for nanny in ("--nanny", "--no-nanny"):
            command = [*worker, *options, nanny, "--scheduler-file", str(scheduler_file)]
            processes.append(subprocess.Popen(command, env=env))
        with Client(scheduler_file=str(scheduler_file), timeout=60) as client:
            client.wait_for_workers(2, timeout=60)
            a, b = addresses(client)
            source = client.submit(make, workers=[a], pure=False)
            assert move(client, source, b, same, LARGE, 0).result()
            assert arrays(client, "sent", "share") == 1
            del source
            until(nothing_held(client), "leases to end")
            assert refused(client, "error") == 0
    finally:
        # Workers first: one whose scheduler goes while it closes may wait for itself without end
        # (Worker.handle_scheduler awaits a close that asyncio.run has cancelled).
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


def test_the_statistics_of_an_asynchronous_client_are_awaited() -> None:
    import asyncio

    async def main() -> dict[str, Any]:
        options = {**WORKERS, "n_workers": 1, "asynchronous": True}
        async with LocalCluster(**options) as cluster, Client(cluster, asynchronous=True) as client:
            await client.register_worker_plugin(GPUIPCPlugin())
            await dask_gpuipc.collect(client)
            return await dask_gpuipc.statistics(client)

    [stats] = asyncio.run(main()).values()
    assert stats["state"] == "enabled"
    assert stats["memories"] == ["host"]
    assert isinstance(GPUIPCPlugin(), GPUIPCPlugin)
