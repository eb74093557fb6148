"""Objects that hold arrays arrive as under plain Dask, by handle, and every byte is counted."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import xarray as xr
from cluster_fixtures import (
    LARGE,
    addresses,
    arrays,
    check_nothing_left,
    client,
    cluster,
    failed,
    left_in_process,
    make,
    move,
    moved,
    nothing_held,
    refused,
    same,
    shared,
    total,
    until,
)
from distributed import Client, LocalCluster, protocol
from distributed.protocol.serialize import serialize
from distributed.utils import nbytes
from fake_device import DeviceArray, DeviceMemory, DevicePlugin, Tensor, compute, from_device

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.comm import OFFER
from dask_gpuipc.config import Settings
from dask_gpuipc.errors import Failure, OpenFailed
from dask_gpuipc.exporter import Exporter
from dask_gpuipc.importer import Importer
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.objects import Piece, take_apart
from dask_gpuipc.serialize import dumps, loads, register
from dask_gpuipc.stats import Statistics
from dask_gpuipc.testing import Fault, FaultyMemory
from dask_gpuipc.transfer import current_transfer
from dask_gpuipc.wire import Ask

__all__ = ["client", "cluster", "shared"]


class Pair(NamedTuple):
    """A tuple that Dask does not walk."""

    left: np.ndarray
    right: np.ndarray


class Tagged(np.ndarray):
    """A subclass, as users write them."""

    tag = "none"


@dataclasses.dataclass
class Result:
    """What a task may well return."""

    data: np.ndarray
    name: str
    more: list[Any]


BASE = np.arange(LARGE, dtype="f8").reshape(256, -1)


def sparse() -> Any:
    return scipy.sparse.random_array((2000, 2000), density=0.02, rng=1)


def locked() -> np.ndarray:
    copy = BASE.copy()
    copy.flags.writeable = False
    return copy


def memory_mapped() -> np.memmap:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, "i8", "w+", shape=(LARGE,))
    mapped[:] = make()
    return mapped


def frame() -> pd.DataFrame:
    return pd.DataFrame({"a": make(), "b": make() / 7, "c": pd.Categorical(make() % 5)})


def dia() -> Any:
    return scipy.sparse.dia_matrix((np.ones((3, LARGE)), [0, 1, 2]), (LARGE, LARGE))


def dataset() -> xr.Dataset:
    return xr.Dataset({"x": (("i", "j"), BASE)}, {"i": np.arange(256)}, {"unit": "m"})


OBJECTS: dict[str, Callable[[], Any]] = {
    "masked": lambda: np.ma.masked_array(BASE, BASE % 3 == 0, fill_value=7),
    "masked, no mask": lambda: np.ma.masked_array(BASE),
    "masked, structured": lambda: np.ma.array(np.zeros(LARGE, "i4,f8"), mask=False),
    "matrix": lambda: np.asmatrix(BASE),
    "recarray": lambda: np.rec.fromarrays([make(), make() / 3], names="a,b"),
    "subclass": lambda: BASE.view(Tagged),
    "memory-mapped": memory_mapped,
    "memory-mapped view": lambda: memory_mapped()[5:-7:2],
    "csr matrix": lambda: scipy.sparse.csr_matrix(sparse()),
    "coo matrix": lambda: scipy.sparse.coo_matrix(sparse()),
    "dok matrix": lambda: scipy.sparse.dok_matrix(scipy.sparse.eye(9000)),
    "dia matrix": dia,
    "csc array": lambda: scipy.sparse.csc_array(sparse()),
    "frame": frame,
    "series": lambda: frame()["a"],
    "index": lambda: pd.Index(make()),
    "xarray": dataset,
    "dataclass": lambda: Result(BASE, "x", [make(), "y"]),
    "dataclass, read-only": lambda: Result(locked(), "x", [locked()[3:]]),
    "dataclass, strided": lambda: Result(BASE[::2, ::3], "x", []),
    "namedtuple": lambda: Pair(BASE, make()),
    "mixed list in a list": lambda: [[1, BASE], ["a", {"b": make()}]],
    "dict with mixed keys": lambda: {(1, "a"): BASE, None: make()},
    "array twice": lambda: [[1, BASE, BASE]],
    "memoryview": lambda: memoryview(BASE),
    "python array": lambda: array.array("d", range(LARGE)),
    "bytes": lambda: bytes(make()),
    "bytearray": lambda: bytearray(make()),
    "text": lambda: "chunk" * LARGE,
    "long pickle": lambda: {"a": [f"text {i}" for i in range(20_000)]},
    "objects": lambda: np.array([{"a": 1}, "b", None] * 10_000, dtype=object),
    "masked objects": lambda: np.ma.array(np.array([[1], "b"] * 10_000, dtype=object), mask=False),
    "function": lambda: same,
    "small": lambda: Result(BASE[0, :9].copy(), "x", []),
    "empty": lambda: scipy.sparse.csr_matrix((5, 5)),
    "none": lambda: None,
    "scalar": lambda: np.float64(3.5),
}


def thing(name: str) -> Any:
    return OBJECTS[name]()


def digest(data: Any) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()


def describe(x: Any) -> Any:
    """Everything that a task can see of an object."""
    if isinstance(x, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(x)
        more = (x.mask is np.ma.nomask, repr(x.fill_value), describe(mask))
        return "masked", describe(np.asarray(x.data)), more
    if isinstance(x, np.ndarray):
        flags = (x.flags.c_contiguous, x.flags.f_contiguous, x.flags.writeable)
        data = digest(repr(x.tolist()).encode()) if x.dtype.hasobject else digest(x.tobytes())
        return type(x).__name__, str(x.dtype), x.shape, flags, data
    if scipy.sparse.issparse(x):
        named = {k: describe(v) for k, v in sorted(vars(x).items()) if not isinstance(v, dict)}
        return type(x).__name__, x.shape, describe(x.toarray() if x.shape[0] < 9000 else 0), named
    if isinstance(x, (pd.DataFrame, pd.Series, pd.Index, xr.Dataset)):
        flat = x.to_dataframe() if isinstance(x, xr.Dataset) else x
        return type(x).__name__, repr(x), digest(flat.to_numpy()), str(getattr(x, "dtypes", ""))
    if isinstance(x, (dict, Result)):
        items = x.items() if isinstance(x, dict) else vars(x).items()
        return type(x).__name__, {k: describe(v) for k, v in items}
    if isinstance(x, (list, tuple)) and len(x) < 100:
        return type(x).__name__, [describe(v) for v in x]
    return type(x).__name__, digest(x) if isinstance(x, memoryview) else digest(repr(x).encode())


ALL_BYTES = {
    "bytes", "bytearray", "python array", "text", "function", "long pickle", "small", "empty",
    "none", "scalar", "masked objects", "objects", "dok matrix",
}  # fmt: skip
"""Have no large buffer that is not made anew at the other end."""


class Outcome(NamedTuple):
    """What became of one object on its way to another worker."""

    seen: Any
    sent: dict[str, int]
    refused: int
    failed: int


def numbers(client: Client) -> tuple[Any, int, int]:
    stats = dask_gpuipc.statistics(client).values()
    refusals = sum(sum(s["refused"].values()) for s in stats)
    return moved(client), refusals, sum(sum(s["failed"].values()) for s in stats)


def move_all(client: Client) -> dict[str, Outcome]:
    a, b, _ = addresses(client)
    found = {}
    for name in OBJECTS:
        source = client.submit(thing, name, workers=[a], pure=False)
        before = numbers(client)
        seen = move(client, source, b, describe)
        sent, refusals, failures = numbers(client)
        sent.subtract(before[0])
        found[name] = Outcome(seen.result(), +sent, refusals - before[1], failures - before[2])
    return found


@pytest.fixture(scope="module")
def outcomes(cluster: LocalCluster) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """All objects, moved by plain Dask and then with the plugin: one registration for all."""
    with Client(cluster) as client:
        plain = move_all(client)
        client.register_worker_plugin(GPUIPCPlugin())
        ours = move_all(client)
        check_nothing_left(client)
    return plain, ours


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_objects_arrive_as_from_plain_dask(outcomes: Any, name: str) -> None:
    plain, ours = outcomes
    assert ours[name].seen == plain[name].seen
    assert ours[name].failed == 0


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_the_sum_over_rungs_is_what_dask_would_send(outcomes: Any, name: str) -> None:
    with warnings.catch_warnings(action="ignore", category=PendingDeprecationWarning):
        x = thing(name)
    frames = serialize(x, iterate_collection=True)[1]
    # Of Python's objects an array holds the addresses.
    expected = x.nbytes if name == "objects" else sum(map(nbytes, frames))
    _, sent, refusals, _ = outcomes[1][name]
    if expected < 1 << 16:
        assert not sent
        return
    assert sum(sent.values()) == pytest.approx(expected, rel=1e-3)
    assert (sent.get("share", 0) > 0.9 * expected) == (name not in ALL_BYTES)
    assert refusals >= bool(sent.get("bytes"))


# -- leases ---------------------------------------------------------------------------------------


def masked() -> np.ma.MaskedArray:
    return np.ma.masked_array(make(), make() % 2 == 0)


def is_masked(x: Any, value: int | None = None) -> bool:
    data = np.asarray(x.data)
    right = np.array_equal(data, make()) if value is None else bool((data == value).all())
    return right and np.array_equal(x.mask, make() % 2 == 0)


def test_the_buffers_of_an_object_live_and_die_together(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(masked, workers=[a], pure=False)
    held = move(shared, source, b)
    assert total(shared, "leases") == total(shared, "holding") == 2
    del source
    assert move(shared, held, b, is_masked).result()
    assert total(shared, "leases") == 2
    del held
    until(nothing_held(shared), "both leases to end with the object")


def overwrite(x: Any) -> Any:
    x.data[:] = -1
    return is_masked(x, -1)


def test_a_receiver_writes_into_its_own_object_only(shared: Client) -> None:
    a, b, c = addresses(shared)
    source = shared.submit(masked, workers=[a], pure=False)
    held = move(shared, source, c)
    assert move(shared, source, b, overwrite).result()
    assert move(shared, held, c, is_masked).result()
    assert move(shared, source, a, is_masked).result()


class OneBufferFails(GPUIPCPlugin):
    """Of an object's two buffers one cannot be opened."""

    def make_memories(self, settings: Settings) -> list[Memory]:
        [memory] = super().make_memories(settings)
        error = OpenFailed(Failure.OPEN_FAILED, "the second load of this worker")
        return [FaultyMemory(memory, Fault("load", first=self.failing(), error=lambda: error))]

    def failing(self) -> int:
        return 1


