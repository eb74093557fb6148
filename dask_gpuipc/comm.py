"""The Dask side: advertise as a consumer, inject handles as a producer, ask again as bytes.

Four hooks into one worker, each put in place by `Hooks.install` and undone by `Hooks.remove`:

- ``worker.rpc.connection_args`` is *replaced* by one whose ``handshake_overrides`` carry the
  advertisement (the scheduler itself passes overrides there). The dict is shared with
  ``worker.connection_args`` and must not be changed in place. Idle connections are remade.
- ``worker.handlers["get_data"]`` is wrapped. Only the side that has the data decides that it goes
  by handle, and only for a peer that said it can read it: a worker that *asked* for a family that
  the other side lacks would never get an answer.
- ``worker.gather_dep`` is wrapped, to ask once more, as bytes, when a handle could not be opened.
- ``worker.monitor.get_process_memory`` is wrapped: before Dask looks at the RSS, to spill or pause
  by it, shared pages that need not be in it leave it.

And `p2p` has its two in the process.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from distributed.comm.utils import OFFLOAD_THRESHOLD
from distributed.core import Status
from distributed.sizeof import safe_sizeof
from distributed.utils import offload
from distributed.worker import Worker, get_data_from_worker
from distributed.worker_state_machine import (
    GatherDepBusyEvent,
    GatherDepFailureEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    StateMachineEvent,
)

from dask_gpuipc import objects, p2p
from dask_gpuipc.consumers import Consumer
from dask_gpuipc.endpoint import Endpoint
from dask_gpuipc.errors import Failure, OpenFailed, Refusal, Refused, WireError
from dask_gpuipc.importer import collecting_failures
from dask_gpuipc.memory.base import Preparation
from dask_gpuipc.objects import Parts
from dask_gpuipc.stats import OTHERS
from dask_gpuipc.transfer import Transfer, current_transfer
from dask_gpuipc.wire import Advertisement, decode, encode

logger = logging.getLogger("distributed.gpuipc")

KEY: Final = "gpuipc"
"""Of the advertisement in the handshake."""
OFFER: Final = ["gpuipc", "dask", "pickle"]
"""Serializers of an answer: Dask's defaults, after our family."""
PLAIN: Final = ["dask", "pickle", "error"]
"""Serializers that a request names to be sent bytes."""
SCHEMES: Final = frozenset({"tcp", "tls", "ws", "wss"})
"""Comms that serialize, and whose reader takes any family (ucx names its own)."""
_ARRAYS: Final = frozenset({"numpy.ndarray", "cupy.ndarray"})
_RECOVERABLE: Final = (GatherDepSuccessEvent, GatherDepNetworkFailureEvent)
"""What an answer in which a handle failed ends as: read to its end, or given up."""
QUICK: Final = 20 << 20
"""Bytes of arrays that are put in place on the event loop: copying them takes some milliseconds at
most, and handing them to a thread takes longer than copying them."""
PREPARED: Final = ("get-data", "gpuipc-prepare", "seconds")
"""In Dask's fine performance metrics: waiting for a peer's channel, and for the device."""


@functools.lru_cache(maxsize=1024)
def parse_advertisement(data: bytes) -> Advertisement:
    """The advertisement from a handshake; `WireError` if it is none of this version."""
    return decode(Advertisement, data)


