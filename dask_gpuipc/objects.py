"""Objects that hold arrays: sparse matrices, masked arrays, data frames, tensors, any of a task's.

Dask's own serializers take such an object apart into a header and buffers, and make it of them
again; here they are made to give the buffers as arrays of bytes of the memories that take them.
There are three ways, in this order:

- ``device``: an adapter, see `adapters`; where CUDA memory is shared;
- ``dask``: the family of that name;
- ``pickle``: everything else, see `pickling`. Its stream goes as bytes, since unpickling is no
  work for the event loop, on which messages without bytes are read.

An object on the GPU must be taken apart before the answer is written, so that what its serializer
copies is finished when it is offered; `comm` does that, and leaves it in `Transfer.parts`.
"""

from __future__ import annotations

import array
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np
from distributed.protocol import pickle
from distributed.protocol.serialize import (
    check_dask_serializable,
    dask_dumps,
    dask_loads,
)
from distributed.utils import nbytes as nbytes_of

from dask_gpuipc import pickling
from dask_gpuipc.adapters import Adapter, adapter_of
from dask_gpuipc.importer import Importer
from dask_gpuipc.memory.base import Memory, Rung

logger = logging.getLogger("distributed.gpuipc")

Header = dict[str, Any]
MAX_LEAVES: Final = 10_000
"""Objects looked at, in one answer, in search of what must be finished."""
ATOMS: Final = (type(None), bool, int, float, complex, np.generic)
COPIED: Final = (str, bytes, bytearray, array.array)
FRAME: Final = ""
"""In place of a kind of memory: on the heap, as a frame of the message."""


@dataclass(eq=False, slots=True)
class Piece:
    """One buffer of an object."""

    frame: Any
    """As its serializer gave it."""
    memory: Memory | None = None
    """The memory that takes it; None if it can only be a frame."""
    array: Any = None
    """All of it, as an array of bytes of that memory."""
    rung: Rung | None = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(self.array.nbytes) if self.memory else int(nbytes_of(self.frame))

    @property
    def device(self) -> str:
        """The kind of memory that it must be in at the other end, or `FRAME`."""
        return self.memory.kind if self.memory is not None and self.memory.prepares else FRAME

    def data(self) -> Any:
        """What to put into the message when it does not go by handle."""
        return self.memory.download(self.array) if self.memory and self.device else self.frame


@dataclass(eq=False, slots=True)
class Parts:
    """An object that was taken apart."""

    whole: Any
    way: str
    header: Header
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(piece.nbytes for piece in self.pieces)

    def device_arrays(self) -> list[Any]:
        """Buffers that must be finished before they are offered."""
        return [piece.array for piece in self.pieces if piece.device]