class OtherBufferFails(OneBufferFails):
    """The other one."""

    def failing(self) -> int:
        return 2


@pytest.mark.parametrize("plugin", [OneBufferFails, OtherBufferFails])
def test_a_buffer_that_cannot_be_opened_takes_the_others_with_it(
    client: Client, plugin: type[GPUIPCPlugin]
) -> None:
    client.register_worker_plugin(plugin())
    a, b, _ = addresses(client)
    source = client.submit(masked, workers=[a], pure=False)
    held = move(client, source, b)
    assert move(client, held, b, is_masked).result()
    assert failed(client, "open_failed") == 1
    assert refused(client, "named_serializers") == 1
    until(lambda: total(client, "leases") == 0, "the lease on the other buffer to end")
    del source, held
    check_nothing_left(client)


def test_an_object_outlives_the_registration_of_its_source(client: Client) -> None:
    a, b, _ = addresses(client)
    client.register_worker_plugin(GPUIPCPlugin())
    source = client.submit(masked, workers=[a], pure=False)
    held = move(client, source, b, lambda x: {"x": [x, {"y": x[3:]}]})
    assert total(client, "leases") == 2
    client.unregister_worker_plugin("gpuipc")
    until(lambda: not any(client.run(left_in_process).values()), "everything to be given back")
    assert move(client, held, b, lambda d: is_masked(d["x"][0])).result()


