"""A device for machines without one: arrays that are to NumPy what CuPy's are, and their memory.

What is computed on it is not finished until somebody waits for the device, and an array that is
read before shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.config import Settings
from dask_gpuipc.errors import Refusal, Refused
from dask_gpuipc.memory.base import Imported, Mapping, Memory, Rung
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.wire import Layout

kernels: list[Callable[[], None]] = []
"""Submitted, and not run yet."""


def synchronize() -> None:
    while kernels:
        kernels.pop(0)()


class DeviceArray:
    """No buffer protocol, and NumPy's functions only by dispatch."""

    __array_priority__ = 100

    def __init__(self, inner: np.ndarray, base: Any = None) -> None:
        self.inner = inner
        self.base = base

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape", "ndim", "size", "nbytes", "itemsize", "strides", "flags"):
            return getattr(self.inner, name)
        raise AttributeError(name)

    def __getstate__(self) -> np.ndarray:
        return self.get()

    def __setstate__(self, inner: np.ndarray) -> None:
        self.__init__(inner.copy())

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(self.inner[index], self)

    def copy(self) -> DeviceArray:
        """A copy on the device, of what is there now: as a kernel of another stream would."""
        return DeviceArray(self.inner.copy())

    def get(self) -> np.ndarray:
        """A copy on the host, which waits."""
        synchronize()
        return self.inner.copy()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self.inner.__array_interface__
        return {name: interface[name] for name in ("shape", "typestr", "data", "strides")}

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.concatenate:
            return NotImplemented
        parts, *rest = args
        return DeviceArray(function([part.inner for part in parts], *rest, **kwargs))


def to_device(block: Any) -> DeviceArray:
    return DeviceArray(np.array(block))


def from_device(block: Any) -> np.ndarray:
    assert isinstance(block, DeviceArray)
    return block.get()


def compute(block: Any) -> DeviceArray:
    """An array that holds the block's values once the device was waited for."""
    result = DeviceArray(np.full_like(block, -1))
    kernels.append(lambda: np.copyto(result.inner, block))
    return result


@cuda_serialize.register(DeviceArray)
def _serialize(x: DeviceArray) -> tuple[dict[str, Any], list[Any]]:
    if not x.flags.c_contiguous:
        x = DeviceArray(np.ascontiguousarray(x.inner))
    flat = x.inner.reshape(-1).view(np.uint8)
    return {"shape": x.shape, "dtype": x.dtype.str}, [DeviceArray(flat, x)]


@cuda_deserialize.register(DeviceArray)
def _deserialize(header: dict[str, Any], frames: list[Any]) -> DeviceArray:
    [frame] = frames
    assert isinstance(frame, DeviceArray)
    return DeviceArray(frame.inner.view(header["dtype"]).reshape(header["shape"]), frame)


@dask_serialize.register(DeviceArray)
def _serialize_by_host(x: DeviceArray) -> tuple[dict[str, Any], list[Any]]:
    header, frames = _serialize(x)
    return header, [memoryview(frame.get()) for frame in frames]


@dask_deserialize.register(DeviceArray)
def _deserialize_by_host(header: dict[str, Any], frames: list[Any]) -> DeviceArray:
    return _deserialize(header, [to_device(np.frombuffer(f, np.uint8)) for f in frames])


class Tensor:
    """What no family of Dask's can take apart while it is on the device, and a pickle can."""

    def __init__(self, data: DeviceArray, more: Any = None) -> None:
        self.data = data
        self.more = more


class _Preparation:
    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = list(arrays)
        self.final = False
        self.unproven = self.allocations = ()

    async def wait(self) -> None:
        synchronize()
        self.final = True


class DeviceMemory(HostMemory):
    """Memory of `DeviceArray`; as CUDA's it offers only what was waited for."""

    kind = "cuda"
    prepares = True

    def accepts(self, obj: object) -> bool:
        return type(obj) is DeviceArray

    def prepare(self, arrays: Sequence[Any], devices: Any = None) -> Any:
        return _Preparation(arrays)

    def wrap(self, buffer: Any) -> Any:
        if not isinstance(buffer, DeviceArray) or not buffer.flags.c_contiguous:
            return None
        return DeviceArray(buffer.inner.reshape(-1).view(np.uint8), buffer)

    def download(self, array: DeviceArray) -> memoryview:
        return array.get().data

    def upload(self, data: Any) -> DeviceArray:
        return to_device(np.frombuffer(data, np.uint8))

    def pin(self, array: Any, prepared: Any) -> Any:
        if prepared is None or not prepared.final or not any(a is array for a in prepared.arrays):
            raise Refused(Refusal.NOT_READY)
        return super().pin(array.inner, None)

    def pin_copies(self, array: Any) -> bool:
        return super().pin_copies(array.inner)

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        imported = super().load(mapping, layout, rung)
        if rung is Rung.SHARE:
            return Imported(DeviceArray(imported.array), rung, owner=imported.owner)
        done: Future[None] = Future()
        done.set_result(None)
        return Imported(DeviceArray(imported.array.copy()), rung, done=done)

    def owner_of(self, array: Any) -> Any:
        return super().owner_of(array.inner)

    def own(self, array: Any) -> Any:
        return DeviceArray(super().own(array.inner))

    def rung(self, preferred: str) -> Rung:
        return Rung.SHARE if preferred == "share" else Rung.COPY


class DevicePlugin(GPUIPCPlugin):
    """The plugin on a machine with this device."""

    def make_memories(self, settings: Settings) -> list[Memory]:
        return [DeviceMemory(), *super().make_memories(settings)]
