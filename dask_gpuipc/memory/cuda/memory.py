"""CUDA memory: the `Memory` of CuPy arrays."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
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
    Prover,
    Rung,
)
from dask_gpuipc.memory.cuda import buffers
from dask_gpuipc.memory.cuda.allocations import Allocations
from dask_gpuipc.memory.cuda.copying import private_copy, upload
from dask_gpuipc.memory.cuda.device import Device
from dask_gpuipc.memory.cuda.driver import (
    Code,
    CudaError,
    as_open_failed,
    as_refused,
    driver,
)
from dask_gpuipc.memory.cuda.mappings import (
    BORROWED,
    CudaMapping,
    Loan,
    array_in,
    open_mapping,
)
from dask_gpuipc.memory.cuda.pinned import HostBlocks, HostMapping, HostMaps
from dask_gpuipc.memory.cuda.proof import CudaProver
from dask_gpuipc.memory.cuda.ready import CudaPreparation, Ways
from dask_gpuipc.memory.cuda.staging import Stage
from dask_gpuipc.memory.cuda.threads import DaemonExecutor
from dask_gpuipc.memory.cuda.virtual import SLABS, one_descriptor, open_virtual
from dask_gpuipc.wire import Announce, Layout


class CudaMemory:
    """Memory of CuPy arrays, shared by legacy CUDA IPC. Implements `Memory`; thread-safe.

    Making one initialises the driver (`cuInit`, a fraction of a second with several GPUs) and asks
    for UUIDs; it creates no context and does not import cupy.

    Parameters
    ----------
    settings : Settings
        Those that begin with ``cuda_`` count here.

    Raises
    ------
    MemoryUnavailable
        cupy, the driver or a GPU is missing.
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
            raise MemoryUnavailable("no GPU is visible")
        self._devices = {
            identity.ordinal: Device(self._driver, identity, settings.cuda_synchronize)
            for identity in found
        }
        self._home = next(iter(self._devices.values()))
        self._ipc = settings.cuda_ipc
        ids = itertools.count(1)
        self._allocations = Allocations(ids=ids)
        self._stages = {
            ordinal: Stage(device, settings.cuda_pinned_limit)
            for ordinal, device in self._devices.items()
        }
        self._blocks = HostBlocks(ids, settings.cuda_host_limit)
        self._maps = HostMaps(self._home)
        self._ways = Ways(
            self._devices,
            self._stages,
            self._allocations,
            self._blocks,
            settings.cuda_ipc,
            settings.cuda_peer_access,
        )
        self._prover = CudaProver(
            {device.uuid: device for device in self._devices.values()},
            self._home,
            ipc=settings.cuda_ipc,
            peer_access=settings.cuda_peer_access,
        )
        self.prover: Prover | None = self._prover
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
        """UUID of the home device, where plain Dask would put a received chunk: ordinal 0.

        Everything is opened and copied there, whichever GPU it lies on: a worker of
        LocalCUDACluster sees all GPUs, its own first. The handles of others are opened once that is
        proven, and so are a MIG instance's own.
        """
        return (self._home.uuid,) if self._ipc and not self._home.mig else ()

    def rung(self, preferred: str) -> Rung:
        """``copy``, unless ``share`` is asked for."""
        return Rung.SHARE if preferred == "share" else Rung.COPY

    # -- exporter ---------------------------------------------------------------------------------

    def prepare(
        self, arrays: Sequence[Any], devices: Collection[str] | None = None
    ) -> CudaPreparation | None:
        """Put a mark behind all work on the arrays' devices, and begin to copy what has to be.

        That is what another process lent or what has no handle, and what lies on a device whose
        handles the peer does not open.
        """
        mine = [array for array in arrays if self.accepts(array)]
        return CudaPreparation(self._ways, mine, devices) if mine else None

    def wrap(self, buffer: Any) -> Any | None:
        """Over whatever has ``__cuda_array_interface__``; see `buffers.wrap`."""
        if self.disabled is not None:
            return None
        return buffers.wrap(buffer)

    def download(self, array: Any) -> memoryview:
        """Wait for the copy to the host; the array must be finished."""
        return buffers.download(array)

    def upload(self, data: Any) -> Any:
        """On the device on which plain Dask would put it; raises `OpenFailed`."""
        try:
            with self._driver.cupy_errors("upload"):
                return buffers.upload(data)
        except CudaError as error:
            raise as_open_failed(error) from error

    def pin_copies(self, array: Any) -> bool:
        """Never: what has to be copied was copied in `prepare`."""
        return False

    def pin(self, array: Any, prepared: Preparation | None) -> Pin:
        """Find the allocation of an array that ``prepared`` covers, and hold its bytes."""
        reason = self.disabled
        if reason is not None:
            raise Refused(Refusal.DISABLED, reason)
        if not isinstance(prepared, CudaPreparation):
            raise Refused(Refusal.NOT_READY, "nothing was waited for")
        try:
            return prepared.pin(array)
        except CudaError as error:
            raise as_refused(error) from error

    def protects(self, array: Any) -> bool:
        """Memory of `pool.Pool` only: legacy IPC has no read-only mode."""
        return SLABS.find(array.data.ptr) is not None

    def check_exportable(self, array: Any) -> None:
        """Raise `Refused` if the memory of an array cannot be shared as it is."""
        if array.data.ptr in BORROWED:
            raise Refused(Refusal.IMPORTED, "another process lent this memory; share a copy")
        device = self._devices.get(array.data.device_id)
        if device is None:
            raise Refused(Refusal.NOT_EXPORTABLE, "the array lives on no GPU with CUDA IPC")
        try:
            self._allocations.pin(device, array).release()
        except CudaError as error:
            raise as_refused(error) from error

    def handle(self, allocation: Allocation) -> Handle:
        """The IPC handle of a pinned allocation, 64 bytes; or the descriptor of an arena."""
        if not allocation.device:
            return self._blocks.handle(allocation)
        try:
            return self._allocations.handle(allocation)
        except CudaError as error:
            raise as_refused(error) from error

    # -- importer ---------------------------------------------------------------------------------

    def open(self, announcement: Announce, fds: Sequence[int]) -> CudaMapping | HostMapping:
        """Open an announced allocation, or arena, on the home device; may create its context."""
        try:
            if not announcement.device:
                return self._maps.open(announcement, fds)
            if fds:
                return open_virtual(self._home, announcement, one_descriptor(fds))
            if not self._ipc:
                raise OpenFailed(Failure.OPEN_FAILED, "gpuipc.cuda.ipc is off here")
            return open_mapping(self._home, announcement)
        finally:
            for fd in fds:
                os.close(fd)

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        """An array in a mapping: an alias, or a copy of this process's own.

        Without room for the copy of what has a handle it is an alias.
        """
        if self.disabled is not None:
            raise OpenFailed(Failure.ERROR, self.disabled)
        dtype = _dtype(layout)
        if isinstance(mapping, HostMapping):
            return self._upload(mapping, layout, dtype)
        assert isinstance(mapping, CudaMapping)
        loan = Loan(mapping)
        try:
            with self._driver.cupy_errors("ndarray"):
                alias = array_in(mapping, layout, dtype, loan)
            if rung is not Rung.SHARE:
                return replace(self._copy(mapping.device, alias), rung=rung)
        except CudaError as error:
            if error.code != Code.OUT_OF_MEMORY:
                raise as_open_failed(error) from error
        return Imported(alias, Rung.SHARE, owner=loan)

    def _upload(self, mapping: HostMapping, layout: Layout, dtype: Any) -> Imported:
        home = self._home
        try:
            array, mark = upload(home, layout, dtype, mapping.address)
        except CudaError as error:
            raise as_open_failed(error) from error
        return Imported(array, Rung.HOST, done=home.when(mark, mapping, array))

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
        for stage in self._stages.values():
            stage.trim()
        self._maps.trim()
        return self._allocations.trim() + self._blocks.trim()

    def collect(self) -> list[Allocation]:
        """As `trim`, but asks after all, and keeps nothing for later."""
        for stage in self._stages.values():
            stage.trim(0)
        self._maps.trim(0)
        return self._allocations.trim(len(self._allocations)) + self._blocks.trim(0)

    def close(self) -> None:
        """Let the threads end when they have done what they were given. Idempotent."""
        self.collect()
        self._allocations.close()
        self._blocks.close()
        self._maps.close()
        self._prover.close()
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
