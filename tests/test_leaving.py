"""Who leaves offers no more; peers copy what they hold of it; pins stay as long as readers do."""

from __future__ import annotations

from typing import Any

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
    identity,
    left_in_process,
    make,
    move,
    same,
    shared,
    total,
    until,
)
from distributed import Client, LocalCluster, Worker, get_worker, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.memory.host import HostMemory

__all__ = ["client", "cluster", "shared"]


def stash(x: np.ndarray) -> None:
    get_worker().stash = x[7:]


def stashed(dask_worker: Worker) -> bool:
    return bool(np.array_equal(dask_worker.stash, make()[7:]))


def unstash(dask_worker: Worker) -> None:
    del dask_worker.stash


def borrowed(dask_worker: Worker) -> list[str]:
    """Keys whose values lie, in part, in another process's memory."""
    return [key for key, value in dask_worker.data.items() if _is_borrowed(value)]


def _is_borrowed(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_borrowed, value))
    if isinstance(value, dict):
        return any(map(_is_borrowed, value.values()))
    return isinstance(value, np.ndarray) and HostMemory.owner_of(None, value) is not None


HELD = {
    "itself": identity,
    "a view": lambda x: x[100:],
    "a transposed view": lambda x: x.reshape(8, -1).T,
    "in containers": lambda x: {"a": [x, (x[::2], 1)], "b": x.view("u1")},
}


def held(x: np.ndarray, name: str) -> Any:
    return HELD[name](x)


def same_held(found: Any, name: str) -> bool:
    return _equal(found, HELD[name](make()))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, dict):
        return all(_equal(one[k], v) for k, v in other.items())
    if isinstance(other, (list, tuple)):
        return all(map(_equal, one, other))
    return np.array_equal(one, other)


def hold_on_b(client: Client) -> dict[str, Any]:
    """What the second worker holds of an array of the first one."""
    a, b, _ = addresses(client)
    source = client.submit(make, workers=[a], allow_other_workers=True, pure=False)
    futures = {name: move(client, source, b, held, name) for name in HELD}
    assert client.run(borrowed, workers=[b])[b]
    assert total(client, "leases") >= 1
    return futures


def check_copied(client: Client, futures: dict[str, Any], b: str, c: str) -> None:
    until(lambda: client.run(borrowed, workers=[b])[b] == [], "the copies")
    for name, future in futures.items():
        for worker in (b, c):
            assert move(client, future, worker, same_held, name).result(), name


@pytest.mark.parametrize("again", [False, True], ids=["unregister", "register again"])
def test_consumers_copy_what_their_data_holds(client: Client, again: bool) -> None:
    """Then the producer's pins end, though the keys live on."""
    client.register_worker_plugin(GPUIPCPlugin())
    a, b, c = addresses(client)
    futures = hold_on_b(client)
    if again:
        client.register_worker_plugin(GPUIPCPlugin())
    else:
        client.unregister_worker_plugin("gpuipc")
        until(lambda: client.run(left_in_process, workers=[a])[a] == [], "the pins to end")
    check_copied(client, futures, b, c)
    del futures
    check_nothing_left(client)


def test_consumers_copy_what_their_data_holds_of_a_worker_that_retires() -> None:
    with LocalCluster(**WORKERS) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b, c = addresses(client)
        futures = hold_on_b(client)
        client.retire_workers([a], close_workers=True)
        until(lambda: a not in addresses(client), "the worker to leave")
        check_copied(client, futures, b, c)
        del futures
        check_nothing_left(client)


def test_what_is_held_elsewhere_keeps_its_pin_until_it_is_let_go(client: Client) -> None:
    """A user's own reference is not found and copied: its bytes stay, the plugin being gone."""
    client.register_worker_plugin(GPUIPCPlugin())
    a, b, c = addresses(client)
    source = client.submit(make, workers=[a], pure=False)
    move(client, source, b, stash).result()
    del source
    client.unregister_worker_plugin("gpuipc")
    assert client.run(left_in_process, workers=[a])[a], "the arena is pinned"
    client.register_worker_plugin(GPUIPCPlugin())
    for seed in range(4):  # what is free is used again
        other = client.submit(make, LARGE, 50 + seed, workers=[a], pure=False)
        assert move(client, other, c, same, LARGE, 50 + seed).result()
        del other
    assert client.run(stashed, workers=[b])[b]
    client.run(unstash, workers=[b])
    check_nothing_left(client)


def test_what_is_held_elsewhere_outlives_the_process_of_its_owner() -> None:
    with LocalCluster(**{**WORKERS, "n_workers": 2}) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        source = client.submit(make, workers=[a], allow_other_workers=True, pure=False)
        move(client, source, b, stash).result()
        client.retire_workers([a], close_workers=True)
        until(lambda: addresses(client) == [b], "the worker to leave")
        assert client.run(stashed, workers=[b])[b]
        client.run(unstash, workers=[b])
        del source
        check_nothing_left(client)


def test_a_worker_that_leaves_gets_bytes_and_gives_bytes(shared: Client) -> None:
    """While one worker's plugin is gone, nothing goes by handle to or from it."""
    a, b, c = addresses(shared)
    shared.run(leave, workers=[a])
    assert dask_gpuipc.statistics(shared)[a]["state"] == "disabled: unregistered"
    for source, to in ((a, b), (b, a)):
        future = shared.submit(make, workers=[source], pure=False)
        wait(future)
        assert move(shared, future, to, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") == arrays(shared, "received", "share") == 0
    future = shared.submit(make, workers=[b], pure=False)
    assert move(shared, future, c, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") == 1


async def leave(dask_worker: Worker) -> None:
    await dask_worker.plugins["gpuipc"].teardown(dask_worker)
