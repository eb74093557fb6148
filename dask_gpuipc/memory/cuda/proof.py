"""What works between two processes and two GPUs, found out by doing it.

The driver claims peer access that then fails, or delivers other bytes (behind an IOMMU, in a
virtual machine, on parts of a GPU). So a handle crosses between two GPUs, or to a MIG instance,
only after the consumer has read a sample there: it opens the sample's handle on its own device,
copies it on a stream of its own into memory of its own, within a limit, and tells the digest of
what it got.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from dask_gpuipc.errors import OpenFailed
from dask_gpuipc.memory.base import Sample
from dask_gpuipc.memory.cuda.device import Device, Mark
from dask_gpuipc.memory.cuda.driver import Code, CudaError
from dask_gpuipc.memory.cuda.mappings import open_mapping
from dask_gpuipc.memory.cuda.threads import DaemonExecutor
from dask_gpuipc.wire import Announce

logger = logging.getLogger("distributed.gpuipc")

SIZE: Final = 1 << 16
"""Bytes of a sample."""
BLOCK: Final = 2 << 20
"""Bytes allocated for one: the driver puts smaller blocks of several owners into one of this size,
and a consumer that has a neighbour of the sample open could not open it once more."""
MAX_SIZE: Final = 1 << 20
LIMIT: Final = 5.0
"""Seconds that reading a sample may take."""
LOOK: Final = 0.001


class CudaProver:
    """Implements `memory.base.Prover`. Thread-safe: it works on a thread of its own.

    Samples and the blocks that they are read into are kept for the life of the process.

    Parameters
    ----------
    devices : dict of str to Device
        Those of this process, by UUID.
    home : Device
        On which handles are opened.
    ipc, peer_access : bool
        Without them, or without the second for another GPU's sample, nothing is read.
    """

    def __init__(
        self, devices: dict[str, Device], home: Device, *, ipc: bool, peer_access: bool
    ) -> None:
        self._devices = devices
        self._home = home
        self._ipc = ipc
        self._peer_access = peer_access
        self._thread = DaemonExecutor("gpuipc-cuda-prove")
        self._samples: dict[str, Sample] = {}
        self._target = 0
        self._stuck: list[Any] = []

    def __repr__(self) -> str:
        return f"<CudaProver for {self._home!r}: {len(self._samples)} samples>"

    def sample(self, device: str) -> Future[Sample]:
        """A block with random bytes on a GPU of this process; fails with `CudaError`."""
        return self._thread.submit(self._sample, device)

    def _sample(self, uuid: str) -> Sample:
        known = self._samples.get(uuid)
        if known is not None:
            return known
        device = self._devices[uuid]
        data = np.frombuffer(os.urandom(SIZE), np.uint8)
        with device.current():
            pointer = device.driver.allocate(BLOCK)
            stream = _new_stream(device)
            device.driver.upload(pointer, data.ctypes.data, SIZE, stream.ptr)
            mark = device.mark_stream(stream.ptr)
            handle = device.driver.get_handle(pointer)
        mark.wait()
        sample = Sample(SIZE, handle, hashlib.sha256(data.tobytes()).digest())
        self._samples[uuid] = sample
        return sample

    def examine(self, device: str, nbytes: int, handle: bytes) -> Future[bytes]:
        """The digest of a peer's sample as the home device reads it; empty where it does not."""
        return self._thread.submit(self._examine, device, nbytes, handle)

    def _examine(self, uuid: str, nbytes: int, handle: bytes) -> bytes:
        allowed = self._ipc and (self._peer_access or uuid == self._home.uuid)
        if not allowed or not 0 < nbytes <= MAX_SIZE or self._stuck:
            return b""
        try:
            return self._read(Announce("cuda", 0, 0, nbytes, uuid, handle))
        except (CudaError, OpenFailed) as error:
            logger.info("%s cannot be read from %s: %s", uuid, self._home.uuid, error)
            return b""

    def _read(self, announcement: Announce) -> bytes:
        nbytes = announcement.nbytes
        mapping = open_mapping(self._home, announcement)
        try:
            pinned, stream, mark = self._begin(mapping.pointer, nbytes)
        except CudaError:
            mapping.close()
            raise
        deadline = time.monotonic() + LIMIT
        while not mark.passed():
            if time.monotonic() > deadline:
                # It may still be written to, and a close would wait for it.
                self._stuck += [mapping, pinned, stream, mark]
                raise CudaError("self-test", Code.NOT_READY, f"not within {LIMIT:.0f} s")
            time.sleep(LOOK)
        mapping.close()
        return hashlib.sha256(bytes(memoryview(pinned)[:nbytes])).digest()

    def _begin(self, source: int, nbytes: int) -> tuple[Any, Any, Mark]:
        """Begin to copy a sample here and down; the host memory, the stream and the mark."""
        home, driver = self._home, self._home.driver
        with home.current():
            if not self._target:
                self._target = driver.allocate(MAX_SIZE)
            pinned = _pinned(home, nbytes)
            stream = _new_stream(home)
            driver.copy(self._target, source, nbytes, stream.ptr)
            driver.download(pinned.ptr, self._target, nbytes, stream.ptr)
            return pinned, stream, home.mark_stream(stream.ptr)

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)


def _new_stream(device: Device) -> Any:
    """A non-blocking stream. Context current."""
    with device.driver.cupy_errors("cudaStreamCreate"):
        import cupy

        return cupy.cuda.Stream(non_blocking=True)


def _pinned(device: Device, nbytes: int) -> Any:
    with device.driver.cupy_errors("cudaHostAlloc"):
        import cupy

        return cupy.cuda.alloc_pinned_memory(nbytes)
