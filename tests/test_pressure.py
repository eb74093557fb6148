"""Budgets, collect, what cannot be had: the next rung, and never a failed task (invariant 16)."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable

import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    Gate,
    addresses,
    arrays,
    check_nothing_left,
    client,
    cluster,
    failed,
    faulty,
    left_in_process,
    make,
    move,
    nothing_held,
    open_gates,
    refused,
    same,
    shared,
    total,
    until,
)
from distributed import Client, Worker, wait
from distributed.worker import Status

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.testing import Fault

__all__ = ["client", "cluster", "faulty", "shared"]

MIB = 1 << 20


# -- the budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "nbytes"), [("3 MiB", 3 * MIB), (0.001, 4_000_000)], ids=["bytes", "fraction"]
)
def test_pinned_bytes_are_never_above_the_limit(
    client: Client, limit: float | str, nbytes: int
) -> None:
    client.register_worker_plugin(GPUIPCPlugin(pinned_limit=limit))
    whole = np.arange(1 << 20).reshape(1024, 1024)
    x = da.from_array(whole, chunks=256)
    ended, seen = threading.Event(), [0]

    def watch() -> None:
        while not ended.is_set():
            stats = dask_gpuipc.statistics(client).values()
            seen.append(max(s["pinned_bytes"] for s in stats))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        held = client.persist(x + x.T)
        for function in (lambda y: y @ y.T, lambda y: y[::-1] + y, lambda y: y - y.T):
            found = client.compute(function(held)).result()
            np.testing.assert_array_equal(found, function(whole + whole.T))
        a, b, _ = addresses(client)
        sources = [client.submit(make, LARGE, i, workers=[a], pure=False) for i in range(8)]
        got = [move(client, source, b) for source in sources]
    finally:
        ended.set()
        watcher.join()
    assert 0 < max(seen) <= nbytes
    assert refused(client, "budget") > 0
    for seed, future in enumerate(got):
        assert move(client, future, b, same, LARGE, seed).result()
    del held, sources, got, future
    check_nothing_left(client)


# -- collect --------------------------------------------------------------------------------------


def memfds(dask_worker: Worker) -> int:
    return sum("memfd" in line for line in left_in_process())


def test_collect_frees_what_nobody_holds_and_nothing_else(shared: Client) -> None:
    a, b, c = addresses(shared)
    kept = shared.submit(make, LARGE, 1, workers=[a], pure=False)
    held = move(shared, kept, b)
    for seed in range(20):
        source = shared.submit(make, LARGE, seed, workers=[a], pure=False)
        assert move(shared, source, c, same, LARGE, seed).result()
        del source
    until(lambda: dask_gpuipc.statistics(shared)[a]["leases"] == 1, "one lease")
    assert dask_gpuipc.statistics(shared)[c]["mappings"] == 1
    assert shared.run(memfds, workers=[c])[c] > 0
    dask_gpuipc.collect(shared)
    assert dask_gpuipc.statistics(shared)[c]["mappings"] == 0
    assert shared.run(memfds, workers=[c])[c] == 0
    assert move(shared, held, b, same, LARGE, 1).result()
    assert dask_gpuipc.statistics(shared)[a]["pinned_bytes"] == MIB
    del kept, held
    until(nothing_held(shared), "the last lease to end")
    dask_gpuipc.collect(shared)
    until(lambda: not any(shared.run(memfds).values()), "no memfd anywhere")
    source = shared.submit(make, workers=[a], pure=False)
    assert move(shared, source, b, same, LARGE, 0).result()
    assert arrays(shared, "sent", "bytes") == 0


# -- nothing to be had ----------------------------------------------------------------------------


def use_up_descriptors(dask_worker: Worker) -> None:
    """Not one more can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = []
    dask_worker.used_up = (soft, used)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    try:
        while True:
            used.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return


def free_descriptors(dask_worker: Worker) -> None:
    soft, used = dask_worker.used_up
    for fd in used:
        os.close(fd)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    del dask_worker.used_up


@pytest.mark.parametrize(
    ("side", "told"), [("producer", "refused no_memory"), ("consumer", "failed evicted")]
)
def test_without_a_free_descriptor_chunks_go_as_bytes(shared: Client, side: str, told: str) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    assert move(shared, source, b, same, LARGE, 0).result()  # the connections are there
    del source
    until(nothing_held(shared), "the lease to end")
    dask_gpuipc.collect(shared)
    until(lambda: not any(shared.run(memfds).values()), "no arena anywhere")
    short = a if side == "producer" else b
    sources = [shared.submit(make, LARGE, i, workers=[a], pure=False) for i in (1, 2)]
    wait(sources)
    shared.run(use_up_descriptors, workers=[short])
    try:
        assert move(shared, sources[0], b, same, LARGE, 1).result()
    finally:
        shared.run(free_descriptors, workers=[short])
    counter, reason = told.split()
    assert {"refused": refused, "failed": failed}[counter](shared, reason) >= 1
    before = arrays(shared, "received", "share")
    assert move(shared, sources[1], b, same, LARGE, 2).result()
    assert arrays(shared, "received", "share") == before + 1


