"""Who dies while a GPU copies or reads another process's memory, and at every step of a transfer.

A kernel that waits for some seconds holds the device: a copy is submitted behind it, or it is the
kernel itself that reads when its time has come.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_fixtures import (
    addresses,
    arrays,
    check_nothing_left,
    client,
    cluster,
    move,
    nothing_held,
    until,
)
from cuda_peer import spin, warm_up
from distributed import Client, wait
from kill_cells import Cell, Sites, short_directory

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

__all__ = ["client", "cluster"]
pytestmark = pytest.mark.gpu

N = 1 << 23
"""Elements of an array of 64 MiB."""
HELD = 6.0
"""Seconds that a kernel waits: longer than it takes to send a chunk and to kill its sender."""

busy: list[Any] = []
"""In a worker: what a waiting kernel uses."""


def make_floats(seed: int, n: int = N) -> Any:
    import cupy

    array = cupy.arange(n, dtype="f8") + seed
    cupy.cuda.runtime.deviceSynchronize()
    return array


def same_floats(x: Any, seed: int) -> bool:
    return bool((x == make_floats(seed)).all())


def keep(x: Any) -> Any:
    return x


def hold_the_device() -> None:
    """Start a kernel on a stream of its own that waits; return at once."""
    import cupy

    x, stream = cupy.zeros(8), cupy.cuda.Stream(non_blocking=True)
    spin(x, x, HELD, 0, stream)
    busy[:] = [x, stream]


def is_held() -> bool:
    return not busy[1].done


def let_the_device_go() -> None:
    busy[1].synchronize()
    busy.clear()


def read_late(x: Any, flag: str) -> Any:
    """A copy of a shared chunk, made by a kernel that first waits."""
    import cupy

    out, stream = cupy.zeros_like(x), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    spin(out, x, HELD, 0, stream)
    Path(flag).touch()
    stream.synchronize()
    return out


@pytest.fixture
def three(client: Client) -> Iterator[tuple[Client, str, str, str]]:
    """Workers whose kernels are compiled; afterwards nothing may be left."""
    client.run(warm_up)
    yield (client, *addresses(client))
    client.wait_for_workers(3, timeout=60)
    check_nothing_left(client)


def share(client: Client, transfer: str, a: str, b: str) -> None:
    """Register, and have one chunk cross, so that the channel is up and the way is known."""
    client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
    first = client.submit(make_floats, 1, workers=[a], pure=False)
    assert move(client, first, b, same_floats, 1).result()
    assert arrays(client, "received", transfer) == 1
    del first
    until(nothing_held(client), "the first lease to end")


def kill(client: Client, address: str) -> None:
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGKILL)
    until(lambda: address not in addresses(client), "the worker to be gone")


def leases(client: Client, address: str) -> int:
    return dask_gpuipc.statistics(client)[address]["leases"]


def begin_a_copy(client: Client, a: str, b: str) -> tuple[Any, Any]:
    """Have a consumer begin to copy a chunk, behind a kernel that waits."""
    source = client.submit(make_floats, 7, workers=[a], allow_other_workers=True, pure=False)
    wait(source)
    client.run(hold_the_device, workers=[b])
    copy = client.submit(keep, source, workers=[b], allow_other_workers=True, pure=False)
    wait(copy)
    assert client.run(is_held, workers=[b])[b], "the kernel did not wait for long enough"
    assert leases(client, a) == 1, "the copy is not made yet"
    return source, copy


def test_the_producer_is_killed_while_the_consumer_copies(three: Any) -> None:
    client, a, b, c = three
    share(client, "copy", a, b)
    source, copy = begin_a_copy(client, a, b)
    kill(client, a)
    assert client.run(is_held, workers=[b])[b], "the copy was made before the producer died"
    client.run(let_the_device_go, workers=[b])
    assert client.submit(same_floats, copy, 7, workers=[b], pure=False).result(timeout=60)
    assert client.submit(same_floats, copy, 7, workers=[c], pure=False).result(timeout=60)
    del source, copy


def test_the_consumer_is_killed_while_it_copies(three: Any) -> None:
    client, a, b, c = three
    share(client, "copy", a, b)
    source, copy = begin_a_copy(client, a, b)
    kill(client, b)
    until(lambda: leases(client, a) == 0, "the lease to end with the consumer")
    for seed in range(3):  # its memory is used again, and the source is what it was
        other = client.submit(make_floats, 50 + seed, workers=[a], pure=False)
        assert move(client, other, c, same_floats, 50 + seed).result()
        del other
    assert client.submit(same_floats, source, 7, workers=[a], pure=False).result(timeout=60)
    assert client.submit(same_floats, source, 7, workers=[c], pure=False).result(timeout=60)
    assert client.submit(same_floats, copy, 7, pure=False).result(timeout=60)
    del source, copy


def test_the_producer_is_killed_while_a_kernel_reads_a_shared_chunk(
    three: Any, tmp_path: Path
) -> None:
    client, a, b, _ = three
    share(client, "share", a, b)
    flag = tmp_path / "reads"
    source = client.submit(make_floats, 7, workers=[a], allow_other_workers=True, pure=False)
    out = client.submit(
        read_late, source, str(flag), workers=[b], allow_other_workers=True, pure=False
    )
    until(flag.exists, "the kernel to wait")
    kill(client, a)
    assert not out.done(), "the kernel read before the producer died"
    assert client.submit(same_floats, out, 7, workers=[b], pure=False).result(timeout=60)
    del source, out


# -- some cells of the kill matrix, with CuPy -----------------------------------------------------

CELLS = [
    Cell("producer", "before the offer", "SIGKILL"),
    Cell("producer", "between the offer and the write", "SIGKILL, its forked child lives"),
    Cell("producer", "before the OK", "SIGSTOP and SIGCONT"),
    Cell("producer", "while the array is held", "clean close"),
    Cell("producer", "after the OK", "nanny restart"),
    Cell("producer", "while releases are queued", "retire_workers"),
    Cell("consumer", "before the OK", "SIGKILL"),
    Cell("consumer", "after the OK", "SIGKILL, its forked child lives"),
    Cell("consumer", "while the array is held", "SIGSTOP and SIGCONT"),
    Cell("consumer", "while releases are queued", "clean close"),
    Cell("consumer", "between the offer and the write", "nanny restart"),
    Cell("consumer", "before the offer", "retire_workers"),
]


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    with short_directory() as directory:
        sites = Sites(directory, "cupy")
        yield sites
        sites.close()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(sites: Sites, cell: Cell) -> None:
    assert sites.run(cell) == "result"