# -- taking apart ---------------------------------------------------------------------------------


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What Dask's serialization asks the families for: it walks some containers itself.

    That of a task's result whatever is in it; others by their first element, as
    `check_dask_serializable` does.
    """
    stack = [(value, True) for value in values]
    seen = 0
    while stack and seen < MAX_LEAVES:
        value, outermost = stack.pop()
        seen += 1
        if _is_walked(value, outermost):
            inner = value.values() if type(value) is dict else value
            stack.extend((x, False) for x in inner)
        else:
            yield value


def _is_walked(value: Any, outermost: bool) -> bool:
    if type(value) not in (list, tuple, set, dict):
        return False
    if not (outermost or check_dask_serializable(value)):
        return False
    return type(value) is not dict or _packs(list(value))


def _packs(keys: list[Any]) -> bool:
    try:
        msgpack.packb(keys)
    except Exception:  # noqa: BLE001 -- msgpack raises almost anything; Dask asks in this way
        return False
    return True


def is_atom(x: Any) -> bool:
    """Whether it is of the small kind without buffers, which comes in thousands."""
    return isinstance(x, ATOMS)


def is_copied(x: Any) -> bool:
    """Whether it is made anew when it is deserialized, so that a handle would save little."""
    return type(x) in COPIED


def take_apart(x: Any, memories: Sequence[Memory], context: Header | None = None) -> Parts:
    """An object's header and buffers. Raises whatever its serializer raises.

    Parameters
    ----------
    x : object
    memories : sequence of Memory
        Asked in order which one takes a buffer.
    context : dict, optional
        Of Dask's serialization.
    """
    adapter = adapter_of(type(x)) if any(m.prepares for m in memories) else None
    if adapter is not None:
        try:
            header, frames = adapter.serialize(x)
        except NotImplementedError:
            pass
        else:
            whole = {"type": pickle.dumps(type(x)), "header": header}
            return Parts(x, "device", whole, _pieces(frames, memories, adapter))
    try:
        header, frames = dask_dumps(x, context)
    except Exception:  # noqa: BLE001 -- some cannot serialize their kind on a GPU; pickle tells
        return _pickled(x, memories, context)
    return Parts(x, "dask", header, _pieces(frames, memories))


def take_all(wholes: Iterable[Any], memories: Sequence[Memory]) -> list[Parts]:
    """Those of so many objects that can be taken apart; of the others `dumps` will tell."""
    parts = []
    for whole in wholes:
        try:
            parts.append(take_apart(whole, memories))
        except Exception:
            logger.debug("%s was not taken apart", type(whole).__name__, exc_info=True)
    return parts


def _pieces(
    frames: Iterable[Any], memories: Sequence[Memory], adapter: Adapter | None = None
) -> list[Piece]:
    rung = Rung.SHARE if adapter is not None and adapter.copies else None
    return [_piece(frame, memories, rung) for frame in frames]


def _piece(frame: Any, memories: Sequence[Memory], rung: Rung | None) -> Piece:
    for memory in memories:
        wrapped = None if type(frame) in COPIED else memory.wrap(frame)
        if wrapped is not None:
            return Piece(frame, memory, wrapped, rung if memory.prepares else None)
    memoryview(frame)  # or it is a device buffer that nobody here can read: TypeError
    return Piece(frame)


def _pickled(x: Any, memories: Sequence[Memory], context: Header | None) -> Parts:
    protocol = (context or {}).get("pickle-protocol")
    pickled = pickling.dumps(x, protocol, device=any(m.prepares for m in memories))
    pieces = _pieces([pickled.stream, *pickled.buffers], memories)
    for frames, adapter in pickled.device:
        pieces += _pieces(frames, memories, adapter)
    return Parts(x, "pickle", pickled.header, pieces)


# -- putting together -----------------------------------------------------------------------------


def put_together(way: str, header: Header, buffers: list[Any]) -> Any:
    """The object that `take_apart` took apart; raises whatever its deserializer raises."""
    if way == "dask":
        return dask_loads(header, buffers)
    if way == "pickle":
        return pickling.loads(header, buffers)
    return pickling.rebuild(pickle.loads(header["type"]), header["header"], buffers)


def owned(importer: Importer, x: Any, producer: str) -> Any:
    """As `Importer.owned`, also for objects that hold arrays."""
    return importer.owned(x, producer, partial(_owned, importer, producer))


def _owned(importer: Importer, producer: str, x: Any) -> Any:
    if is_atom(x) or is_copied(x):
        return x
    try:
        parts = take_apart(x, importer.memories)
        lent = [p.memory and importer.lent(p.memory, p.array, producer) for p in parts.pieces]
        if not any(lent):
            return x
        buffers = [_own(p) if mine else p.frame for p, mine in zip(parts.pieces, lent, strict=True)]
        return put_together(parts.way, parts.header, buffers)
    except Exception:
        logger.debug("%s keeps what it was lent", type(x).__name__, exc_info=True)
        return x


def _own(piece: Piece) -> Any:
    assert piece.memory is not None
    copy = piece.memory.own(piece.array)
    return copy.data if isinstance(copy, np.ndarray) else copy
