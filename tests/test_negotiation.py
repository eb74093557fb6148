"""Who gets handles, and that everybody else gets bytes (invariants 2, 4, 5, 6, 7, 16, 20)."""

from __future__ import annotations

import glob
import os
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
    client,
    cluster,
    make,
    move,
    outgoing,
    refused,
    same,
    shared,
    total,
    until,
)
from distributed import Client, LocalCluster, Worker, wait
from distributed.security import Security

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin, process

__all__ = ["client", "cluster", "shared"]


async def add_plugin(dask_worker: Worker) -> str:
    plugin = GPUIPCPlugin()
    await dask_worker.plugin_add(plugin, name="gpuipc")
    return plugin.state


async def remove_plugin(dask_worker: Worker) -> None:
    await dask_worker.plugin_remove(name="gpuipc")


@pytest.mark.parametrize("has_it", ["producer", "consumer"])
def test_half_registered_workers_talk_bytes(client: Client, has_it: str) -> None:
    """The consumer asks for nothing special: a producer without the plugin can answer."""
    a, b, _ = addresses(client)
    there = a if has_it == "producer" else b
    assert client.run(add_plugin, workers=[there]) == {there: "enabled"}
    source = client.submit(make, workers=[a], pure=False)
    assert move(client, source, b, same, LARGE, 0).result()
    assert arrays(client, "sent", "share") == 0
    assert refused(client, "no_advertisement") == (1 if has_it == "producer" else 0)
    client.run(remove_plugin, workers=[there])


def test_connections_from_before_the_registration_are_upgraded(client: Client) -> None:
    a, b, _ = addresses(client)
    before = client.submit(make, workers=[a], pure=False)
    assert move(client, before, b, same, LARGE, 0).result()  # the connection is pooled now
    client.register_worker_plugin(GPUIPCPlugin())
    after = client.submit(make, LARGE, 1, workers=[a], pure=False)
    assert move(client, after, b, same, LARGE, 1).result()
    assert arrays(client, "sent", "share") == 1
    del before, after
    check_nothing_left(client)
    again = client.submit(make, LARGE, 2, workers=[a], pure=False)
    assert move(client, again, b, same, LARGE, 2).result()


def test_what_is_no_worker_gets_bytes(shared: Client) -> None:
    """The scheduler and clients: gather, direct or not, and scatter."""
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    for direct in (True, False):
        np.testing.assert_array_equal(shared.gather(source, direct=direct), make())
        [scattered] = shared.scatter([make(LARGE, 5)], workers=[b], direct=direct, hash=False)
        assert move(shared, scattered, b, same, LARGE, 5).result()
    assert arrays(shared, "sent", "share") == 0
    assert refused(shared, "no_advertisement") == 2
    assert arrays(shared, "sent", "bytes") == 2


class Holder:
    def __init__(self) -> None:
        self.x = make()

    def get(self) -> np.ndarray:
        return self.x

    def add(self, x: np.ndarray) -> int:
        return int((self.x + x).sum())


def ask_actor(actor: Any) -> bool:
    return same(actor.get().result(), LARGE, 0)


def test_actors_get_bytes(shared: Client) -> None:
    a, b, _ = addresses(shared)
    actor = shared.submit(Holder, actor=True, workers=[a]).result()
    assert shared.submit(ask_actor, actor, workers=[b]).result(timeout=60)
    assert arrays(shared, "sent", "share") == 0


def evict_all(dask_worker: Worker) -> int:
    count = 0
    while dask_worker.data.memory:
        dask_worker.data.evict()
        count += 1
    return count


