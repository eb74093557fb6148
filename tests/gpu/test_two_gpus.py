"""Two GPUs: handles across them, the self-test of each pair, and devices by UUID.

Between processes first, then between workers as users start them: by LocalCUDACluster, and by
``dask worker`` with ``CUDA_VISIBLE_DEVICES`` rotated, restricted, permuted and in UUID form.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import addresses, arrays, check_nothing_left, failed, move, until
from cuda_peer import (
    Peer,
    active,
    close,
    close_behind_kernel,
    drop,
    examine,
    fence_behind_kernel,
    home,
    load,
    look,
    memory,
    offer,
    open_,
    place,
    ready,
    settle,
    spin,
    stream_of,
    uuid_of,
    warm_up,
    write,
)
from distributed import Client, LocalCluster
from test_cluster_gpu import (
    describe_gpu,
    from_gpu,
    layout_gpu,
    make_gpu,
    same_gpu,
    to_gpu,
    use_rmm,
)
from test_cuda_memory import LAYOUTS, fill

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

pytestmark = pytest.mark.multigpu
N = 1 << 20
PATIENCE = 90


@pytest.fixture(scope="module", autouse=True)
def uuids(gpu: None) -> list[str]:
    """UUIDs of the GPUs, in the order in which this process sees them; skips below two."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs; {count} visible")
    return [uuid_of(ordinal) for ordinal in range(count)]


# -- between two processes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(uuids: list[str]) -> Iterator[Peer]:
    """A process whose home is the second GPU, and which does not see the first."""
    peer = Peer(CUDA_VISIBLE_DEVICES="1")
    peer.call(warm_up)
    yield peer
    peer.stop()


def forms(uuids: list[str]) -> dict[str, str]:
    return {
        "rotated": "1,0",
        "restricted": "1",
        "uuids": f"{uuids[1]},{uuids[0]}",
        "one uuid": uuids[1],
        "uuid prefix": uuids[1][:12],
    }


@pytest.mark.parametrize("form", forms(["GPU-0", "GPU-1"]))
def test_devices_are_known_by_uuid(uuids: list[str], form: str) -> None:
    """And their handles are opened on the process's own first one."""
    peer = Peer(CUDA_VISIBLE_DEVICES=forms(uuids)[form])
    try:
        assert peer.call(home) == (uuids[1],)
        host, array = fill()
        pin, announcement = offer(array)
        assert announcement.device == uuids[0]
        peer.call(open_, "m", announcement)
        for rung in ("copy", "share"):
            assert peer.call(load, rung, "m", pin.layout, rung) == rung
            np.testing.assert_array_equal(peer.call(look, rung)[0], host)
            assert peer.call(place, rung) == (0, uuids[1])
        peer.call(settle, "copy")
        peer.call(drop, "copy", "share")
        peer.call(close, "m")
        pin.release()
    finally:
        peer.stop()


def test_a_pair_proves_itself(other: Peer, uuids: list[str]) -> None:
    sample = memory().prover.sample(uuids[0]).result(20)
    assert other.call(examine, uuids[0], sample.nbytes, sample.handle) == sample.digest
    second = memory().prover.sample(uuids[1]).result(20)
    assert second.handle != sample.handle
    assert other.call(examine, uuids[1], second.nbytes, second.handle) == second.digest


def test_without_peer_access_only_the_same_gpu_proves_itself(uuids: list[str]) -> None:
    peer = Peer(CUDA_VISIBLE_DEVICES="1", DASK_GPUIPC__CUDA__PEER_ACCESS="False")
    try:
        for device, works in ((uuids[0], False), (uuids[1], True)):
            sample = memory().prover.sample(device).result(20)
            seen = peer.call(examine, device, sample.nbytes, sample.handle)
            assert seen == (sample.digest if works else b"")
    finally:
        peer.stop()


