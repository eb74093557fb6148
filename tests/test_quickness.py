"""Nothing slow runs on the event loop, and mappings are few (invariants 15 and 19).

The memory of these workers opens ahead and closes on a thread of its own, as that of CUDA does, and
its opens and closes are held as long as a test likes: no test takes a time. Each question to a
worker is answered by its event loop, so an answer shows that the loop goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_fixtures import (
    LARGE,
    FaultyPlugin,
    Gate,
    addresses,
    arrays,
    calls,
    check_nothing_left,
    client,
    close_gates,
    cluster,
    errors,
    failed,
    let_go,
    make,
    move,
    nothing_held,
    open_gates,
    refused,
    same,
    shared,
    until,
)
from distributed import Client, Worker, wait

import dask_gpuipc
from dask_gpuipc.config import Settings
from dask_gpuipc.memory.base import Imported, Mapping, Memory, Rung
from dask_gpuipc.testing import Fault, FaultyMemory
from dask_gpuipc.wire import Announce, Layout

__all__ = ["client", "cluster", "errors", "shared"]


class SlowMapping:
    """A mapping that is closed when the gate ``close`` is opened."""

    def __init__(self, inner: Mapping, memory: SlowMemory) -> None:
        self.inner = inner
        self.nbytes = inner.nbytes
        self._memory = memory

    def close(self) -> None:
        self._memory.closing += 1
        assert Gate("close").wait(60)
        self.inner.close()
        self._memory.closing -= 1


class SlowMemory(FaultyMemory):
    """Host memory that opens ahead and closes on its own thread, slowly."""

    closing = 0

    def __init__(self, inner: Memory, *faults: Fault) -> None:
        super().__init__(inner, *faults)
        self.executor = ThreadPoolExecutor(1)

    def open(self, announcement: Announce, fds: Sequence[int]) -> Mapping:
        return SlowMapping(super().open(announcement, fds), self)

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        return super().load(mapping.inner, layout, rung)

    def close(self) -> None:
        super().close()
        self.executor.shutdown(wait=False)


class SlowPlugin(FaultyPlugin):
    def make_memories(self, settings: Settings) -> list[Memory]:
        return [SlowMemory(m.inner, *self.faults[0]) for m in super().make_memories(settings)]

    def __reduce__(self) -> Any:
        return SlowPlugin, self.faults


def closing(dask_worker: Worker) -> int:
    return dask_worker.plugins["gpuipc"].endpoint.memories[0].closing


@pytest.fixture
def slow(client: Client) -> Iterator[Client]:
    yield client
    open_gates(client)
    until(nothing_held(client), "all leases to end")
    dask_gpuipc.collect(client)  # so that what the teardown closes is not held
    until(lambda: not any(client.run(_let_all_close).values()), "all mappings to be closed")
    check_nothing_left(client)
    client.run(close_gates)


def _let_all_close(dask_worker: Worker) -> int:
    let_go()
    return closing(dask_worker)


def transfer(client: Client, a: str, b: str, seed: int, n: int = LARGE) -> None:
    source = client.submit(make, n, seed, workers=[a], pure=False)
    assert move(client, source, b, same, n, seed).result(timeout=30)


def test_the_loop_goes_on_while_a_mapping_is_closed(slow: Client) -> None:
    a, b, c = addresses(slow)
    slow.register_worker_plugin(SlowPlugin())
    transfer(slow, a, b, 1)
    until(nothing_held(slow), "the mapping to be idle")
    dask_gpuipc.collect(slow)
    until(lambda: slow.run(closing, workers=[b])[b] == 1, "the mapping to be on its way")
    transfer(slow, a, b, 2)  # in an allocation that is opened while the other is being closed
    transfer(slow, c, b, 3)
    assert arrays(slow, "received", "share") == 3
    assert slow.run(closing, workers=[b]) == {b: 1}


OFFLOADED = 2 << 20
"""Elements of an array of 16 MiB: an answer with two is written on Dask's offload thread."""


def test_the_loop_goes_on_while_an_allocation_is_opened_ahead(slow: Client) -> None:
    """The second array of an answer is held back, while the first is opened without end."""
    a, b, c = addresses(slow)
    slow.register_worker_plugin(
        SlowPlugin([Fault("open", hold=Gate("open")), Fault("pin", first=2, hold=Gate("pin"))])
    )
    sources = [slow.submit(make, OFFLOADED, seed, workers=[a], pure=False) for seed in range(2)]
    wait(sources)
    both = slow.submit(same_as_made, sources, workers=[b], pure=False)
    until(lambda: calls(slow, b, "open") == 1, "the allocation to be opened ahead")
    assert calls(slow, a, "pin") == 2
    transfer(slow, c, b, 3)  # from a producer that the other one does not hold up
    assert arrays(slow, "received", "share") == 1
    slow.run(let_go, "pin", workers=[a])
    assert both.result(timeout=30)  # as bytes, for the allocation is not open yet
    assert failed(slow, "busy") == 1  # and the other is not announced any more
    assert refused(slow, "named_serializers") == 2  # both arrays of the answer
    open_gates(slow, "open")
    until(nothing_held(slow), "the leases of the allocation to end")
    transfer(slow, a, b, 4)
    assert arrays(slow, "received", "share") == 2


def same_as_made(xs: list[Any]) -> bool:
    return all(same(x, OFFLOADED, seed) for seed, x in enumerate(xs))


# -- how many mappings there are ------------------------------------------------------------------


def look(client: Client, worker: str, *names: str) -> list[int]:
    stats = dask_gpuipc.statistics(client)[worker]
    return [stats[name] for name in names]


def test_an_allocation_is_opened_once_and_closed_when_idle(shared: Client) -> None:
    a, b, _ = addresses(shared)
    for seed in range(5):
        transfer(shared, a, b, seed)
    assert look(shared, b, "mappings", "opens", "hits") == [1, 1, 4]
    until(nothing_held(shared), "the mapping to be idle")
    shared.run(collect_mappings, workers=[b])
    assert look(shared, b, "mappings", "mapped_bytes") == [0, 0]
    transfer(shared, a, b, 5)  # the allocation is announced again, and opened again
    assert look(shared, b, "mappings", "opens", "hits") == [1, 2, 4]
    assert arrays(shared, "received", "share") == 6


def collect_mappings(dask_worker: Worker) -> None:
    """Only of the consumer: the producer keeps its arena."""
    dask_worker.plugins["gpuipc"].endpoint.importer.collect()


SMALL = 1 << 13
"""Elements of an array of 64 KiB, the smallest that goes by handle."""


def test_idle_mappings_are_bounded(client: Client) -> None:
    client.register_worker_plugin(FaultyPlugin(settings={"host_arena_size": 1}))
    a, b, _ = addresses(client)
    sources = [client.submit(make, SMALL, seed, workers=[a], pure=False) for seed in range(80)]
    held = client.submit(list, sources, workers=[b], pure=False)
    wait(held)
    assert look(client, b, "mappings", "holding") == [80, 80]
    del sources, held
    until(nothing_held(client), "all leases to end")
    until(lambda: look(client, b, "mappings") == [64], "the oldest mappings to be closed")
    transfer(client, a, b, 1, SMALL)
    check_nothing_left(client)
