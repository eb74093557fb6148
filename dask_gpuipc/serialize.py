"""The ``gpuipc`` serializer family.

It is in no default list of serializers: only an answer for which a transfer is set names it, so the
scheduler, clients, scatter, spilling, actors and p2p can never make a descriptor.

`dumps` raises nothing but NotImplementedError ("next family"), `loads` nothing but OSError ("ask
again"); anything else would leave tasks pending for ever (dask/distributed#6705).

A header holds one array's ``descriptor``, and there are no frames; or it holds an object that
`objects` took apart: its own header, and the ``places`` of its buffers. A place is a descriptor; or
a text, where the buffer is the next frame: the kind of memory to put it in, or `FRAME` to leave it
on the heap. The buffers of an object live and die together: each has a lease, which ends with the
object, and one whose handle fails takes the others with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from distributed.metrics import context_meter
from distributed.protocol.serialize import register_serialization_family
from distributed.sizeof import safe_sizeof

from dask_gpuipc.consumers import Consumer
from dask_gpuipc.errors import Failure, OpenFailed, Refusal, Refused, WireError
from dask_gpuipc.importer import Importer, failures, importer_of
from dask_gpuipc.objects import (
    FRAME,
    Header,
    Parts,
    Piece,
    is_atom,
    is_copied,
    put_together,
    take_apart,
)
from dask_gpuipc.transfer import Transfer, current_transfer
from dask_gpuipc.wire import Descriptor, decode, encode

logger = logging.getLogger("distributed.gpuipc")

FAMILY: Final = "gpuipc"


def register() -> None:
    """Make the family known to this process. Idempotent.

    It stays known for the life of the process: an answer that was on its way when the plugin was
    unregistered would otherwise meet an unknown family, which Dask does not recover from.
    """
    register_serialization_family(FAMILY, dumps, loads)


# -- exporting ------------------------------------------------------------------------------------


def dumps(x: Any, context: Header | None = None) -> tuple[Header, list[Any]]:
    """A header and frames, see above.

    Parameters
    ----------
    x : object
    context : dict, optional
        Of Dask's serialization.

    Raises
    ------
    Refused
        (a NotImplementedError) Outside of a transfer; or it declined the array, or all that is
        large in the object. Counted, unless it is small.
    """
    transfer = current_transfer.get()
    if transfer is None:
        raise Refused(Refusal.NO_ADVERTISEMENT, "no transfer is open")
    if transfer.takes(x):
        return {"descriptor": encode(_exported(transfer, x))}, []
    if is_atom(x):
        raise Refused(Refusal.UNSUPPORTED_TYPE, type(x).__name__)
    try:
        consumer = transfer.admit()
        parts = _parts(transfer, x, context)
    except Refused as refused:
        transfer.refuse(refused.reason, safe_sizeof(x), refused.detail)
        raise
    return _export(transfer, consumer, parts)


def _exported(transfer: Transfer, array: Any, **options: Any) -> Descriptor:
    begin = time.perf_counter()
    descriptor = transfer.export(array, **options)
    _digest("gpuipc-export", time.perf_counter() - begin)
    _digest(f"gpuipc-{descriptor.rung}", nbytes=descriptor.layout.nbytes)
    return descriptor


def _digest(activity: str, seconds: float | None = None, nbytes: int | None = None) -> None:
    """Have Dask's fine performance metrics count it, for whichever get-data or gather-dep it is."""
    if seconds is not None:
        context_meter.digest_metric(activity, seconds, "seconds")
    if nbytes is not None:
        context_meter.digest_metric(activity, nbytes, "bytes")
        context_meter.digest_metric(activity, 1, "count")


def _parts(transfer: Transfer, x: Any, context: Header | None) -> Parts:
    if is_copied(x):
        raise Refused(Refusal.UNSUPPORTED_TYPE, type(x).__name__)
    try:
        parts: Parts | None = transfer.parts.pop(id(x), None)
        return parts or take_apart(x, transfer.memories, context)
    except Exception as error:
        raise Refused(Refusal.UNSUPPORTED_TYPE, repr(error)) from error


def _export(transfer: Transfer, consumer: Consumer, parts: Parts) -> tuple[Header, list[Any]]:
    if any(p.device and p.device not in consumer.them.memories for p in parts.pieces):
        transfer.refuse(Refusal.NO_COMMON_MEMORY, parts.nbytes, type(parts.whole).__name__)
        raise Refused(Refusal.NO_COMMON_MEMORY, type(parts.whole).__name__)
    places, frames = _places(transfer, parts)
    large = transfer.is_large(parts.nbytes)
    if not large and all(place == FRAME for place in places):
        raise Refused(Refusal.TOO_SMALL, f"{parts.nbytes} bytes")
    small = sum(p.nbytes for p in parts.pieces if _is_small(transfer, p))
    if large and small:
        transfer.count(Refusal.TOO_SMALL, small)
    return {
        "consumer": consumer.peer,
        "way": parts.way,
        "header": parts.header,
        "places": places,
    }, frames


