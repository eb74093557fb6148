"""Handles of a GPU go to a peer only when it has read a sample there (`memory.base.Prover`).

Between two real processes, by a memory whose arrays are said to lie on a device. Its samples are
files, which the other process reads, misreads, or does not read.
"""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import Child, child

from dask_gpuipc.config import Settings
from dask_gpuipc.endpoint import Endpoint
from dask_gpuipc.errors import Refusal, Refused
from dask_gpuipc.memory.base import Sample
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.testing import leak_check
from dask_gpuipc.wire import Advertisement, Proof

HERE, THERE = "GPU-here", "GPU-there"
here: dict[str, Any] = {}
"""Of a child process."""


class Preparation:
    def __init__(self, unproven: set[str]) -> None:
        self.unproven = unproven
        self.allocations = ()

    async def wait(self) -> None:
        pass


class OnDevice(HostMemory):
    """All its arrays lie on one device, whose handles only that device opens by itself."""

    prepares = True

    def __init__(self, device: str, file: str, prover: str) -> None:
        super().__init__(1 << 20)
        self._device = device
        self.prover = FileProver(file, prover)

    def devices(self) -> tuple[str, ...]:
        return (self._device,)

    def prepare(self, arrays: Any, devices: Any = None) -> Preparation:
        return Preparation({self._device} - set(devices))

    def pin(self, array: Any, prepared: Any) -> Any:
        pin = super().pin(array, prepared)
        pin.allocation = replace(pin.allocation, device=self._device)
        return pin

    def handle(self, allocation: Any) -> Any:
        return super().handle(replace(allocation, device=""))


class FileProver:
    def __init__(self, file: str, kind: str) -> None:
        self._file = file
        self._kind = kind
        self.samples = 0
        self.asked: list[Future[bytes]] = []

    def sample(self, device: str) -> Future[Sample]:
        self.samples += 1
        future: Future[Sample] = Future()
        if self._kind == "no sample":
            future.set_exception(OSError("no room"))
            return future
        with open(self._file, "wb") as file:
            file.write(b"random bytes")
        digest = hashlib.sha256(b"random bytes").digest()
        future.set_result(Sample(12, self._file.encode(), digest))
        return future

    def examine(self, device: str, nbytes: int, handle: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        self.asked.append(future)
        if self._kind == "reads":
            with open(handle, "rb") as file:
                future.set_result(hashlib.sha256(file.read(nbytes)).digest())
        elif self._kind == "misreads":
            future.set_result(hashlib.sha256(b"other bytes").digest())
        elif self._kind == "cannot":
            future.set_result(b"")
        return future  # or never says anything


def begin(directory: str, device: str, prover: str) -> Advertisement:
    stack = contextlib.ExitStack()
    stack.enter_context(leak_check(ignore=["asyncio_"]))
    memory = OnDevice(device, f"{directory}/sample", prover)
    settings = replace(Settings.load(min_bytes=1), socket_directory=directory)
    endpoint = Endpoint(settings, [memory], "scheduler")
    here.update(endpoint=endpoint, memory=memory, stack=stack)
    return endpoint.advertisement


async def connect(them: Advertisement) -> None:
    here["consumer"] = await here["endpoint"].consumer(them)


def export() -> Refusal | None:
    """Prepare and export an array; why it was refused."""
    exporter, consumer = here["endpoint"].exporter, here["consumer"]
    array = np.zeros(1000)
    transfer = exporter.begin(consumer, exporter.prepare(consumer, [array]))
    try:
        transfer.export(array)
    except Refused as refused:
        return refused.reason
    finally:
        exporter.failed(transfer)
    return None


def exports() -> bool:
    return export() is None


def samples() -> int:
    return here["memory"].prover.samples


def asked(number: int) -> bool:
    return len(here["memory"].prover.asked) == number


async def end() -> None:
    endpoint = here["endpoint"]
    endpoint.stop()
    assert await endpoint.wait_closed(20), repr(endpoint)
    stack = here.pop("stack")
    here.clear()
    del endpoint
    stack.close()


class Pair:
    def __init__(self, a: Child, b: Child, directory: str) -> None:
        self.a, self.b, self.directory = a, b, directory

    def begin(self, there: str = THERE, sample: str = "", examine: str = "reads") -> None:
        self.a.call(begin, self.directory, HERE, sample)
        self.a.call(connect, self.b.call(begin, self.directory, there, examine))


@pytest.fixture(scope="module")
def two():
    with child() as a, child() as b:
        a.call(samples_of_nothing)
        b.call(samples_of_nothing)
        yield a, b


def samples_of_nothing() -> None:
    pass


@pytest.fixture
def pair(two, short_path):
    pair = Pair(*two, str(short_path))
    yield pair
    two[1].start(end)
    two[0].call(end)
    two[1].finish()


def test_the_same_device_needs_no_proof(pair):
    pair.begin(there=HERE)
    assert pair.a.call(export) is None
    assert pair.a.call(samples) == 0


def test_another_device_is_proven_once_and_then_used(pair):
    pair.begin()
    assert pair.a.call(export) is Refusal.OTHER_DEVICE
    pair.a.until(exports)
    assert pair.a.call(export) is None
    assert pair.a.call(samples) == 1
    assert pair.b.call(asked, 1)


@pytest.mark.parametrize("examine", ["misreads", "cannot", "is silent"])
def test_what_does_not_read_right_is_never_used(pair, examine):
    pair.begin(examine=examine)
    for _ in range(5):
        assert pair.a.call(export) is Refusal.OTHER_DEVICE
        pair.b.until(asked, 1)
    assert pair.a.call(samples) == 1


def test_a_device_without_a_sample_is_not_proven(pair):
    pair.begin(sample="no sample")
    for _ in range(3):
        assert pair.a.call(export) is Refusal.OTHER_DEVICE
    assert pair.b.call(asked, 0)


def test_a_proof_that_nobody_asked_for_proves_nothing(pair):
    pair.begin(there=THERE, examine="is silent")
    pair.b.call(claim, HERE)
    assert pair.a.call(export) is Refusal.OTHER_DEVICE
    assert pair.a.call(export) is Refusal.OTHER_DEVICE


def claim(device: str) -> None:
    """As a consumer, say that a device was read, in several ways."""
    for channel in here["endpoint"]._channels:
        for digest in (b"", b"\0" * 32):
            channel.post(Proof("host", device, digest))