class Direct:
    """An exporter and an importer of both memories, joined by calls instead of a channel."""

    def __init__(self) -> None:
        self.memories = [DeviceMemory(), HostMemory()]
        self.asked = mock.Mock()
        self.importer = Importer("b", self.memories, Statistics(), lambda: None)
        self.exporter = Exporter("a", self.memories, Statistics(), min_bytes={"host": 1, "cuda": 1})
        self.producer = self.importer.attach("a")
        self.producer.channel = mock.Mock(post=partial(self.exporter.receive, "b"))
        channel = mock.Mock(usable=True, send=self.announce, post=self.asked)
        them = mock.Mock(peer="b", memories=("cuda", "host"), devices=())
        self.transfer = self.exporter.begin(self.exporter.attach(them, channel, set()))

    def announce(self, message: Any, fds: Sequence[int]) -> None:
        self.importer.receive(self.producer, message, tuple(map(os.dup, fds)))

    @property
    def leases(self) -> int:
        self.importer.flush()
        return self.exporter.leases

    def close(self) -> None:
        self.importer.flush()
        self.exporter.died("b")  # what was offered and never loaded
        assert self.exporter.pinned_bytes == 0
        self.importer.collect()
        for memory in self.memories:
            memory.close()


@pytest.fixture
def direct() -> Iterator[Direct]:
    register()
    logging.disable(logging.CRITICAL)  # pytest keeps the records, and with them tracebacks
    pair = Direct()
    token = current_transfer.set(pair.transfer)
    yield pair
    current_transfer.reset(token)
    logging.disable(logging.NOTSET)
    pair.close()


