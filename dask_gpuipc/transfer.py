"""One answer to one request: what the serializer exports arrays into.

`current_transfer` tells the serializer which answer it is writing. A context variable reaches the
thread on which Dask serializes large messages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from dask_gpuipc.consumers import Consumer
from dask_gpuipc.errors import Refusal
from dask_gpuipc.memory.base import Memory, Preparation, Rung
from dask_gpuipc.stats import OTHERS
from dask_gpuipc.wire import Descriptor

current_transfer: ContextVar[Transfer | None] = ContextVar("gpuipc_transfer", default=None)


class _Exports(Protocol):
    """What a transfer asks of its exporter; `exporter.Exporter` says what each does."""

    @property
    def memories(self) -> Sequence[Memory]: ...
    def export(
        self,
        transfer: Transfer,
        obj: Any,
        *,
        readonly: bool = False,
        ended: Callable[[], None] | None = None,
        source: Hashable | None = None,
        rung: Rung | None = None,
    ) -> Descriptor: ...
    def retract(self, descriptors: Iterable[Descriptor]) -> None: ...
    def admit(self, transfer: Transfer) -> Consumer: ...
    def min_bytes(self, kind: str) -> int: ...
    def is_large(self, nbytes: int) -> bool: ...
    def refuse(self, reason: Refusal, nbytes: int, to: str, detail: str) -> None: ...
    def count(self, reason: Refusal, nbytes: int, to: str, detail: str) -> None: ...


class Transfer:
    """One answer. Exports may run on any thread, also after it has ended (they are refused).

    Parameters
    ----------
    consumer : Consumer or None
        None makes every export a counted refusal with ``reason``.
    to : str
        Name under which its arrays are counted; in Dask the requesting worker's address.
    """

    def __init__(
        self,
        exporter: _Exports,
        number: int,
        consumer: Consumer | None,
        prepared: Mapping[str, Preparation | None],
        reason: Refusal | None,
        to: str = OTHERS,
    ) -> None:
        self._exporter = exporter
        self.number = number
        self.consumer = consumer
        self.channel = None if consumer is None else consumer.channel
        self.prepared = prepared
        self.reason = reason
        self.to = to
        self.settled = False
        """Whether the consumer said OK."""
        self.parts: dict[int, Any] = {}
        """Objects that were taken apart beforehand, by their identity; see `objects`."""

    def __repr__(self) -> str:
        state = f"refused, {self.reason}" if self.reason else f"to {self.consumer!r}"
        return f"<Transfer {self.number} {state}>"

    @property
    def memories(self) -> Sequence[Memory]:
        """The exporter's, in the order in which they are asked."""
        return self._exporter.memories

    def takes(self, obj: Any) -> bool:
        """Whether an object is an array of some memory here."""
        return any(memory.accepts(obj) for memory in self.memories)

    def export(
        self,
        obj: Any,
        *,
        readonly: bool = False,
        ended: Callable[[], None] | None = None,
        source: Hashable | None = None,
        rung: Rung | None = None,
    ) -> Descriptor:
        """A descriptor for an array of any memory; see `exporter.Exporter.export`."""
        return self._exporter.export(
            self, obj, readonly=readonly, ended=ended, source=source, rung=rung
        )

    def retract(self, descriptors: Iterable[Descriptor]) -> None:
        """End leases whose descriptors will not be sent."""
        self._exporter.retract(descriptors)

    def admit(self) -> Consumer:
        """The consumer, if it may be offered anything now; raises `Refused`, uncounted."""
        return self._exporter.admit(self)

    def min_bytes(self, kind: str) -> int:
        """Bytes below which a buffer of a memory is not worth a handle."""
        return self._exporter.min_bytes(kind)

    def is_large(self, nbytes: int) -> bool:
        """Whether what goes as bytes is large enough for a handle in host memory."""
        return self._exporter.is_large(nbytes)

    def refuse(self, reason: Refusal, nbytes: int, detail: str = "") -> None:
        """`count`, if it is large."""
        self._exporter.refuse(reason, nbytes, self.to, detail)

    def count(self, reason: Refusal, nbytes: int, detail: str = "") -> None:
        """Count what goes as bytes, and why."""
        self._exporter.count(reason, nbytes, self.to, detail)