def _places(transfer: Transfer, parts: Parts) -> tuple[list[bytes | str], list[Any]]:
    places: list[bytes | str] = []
    frames: list[Any] = []
    offered: list[Descriptor] = []
    try:
        for number, piece in enumerate(parts.pieces):
            descriptor = _offer(transfer, piece, (id(parts.whole), number))
            if descriptor is None:
                places.append(piece.device)
                frames.append(piece.data())
            else:
                offered.append(descriptor)
                places.append(encode(descriptor))
    except Exception as error:
        transfer.retract(offered)
        transfer.refuse(Refusal.ERROR, parts.nbytes)
        raise Refused(Refusal.ERROR, repr(error)) from error
    return places, frames


def _offer(transfer: Transfer, piece: Piece, source: tuple[int, int]) -> Descriptor | None:
    """The descriptor of a buffer; None if it goes as bytes, and counted unless it is small."""
    if _is_small(transfer, piece):
        return None
    if piece.memory is None:
        transfer.count(Refusal.UNSUPPORTED_TYPE, piece.nbytes)
        return None
    try:
        descriptor = _exported(transfer, piece.array, source=source, rung=piece.rung)
    except Refused:
        return None
    # What may be written is the deserializer's to say, as under plain Dask.
    return replace(descriptor, layout=replace(descriptor.layout, writeable=True))


def _is_small(transfer: Transfer, piece: Piece) -> bool:
    if piece.memory is None:
        return not transfer.is_large(piece.nbytes)
    return piece.nbytes < transfer.min_bytes(piece.memory.kind)


# -- importing ------------------------------------------------------------------------------------


def loads(header: Header, frames: list[Any]) -> Any:
    """The array or object of a header and frames.

    Where somebody collects failures (`importer.collecting_failures`), a failed load is noted there.
    It gives None if the producer has been told, so that the connection stays usable and the rest of
    the message is read.

    Raises
    ------
    OpenFailed
        (an OSError) It cannot be imported here.
    """
    try:
        if "descriptor" in header:
            return _array(header["descriptor"])
        return _object(header, frames)
    except OpenFailed as failed:
        noted = failures.get()
        if noted is None:
            raise
        # Not the error itself: its traceback holds the frames that read this message, and with them
        # the arrays that were loaded before.
        noted.append(OpenFailed(failed.reason, failed.detail))
        if failed.reason in _UNTOLD:
            raise
        return None


_UNTOLD: Final = (Failure.UNREADABLE, Failure.UNKNOWN_PEER)
"""The producer hears nothing of these until the connection fails, and it asks."""


def _array(data: Any) -> Any:
    begin = time.perf_counter()
    try:
        descriptor = decode(Descriptor, data)
    except (WireError, TypeError) as error:
        raise OpenFailed(Failure.UNREADABLE, str(error)) from error
    array = importer_of(descriptor.consumer).load(descriptor)
    _digest("gpuipc-import", time.perf_counter() - begin, descriptor.layout.nbytes)
    return array


def _object(header: Header, frames: list[Any]) -> Any:
    try:
        importer = importer_of(header["consumer"])
        way, inner, places = header["way"], header["header"], header["places"]
    except (KeyError, TypeError) as error:
        raise OpenFailed(Failure.UNREADABLE, f"a header of {sorted(header)}") from error
    try:
        return put_together(way, inner, _buffers(importer, places, frames))
    except OpenFailed:
        raise
    except Exception as error:
        detail = f"it could not be rebuilt: {error!r}"
        logger.debug(detail, exc_info=True)
    # Not within the except: the error's traceback would hold the buffers.
    importer.failed(Failure.ERROR, detail)
    raise OpenFailed(Failure.ERROR, detail)


def _buffers(importer: Importer, places: Sequence[bytes | str], frames: list[Any]) -> list[Any]:
    """All buffers. After a failure the others are loaded still, since that settles their leases."""
    rest = iter(frames)
    buffers: list[Any] = []
    failed: list[tuple[Failure, str]] = []  # not the error: its traceback would hold the buffers
    for place in places:
        try:
            buffers.append(_buffer(importer, place, rest))
        except OpenFailed as error:
            failed.append((error.reason, error.detail))
    if failed:
        buffers.clear()
        raise OpenFailed(*max(failed, key=lambda told: told[0] in _UNTOLD))
    return buffers


def _buffer(importer: Importer, place: bytes | str, rest: Iterator[Any]) -> Any:
    if isinstance(place, str):
        frame = next(rest)
        return importer.memory(place).upload(frame) if place != FRAME else frame
    array = _array(place)
    return array.data if isinstance(array, np.ndarray) else array
