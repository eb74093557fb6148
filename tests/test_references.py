"""A lease lasts as long as its last reader, whoever that is, and no longer (invariants 11, 12, 17).

After each test the fixture ``shared`` waits for all leases to end by themselves, and fails if they
do not. The tests see to it that a lease lives while its reader does, with what it reads intact:
memory is poisoned the moment that it is recycled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
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
    identity,
    make,
    move,
    nothing_held,
    same,
    total,
    until,
)
from distributed import Client, LocalCluster, Reschedule, Worker, get_client, get_worker, wait
from distributed.worker import Status

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.config import Settings
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.testing import poisoned_arenas

__all__ = ["client", "cluster"]


class Poisoning(GPUIPCPlugin):
    """The plugin with poison in all memory that is recycled."""

    def make_memories(self, settings: Settings) -> list[Memory]:
        self.poison = contextlib.ExitStack()
        self.poison.enter_context(poisoned_arenas())
        return super().make_memories(settings)

    async def teardown(self, worker: Worker) -> None:
        await super().teardown(worker)
        self.poison.close()


@pytest.fixture
def shared(client: Client) -> Iterator[Client]:
    client.register_worker_plugin(Poisoning())
    yield client
    check_nothing_left(client)


def until_leased(client: Client, owner: str, count: int) -> None:
    """So many leases are on arrays of one worker, once those of others have ended."""

    def leases() -> bool:
        return dask_gpuipc.statistics(client)[owner]["leases"] == count

    until(leases, f"{count} leases on {owner}")


def churn(client: Client, a: str, b: str) -> None:
    """What is free in the arenas of a worker is used again."""
    for seed in range(3):
        other = client.submit(make, LARGE, 1000 + seed, workers=[a], pure=False)
        assert move(client, other, b, same, LARGE, 1000 + seed).result()
        del other


def forgotten(client: Client, key: str) -> Callable[[], bool]:
    """Whether no worker has a key."""
    return lambda: not any(client.run(has_key, key).values())


def has_key(key: str, dask_worker: Worker) -> bool:
    return key in dask_worker.data


# -- results --------------------------------------------------------------------------------------


def test_the_result_of_an_identity_task_is_a_reader(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    same_again = move(shared, source, b)
    key = source.key
    del source
    until(forgotten(shared, key), "the source to be forgotten")
    churn(shared, a, c)
    until_leased(shared, a, 1)
    assert move(shared, same_again, b, same, LARGE, 0).result()
    del same_again
    until(nothing_held(shared), "the lease to end")


def nest(x: np.ndarray) -> dict[str, Any]:
    return {"views": [x[::2], (x.reshape(2, -1).T, {"deep": memoryview(x)})]}


def read_nest(found: dict[str, Any]) -> bool:
    x = make()
    even, (transposed, rest) = found["views"]
    deep = np.asarray(rest["deep"])
    return (
        np.array_equal(even, x[::2]) and same(transposed.T.ravel(), LARGE, 0) and (deep == x).all()
    )


def test_views_in_containers_are_readers(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    nested = move(shared, source, b, nest)
    key = source.key
    del source
    until(forgotten(shared, key), "the source to be forgotten")
    churn(shared, a, c)
    until_leased(shared, a, 1)
    assert move(shared, nested, b, read_nest).result()


class Keeper:
    """An actor that keeps what it is given."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def keep(self, x: Any) -> None:
        self.kept = x[10:]

    def check(self) -> bool:
        return bool(np.array_equal(self.kept, make()[-len(self.kept) :]))


