"""What was received is handed on, never as the receiver's own memory, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    WORKERS,
    addresses,
    arrays,
    check_nothing_left,
    identity,
    make,
    move,
    same,
    until,
)
from distributed import Client, LocalCluster, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {
        "distributed.scheduler.active-memory-manager.start": False,
        "distributed.scheduler.allowed-failures": 100,
    }
    with (
        dask.config.set(config),
        LocalCluster(**{**WORKERS, "n_workers": 4, "threads_per_worker": 1}) as cluster,
    ):
        yield cluster


@pytest.fixture
def shared(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(4, timeout=60)
        client.register_worker_plugin(GPUIPCPlugin())
        yield client
        client.wait_for_workers(4, timeout=60)
        check_nothing_left(client)


def kill(client: Client, address: str) -> None:
    """SIGKILL, and wait until the cluster has noticed; a nanny starts another."""
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGKILL)
    until(lambda: address not in addresses(client), "the worker to be gone")
    client.wait_for_workers(4, timeout=60)


def others(client: Client, *known: str) -> list[str]:
    return [address for address in addresses(client) if address not in known]


WRAPS = {
    "itself": identity,
    "a view": lambda x: x[1:-1],
    "a strided view": lambda x: x[::-3],
    "another dtype": lambda x: x.view("u1"),
    "a new shape": lambda x: x.reshape(8, -1).T,
    "from its buffer": lambda x: np.frombuffer(x, "i8"),
    "from its memoryview": lambda x: np.asarray(memoryview(x)[3:]),
    "an array over it": lambda x: np.ndarray(x.shape, x.dtype, x),
    "strides of one's own": lambda x: np.lib.stride_tricks.as_strided(x, (1000, 50), (8, 16)),
    "in a list": lambda x: [x, x[5:]],
}


def wrapped(x: np.ndarray, name: str) -> Any:
    return WRAPS[name](x)


def equal(found: Any, name: str) -> bool:
    want = WRAPS[name](make())
    pairs = zip(found, want, strict=True) if isinstance(want, list) else [(found, want)]
    return all(f.dtype == w.dtype and np.array_equal(f, w) for f, w in pairs)


@pytest.mark.parametrize("name", WRAPS)
def test_it_is_copied_and_survives_all_that_had_it_before(shared: Client, name: str) -> None:
    """However it was wrapped: the third worker's array hangs on the second alone."""
    a, b, c, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    second = move(shared, source, b, wrapped, name)
    third = move(shared, second, c)
    assert shared.submit(equal, third, name, workers=[c]).result()
    assert arrays(shared, "sent", "share") >= 2
    stats = dask_gpuipc.statistics(shared)
    assert stats[a]["leases"] >= 1, "the second worker reads the first one's memory"
    assert stats[b]["leases"] >= 1, "the third worker reads the second one's, and no other's"
    assert stats[c]["holding"] == stats[b]["leases"]
    del source, second
    until(
        lambda: dask_gpuipc.statistics(shared)[a]["leases"] == 0,
        "the first worker's leases to end while the third still reads",
    )
    assert shared.submit(equal, third, name, workers=[c], pure=False).result()


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_chain_holds_when_a_link_of_it_dies(shared: Client, dies: int) -> None:
    """A -> B -> C -> D, each from the one before; then one of the first three is killed."""
    chain = addresses(shared)
    futures = [
        shared.submit(make, workers=chain[:1], allow_other_workers=True, pure=False),
    ]
    for address in chain[1:]:
        futures.append(
            shared.submit(
                identity, futures[-1], workers=[address], allow_other_workers=True, pure=False
            )
        )
        wait(futures)
    assert arrays(shared, "sent", "share") >= 3
    kill(shared, chain[dies])
    survivors = [address for address in chain if address in addresses(shared)]
    for future in futures:
        for address in survivors:
            assert move(shared, future, address, same, LARGE, 0).result()
    [new] = others(shared, *survivors)
    assert move(shared, futures[-1], new, same, LARGE, 0).result()


def test_fan_out_holds_when_the_source_dies(shared: Client) -> None:
    """One chunk is on all workers; those that still have it serve the new one."""
    a, *rest = addresses(shared)
    source = shared.submit(make, workers=[a], allow_other_workers=True, pure=False)
    wait(source)
    readers = [move(shared, source, address, lambda x: x[::2]) for address in rest]
    assert arrays(shared, "sent", "share") >= 3
    kill(shared, a)
    for reader, address in zip(readers, rest, strict=True):
        assert shared.submit(
            lambda x: bool(np.array_equal(x, make()[::2])), reader, workers=[address]
        ).result()
    [new] = others(shared, *rest)
    assert move(shared, source, new, same, LARGE, 0).result()


def test_everybody_asks_everybody_while_workers_die(shared: Client) -> None:
    """Many chunks are read on every worker, in all orders; two workers are killed meanwhile."""
    made = [shared.submit(make, LARGE // 8, seed, pure=False, retries=10) for seed in range(12)]
    checks = [
        shared.submit(
            same,
            future,
            LARGE // 8,
            seed,
            workers=[address],
            allow_other_workers=True,
            pure=False,
            retries=10,
        )
        for seed, future in enumerate(made)
        for address in addresses(shared)
    ]
    for _ in range(2):
        kill(shared, addresses(shared)[0])
    assert all(shared.gather(checks))
