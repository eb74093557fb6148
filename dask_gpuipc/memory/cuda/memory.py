"""CUDA memory: the `Memory` of CuPy arrays."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

from dask_gpuipc.config import Settings
from dask_gpuipc.dtypes import decode_dtype
from dask_gpuipc.errors import (
    Failure,
    MemoryUnavailable,
    OpenFailed,
    Refusal,
    Refused,
    WireError,
)
from dask_gpuipc.memory.base import (
    Allocation,
    Handle,
    Imported,
    Mapping,
    Pin,
    Preparation,
    Rung,
)
from dask_gpuipc.memory.cuda.allocations import Allocations
from dask_gpuipc.memory.cuda.copying import private_copy
from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import (
    Code,
    CudaError,
    as_open_failed,
    as_refused,
    driver,
)
from dask_gpuipc.memory.cuda.mappings import CudaMapping, Loan, array_in, open_mapping
from dask_gpuipc.memory.cuda.ready import CudaPreparation
from dask_gpuipc.memory.cuda.threads import DaemonExecutor
from dask_gpuipc.wire import Announce, Layout


class CudaMemory:
    """Memory of CuPy arrays, shared by legacy CUDA IPC. Implements `Memory`; thread-safe.

    Making one initialises the driver (`cuInit`, a fraction of a second with several GPUs) and asks
    for UUIDs; it creates no context and does not import cupy.

    Parameters
    ----------
    settings : Settings
        ``cuda_synchronize`` is what counts here.

    Raises
    ------
    MemoryUnavailable
        cupy, the driver or a GPU with CUDA IPC is missing.
    """

    kind = "cuda"
    prepares = True

    def __init__(self, settings: Settings) -> None:
        if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
            raise MemoryUnavailable("cupy is not installed")
        self._driver = driver()
        try:
            found = self._driver.devices()
        except CudaError as error:
            raise MemoryUnavailable(str(error)) from error
        if not found:
            raise MemoryUnavailable("no GPU with CUDA IPC is visible (MIG instances have none)")
        self._devices = {
            identity.ordinal: Device(self._driver, identity, settings.cuda_synchronize)
            for identity in found
        }
        self._by_uuid = {device.uuid: device for device in self._devices.values()}
        self._allocations = Allocations()
        self._opener = DaemonExecutor("gpuipc-cuda-open")
        self.executor: Executor | None = self._opener

    def __repr__(self) -> str:
        state = f", disabled: {self.disabled}" if self.disabled else ""
        return (
            f"<CudaMemory: {len(self._devices)} devices, "
            f"{len(self._allocations)} allocations known{state}>"
        )

    @property
    def disabled(self) -> str | None:
        """Why this process shares no CUDA memory any more, or None."""
        return self._driver.unusable()

    def accepts(self, obj: object) -> bool:
        """Whether an object is exactly a ``cupy.ndarray``."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and type(obj) is getattr(cupy, "ndarray", None)

    def devices(self) -> tuple[str, ...]:
        """UUID of the GPU on which plain Dask would put a received chunk: ordinal 0.

        A worker of LocalCUDACluster sees all GPUs, its own first. A chunk of another one must not
        arrive there, and goes as bytes until pairs of GPUs are supported.
        """
        return tuple(self._by_uuid)[:1]

    def rung(self, preferred: str) -> Rung:
        """``copy``, unless ``share`` is asked for."""
        return Rung.SHARE if preferred == "share" else Rung.COPY

    # -- exporter ---------------------------------------------------------------------------------

    def prepare(self, arrays: Sequence[Any]) -> CudaPreparation | None:
        """Put a mark behind all work on the arrays' devices; copies what another process lent."""
        mine = [array for array in arrays if self.accepts(array)]
        return CudaPreparation(self._devices, mine) if mine else None

    def pin_copies(self, array: Any) -> bool:
        """Never: bytes stay where they are."""
        return False

    def pin(self, array: Any, prepared: Preparation | None) -> Pin:
        """Find the allocation of an array that ``prepared`` covers, and hold its bytes."""
        reason = self.disabled
        if reason is not None:
            raise Refused(Refusal.DISABLED, reason)
        if not isinstance(prepared, CudaPreparation):
            raise Refused(Refusal.NOT_READY, "nothing was waited for")
        device, source = prepared.source(array)
        try:
            return self._allocations.pin(device, source)
        except CudaError as error:
            raise as_refused(error) from error

    def handle(self, allocation: Allocation) -> Handle:
        """The IPC handle of a pinned allocation; 64 bytes, no descriptors."""
        try:
            return self._allocations.handle(allocation)
        except CudaError as error:
            raise as_refused(error) from error

    # -- importer ---------------------------------------------------------------------------------

    def open(self, announcement: Announce, fds: Sequence[int]) -> CudaMapping:
        """Open an announced allocation; the first on a device may create its context."""
        for fd in fds:
            os.close(fd)
        device = self._by_uuid.get(announcement.device)
        if device is None:
            visible = ", ".join(self._by_uuid)
            raise OpenFailed(
                Failure.OPEN_FAILED,
                f"device {announcement.device!r} is not visible here; visible: {visible}",
            )
        return open_mapping(device, announcement)

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        """An array in a mapping: an alias, or a copy of this process's own.

        Without room for the copy it is an alias.
        """
        assert isinstance(mapping, CudaMapping)
        if self.disabled is not None:
            raise OpenFailed(Failure.ERROR, self.disabled)
        dtype = _dtype(layout)
        loan = Loan(mapping)
        try:
            with self._driver.cupy_errors("ndarray"):
                alias = array_in(mapping, layout, dtype, loan)
            if rung is Rung.COPY:
                return self._copy(mapping.device, alias)
        except CudaError as error:
            if error.code != Code.OUT_OF_MEMORY:
                raise as_open_failed(error) from error
        return Imported(alias, Rung.SHARE, owner=loan)

    def _copy(self, device: Device, alias: Any) -> Imported:
        copy, mark = private_copy(device, alias)
        return Imported(copy, Rung.COPY, done=device.when(mark, alias))

    def owner_of(self, array: Any) -> Loan | None:
        """The loan at the root of an array that is an alias, views included."""
        owner = getattr(array.data.mem, "_owner", None)
        return owner if isinstance(owner, Loan) else None

    def own(self, array: Any) -> Any:
        """A copy in this process's own memory, ready on any stream; raises `OpenFailed`."""
        try:
            device = self._devices[array.data.device_id]
            return self._copy(device, array).array
        except CudaError as error:
            raise as_open_failed(error) from error

    def fence(self) -> Future[None] | None:
        """An event over each context that ever had a mapping, recorded now."""
        fences = [device.fence() for device in self._devices.values() if device.imports]
        return _all_of([fence for fence in fences if fence is not None])

    # -- both -------------------------------------------------------------------------------------

    def trim(self) -> list[Allocation]:
        """Allocations that were freed since: asks after a few of those that nobody has pinned."""
        return self._allocations.trim()

    def collect(self) -> list[Allocation]:
        """As `trim`, but asks after all."""
        return self._allocations.trim(len(self._allocations))

    def close(self) -> None:
        """Let the threads end when they have done what they were given. Idempotent."""
        self._opener.shutdown(wait=False)
        for device in self._devices.values():
            device.waiter.shutdown(wait=False)
            device.closer.shutdown(wait=False)


def _dtype(layout: Layout) -> Any:
    try:
        dtype = decode_dtype(layout.dtype)
    except WireError as error:
        raise OpenFailed(Failure.MALFORMED, str(error)) from error
    if dtype.itemsize != layout.itemsize:
        raise OpenFailed(
            Failure.MALFORMED, f"{dtype} has {dtype.itemsize} bytes, not {layout.itemsize}"
        )
    return dtype


def _all_of(futures: list[Future[None]]) -> Future[None] | None:
    """One future for several; None for none."""
    if len(futures) <= 1:
        return futures[0] if futures else None
    whole: Future[None] = Future()
    whole.set_running_or_notify_cancel()
    turn = itertools.count(1)  # atomic: they complete on as many threads

    def passed(_: Future[None]) -> None:
        if next(turn) == len(futures):
            whole.set_result(None)

    for future in futures:
        future.add_done_callback(passed)
    return whole