def test_spilled_data_is_bytes_on_disk_and_goes_by_handle_again(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    got = move(shared, source, b)
    assert shared.run(evict_all, workers=[a, b]) == {a: 1, b: 2}  # the source came along
    until(lambda: total(shared, "leases") == 0, "the lease to end when the receiver has spilled")
    assert move(shared, got, c, same, LARGE, 0).result()
    assert move(shared, source, c, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") == 3


async def get_named(address: str, dask_worker: Worker, key: str) -> bool:
    from distributed.worker import get_data_from_worker

    response = await get_data_from_worker(
        dask_worker.rpc, [key], address, deserializers=["dask", "pickle", "error"]
    )
    return same(response["data"][key], LARGE, 0)


def test_requests_that_name_their_serializers_are_left_alone(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    assert shared.run(get_named, a, key=source.key, workers=[b]) == {b: True}
    assert refused(shared, "named_serializers") == 1
    assert arrays(shared, "sent", "share") == 0


@pytest.mark.parametrize(
    ("protocol", "reason"), [("inproc://", "other_transport"), ("tcp://", "same_process")]
)
def test_workers_of_one_process_are_left_to_dask(protocol: str, reason: str) -> None:
    options = {**WORKERS, "n_workers": 2, "processes": False, "protocol": protocol}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        source = client.submit(make, workers=[a], pure=False)
        assert move(client, source, b, same, LARGE, 0).result()
        assert arrays(client, "sent", "share") == 0
        assert refused(client, reason) >= 1  # inproc: also the client's own requests


def pretend(what: str) -> None:
    """Make this worker look as if it ran elsewhere."""
    if what == "other_node":
        process.boot_id = lambda: "another boot"
    else:
        process.namespaces = lambda: ("another", "mnt", "pid", "user")


@pytest.mark.parametrize("reason", ["other_node", "other_namespace"])
def test_workers_elsewhere_get_bytes_and_the_reason_is_counted(reason: str) -> None:
    with LocalCluster(**{**WORKERS, "n_workers": 2}) as cluster, Client(cluster) as client:
        a, b = addresses(client)
        client.run(pretend, reason, workers=[b])
        client.register_worker_plugin(GPUIPCPlugin())
        for producer, consumer in ((a, b), (b, a)):
            source = client.submit(make, workers=[producer], pure=False)
            assert move(client, source, consumer, same, LARGE, 0).result()
        assert arrays(client, "sent", "share") == 0
        assert arrays(client, "sent", "bytes") == refused(client, reason) == 2


def test_tls_clusters_share(tmp_path: Any) -> None:
    pytest.importorskip("cryptography", reason="temporary TLS credentials need cryptography")
    options = {**WORKERS, "n_workers": 2, "security": Security.temporary()}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        assert a.startswith("tls://")
        source = client.submit(make, workers=[a], pure=False)
        assert move(client, source, b, same, LARGE, 0).result()
        assert arrays(client, "sent", "share") == 1
        del source
        check_nothing_left(client)


def test_websocket_clusters_share() -> None:
    options = {**WORKERS, "n_workers": 2, "protocol": "ws://"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        assert a.startswith("ws://")
        source = client.submit(make, workers=[a], pure=False)
        assert move(client, source, b, same, LARGE, 0).result()
        assert arrays(client, "sent", "share") == 1
        del source
        check_nothing_left(client)


def sockets_in(folder: str) -> int:
    return len(glob.glob(f"{folder}/dask-gpuipc-*-{os.getpid()}-*/s"))


def test_the_socket_directory_is_configured_on_the_worker(short_path: Any) -> None:
    """Where the temporary directory is private to each process, or its path too long."""
    options = {**WORKERS, "n_workers": 2}
    with (
        dask.config.set({"gpuipc.socket-directory": str(short_path)}),
        LocalCluster(**options) as cluster,
        Client(cluster) as client,
    ):
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        assert client.run(sockets_in, str(short_path)) == {a: 1, b: 1}
        source = client.submit(make, workers=[a], pure=False)
        assert move(client, source, b, same, LARGE, 0).result()
        assert arrays(client, "sent", "share") == 1
        del source
        check_nothing_left(client)
        assert client.run(sockets_in, str(short_path)) == {a: 0, b: 0}


def test_pinned_bytes_stay_within_the_limit(client: Client) -> None:
    client.register_worker_plugin(GPUIPCPlugin(pinned_limit="4 MiB"))
    a, b, _ = addresses(client)
    sources = [client.submit(make, LARGE, i, workers=[a], pure=False) for i in range(8)]
    got = [move(client, s, b) for s in sources]
    assert dask_gpuipc.statistics(client)[a]["pinned_bytes"] == 4 << 20
    assert arrays(client, "sent", "share") == 4
    assert arrays(client, "sent", "bytes") == refused(client, "budget") == 4
    for i, future in enumerate(got):
        assert move(client, future, b, same, LARGE, i).result()
    del sources, got, future
    check_nothing_left(client)


def test_min_bytes_decides(client: Client) -> None:
    client.register_worker_plugin(GPUIPCPlugin(min_bytes={"host": LARGE * 8 + 1}))
    a, b, _ = addresses(client)
    below = client.submit(make, workers=[a], pure=False)
    above = client.submit(make, LARGE + 1, workers=[a], pure=False)
    assert move(client, below, b, same, LARGE, 0).result()
    assert move(client, above, b, same, LARGE + 1, 0).result()
    assert arrays(client, "sent", "share") == 1
    assert arrays(client, "sent", "bytes") == 0
    del below, above
    check_nothing_left(client)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transfer": "fast"}, "'auto', 'copy' or 'share'"),
        ({"min_bytes": "many"}, "number of bytes"),
        ({"min_bytes": {"disk": 1}}, "memories are"),
        ({"pinned_limit": "-1"}, "negative"),
    ],
)
def test_bad_arguments_are_told_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(dask_gpuipc.errors.ConfigError, match=message):
        GPUIPCPlugin(**arguments)


def test_replicate_goes_by_handle(shared: Client) -> None:
    """`Worker.gather`, which replicate and rebalance use."""
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    shared.replicate([source], n=3)
    for worker in (b, c):
        assert move(shared, source, worker, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") == 2
    assert not any(shared.run(outgoing).values())


def test_configuration_on_the_worker_is_used() -> None:
    options = {**WORKERS, "n_workers": 2}
    with (
        dask.config.set({"gpuipc.min-bytes": "1 TiB"}),
        LocalCluster(**options) as cluster,
        Client(cluster) as client,
    ):
        client.register_worker_plugin(GPUIPCPlugin())
        a, b = addresses(client)
        source = client.submit(make, workers=[a], pure=False)
        assert move(client, source, b, same, LARGE, 0).result()
        assert arrays(client, "sent", "share") == 0
