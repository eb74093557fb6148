"""The ``gpuipc`` serializer family.

It is in no default list of serializers: only an answer for which a transfer is set names it, so the
scheduler, clients, scatter, spilling, actors and p2p can never make a descriptor.

`dumps` raises nothing but NotImplementedError ("next family"), `loads` nothing but OSError ("ask
again"); anything else would leave tasks pending for ever (dask/distributed#6705).
"""

from __future__ import annotations

import time
from typing import Any, Final

from distributed.metrics import context_meter
from distributed.protocol.serialize import register_serialization_family

from dask_gpuipc.errors import Failure, OpenFailed, Refusal, Refused, WireError
from dask_gpuipc.exporter import current_transfer
from dask_gpuipc.importer import failures, importer_of
from dask_gpuipc.wire import Descriptor, decode, encode

FAMILY: Final = "gpuipc"


def dumps(x: Any) -> tuple[dict[str, Any], list[bytes]]:
    """A header that holds the array's descriptor, and no frames.

    Raises
    ------
    Refused
        (a NotImplementedError) Outside of a transfer, or the transfer declined this object.
    """
    transfer = current_transfer.get()
    if transfer is None:
        raise Refused(Refusal.NO_ADVERTISEMENT, "no transfer is open")
    begin = time.perf_counter()
    descriptor = transfer.export(x)
    _digest("gpuipc-export", time.perf_counter() - begin)
    _digest(f"gpuipc-{descriptor.rung}", nbytes=descriptor.layout.nbytes)
    return {"descriptor": encode(descriptor)}, []


def loads(header: dict[str, Any], frames: list[Any]) -> Any:
    """The array that a header describes.

    Where somebody collects failures (`importer.collecting_failures`), a failed load is noted there.
    It gives None if the producer has been told, so that the connection stays usable and the rest of
    the message is read.

    Raises
    ------
    OpenFailed
        (an OSError) It cannot be imported here.
    """
    try:
        begin = time.perf_counter()
        descriptor = _descriptor(header)
        array = importer_of(descriptor.consumer).load(descriptor)
        _digest("gpuipc-import", time.perf_counter() - begin, descriptor.layout.nbytes)
        return array
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


def _digest(activity: str, seconds: float | None = None, nbytes: int | None = None) -> None:
    """Have Dask's fine performance metrics count it, for whichever get-data or gather-dep it is."""
    if seconds is not None:
        context_meter.digest_metric(activity, seconds, "seconds")
    if nbytes is not None:
        context_meter.digest_metric(activity, nbytes, "bytes")
        context_meter.digest_metric(activity, 1, "count")


def _descriptor(header: dict[str, Any]) -> Descriptor:
    data = header.get("descriptor")
    if not isinstance(data, bytes):
        raise OpenFailed(Failure.UNREADABLE, f"no descriptor in a header of {sorted(header)}")
    try:
        return decode(Descriptor, data)
    except WireError as error:
        raise OpenFailed(Failure.UNREADABLE, str(error)) from error


def register() -> None:
    """Make the family known to this process. Idempotent.

    It stays known for the life of the process: an answer that was on its way when the plugin was
    unregistered would otherwise meet an unknown family, which Dask does not recover from.
    """
    register_serialization_family(FAMILY, dumps, loads)