@pytest.mark.parametrize("rung", ["share", "copy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_across(other: Peer, layout: str, rung: str) -> None:
    host, device = fill()
    want, array = LAYOUTS[layout](host), LAYOUTS[layout](device)
    pin, announcement = offer(array)
    other.call(open_, "m", announcement)
    assert other.call(load, "x", "m", pin.layout, rung) == rung
    np.testing.assert_array_equal(other.call(look, "x")[0], want)
    if rung == "copy":
        other.call(settle, "x")
    other.call(drop, "x")
    other.call(close, "m")
    pin.release()


@pytest.mark.parametrize(("rung", "seen"), [("copy", 1.0), ("share", 5.0)])
def test_writing_into_an_import_across(other: Peer, rung: str, seen: float) -> None:
    import cupy

    array = cupy.ones(1000)
    pin, announcement = offer(array)
    other.call(open_, "m", announcement)
    other.call(load, "x", "m", pin.layout, rung)
    other.call(write, "x", 5.0)
    assert float(array.max()) == seen
    other.call(drop, "x")
    other.call(close, "m")
    pin.release()


@pytest.mark.parametrize("rung", ["share", "copy"])
@pytest.mark.parametrize("kind", ["default", "per-thread", "blocking", "non-blocking"])
def test_order_under_long_kernels_across(other: Peer, kind: str, rung: str) -> None:
    import cupy

    array = cupy.zeros(1 << 16)
    cupy.cuda.runtime.deviceSynchronize()
    start = time.monotonic()
    spin(array, array, 1.0, 9.0, stream_of(kind))
    prepared = memory().prepare([array])
    assert time.monotonic() - start < 0.1, "prepare waited"
    asyncio.run(prepared.wait())
    assert time.monotonic() - start >= 0.9
    pin, announcement = offer(array, prepared)
    other.call(open_, "m", announcement)
    assert other.call(load, "x", "m", pin.layout, rung) == rung
    assert other.call(look, "x")[0].min() == 9.0
    other.call(drop, "x")
    other.call(close, "m")
    pin.release()


def test_a_release_across_waits_for_the_kernel_that_reads(other: Peer) -> None:
    import cupy

    pin, announcement = offer(cupy.zeros(1 << 16))
    other.call(open_, "m", announcement)
    other.call(load, "x", "m", pin.layout, "share")
    made, passed = other.call(fence_behind_kernel, "x", 1.0)
    assert made < 0.1
    assert passed >= 0.9
    called, _, closed = other.call(close_behind_kernel, "m", 1.0)
    assert called < 0.02
    assert closed >= 0.9
    pin.release()


def test_arrays_of_both_devices_of_one_process_arrive(other: Peer, uuids: list[str]) -> None:
    import cupy

    with cupy.cuda.Device(1):
        second = cupy.full(1000, 2.0)
        cupy.cuda.runtime.deviceSynchronize()
    first = cupy.full(1000, 1.0)
    prepared = ready(first, second)
    for value, array in ((1.0, first), (2.0, second)):
        pin, announcement = offer(array, prepared)
        assert announcement.device == uuids[int(value) - 1]
        other.call(open_, "m", announcement)
        other.call(load, "x", "m", pin.layout, "copy")
        assert set(other.call(look, "x")[0].tolist()) == {value}
        assert other.call(place, "x") == (0, uuids[1])
        other.call(settle, "x")
        other.call(drop, "x")
        other.call(close, "m")
        pin.release()


def test_only_arrays_of_unproven_devices_go_by_the_host(uuids: list[str]) -> None:
    import cupy

    with cupy.cuda.Device(1):
        second = cupy.full(1000, 2.0)
    first = cupy.full(1000, 1.0)
    prepared = ready(first, second, devices={uuids[0]})
    assert prepared.unproven == {uuids[1]}
    pins = [memory().pin(array, prepared) for array in (first, second)]
    assert [pin.rung for pin in pins] == [None, "host"]
    for pin in pins:
        pin.release()


def test_an_import_across_makes_no_context_on_the_exporters_gpu(
    uuids: list[str], record_property: Any
) -> None:
    """Another process's context there would take hundreds of MB."""
    import cupy

    peer = Peer(CUDA_VISIBLE_DEVICES="1,0")
    try:
        peer.call(warm_up)
        array = cupy.zeros(1 << 20)
        cupy.cuda.runtime.deviceSynchronize()
        before = cupy.cuda.runtime.memGetInfo()[0]
        pin, announcement = offer(array)
        peer.call(open_, "m", announcement)
        peer.call(load, "x", "m", pin.layout, "copy")
        peer.call(look, "x")
        taken = before - cupy.cuda.runtime.memGetInfo()[0]
        record_property("bytes taken on the exporter's GPU by an open", taken)
        assert not peer.call(active, 1)
        assert taken < 256 << 20, f"{taken >> 20} MiB were taken on the exporter's GPU"
        peer.call(drop, "x")
        peer.call(close, "m")
        pin.release()
    finally:
        peer.stop()


# -- between workers ------------------------------------------------------------------------------


def device_of(x: Any) -> str:
    """The GPU on which an array is said to be, and whose memory it is: its own, or lent."""
    import cupy

    from dask_gpuipc.memory.cuda.mappings import BORROWED

    if x.data.ptr in BORROWED:
        return f"{uuid_of(x.device.id)}, lent"
    really = cupy.cuda.runtime.pointerGetAttributes(x.data.ptr).device
    assert really == x.device.id
    return f"{uuid_of(really)}, own"


def own_gpu() -> str:
    return uuid_of(0)


def has_arrived(client: Client, a: str, b: str, rung: str, seeds: Iterator[int]) -> bool:
    """Move one chunk, and check it; whether it went by a rung."""
    seed = next(seeds)
    before = sent(client, a, rung)
    source = client.submit(make_gpu, N, seed, workers=[a], pure=False)
    assert move(client, source, b, same_gpu, N, seed).result()
    return sent(client, a, rung) > before


def sent(client: Client, worker: str, rung: str) -> int:
    found = dask_gpuipc.statistics(client)[worker]["sent"].get(rung, {"arrays": 0})
    return int(found["arrays"])


def prove(client: Client, rung: str = "copy") -> None:
    """Move chunks until each pair of workers has proven itself; all of them are right."""
    seeds = iter(range(1_000_000))
    workers = addresses(client)
    for a in workers:
        for b in workers:
            if a != b:
                until(
                    lambda a=a, b=b: has_arrived(client, a, b, rung, seeds), f"{a} to {b}: {rung}"
                )


def check_all(client: Client, rung: str = "copy") -> None:
    """Chunks cross, land on the consumer's own GPU, and objects are as plain Dask delivers them."""
    prove(client, rung)
    a, b = addresses(client)[:2]
    gpus = client.run(own_gpu)
    source = client.submit(make_gpu, N, 3, workers=[a], pure=False)
    where = f"{gpus[b]}, {'lent' if rung == 'share' else 'own'}"
    assert move(client, source, b, device_of).result() == where
    ours = describe_all(client, a, b, order=rung != "share")
    assert arrays(client, "sent", "bytes") == 0
    assert failed(client, "open_failed") == 0
    client.unregister_worker_plugin("gpuipc")
    assert describe_all(client, a, b, order=rung != "share") == ours
    del source


def describe_all(client: Client, a: str, b: str, *, order: bool) -> list[Any]:
    """Objects that are made anew on one worker, as the other one gets them.

    An alias keeps its strides where plain Dask delivers a contiguous copy: without `order` nothing
    that is strided is among them.
    """
    names = ("C", "F", *(("strided", "negative") if order else ()), "list")
    sources = [client.submit(layout_gpu, name, workers=[a], pure=False) for name in names]
    return [move(client, source, b, describe_gpu).result() for source in sources]


@contextlib.contextmanager
def cuda_cluster(**options: Any) -> Iterator[Client]:
    dask_cuda = pytest.importorskip("dask_cuda")
    with (
        dask_cuda.LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=[0, 1], dashboard_address=":0", silence_logs=40, **options
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=PATIENCE)
        yield client


@pytest.mark.parametrize("transfer", ["auto", "share"])
def test_local_cuda_cluster(transfer: str) -> None:
    with cuda_cluster() as client:
        assert len(set(client.run(own_gpu).values())) == 2
        client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
        check_all(client, "share" if transfer == "share" else "copy")
        check_nothing_left(client)


@pytest.mark.parametrize("transfer", ["auto", "share"])
def test_workflows_across_equal_numpy(transfer: str) -> None:
    whole = np.random.default_rng(1).integers(0, 100, (1024, 1024)).astype("f8")
    with cuda_cluster() as client, dask.config.set({"array.rechunk.method": "tasks"}):
        client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
        rung = "share" if transfer == "share" else "copy"
        prove(client, rung)
        before = arrays(client, "sent", rung)
        x = da.from_array(whole, chunks=256).map_blocks(to_gpu)
        for expression, want in (
            (x + x.T, whole + whole.T),
            (x @ x.T, whole @ whole.T),
            (x.rechunk((1024, 64)).cumsum(axis=0), whole.cumsum(axis=0)),
        ):
            got = client.compute(expression.map_blocks(from_gpu)).result()
            np.testing.assert_array_equal(got, want)
        assert arrays(client, "sent", rung) > before + 20
        check_nothing_left(client)


@pytest.mark.parametrize(
    ("options", "rung"),
    [
        ({"rmm_pool_size": "30 GiB"}, "copy"),
        ({"rmm_async": True}, "stage"),
        ({"rmm_managed_memory": True}, "stage"),
    ],
)
def test_rmm_on_both_gpus(options: dict[str, Any], rung: str) -> None:
    pytest.importorskip("rmm")
    with cuda_cluster(**options) as client:
        client.run(use_rmm)
        client.register_worker_plugin(GPUIPCPlugin())
        check_all(client, rung)
        check_nothing_left(client)


def test_without_peer_access_chunks_go_by_the_host() -> None:
    with dask.config.set({"gpuipc.cuda.peer-access": False}), cuda_cluster() as client:
        client.register_worker_plugin(GPUIPCPlugin())
        check_all(client, "host")
        assert arrays(client, "sent", "copy") == 0
        check_nothing_left(client)


@contextlib.contextmanager
def workers(*visible: str, **settings: str) -> Iterator[Client]:
    """``dask worker`` processes, each with its own CUDA_VISIBLE_DEVICES."""
    options = {"n_workers": 0, "dashboard_address": ":0", "silence_logs": 40}
    with LocalCluster(**options) as cluster, contextlib.ExitStack() as stack:
        for devices in visible:
            environment = {
                **os.environ,
                **settings,
                "CUDA_VISIBLE_DEVICES": devices,
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            program = [sys.executable, "-m", "distributed.cli.dask_worker"]
            flags = ["--no-nanny", "--no-dashboard", "--nthreads", "1", "--memory-limit", "8GB"]
            process = subprocess.Popen(
                [*program, cluster.scheduler_address, *flags],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        client = stack.enter_context(Client(cluster))
        client.wait_for_workers(len(visible), timeout=PATIENCE)
        yield client


@pytest.mark.parametrize("kind", ["rotated", "restricted", "uuids", "one uuid each"])
def test_visible_devices_of_plain_workers(uuids: list[str], kind: str) -> None:
    visible = {
        "rotated": ("0,1", "1,0"),
        "restricted": ("0", "1"),
        "uuids": (f"{uuids[0]},{uuids[1]}", f"{uuids[1]},{uuids[0]}"),
        "one uuid each": (uuids[0], uuids[1]),
    }[kind]
    with workers(*visible) as client:
        assert len(set(client.run(own_gpu).values())) == 2
        client.register_worker_plugin(GPUIPCPlugin())
        check_all(client)
        check_nothing_left(client)


def test_three_workers_of_which_two_are_on_one_gpu() -> None:
    """Each pair by itself: the same GPU at once, the other one once it is proven."""
    with workers("0", "0,1", "1,0") as client:
        client.register_worker_plugin(GPUIPCPlugin())
        gpus = client.run(own_gpu)
        near = sorted(a for a, gpu in gpus.items() if list(gpus.values()).count(gpu) == 2)
        assert has_arrived(client, *near, "copy", iter([1]))
        prove(client)
        check_nothing_left(client)


def make_on(ordinal: int, n: int, seed: int) -> Any:
    import cupy

    with cupy.cuda.Device(ordinal):
        made = make_gpu(n, seed)
        cupy.cuda.runtime.deviceSynchronize()
        return made


def test_a_chunk_that_a_task_made_on_another_gpu_lands_on_the_consumers_own() -> None:
    with workers("0,1", "0,1") as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        gpus = client.run(own_gpu)

        def crossed() -> bool:
            source = client.submit(make_on, 1, N, 5, workers=[a], pure=False)
            assert move(client, source, b, same_gpu, N, 5).result()
            assert move(client, source, b, device_of).result() == f"{gpus[b]}, own"
            return sent(client, a, "copy") > 0

        until(crossed, "the other GPU to be proven")
        check_nothing_left(client)


def test_one_side_without_peer_access(uuids: list[str]) -> None:
    """The pair of which one side will not goes by the host, both ways; nothing fails."""
    with workers("0", "1", DASK_GPUIPC__CUDA__PEER_ACCESS="False") as client:
        client.register_worker_plugin(GPUIPCPlugin())
        check_all(client, "host")
        assert arrays(client, "sent", "copy") == 0
        check_nothing_left(client)


@pytest.mark.parametrize("transfer", ["copy", "share"])
def test_churn_across_reads_nothing_that_was_recycled(transfer: str) -> None:
    with cuda_cluster() as client:
        client.register_worker_plugin(GPUIPCPlugin(transfer=transfer))
        prove(client, transfer)
        a, b = addresses(client)
        kept = []
        for seed in range(60):
            one, other = ((a, b), (b, a))[seed % 2]
            source = client.submit(make_gpu, N, seed, workers=[one], pure=False)
            got = move(client, source, other)
            assert move(client, got, other, same_gpu, N, seed).result()
            if seed % 10 == 0:
                kept.append((seed, got, other))
            del source, got
        for seed, future, where in kept:
            assert move(client, future, where, same_gpu, N, seed).result()
        del kept, future
        check_nothing_left(client)