class Hooks:
    """The hooks into one worker. Belongs to its event loop."""

    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._get_data = worker.handlers["get_data"]
        self._gather_dep = worker.gather_dep
        self._get_process_memory = worker.monitor.get_process_memory
        self._connection_args = worker.rpc.connection_args
        self._address = worker.address
        self._installed = False

    def install(self) -> None:
        """Put the hooks in place."""
        worker = self._worker
        self._own_get_data = self._wrap_get_data()
        self._own_gather_dep = self._wrap_gather_dep()
        self._own_get_process_memory = self._wrap_get_process_memory()
        present: Any = self._connection_args.get("handshake_overrides") or {}
        overrides = {**present, KEY: encode(self._endpoint.advertisement)}
        self._own_connection_args = {**self._connection_args, "handshake_overrides": overrides}
        worker.handlers["get_data"] = self._own_get_data
        worker.gather_dep = self._own_gather_dep  # type: ignore[method-assign]
        worker.monitor.get_process_memory = self._own_get_process_memory  # type: ignore[method-assign]
        worker.rpc.connection_args = self._own_connection_args
        p2p.install(self._address, functools.partial(self._endpoint.exporter.refuse, Refusal.P2P))
        self._installed = True
        worker.rpc.collect()

    def remove(self) -> None:
        """Undo them. What somebody else has wrapped since stays, and calls through. Idempotent."""
        if not self._installed:
            return
        self._installed = False
        p2p.remove(self._address)
        worker = self._worker
        if worker.handlers.get("get_data") is self._own_get_data:
            worker.handlers["get_data"] = self._get_data
        if worker.__dict__.get("gather_dep") is self._own_gather_dep:
            del worker.gather_dep
        if worker.monitor.__dict__.get("get_process_memory") is self._own_get_process_memory:
            worker.monitor.get_process_memory = self._get_process_memory  # type: ignore[method-assign]
        if worker.rpc.connection_args is self._own_connection_args:
            worker.rpc.connection_args = self._connection_args
        if worker.rpc.status == Status.running:
            worker.rpc.collect()

    # -- producer ---------------------------------------------------------------------------------

    def _wrap_get_data(self) -> Any:
        original = self._get_data

        @functools.wraps(original)
        async def get_data(
            comm: Any,
            keys: Collection[Any],
            who: str | None = None,
            serializers: list[str] | None = None,
            **more: Any,
        ) -> Any:
            reason = self._leave_alone(comm, serializers)
            if reason is not None:
                self._count_left_alone(keys, reason, who or OTHERS)
                return await original(comm, keys=keys, who=who, serializers=serializers, **more)
            begin = time.perf_counter()
            transfer = await self._begin(comm, keys, who or OTHERS)
            self._worker.digest_metric(PREPARED, time.perf_counter() - begin)
            token = current_transfer.set(transfer)
            offloads = comm.allow_offload
            comm.allow_offload = offloads and not self._is_quick(transfer, keys)
            try:
                result = await original(comm, keys=keys, who=who, serializers=OFFER, **more)
                if result == Status.dont_reply:
                    self._endpoint.exporter.granted(transfer)
                return result
            finally:
                comm.allow_offload = offloads
                current_transfer.reset(token)
                # To no effect if it was granted; else the consumer is asked what it has.
                self._endpoint.exporter.failed(transfer)

        return get_data

    def _is_quick(self, transfer: Transfer, keys: Collection[Any]) -> bool:
        """Whether the answer is written sooner than a thread would have begun with it."""
        if transfer.consumer is None:
            return False
        tasks = self._worker.state.tasks
        found = [tasks[key] for key in keys if key in tasks]
        return sum(ts.nbytes or 0 for ts in found) <= QUICK and all(_is_array(ts) for ts in found)

    def _count_left_alone(self, keys: Collection[Any], reason: Refusal, to: str) -> None:
        """Count what a request that is left alone moves; nothing is unspilled for it."""
        exporter, tasks = self._endpoint.exporter, self._worker.state.tasks
        sizes = [tasks[key].nbytes or 0 for key in keys if key in tasks]
        large = [nbytes for nbytes in sizes if exporter.is_large(nbytes)]
        for nbytes in large:
            exporter.count(reason, nbytes, to)
        if not large:
            self._endpoint.stats.refused(reason)

    def _leave_alone(self, comm: Any, serializers: list[str] | None) -> Refusal | None:
        if not self._installed:
            return Refusal.STOPPING
        if serializers is not None:
            return Refusal.NAMED_SERIALIZERS
        if _scheme(comm.local_address) not in SCHEMES:
            return Refusal.OTHER_TRANSPORT
        return None

    async def _begin(self, comm: Any, keys: Collection[Any], to: str) -> Transfer:
        """Open the transfer for a request; one that only counts, if nothing can go by handle."""
        exporter = self._endpoint.exporter
        try:
            consumer = await self._endpoint.consumer(self._advertised(comm))
            consumer.channel.drain()  # its last releases and denials
            prepared, parts = await self._prepare(consumer, keys)
            transfer = exporter.begin(consumer, prepared, to=to)
            transfer.parts.update((id(part.whole), part) for part in parts)
            return transfer
        except Refused as refused:
            self._endpoint.stats.notices.tell(refused.reason, refused.detail)
            return exporter.begin(None, reason=refused.reason, to=to)
        except Exception as error:  # noqa: BLE001 -- the log is told, with the traceback
            # An error for an answer would leave the requester's tasks pending for ever.
            self._endpoint.stats.notices.tell(Refusal.ERROR, repr(error), error)
            return exporter.begin(None, reason=Refusal.ERROR, to=to)

    def _advertised(self, comm: Any) -> Advertisement:
        data = (comm.remote_info or {}).get(KEY)
        if data is None:
            raise Refused(Refusal.NO_ADVERTISEMENT)
        try:
            return parse_advertisement(bytes(data))
        except (WireError, TypeError) as error:
            raise Refused(Refusal.WIRE_VERSION, str(error)) from error

    async def _prepare(
        self, consumer: Consumer, keys: Collection[Any]
    ) -> tuple[Mapping[str, Preparation], list[Parts]]:
        """Have the arrays of an answer finished before they are offered, those in objects too.

        The values are fetched here first, so that what has to be unspilled is also finished. An
        array that turns up later (spilled again in between) is not covered, and goes as bytes.
        """
        if not any(memory.prepares for memory in self._endpoint.memories):
            return {}, []
        data = self._worker.data
        arrays, others = self._sort(data[k] for k in keys if k in data)
        parts = await self._take_apart(others)
        prepared = await self._finish(consumer, arrays, parts)
        on_device = [part.whole for part in parts if part.device_arrays()]
        if on_device:
            # The serializers may have copied what was not finished yet: now it is.
            parts = [part for part in parts if not part.device_arrays()]
            parts += await self._take_apart(on_device)
            prepared = await self._finish(consumer, arrays, parts)
        return prepared, parts

    def _sort(self, values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Arrays that are worth a handle, and objects that may hold some."""
        exporter, memories = self._endpoint.exporter, self._endpoint.memories
        arrays, others = [], []
        for leaf in objects.leaves(values):
            kind = next((memory.kind for memory in memories if memory.accepts(leaf)), None)
            if kind is not None:
                if leaf.nbytes >= exporter.min_bytes(kind):
                    arrays.append(leaf)
            elif not objects.is_atom(leaf) and not objects.is_copied(leaf):
                others.append(leaf)
        return arrays, others

    async def _take_apart(self, wholes: list[Any]) -> list[Parts]:
        take = functools.partial(objects.take_all, wholes, self._endpoint.memories)
        if OFFLOAD_THRESHOLD and sum(map(safe_sizeof, wholes)) > OFFLOAD_THRESHOLD:
            parts: list[Parts] = await offload(take)
            return parts
        return take()

    async def _finish(
        self, consumer: Consumer, arrays: list[Any], parts: list[Parts]
    ) -> Mapping[str, Preparation]:
        inside = [array for part in parts for array in part.device_arrays()]
        prepared = self._endpoint.exporter.prepare(consumer, [*arrays, *inside])
        for preparation in prepared.values():
            await preparation.wait()
        return prepared

    # -- consumer ---------------------------------------------------------------------------------

    def _wrap_gather_dep(self) -> Any:
        original = self._gather_dep

        @functools.wraps(original)
        async def gather_dep(
            worker: str, to_gather: Collection[Any], total_nbytes: int, *, stimulus_id: str
        ) -> StateMachineEvent:
            with collecting_failures() as failed, self._endpoint.stats.measured():
                event = await original(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
            if not failed or not isinstance(event, _RECOVERABLE):
                return event
            self._count(failed)
            logger.info("Asking %s again, as bytes: %s", worker, failed[0])
            # nothing of the first answer is kept: its arrays are released
            del event
            return await self._gather_bytes(worker, to_gather, total_nbytes)

        return gather_dep

    def _count(self, failed: Iterable[OpenFailed]) -> None:
        """Count the failures that no importer saw, and so did not count."""
        for failure in failed:
            if failure.reason in (Failure.UNREADABLE, Failure.UNKNOWN_CONSUMER):
                self._endpoint.stats.failed(failure.reason, failure.detail)

    async def _gather_bytes(
        self, worker: str, to_gather: Collection[Any], total_nbytes: int
    ) -> StateMachineEvent:
        """What gather_dep does, with serializers that make the producer send bytes."""
        common: dict[str, Any] = {"worker": worker, "total_nbytes": total_nbytes}
        try:
            response = await get_data_from_worker(
                rpc=self._worker.rpc,
                keys=to_gather,
                worker=worker,
                who=self._worker.address,
                deserializers=PLAIN,
            )
            if response["status"] == "busy":
                return GatherDepBusyEvent(**common, stimulus_id=f"gather-dep-busy-{time.time()}")
            return GatherDepSuccessEvent(
                **common,
                data=response["data"],
                stimulus_id=f"gather-dep-success-{time.time()}",
            )
        except OSError:
            logger.info("Worker %s was lost while asked again", worker, exc_info=True)
            return GatherDepNetworkFailureEvent(
                **common, stimulus_id=f"gather-dep-network-failure-{time.time()}"
            )
        except Exception as error:
            logger.exception("Data of %s could not be read", worker)
            return GatherDepFailureEvent.from_exception(
                error, **common, stimulus_id=f"gather-dep-failed-{time.time()}"
            )

    # -- both -------------------------------------------------------------------------------------

    def _wrap_get_process_memory(self) -> Callable[[], int]:
        original = self._get_process_memory

        @functools.wraps(original)
        def get_process_memory() -> int:
            # Not left to the endpoint's ticks: memory can grow by a lot between two of them.
            self._endpoint.trim()
            return original()

        return get_process_memory


def _is_array(task: Any) -> bool:
    kind = task.type
    return kind is not None and f"{kind.__module__}.{kind.__name__}" in _ARRAYS


def _scheme(address: str) -> str:
    """Of a comm's own address; the accepting side of a web socket tells its host only."""
    scheme, separator, _ = address.partition("://")
    return scheme if separator else "ws"