def test_a_message_that_is_written_twice_is_asked_about(direct: Direct) -> None:
    """One value that msgpack cannot take makes Dask run all dumps again."""
    message = {"data": {"x": protocol.to_serialize(masked())}, "odd": np.int64(3)}
    frames = protocol.dumps(message, serializers=OFFER)
    assert direct.leases == 4
    got = protocol.loads(frames)["data"]["x"]
    direct.exporter.granted(direct.transfer)
    direct.asked.assert_called_once_with(Ask(direct.transfer.number))
    direct.importer.receive(direct.producer, Ask(direct.transfer.number), ())
    assert direct.leases == 2
    assert is_masked(got)
    del got
    assert direct.leases == 0


def test_an_error_between_two_buffers_takes_their_leases_back(direct: Direct) -> None:
    x = Pair(make(), make(seed=1))
    parts = direct.transfer.parts[id(x)] = take_apart(x, direct.memories)
    broken = mock.Mock(kind="cuda", download=mock.Mock(side_effect=OSError))
    parts.pieces[-1] = Piece(None, broken, mock.Mock(nbytes=0))
    with pytest.raises(NotImplementedError):
        dumps(x)
    assert direct.leases == 0


class Broken:
    """Cannot be made again."""

    def __init__(self) -> None:
        self.data = make()

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it breaks on arrival")


def test_what_breaks_on_arrival_is_an_oserror_and_leaves_no_lease(direct: Direct) -> None:
    header, frames = dumps(Broken())
    assert direct.leases == 1
    with pytest.raises(OSError, match="it breaks on arrival"):
        loads(header, frames)
    assert direct.leases == 0


def test_one_object_twice_in_a_message_is_loaded_twice(direct: Direct) -> None:
    x = masked()
    frames = protocol.dumps([protocol.to_serialize(x), protocol.to_serialize(x)], serializers=OFFER)
    assert all(map(is_masked, protocol.loads(frames)))
    assert direct.leases == 0


@pytest.mark.parametrize(
    "change",
    [
        {"consumer": "nobody"},
        {"consumer": None},
        {"way": "by air"},
        {"header": {}},
        {"places": [b""]},
        {"places": [b"abc", 5]},
        {"places": None},
        {"places": ["", "", "", ""]},
        {"places": ["memory"]},
    ],
    ids=str,
)
def test_a_malformed_header_is_an_oserror(direct: Direct, change: dict[str, Any]) -> None:
    header, frames = dumps(Pair(make(), make()))
    with pytest.raises(OSError, match=r"."):
        loads({**header, **change}, frames)
    with pytest.raises(OSError, match=r"."):
        loads({name: value for name, value in header.items() if name not in change}, frames)


# -- on a device ----------------------------------------------------------------------------------


@pytest.fixture
def device(client: Client) -> Iterator[Client]:
    client.register_worker_plugin(DevicePlugin(min_bytes={"cuda": 1}))
    yield client
    check_nothing_left(client)


