"""Shared pages count in a worker's RSS, by which Dask spills, pauses and restarts workers.

The same workflow, near the memory limit: under plain Dask, under the plugin, and under one that
keeps its arenas resident, which shows that there is something to be seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cluster_fixtures import (
    WORKERS,
    FaultyPlugin,
    addresses,
    arrays,
    check_nothing_left,
    move,
    nothing_held,
    until,
)
from distributed import Client, LocalCluster, Worker, wait

from dask_gpuipc import GPUIPCPlugin

MIB = 1 << 20
LIMIT = 640 * MIB
"""Dask spills at 448 MiB, pauses at 512 and restarts at 608; the arenas leave at 320."""
CHUNK = 32 * MIB
CHUNKS = 6
"""They fit below all of that twice with what an idle worker has, but not three times."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(**{**WORKERS, "n_workers": 2, "memory_limit": LIMIT}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        yield client
        check_nothing_left(client)


def ones(seed: int) -> np.ndarray:
    return np.full(CHUNK, seed, "u1")


def at_once(seed: int) -> list[np.ndarray]:
    """More than Dask and the plugin can look at between two steps."""
    return [ones(seed) for _ in range(CHUNKS)]


async def monitored(dask_worker: Worker) -> int:
    """Have the memory monitor look, as it does ten times a second; how many keys are on disk."""
    await dask_worker.memory_manager.memory_monitor(dask_worker)
    return len(dask_worker.data.slow)


def workflow(client: Client) -> dict[str, Any]:
    """What the memory monitors did about it."""
    a, b = addresses(client)
    before = client.run(os.getpid)
    spilled = 0
    for _ in range(2):  # the first time the slots of the arena are fresh, and not resident
        received = []
        for seed in range(CHUNKS):
            source = client.submit(ones, seed, workers=[a], pure=False)
            received.append(move(client, source, b))
            del source
            assert move(client, received[-1], b, np.max).result() == seed
        spilled += sum(client.run(monitored).values())
        del received
        until(nothing_held(client), "the slots to be free")
    own = client.submit(at_once, 7, workers=[a], pure=False)
    wait(own)
    spilled += sum(client.run(monitored).values())
    events = [event for _, event in client.get_events(a)]
    return {
        "spilled": spilled,
        "paused": any(e.get("status") == "paused" for e in events),
        "restarted": client.run(os.getpid) != before,
    }


UNTOUCHED = {"spilled": 0, "paused": False, "restarted": False}


def test_plain_dask_leaves_the_worker_alone(client: Client) -> None:
    assert workflow(client) == UNTOUCHED


def test_so_does_the_plugin(client: Client) -> None:
    client.register_worker_plugin(GPUIPCPlugin())
    assert workflow(client) == UNTOUCHED
    assert arrays(client, "received", "share") == 2 * CHUNKS


def test_resident_arenas_would_count(client: Client) -> None:
    client.register_worker_plugin(FaultyPlugin(settings={"host_resident_limit": None}))
    assert workflow(client)["spilled"] > 0
