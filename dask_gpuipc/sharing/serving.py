"""The source's side of a visit: a grant, and the bytes where no handle can go.

What goes by handle takes the way of any transfer between two endpoints: the arrays are finished
first, the source dials the visitor, pins, announces, offers. The visitor's outcome is what a
worker's OK is to Dask: it settles the transfer, and without it the visitor is asked over the
channel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dask_gpuipc.dtypes import encode_dtype
from dask_gpuipc.errors import NotPermitted, Refusal, Refused, SharingError, SourceGone
from dask_gpuipc.memory.base import Rung
from dask_gpuipc.sharing.desk import Guest, Outcome, Reply, Verdict, Want
from dask_gpuipc.sharing.shelf import Claim, Entry
from dask_gpuipc.wire import MAX_MESSAGE, Advertisement, Descriptor, Layout

if TYPE_CHECKING:
    from dask_gpuipc.consumers import Consumer
    from dask_gpuipc.exporter import Exporter
    from dask_gpuipc.memory.base import Preparation
    from dask_gpuipc.sharing.node import Node
    from dask_gpuipc.transfer import Transfer

PROOF: Final = 5.0
"""Seconds that a visitor has to prove that it can read another GPU's memory."""
GLANCE: Final = 0.01
"""Seconds between two looks at whether it did."""


async def serve(node: Node, guest: Guest) -> None:
    """Answer one visit. On the node's loop."""
    want = await guest.receive(Want)
    # Whatever the answer: a socket that is closed with something unread in it loses what was sent.
    them = None if want.kind == "event" else await guest.receive(Advertisement)
    try:
        claim = node.shelf.enter(want.key, (guest.pid, guest.start_time))
    except (SourceGone, NotPermitted) as error:
        await guest.send(Reply(_verdict(error), str(error)))
        return
    try:
        if claim.entry.kind != want.kind:
            await guest.send(Reply(Verdict.GONE, f"that is no {want.kind} but {claim.entry.kind}"))
        elif them is None:
            await _serve_event(guest, claim)
        else:
            await _serve_array(node, guest, claim, them)
    finally:
        claim.end()


def _verdict(error: SharingError) -> Verdict:
    return Verdict.GONE if isinstance(error, SourceGone) else Verdict.NOT_PERMITTED


async def _serve_event(guest: Guest, claim: Claim) -> None:
    # The driver forbids to destroy an event that others have open: it stays while they do.
    lease = claim.lease(guest.pid)
    try:
        await guest.send(Reply(Verdict.EVENT, ""))
        await guest.send_bytes(claim.entry.payload)
        await guest.wait_gone()
    finally:
        lease.end()


async def _serve_array(node: Node, guest: Guest, claim: Claim, them: Advertisement) -> None:
    entry = claim.entry
    if them.pid != guest.pid or them.start_time != guest.start_time:
        await guest.send(Reply(Verdict.NOT_PERMITTED, f"process {guest.pid} asks as {them.pid}"))
        return
    try:
        good = await _grant(node, guest, claim, them)
    except Refused as refused:
        if not entry.once:
            await guest.send(Reply(Verdict.REFUSED, str(refused)))
            return
        good = False
    if entry.once:
        if not good:
            await _send_bytes(node, guest, entry)
        node.shelf.withdraw(entry)


async def _grant(node: Node, guest: Guest, claim: Claim, them: Advertisement) -> bool:
    """Offer a lease and settle it; whether the visitor has the array."""
    entry = claim.entry
    endpoint = node.endpoint_of(entry.kind)
    if endpoint is None:
        raise Refused(Refusal.STOPPING)
    consumer = await endpoint.consumer(them)
    prepared = await _prepare(endpoint.exporter, consumer, entry)
    transfer = endpoint.exporter.begin(consumer, prepared)
    try:
        descriptor = await _export(transfer, claim, guest.pid)
        await guest.send(Reply(Verdict.GRANTED, ""))
        await guest.send(descriptor)
        good = (await guest.receive(Outcome)).good
    except BaseException:
        endpoint.exporter.failed(transfer)
        raise
    _settle(endpoint.exporter, transfer, good)
    return good


def _settle(exporter: Exporter, transfer: Transfer, good: bool) -> None:
    if good:
        exporter.granted(transfer)
    else:
        exporter.failed(transfer)


async def _prepare(exporter: Exporter, consumer: Consumer, entry: Entry) -> dict[str, Preparation]:
    """Wait until an array is finished; for a handle also until its way is known.

    Whether the visitor opens memory of another GPU than its first is found out while the first
    array from there goes by another way. A handle has no other way, so here that is waited for.
    """
    prepared = exporter.prepare(consumer, [entry.obj])
    for preparation in prepared.values():
        await preparation.wait()
    unproven = {device for p in prepared.values() for device in p.unproven}
    if entry.once or not unproven:
        return prepared
    for _ in range(int(PROOF / GLANCE)):
        if unproven <= consumer.opens:
            break
        await asyncio.sleep(GLANCE)
    prepared = exporter.prepare(consumer, [entry.obj])
    for preparation in prepared.values():
        await preparation.wait()
    return prepared


async def _export(transfer: Transfer, claim: Claim, pid: int) -> Descriptor:
    entry = claim.entry
    lease = claim.lease(pid)
    try:
        # In a thread: the first export of a large NumPy array copies it.
        descriptor = await asyncio.to_thread(
            transfer.export, entry.obj, readonly=entry.readonly, ended=lease.end
        )
        if not entry.once and descriptor.rung != Rung.SHARE:
            raise Refused(
                Refusal.OTHER_DEVICE,
                f"a handle stands for the memory itself; to there it would be a copy "
                f"({descriptor.rung})",
            )
        return descriptor
    except BaseException:
        lease.end()
        raise


async def _send_bytes(node: Node, guest: Guest, entry: Entry) -> None:
    """The last rung: the array itself, through the desk's socket."""
    endpoint = node.endpoint_of(entry.kind)
    finished = endpoint and endpoint.memories[0].prepare([entry.obj])
    if finished:
        await finished.wait()
    array: np.ndarray[Any, Any] = await asyncio.to_thread(_on_host, entry.obj)
    layout = Layout(0, encode_dtype(array.dtype), array.itemsize, array.shape, array.strides)
    await guest.send(Reply(Verdict.BYTES, ""))
    await guest.send(layout)
    data = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    for start in range(0, len(data), MAX_MESSAGE):
        await guest.send_bytes(data[start : start + MAX_MESSAGE])
    await guest.receive(Outcome)


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    if not isinstance(array, np.ndarray):
        array = array.get()
    return np.ascontiguousarray(array)
