"""Received chunks are what plain Dask delivers, and stay so (invariants 1, 11, 12, 14)."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    Gate,
    addresses,
    arrays,
    client,
    close_gates,
    cluster,
    identity,
    make,
    move,
    nothing_held,
    open_gates,
    refused,
    same,
    shared,
    until,
)
from distributed import Client, Worker, get_worker, wait

import dask_gpuipc
from dask_gpuipc.bench import remote

__all__ = ["client", "cluster", "shared"]

STRUCTURE = np.dtype([("a", "<i4"), ("b", "<f8", (2,)), ("c", "S3")], align=True)


def layouts() -> dict[str, Any]:
    base = np.arange(LARGE, dtype="f8").reshape(256, -1)
    structured = np.zeros(LARGE // 8, STRUCTURE)
    structured["a"] = np.arange(LARGE // 8)
    readonly = base.copy()
    readonly.flags.writeable = False
    return {
        "C": base,
        "F": np.asfortranarray(base),
        "strided": base[::2, 1::3],
        "negative": base[::-1, ::-2],
        "transposed 3-d": base.reshape(16, 16, -1).transpose(2, 0, 1),
        "broadcast": np.broadcast_to(base[:, :1], (256, 4096)),
        "broadcast row": np.broadcast_to(np.arange(20_000.0), (3, 20_000)),
        "structured": structured,
        "datetime": np.arange(LARGE).astype("M8[ns]"),
        "big endian": base.astype(">f4"),
        "bool": base > 7,
        "complex": base + 1j * base,
        "half": (np.arange(LARGE) % 2048).astype("f2"),
        "text": np.arange(LARGE).astype("U6"),
        "read-only": readonly,
        "empty": np.empty((0, 5)),
        "0-d": np.array(3.5),
        "objects": np.array([{"a": 1}, "b", None] * 100, dtype=object),
        "masked": np.ma.masked_array(base, base % 3 == 0),
        "matrix": np.asmatrix(base),
        "list": [base, base[::2], 3, "x"],
        "dict in tuple": ({"a": base, "b": np.asfortranarray(base)}, 1),
        "mixed list": [1, base],
        "subnormal": np.full(LARGE, 5e-324),
    }


def layout(name: str) -> Any:
    return layouts()[name]


def describe(x: Any) -> Any:
    """Everything that a task can see of an object."""
    if isinstance(x, np.ndarray):
        data = x.filled(0) if isinstance(x, np.ma.MaskedArray) else x
        return (
            type(x).__name__,
            str(x.dtype),
            x.shape,
            x.flags.c_contiguous,
            x.flags.f_contiguous,
            x.flags.writeable,
            data.tobytes() if not x.dtype.hasobject else repr(x.tolist()),
        )
    if isinstance(x, dict):
        return {k: describe(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [describe(v) for v in x]
    return x


@pytest.mark.parametrize("name", sorted(layouts()))
def test_received_objects_are_as_plain_dask_delivers_them(shared: Client, name: str) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(layout, name, workers=[a], pure=False)
    ours = move(shared, source, b, describe).result()
    shared.unregister_worker_plugin("gpuipc")
    plain = move(shared, source, b, describe).result()
    assert ours == plain


def test_large_arrays_go_by_handle_and_small_ones_as_bytes(shared: Client) -> None:
    a, b, _ = addresses(shared)
    large = shared.submit(make, workers=[a], pure=False)
    small = shared.submit(make, 10, workers=[a], pure=False)
    assert move(shared, large, b, same, LARGE, 0).result()
    assert move(shared, small, b, same, 10, 0).result()
    assert arrays(shared, "sent", "share") == arrays(shared, "received", "share") == 1
    assert arrays(shared, "sent", "bytes") == 0
    assert refused(shared, "too_small") >= 1


def overwrite(x: np.ndarray, value: int) -> np.ndarray:
    x[:] = value
    return x


def test_a_receiver_writes_into_its_own_copy_only(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, c)  # a second import of the same slot
    written = move(shared, source, b, overwrite, -1)
    assert shared.submit(lambda x: bool((x == -1).all()), written, workers=[b]).result()
    assert move(shared, held, c, same, LARGE, 0).result()
    assert move(shared, source, a, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") >= 2


def test_what_its_owner_changed_in_place_is_sent_as_it_is_now(shared: Client) -> None:
    """The result of a task is its input, written into, while the first bytes are still leased."""
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, c)
    changed = move(shared, source, a, overwrite, -1)
    assert shared.submit(lambda x: bool((x == -1).all()), changed, workers=[b]).result()
    assert move(shared, held, c, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") == 2


def test_recycled_slots_never_show_through(shared: Client) -> None:
    """A slot is used again and again while other imports of its arena are held."""
    a, b, _ = addresses(shared)
    kept = {}
    for seed in range(30):
        source = shared.submit(make, LARGE, seed, workers=[a], pure=False)
        got = move(shared, source, b)
        if seed % 3 == 0:
            kept[seed] = got
        else:
            assert move(shared, got, b, overwrite, seed).result() is not None
        del source, got
    for seed, future in kept.items():
        assert move(shared, future, b, same, LARGE, seed).result(), seed


def last_tenth(x: np.ndarray) -> np.ndarray:
    return x[-x.size // 10 :]


def stash(x: np.ndarray) -> None:
    get_worker().stash = x[5:100]


def look(dask_worker: Any) -> bool:
    return bool(np.array_equal(dask_worker.stash, make()[5:100]))


def unstash(dask_worker: Any) -> None:
    del dask_worker.stash


def test_views_keep_the_lease_when_their_key_is_gone(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    view = move(shared, source, b, last_tenth)
    move(shared, source, b, stash).result()
    del source
    until(lambda: not shared.run(lambda dask_worker: len(dask_worker.data), workers=[a])[a], "key")
    # The slot would be recycled by these, were it free.
    for seed in range(5):
        other = shared.submit(make, LARGE, seed + 100, workers=[a], pure=False)
        assert move(shared, other, b, same, LARGE, seed + 100).result()
        del other
    assert shared.run(look, workers=[b])[b]
    assert move(shared, view, b, lambda x: x.tobytes() == last_tenth(make()).tobytes()).result()
    assert not nothing_held(shared)()
    shared.run(unstash, workers=[b])
    del view
    until(nothing_held(shared), "the lease to end with its last view")


def fail_with(x: np.ndarray) -> None:
    raise ValueError("a task that holds its input in a traceback")


def test_failed_cancelled_and_released_tasks_end_their_leases(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    failing = shared.submit(fail_with, source, workers=[b], pure=False)
    assert isinstance(failing.exception(), ValueError)
    cancelled = move(shared, source, b)
    cancelled.cancel()
    released = move(shared, source, b)
    released.release()
    assert arrays(shared, "sent", "share") >= 1
    del failing, cancelled, released, source
    until(nothing_held(shared), "all leases to end")


def wait_for_gate(x: np.ndarray) -> int:
    assert Gate("task").wait(30)
    return int(x.sum())


def executing(dask_worker: Worker) -> int:
    return len(dask_worker.state.executing)


def test_a_task_that_is_cancelled_while_it_runs_ends_its_lease(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    running = shared.submit(wait_for_gate, source, workers=[b], pure=False)
    until(lambda: shared.run(executing, workers=[b])[b] == 1, "the task to run")
    running.cancel()
    del source
    assert not nothing_held(shared)()  # it still reads
    open_gates(shared, "task")
    until(nothing_held(shared), "the lease to end with the task")
    shared.run(close_gates)


WORKFLOWS = {
    "x + x.T": lambda x: x + x.T,
    "matmul": lambda x: x @ x.T,
    "rechunk": lambda x: x.rechunk((x.shape[0], 64)).cumsum(axis=0),
    "overlap": lambda x: x.map_overlap(lambda b: b[2:] + b[:-2], depth=(1, 0), trim=False),
    "roll and concatenate": lambda x: da.concatenate([x[::-2], da.roll(x, 100, axis=1)]),
    "reductions": lambda x: da.stack([x.sum(axis=0), x.max(axis=1), x.min(axis=0)]),
    "fancy index": lambda x: x[np.arange(0, x.shape[0], 7)][:, [3, 900, 5]],
    "boolean mask": lambda x: x[x % 3 == 0].sum(),
    "reshape": lambda x: x.reshape(-1)[:131072].reshape(1024, 128).sum(axis=1),
    "histogram": lambda x: da.histogram(x, bins=16, range=(0, 1000))[0],
}


def check_workflow(client: Client, name: str) -> None:
    whole = np.random.default_rng(1).integers(0, 1000, (1024, 1024))
    x = da.from_array(whole, chunks=256)
    got = client.compute(WORKFLOWS[name](x)).result()
    with dask.config.set({"array.rechunk.method": "tasks"}):
        want = dask.compute(WORKFLOWS[name](x), scheduler="threads")[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_workflows_equal_numpy(shared: Client, name: str) -> None:
    with dask.config.set({"array.rechunk.method": "tasks"}):
        check_workflow(shared, name)


def test_p2p_rechunk_equals_numpy(shared: Client) -> None:
    with dask.config.set({"array.rechunk.method": "p2p"}):
        check_workflow(shared, "rechunk")


def test_one_chunk_to_many_and_on(shared: Client) -> None:
    """Fan-out, and A -> B -> C: what was received is handed on."""
    a, b, c = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    there = [move(shared, source, w) for w in (b, c)]
    del source
    onward = move(shared, there[0], c, identity)
    del there
    assert move(shared, onward, c, same, LARGE, 0).result()
    assert arrays(shared, "sent", "share") >= 2


def test_a_chunk_that_others_fetch_again_and_again_is_copied_once(shared: Client) -> None:
    a, *others = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    wait(source)
    for times in (1, 2):
        answers = shared.run(remote.ask, source.key, a, "host", workers=others)
        assert {rung for _, rung in answers.values()} == {"share"}
        held = dask_gpuipc.statistics(shared)[a]
        assert held["leases"] == times * len(others)
        assert held["pinned_bytes"] == 8 * LARGE
        assert shared.run(remote.shared_bytes, workers=[a])[a] == 8 * LARGE
    shared.run(remote.drop, workers=others)


def test_many_arrays_in_one_answer(shared: Client) -> None:
    a, b, _ = addresses(shared)
    sources = [shared.submit(make, LARGE, i, workers=[a], pure=False) for i in range(40)]
    wait(sources)
    ok = shared.submit(
        lambda xs: [same(x, LARGE, i) for i, x in enumerate(xs)], sources, workers=[b], pure=False
    )
    assert all(ok.result())
    assert arrays(shared, "sent", "share") == 40