def on_device(x: Any) -> Any:
    """The same values in NumPy, after a look that every array is on the device."""
    if isinstance(x, DeviceArray):
        return from_device(x)
    if isinstance(x, Tensor):
        return on_device(x.data), on_device(x.more)
    if isinstance(x, (list, tuple)) or (isinstance(x, np.ndarray) and x.dtype.hasobject):
        return [on_device(v) for v in x]
    return {k: on_device(v) for k, v in x.items()} if isinstance(x, dict) else x


def digests(x: Any) -> Any:
    return describe(on_device(x))


DEVICE: dict[str, Callable[[], Any]] = {
    "array": lambda: compute(BASE),
    "mixed list": lambda: [1, compute(BASE)],
    "mixed list in a list": lambda: [[1, compute(BASE)], {"a": [2, compute(make())]}],
    "dict with mixed keys": lambda: {None: compute(BASE), (1, "a"): 3},
    "strided in a list": lambda: [[1, compute(BASE)[::2, 1::3]]],
    "object": lambda: Tensor(compute(BASE), [compute(make()), "x"]),
    "array twice": lambda: (lambda x: Tensor(x, x))(compute(BASE)),
    "both sides": lambda: Tensor(compute(BASE), [make(), masked()]),
    "empty in a list": lambda: [["x", compute(np.empty((0, 3)))]],
    "in an object array": lambda: np.array([compute(BASE), "x"], dtype=object),
}


def device_thing(name: str) -> Any:
    return DEVICE[name]()


@pytest.mark.parametrize("name", sorted(DEVICE))
def test_case_20_device_arrays_are_finished_and_by_handle_wherever_they_are(
    device: Client, name: str
) -> None:
    a, b, _ = addresses(device)
    source = device.submit(device_thing, name, workers=[a], pure=False)
    got = move(device, source, b, digests)
    assert got.result() == digests(device_thing(name))
    if name not in ("empty in a list", "in an object array"):
        assert arrays(device, "sent", "copy") == arrays(device, "received", "copy") > 0
        assert refused(device, "not_ready") == 0
    assert refused(device, "error") == 0


def test_what_the_device_memory_refuses_goes_as_bytes(client: Client) -> None:
    client.register_worker_plugin(DevicePlugin(min_bytes={"cuda": "1 GiB"}))
    a, b, _ = addresses(client)
    source = client.submit(device_thing, "both sides", workers=[a], pure=False)
    got = move(client, source, b, digests)
    assert got.result() == digests(device_thing("both sides"))
    assert arrays(client, "sent", "copy") == 0
    assert arrays(client, "sent", "share") == 1
    assert refused(client, "too_small") == 1
    assert refused(client, "unsupported_type") == 1  # a masked array in a pickle is in its stream
    assert moved(client)["bytes"] >= BASE.nbytes
    del source, got
    check_nothing_left(client)


def test_a_consumer_without_the_device_gets_what_plain_dask_sends(client: Client) -> None:
    a, b, _ = addresses(client)
    client.run(add_plugin, DevicePlugin, workers=[a])
    client.run(add_plugin, GPUIPCPlugin, workers=[b])
    source = client.submit(device_thing, "mixed list in a list", workers=[a], pure=False)
    got = move(client, source, b, digests)
    assert got.result() == digests(device_thing("mixed list in a list"))
    assert refused(client, "no_common_memory") == 2
    del source, got
    for worker in (a, b):
        client.run(remove_plugin, workers=[worker])


async def add_plugin(make_plugin: type[GPUIPCPlugin], dask_worker: Any) -> None:
    await dask_worker.plugin_add(make_plugin(), name="gpuipc")


async def remove_plugin(dask_worker: Any) -> None:
    await dask_worker.plugin_remove(name="gpuipc")


def test_shared_device_memory_in_objects_is_copied_when_its_source_leaves(client: Client) -> None:
    client.register_worker_plugin(DevicePlugin(transfer="share"))
    a, b, _ = addresses(client)
    source = client.submit(device_thing, "object", workers=[a], pure=False)
    held = move(client, source, b)
    assert arrays(client, "sent", "share") == total(client, "leases") == 2
    client.unregister_worker_plugin("gpuipc")
    until(lambda: not any(client.run(left_in_process).values()), "everything to be given back")
    assert move(client, held, b, digests).result() == digests(device_thing("object"))
