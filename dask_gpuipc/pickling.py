"""Pickle streams, with all that is large beside them.

As Dask's ``pickle`` family: buffers (protocol 5) beside the stream, cloudpickle for what is defined
in ``__main__``. Two things more are taken out of the stream, so that they can go by handle: NumPy
arrays that are not contiguous, which NumPy itself writes into it; and what has an adapter (see
`adapters`), wherever it is in the object.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle
import numpy as np
from distributed.protocol.serialize import pickle_loads

from dask_gpuipc.adapters import Adapter, Header, adapter_of

LARGE: Final = 4096
"""Bytes of a strided array from which a buffer of its own is worth it."""


@dataclass(eq=False, slots=True)
class Pickled:
    """A stream, and what is beside it."""

    stream: bytes = b""
    buffers: list[memoryview] = field(default_factory=list)
    device: list[tuple[list[Any], Adapter]] = field(default_factory=list)
    """Device buffers of each object that an adapter took apart."""

    def keep(self, buffer: pickle.PickleBuffer) -> None:
        """Leave a buffer out of the stream."""
        self.buffers.append(memoryview(buffer))

    @property
    def header(self) -> Header:
        """What Dask's family keeps of the buffers."""
        return {"writeable": tuple(not view.readonly for view in self.buffers)}


def dumps(x: Any, protocol: int | None = None, *, device: bool) -> Pickled:
    """Pickle an object; with ``device``, what has an adapter is taken out of the stream.

    Raises whatever pickling raises.
    """
    if not device:
        with contextlib.suppress(Exception):  # cloudpickle will have its own to say
            pickled = _quick(x, protocol)
            if b"__main__" not in pickled.stream:
                return pickled
    return _thorough(x, protocol)


def _quick(x: Any, protocol: int | None) -> Pickled:
    pickled, stream = Pickled(), io.BytesIO()
    pickler = pickle.Pickler(stream, protocol, buffer_callback=pickled.keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, np.ndarray: _reduce_array}
    pickler.dump(x)
    pickled.stream = stream.getvalue()
    return pickled


def _thorough(x: Any, protocol: int | None) -> Pickled:
    pickled, stream = Pickled(), io.BytesIO()
    _Pickler(stream, protocol, pickled).dump(x)
    pickled.stream = stream.getvalue()
    return pickled


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    """As NumPy does; what it would write into the stream is made contiguous, in the same order."""
    if not array.flags.forc and array.nbytes >= LARGE and not array.dtype.hasobject:
        array = np.ascontiguousarray(array)
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Asks about every object that is not of a built-in type."""

    def __init__(self, stream: io.BytesIO, protocol: int | None, pickled: Pickled) -> None:
        super().__init__(stream, protocol=protocol, buffer_callback=pickled.keep)
        self._pickled = pickled
        self._count = 0
        self._adapters: dict[type, Adapter | None] = {}

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls is np.ndarray:
            return _reduce_array(obj)
        if cls not in self._adapters:
            self._adapters[cls] = adapter_of(cls)
        adapter = self._adapters[cls]
        if adapter is not None:
            with contextlib.suppress(NotImplementedError):
                return self._take_out(obj, adapter)
        return super().reducer_override(obj)

    def _take_out(self, obj: Any, adapter: Adapter) -> Any:
        header, frames = adapter.serialize(obj)
        self._pickled.device.append((frames, adapter))
        start, self._count = self._count, self._count + len(frames)
        return _restore, (type(obj), header, start, self._count)


_device: ContextVar[Sequence[Any]] = ContextVar("gpuipc_device_buffers")
"""Of the object that is being unpickled."""


def loads(header: Header, frames: Sequence[Any]) -> Any:
    """The object of a stream, its buffers and its device buffers; raises whatever that raises."""
    count = 1 + len(header["writeable"])
    token = _device.set(frames[count:])
    try:
        return pickle_loads(header, list(frames[:count]))
    finally:
        _device.reset(token)


def _restore(cls: type, header: Header, start: int, stop: int) -> Any:
    """What a stream names in place of what was taken out of it."""
    return rebuild(cls, header, _device.get()[start:stop])


def rebuild(cls: type, header: Header, buffers: Sequence[Any]) -> Any:
    """An object of a type that has an adapter, made of its device buffers."""
    adapter = adapter_of(cls)
    if adapter is None:
        raise TypeError(f"nothing here makes a {cls.__name__} of device buffers")
    return adapter.deserialize(header, list(buffers))
