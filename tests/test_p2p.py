"""Shards of p2p: those without the buffer protocol do not fail, and all are counted (case 21)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import check_nothing_left, client, cluster, moved, refused, shared
from distributed import Client, Worker
from distributed.shuffle import _core
from fake_device import from_device, to_device

from dask_gpuipc import GPUIPCPlugin, p2p

__all__ = ["client", "cluster", "shared"]

SIDE = 1024
WHOLE = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)


def rechunked(side: int, chunks: Any) -> Any:
    x = da.from_array(WHOLE[:side, :side], chunks=(side // 16, side))
    on_device = x.map_blocks(to_device, meta=np.empty((0, 0), int))
    return on_device.rechunk(chunks).map_blocks(from_device, meta=np.empty((0, 0), int))


def is_p2p(x: Any) -> bool:
    return any("rechunk-transfer" in str(key) for key in x.__dask_graph__())


@pytest.mark.parametrize("side", [256, 1024], ids=["merged shards", "single shards"])
def test_case_21_rechunk_of_device_arrays_with_default_configuration(
    client: Client, side: int
) -> None:
    x = rechunked(side, (side, side // 16))
    assert dask.config.get("array.rechunk.method", None) is None
    assert is_p2p(x), "Dask has another default now"
    with pytest.raises(RuntimeError, match=r"P2P .* failed"):
        client.compute(x).result()
    client.register_worker_plugin(GPUIPCPlugin())
    # Another graph: what p2p remembers of the failed one has its key.
    x = rechunked(side, (side, side // 8))
    assert is_p2p(x)
    np.testing.assert_array_equal(client.compute(x).result(), WHOLE[:side, :side])
    client.unregister_worker_plugin("gpuipc")
    with pytest.raises(RuntimeError, match=r"P2P .* failed"):
        client.compute(rechunked(side, (side, side // 32))).result()


def test_shards_that_go_to_other_workers_are_counted(shared: Client) -> None:
    x = da.from_array(WHOLE, chunks=(64, SIDE))
    with dask.config.set({"array.rechunk.method": "p2p"}):
        got = shared.compute(x.rechunk((SIDE, 128))).result()
    np.testing.assert_array_equal(got, WHOLE)
    # What the client fetched is counted too, and has a reason of its own.
    assert refused(shared, "no_advertisement") == 1
    assert refused(shared, "p2p") > 0
    assert 0 < moved(shared)["bytes"] - WHOLE.nbytes <= WHOLE.nbytes


def functions(dask_worker: Worker | None = None) -> list[str]:
    found = (_core._mean_shard_size, _core.ShuffleRun.send)
    return [f"{f.__code__.co_filename}:{f.__code__.co_firstlineno}" for f in found]


def test_what_is_patched_is_undone(client: Client) -> None:
    before = client.run(functions)
    client.register_worker_plugin(GPUIPCPlugin())
    during = client.run(functions)
    assert all(not set(before[w]) & set(during[w]) for w in before)
    client.register_worker_plugin(GPUIPCPlugin(transfer="copy"))
    assert client.run(functions) == during
    check_nothing_left(client)
    assert client.run(functions) == before


def test_the_last_worker_of_a_process_undoes_it() -> None:
    before = functions()
    counts: dict[str, list[int]] = {"a": [], "b": []}
    p2p.install("a", counts["a"].append)
    p2p.install("b", counts["b"].append)
    p2p.remove("a")
    assert functions() != before
    run = mock.Mock(local_address="b")
    shards = [
        ((0, 1), [((0,), ((0, 0), to_device(np.zeros(5))))]),
        ((2,), [((0,), ((1,), b"abc"))]),
    ]
    for address in ("b", "c"):
        with contextlib.suppress(TypeError):  # the mock cannot be awaited
            asyncio.run(_core.ShuffleRun.send(run, address, shards))
    p2p.remove("b")
    p2p.remove("b")
    assert functions() == before
    assert counts == {"a": [], "b": [40, 3]}


def test_what_others_patch_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "_mean_shard_size", _core._mean_shard_size)  # put back at the end
    p2p.install("a", print)
    ours = _core._mean_shard_size

    def theirs(shards: Any) -> int:
        return ours(shards)

    _core._mean_shard_size = theirs
    p2p.remove("a")
    assert _core._mean_shard_size is theirs
    assert theirs([(1, np.zeros(4)), (2, np.zeros(8))]) == 48


def test_shards_of_both_kinds_are_measured() -> None:
    plain = _core._mean_shard_size
    p2p.install("a", print)
    try:
        measure = _core._mean_shard_size
        for shards in ([], [(1, (2, 3), np.zeros(4))], [(1, np.zeros(3, "M8[ns]")), b"abcd"]):
            assert measure(shards) == plain(shards)
        assert measure([(1, to_device(np.zeros(n))) for n in range(20)]) == 8 * 45 // 10
        with pytest.raises(TypeError):
            measure([(1, 2.5)])
    finally:
        p2p.remove("a")


def test_a_dask_without_these_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_core, "_mean_shard_size")
    p2p.install("a", print)
    assert "p2p.py" not in _core.ShuffleRun.send.__code__.co_filename
    p2p.remove("a")
    assert not hasattr(_core, "_mean_shard_size")