def test_a_thousand_allocations_in_one_answer(faulty: Callable[..., Client]) -> None:
    """More announcements than a socket takes at once: what does not fit goes as bytes."""
    client = faulty(settings={"host_arena_size": 1 << 16})
    a, b, _ = addresses(client)
    count, n = 700, (1 << 16) // 8
    sources = client.map(make, [n] * count, range(count), workers=[a], pure=False)
    wait(sources)
    good = client.submit(all_right, sources, n, workers=[b], pure=False)
    assert good.result()
    assert arrays(client, "sent", "share") > 0
    assert arrays(client, "sent", "share") + arrays(client, "sent", "bytes") == count


def all_right(xs: list[np.ndarray], n: int) -> bool:
    return all(same(x, n, seed) for seed, x in enumerate(xs))


def test_a_peer_that_does_not_read_holds_up_nobody(faulty: Callable[..., Client]) -> None:
    """Hundreds of messages wait for a stopped process; the others go on; then it reads them all."""
    client = faulty(settings={"host_arena_size": 1 << 16})
    a, b, c = addresses(client)
    count, n = 500, (1 << 16) // 8
    sources = client.map(make, [n] * count, range(count), workers=[a], pure=False)
    wait(sources)
    assert client.submit(all_right, sources, n, workers=[c], pure=False).result()
    del sources
    until(nothing_held(client), "the leases to end")
    pid = client.run(os.getpid, workers=[c])[c]
    os.kill(pid, signal.SIGSTOP)
    try:
        client.run(collect_here, workers=[a])  # every allocation is withdrawn
        for seed in range(3):
            source = client.submit(make, LARGE, seed, workers=[a], pure=False)
            assert move(client, source, b, same, LARGE, seed).result()
            del source
    finally:
        os.kill(pid, signal.SIGCONT)
    source = client.submit(make, workers=[a], pure=False)
    before = arrays(client, "received", "share")
    assert move(client, source, c, same, LARGE, 0).result()
    assert arrays(client, "received", "share") == before + 1
    assert dask_gpuipc.statistics(client)[c]["mappings"] == 1, "it has read all withdrawals"


def collect_here(dask_worker: Worker) -> None:
    dask_worker.plugins["gpuipc"].endpoint.collect()


# -- spilling, pausing ----------------------------------------------------------------------------


def evict_all(dask_worker: Worker) -> int:
    count = 0
    while dask_worker.data.memory:
        dask_worker.data.evict()
        count += 1
    return count


def churn(client: Client, a: str, c: str) -> None:
    for seed in range(100, 104):
        other = client.submit(make, LARGE, seed, workers=[a], pure=False)
        assert move(client, other, c, same, LARGE, seed).result()
        del other


def test_what_the_owner_spills_its_readers_still_read(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)
    assert shared.run(evict_all, workers=[a])[a] == 1
    churn(shared, a, c)
    assert total(shared, "leases") >= 1
    assert move(shared, held, b, same, LARGE, 0).result()
    assert move(shared, source, c, same, LARGE, 0).result()  # from disk, then by handle
    assert arrays(shared, "sent", "bytes") == 0


def test_what_a_reader_spills_it_lets_go(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b, lambda x: [x[5:], x])
    assert shared.run(evict_all, workers=[b])[b] >= 1
    until(lambda: dask_gpuipc.statistics(shared)[a]["leases"] == 0, "the lease to end")
    churn(shared, a, c)
    assert shared.submit(
        lambda xs: same(xs[1], LARGE, 0) and np.array_equal(xs[0], make()[5:]), held, workers=[b]
    ).result()


def test_spilling_while_an_answer_is_written(faulty: Callable[..., Client]) -> None:
    """The chunk goes to disk when its copy is made, but not yet offered."""
    client = faulty(Fault("handle", hold=Gate("offer")))
    a, b, _ = addresses(client)
    n = 4 * MIB  # 32 MiB: serialized on the offload thread, so that the loop goes on
    source = client.submit(make, n, workers=[a], pure=False)
    wait(source)
    good = client.submit(same, source, n, 0, workers=[b], pure=False)
    until(lambda: client.run(calls_of_handle, workers=[a])[a] == 1, "the answer")
    assert client.run(evict_all, workers=[a])[a] == 1
    open_gates(client, "offer")
    assert good.result()
    assert arrays(client, "received", "share") == 1


def calls_of_handle(dask_worker: Worker) -> int:
    return dask_worker.plugins["gpuipc"].endpoint.memories[0].calls["handle"]


def set_status(name: str, dask_worker: Worker) -> None:
    dask_worker.status = Status[name]


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_paused_workers_keep_their_leases_and_serve(shared: Client, who: str) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)
    paused = a if who == "producer" else b
    shared.run(set_status, "paused", workers=[paused])
    try:
        assert move(shared, held, c, same, LARGE, 0).result()
        if who == "consumer":
            churn(shared, a, c)
    finally:
        shared.run(set_status, "running", workers=[paused])
    assert move(shared, held, b, same, LARGE, 0).result()
    assert arrays(shared, "sent", "bytes") == 0
