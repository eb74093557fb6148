"""The CUDA driver as this package uses it: typed, guarded, and with errors translated once.

`cuda.bindings.driver` returns ``(CUresult, ...)`` tuples, CuPy raises errors with a ``status``, and
both number them alike. Either becomes a `CudaError` here, and nowhere else; a sticky one, after
which the context is lost, disables CUDA memory in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from dask_gpuipc.errors import (
    Failure,
    GPUIPCError,
    MemoryUnavailable,
    OpenFailed,
    Refusal,
    Refused,
)

logger = logging.getLogger("distributed.gpuipc")

HANDLE_BYTES: Final = 64
"""CU_IPC_HANDLE_SIZE."""
LEGACY_STREAM: Final = 1
"""CU_STREAM_LEGACY: the default stream that all blocking streams synchronise with."""
CONTEXT_EVENTS_SINCE: Final = 12050


class Code(IntEnum):
    """Numbers of CUresult and cudaError_t that mean something here."""

    UNFORESEEN = -2
    """CuPy raised something that is no CUDA error."""
    UNUSABLE = -1
    """No call was made; see `Driver.unusable`."""
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    ALREADY_MAPPED = 208
    NOT_READY = 600
    CAPTURE_IMPLICIT = 906


CAPTURE_CODES: Final = range(900, 909)
STICKY_CODES: Final = frozenset(
    {
        4,  # deinitialized
        214, 220, 226,  # uncorrectable ECC or NVLink error, contained error
        700, 702, 709, 710,  # illegal address, launch timeout, context destroyed, assert
        714, 715, 716, 717, 718, 719, 721,  # hardware stack .. launch failed, tensor memory leak
        806, 807, 810,  # the MPS server or client is gone
    }
)  # fmt: skip
"""After these the context is lost; every later call would fail alike."""


class CudaError(GPUIPCError):
    """A CUDA call failed, or was not made. Stays inside `dask_gpuipc.memory.cuda`."""

    def __init__(self, call: str, code: int, detail: str) -> None:
        super().__init__(f"{call}: {detail}")
        self.code = code

    @property
    def capturing(self) -> bool:
        """A graph capture is in the way."""
        return self.code in CAPTURE_CODES


def as_refused(error: CudaError) -> Refused:
    """What an exporter says of it."""
    if error.capturing:
        return Refused(Refusal.CAPTURING, str(error))
    if error.code == Code.UNUSABLE or error.code in STICKY_CODES:
        return Refused(Refusal.DISABLED, str(error))
    if error.code == Code.OUT_OF_MEMORY:
        return Refused(Refusal.NO_MEMORY, str(error))
    return Refused(Refusal.NOT_EXPORTABLE, str(error))


def as_open_failed(error: CudaError, default: Failure = Failure.ERROR) -> OpenFailed:
    """What an importer says of it."""
    if error.code == Code.OUT_OF_MEMORY:
        return OpenFailed(Failure.NO_MEMORY, str(error))
    if error.code == Code.UNUSABLE or error.code in STICKY_CODES or error.capturing:
        return OpenFailed(Failure.ERROR, str(error))
    return OpenFailed(default, str(error))


@dataclass(frozen=True, slots=True)
class Identity:
    """A device that this process sees."""

    ordinal: int
    uuid: str
    mig: bool = False
    """A part of a GPU; NVIDIA documents no CUDA IPC for it."""


class Driver:
    """The driver API of this process. Thread-safe.

    Made by `driver`, once: `cuInit`, which creates no context. All methods but `devices` raise
    `CudaError`.

    Raises
    ------
    MemoryUnavailable
        There are no bindings, no driver, or no device.
    """

    def __init__(self) -> None:
        self.disabled: str | None = None
        self._api = _bindings()
        self._pid = os.getpid()
        self._leaving = False
        try:
            self._call("cuInit", 0)
            version = self._call("cuDriverGetVersion")
        except CudaError as error:
            raise MemoryUnavailable(_why_no_init(error)) from error
        self.context_events = version >= CONTEXT_EVENTS_SINCE and hasattr(
            self._api, "cuCtxRecordEvent"
        )
        """Whether one event can cover a whole context."""
        self._event_flags = (
            self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
            | self._api.CUevent_flags.CU_EVENT_BLOCKING_SYNC.value
        )
        self._relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        # Registered after cupy's own, where it was imported before, and so run earlier.
        atexit.register(self._leave)

    def __repr__(self) -> str:
        return f"<Driver: {self.unusable() or 'usable'}>"

    # -- whether to call at all -------------------------------------------------------------------

    def unusable(self) -> str | None:
        """Why no CUDA call may be made now, or None."""
        if self._leaving:
            return "the interpreter is exiting"
        if os.getpid() != self._pid:
            return (
                "this process was forked after CUDA was initialised in its parent; "
                "start it with the spawn method instead"
            )
        return self.disabled

    def disable(self, reason: str) -> None:
        """Make no CUDA call from now on."""
        if self.disabled is None:
            self.disabled = reason
            logger.error("CUDA memory is no longer shared by this process: %s", reason)

    def _leave(self) -> None:
        self._leaving = True

    def failed(self, call: str, code: int, detail: str) -> CudaError:
        """The error for a code; takes note of a sticky one."""
        if code in STICKY_CODES:
            self.disable(f"{call}: {detail}")
        return CudaError(call, code, detail)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the API; its value, the tuple of its values, or None."""
        reason = self.unusable()
        if reason is not None:
            raise CudaError(name, Code.UNUSABLE, reason)
        try:
            code, *values = getattr(self._api, name)(*arguments)
        except (RuntimeError, ValueError) as error:
            # No libcuda, or one without this function; or a result that the bindings do not know
            raise CudaError(name, Code.UNFORESEEN, str(error)) from error
        if code.value:
            raise self.failed(name, code.value, code.name)
        return values[0] if len(values) == 1 else tuple(values) or None

    @contextlib.contextmanager
    def cupy_errors(self, what: str) -> Iterator[None]:
        """Around calls of CuPy: whatever it raises leaves as `CudaError`."""
        reason = self.unusable()
        if reason is not None:
            raise CudaError(what, Code.UNUSABLE, reason)
        try:
            yield
        except GPUIPCError:
            raise
        except MemoryError as error:
            raise CudaError(what, Code.OUT_OF_MEMORY, str(error)) from error
        except Exception as error:
            # CUDARuntimeError, CUDADriverError; but also a kernel that did not compile
            code = getattr(error, "status", Code.UNFORESEEN)
            raise self.failed(what, int(code), str(error)) from error

    # -- devices and contexts ---------------------------------------------------------------------

    def devices(self) -> list[Identity]:
        """The devices visible here, MIG instances among them.

        `cuDeviceGetUuid` (its second version) and `cuDeviceGetName`; no context is created.
        """
        get_uuid = "cuDeviceGetUuid_v2"  # CUDA 13 has only this one, under the plain name
        if not hasattr(self._api, get_uuid):
            get_uuid = "cuDeviceGetUuid"
        found = []
        for ordinal in range(self._call("cuDeviceGetCount")):
            device = self._call("cuDeviceGet", ordinal)
            name = self._call("cuDeviceGetName", 256, device)
            mig = b" MIG " in name
            number = uuid.UUID(bytes=self._call(get_uuid, device).bytes)
            found.append(Identity(ordinal, f"{'MIG' if mig else 'GPU'}-{number}", mig))
        return found

    def retain(self, ordinal: int) -> Any:
        """The primary context of a device (`cuDevicePrimaryCtxRetain`); creates it if need be."""
        return self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))

    @contextlib.contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Make a context current in this thread, and put back what was before.

        In here, another thread's graph capture in global mode forbids nothing
        (`cuThreadExchangeStreamCaptureMode`): none of the calls touches its streams, and without
        this a mere event query would break the capture.
        """
        self._call("cuCtxPushCurrent", context)
        try:
            mode = self._call("cuThreadExchangeStreamCaptureMode", self._relaxed)
            try:
                yield
            finally:
                self._restore("cuThreadExchangeStreamCaptureMode", mode)
        finally:
            self._restore("cuCtxPopCurrent")

    def _restore(self, name: str, *arguments: Any) -> None:
        # Its own failure must not hide the error that brought us here.
        if not self._leaving:
            with contextlib.suppress(RuntimeError, ValueError):
                getattr(self._api, name)(*arguments)

    # -- order; a context is current --------------------------------------------------------------

    def capturing(self) -> bool:
        """Whether a blocking stream of the current context captures (`cuStreamIsCapturing`)."""
        try:
            return bool(self._call("cuStreamIsCapturing", LEGACY_STREAM).value)
        except CudaError as error:
            if error.code == Code.CAPTURE_IMPLICIT:
                return True
            raise

    def new_event(self) -> Any:
        """An event without timing on which a thread can block (`cuEventCreate`)."""
        return self._call("cuEventCreate", self._event_flags)

    def record_all(self, context: Any, event: Any) -> None:
        """Put an event behind all work of the context; see the package for what "all" is."""
        if self.context_events:
            self._call("cuCtxRecordEvent", context, event)
        else:
            self._call("cuEventRecord", event, LEGACY_STREAM)

    def hold_all(self, context: Any, event: Any) -> None:
        """Make all later work of the context wait for an event, on the device."""
        if self.context_events:
            self._call("cuCtxWaitEvent", context, event)
        else:
            self._call("cuStreamWaitEvent", LEGACY_STREAM, event, 0)

    def record(self, stream: int, event: Any) -> None:
        """Put an event behind the work of one stream (`cuEventRecord`)."""
        self._call("cuEventRecord", event, stream)

    def hold(self, stream: int, event: Any) -> None:
        """Make the later work of one stream wait for an event (`cuStreamWaitEvent`)."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def passed(self, event: Any) -> bool:
        """Whether all that was before the event is over (`cuEventQuery`)."""
        try:
            self._call("cuEventQuery", event)
        except CudaError as error:
            if error.code == Code.NOT_READY:
                return False
            raise
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Device to device, asynchronously (`cuMemcpyDtoDAsync`)."""
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Device to host; asynchronously, if the host memory is pinned (`cuMemcpyDtoHAsync`)."""
        self._call("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Host to device, likewise (`cuMemcpyHtoDAsync`)."""
        self._call("cuMemcpyHtoDAsync", target, source, nbytes, stream)

    # -- memory; a context is current -------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Device memory that has a legacy IPC handle, for good (`cuMemAlloc`)."""
        return int(self._call("cuMemAlloc", nbytes))

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, for all contexts (`cuMemHostRegister`). Slow: it visits every page."""
        flag = self._api.CU_MEMHOSTREGISTER_PORTABLE
        self._call("cuMemHostRegister", address, nbytes, flag)

    def unregister(self, address: int) -> None:
        """Undo `register` (`cuMemHostUnregister`). May wait for running kernels."""
        self._call("cuMemHostUnregister", address)

    def address_range(self, pointer: int) -> tuple[int, int]:
        """Base and size in bytes of an allocation (`cuMemGetAddressRange`)."""
        base, size = self._call("cuMemGetAddressRange", pointer)
        return int(base), size

    def buffer_id(self, pointer: int) -> int:
        """A number no other allocation of this process ever has (`cuPointerGetAttribute`)."""
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        return int(self._call("cuPointerGetAttribute", attribute, pointer))

    def exportable(self, pointer: int) -> bool:
        """Whether an allocation has a legacy IPC handle.

        The driver says no for stream-ordered memory, and has an error for managed memory.
        """
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        try:
            return bool(self._call("cuPointerGetAttribute", attribute, pointer))
        except CudaError:
            if self.unusable():
                raise
            return False

    def get_handle(self, base: int) -> bytes:
        """The IPC handle of an allocation (`cuIpcGetMemHandle`)."""
        handle = self._call("cuIpcGetMemHandle", base)
        # The bindings show no field of the struct, only its address.
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open_handle(self, payload: bytes) -> int:
        """Address of another process's allocation, opened here (`cuIpcOpenMemHandle`)."""
        handle = self._api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), payload, HANDLE_BYTES)
        flag = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", handle, flag.value))

    def close_handle(self, pointer: int) -> None:
        """Undo one `open_handle` (`cuIpcCloseMemHandle`). Waits for running kernels."""
        self._call("cuIpcCloseMemHandle", pointer)


@functools.cache
def driver() -> Driver:
    """The driver of this process; a forked child finds its parent's, and it unusable there."""
    return Driver()


def _bindings() -> Any:
    try:
        import cuda.bindings.driver
    except ImportError as error:
        raise MemoryUnavailable(f"cuda-bindings: {error}; install cuda-python") from error
    return cuda.bindings.driver


def _why_no_init(error: CudaError) -> str:
    if error.code == Code.NOT_INITIALIZED:
        return (
            f"{error}; CUDA was initialised before this process was forked: "
            "start it with the spawn method"
        )
    return str(error)