def test_actors_are_readers(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    actor = shared.submit(Keeper, source, actor=True, workers=[b]).result()
    key = source.key
    del source
    until(forgotten(shared, key), "the source to be forgotten")
    churn(shared, a, c)
    until_leased(shared, a, 1)
    assert actor.check().result()
    del actor
    until(nothing_held(shared), "the lease to end with the actor")


def fail_with(x: np.ndarray, seed: int) -> None:
    y = x[seed:]
    raise ValueError(f"{y.nbytes} bytes are in the traceback of this task")


def test_failed_tasks_end_their_leases_though_their_tracebacks_held_the_input(
    shared: Client,
) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    failing = [
        shared.submit(fail_with, source, seed, workers=[b], pure=False, retries=2)
        for seed in range(4)
    ]
    assert {type(f.exception()) for f in failing} == {ValueError}
    errors = [f.traceback() for f in failing]
    assert all(errors)
    assert arrays(shared, "sent", "share") >= 1
    del failing, source, errors
    until(nothing_held(shared), "the leases to end")


# -- tasks that use the cluster -------------------------------------------------------------------


def ask_others(x: np.ndarray, where: str) -> bool:
    """Have another worker read a view of what this task received, while this one waits."""
    here = get_client()
    scattered = here.scatter(x[5:], direct=True, hash=False)
    far = here.submit(lambda y: bool(np.array_equal(y, make()[5:])), scattered, workers=[where])
    return far.result() and same(x, LARGE, 0)


def test_a_task_that_submits_tasks(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    assert move(shared, source, b, ask_others, c).result()


def gather_here(where: str) -> bool:
    here = get_client()
    futures = [here.submit(make, LARGE, i, workers=[where], pure=False) for i in range(3)]
    return all(same(x, LARGE, i) for i, x in enumerate(here.gather(futures, direct=True)))


def test_a_task_that_gathers(shared: Client) -> None:
    a, b, _ = addresses(shared)
    assert shared.submit(gather_here, a, workers=[b], pure=False).result()


# -- what the scheduler does with data ------------------------------------------------------------


def test_published_and_persisted_data(shared: Client) -> None:
    whole = np.arange(1 << 20).reshape(1024, 1024)
    x = da.from_array(whole, chunks=256)
    published = (x + x.T).persist()
    wait(published)
    shared.publish_dataset(total=published)
    del published
    found = shared.get_dataset("total")
    np.testing.assert_array_equal(shared.compute(found[::-1]).result(), (whole + whole.T)[::-1])
    assert arrays(shared, "sent", "share") > 0
    del found
    shared.unpublish_dataset("total")
    until(nothing_held(shared), "the leases to end")


def hold(x: np.ndarray, path: str) -> int:
    """Run until somebody removes a file."""
    until(lambda: not os.path.exists(path), path)
    return int(x.sum())


def test_cancelled_tasks_release_what_they_read_when_they_end(
    shared: Client, tmp_path: Path
) -> None:
    a, b, c = addresses(shared)
    flag = tmp_path / "flag"
    flag.touch()
    source = shared.submit(make, workers=[a], pure=False)
    running = shared.submit(hold, source, str(flag), workers=[b], pure=False)
    until_leased(shared, a, 1)
    running.cancel()
    del running, source
    churn(shared, a, c)
    until_leased(shared, a, 1)
    flag.unlink()
    until(nothing_held(shared), "the lease to end with the task")


def elsewhere(x: np.ndarray, not_here: str) -> bool:
    """On one worker: pause it, and go elsewhere.

    From within the task, so that the scheduler hears of the pause before it places the task anew: a
    paused worker would never begin a task that was on its way to it.
    """
    worker = get_worker()
    if worker.address == not_here:
        asyncio.run_coroutine_threadsafe(pause(worker), worker.loop.asyncio_loop).result(30)  # type: ignore[attr-defined]
        raise Reschedule
    return same(x, LARGE, 0)


async def pause(worker: Worker) -> None:
    worker.status = Status.paused


def test_rescheduled_tasks(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    future = shared.submit(elsewhere, source, b, workers=[b], allow_other_workers=True, pure=False)
    try:
        assert future.result(timeout=30)
        assert arrays(shared, "received", "share") >= 1, "the first try was on another worker"
    finally:
        shared.run(unpause, workers=[b])


def unpause(dask_worker: Worker) -> None:
    dask_worker.status = Status.running


def busy(x: np.ndarray, i: int) -> int:
    """Some milliseconds of work, so that it is worth while to steal it."""
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        pass
    return int(x[i])


def test_work_is_stolen(shared: Client) -> None:
    a, *_ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    futures = shared.map(
        busy, [source] * 60, range(60), workers=[a], allow_other_workers=True, pure=False
    )
    stolen = shared.map(busy, [source] * 60, range(60), pure=False)
    want = [int(x) for x in make()[:60]]
    assert shared.gather(futures) == shared.gather(stolen) == want
    assert arrays(shared, "received", "share") >= 1


def has_replicas(client: Client, future: Any, count: int) -> bool:
    return len(client.who_has(future)[future.key]) == count


def test_replicas_are_made_and_dropped(shared: Client) -> None:
    """By `replicate`, and by the active memory manager, which keeps one of them."""
    a, *_ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    shared.replicate(source, n=3)
    until(partial(has_replicas, shared, source, 3), "three replicas")
    held = total(shared, "leases")
    assert held >= 1
    shared.amm.start()
    try:
        shared.amm.run_once()
        until(partial(has_replicas, shared, source, 1), "one replica")
    finally:
        shared.amm.stop()
    [keeper] = shared.who_has(source)[source.key]
    assert move(shared, source, keeper, same, LARGE, 0).result()
    del source
    until(nothing_held(shared), "the leases to end")


# -- clusters that change -------------------------------------------------------------------------


@pytest.mark.stress
def test_scaling_up_and_down_under_load() -> None:
    """Adaptive scaling starts workers while there is work, and retires them when there is not."""
    options = {**WORKERS, "n_workers": 1}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        client.register_worker_plugin(Poisoning())
        cluster.adapt(minimum=1, maximum=3, interval="50ms", wait_count=1, target_duration="50ms")
        kept, before = None, 0
        for seed in range(2):
            whole = np.random.default_rng(seed).integers(0, 100, (1024, 1024))
            x = da.from_array(whole, chunks=128)
            if kept is not None:
                x = x + kept
            found = client.compute((x + x.T).map_blocks(slow))
            until(lambda: len(addresses(client)) > 1, "more workers")
            want = whole + before
            np.testing.assert_array_equal(found.result(), want + want.T)
            kept, before = client.persist(x), want
            wait(kept)
            del found
            until(lambda: len(addresses(client)) == 1, "fewer workers", 60)
        assert int(client.compute(kept.sum()).result()) == int(before.sum())
        cluster.adapt(minimum=2, maximum=2)
        client.wait_for_workers(2, timeout=60)
        del kept, x
        check_nothing_left(client)


def slow(block: np.ndarray) -> np.ndarray:
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    return block


def test_readers_survive_the_death_of_the_owner(shared: Client) -> None:
    """What views, results and a running task read is intact when its owner was killed."""
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], allow_other_workers=True, pure=False)
    held = move(shared, source, b)
    view = move(shared, source, c, identity)
    pid = shared.run(os.getpid, workers=[a])[a]
    os.kill(pid, signal.SIGKILL)
    until(lambda: a not in addresses(shared), "the worker to be gone")
    shared.wait_for_workers(3, timeout=60)
    assert move(shared, held, b, same, LARGE, 0).result()
    assert move(shared, view, c, same, LARGE, 0).result()
    new = next(w for w in addresses(shared) if w not in (b, c))
    assert move(shared, held, new, same, LARGE, 0).result()
