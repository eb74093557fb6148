"""What a kind of memory must be able to do to be shared.

One `Memory` object serves both sides of an endpoint. As exporter it *prepares* arrays (their bytes
must be finished before they are offered), *pins* one (finds its allocation and keeps its bytes in
place) and makes a *handle* of an allocation for a peer. As importer it *opens* a handle to a
`Mapping`, *loads* an array from it, and *fences*: tells when everything that was reading has ended.

Contract
--------
- `accepts` is cheap and imports nothing.
- `pin`, `handle`, `open` and `load` may run on any thread, the event loop among them, and several
  at a time; they wait for nothing slow. `Mapping.close` may be slow; where `executor` is not None,
  the importer opens ahead and closes on it.
- `pin` raises only `Refused`; `open` and `load` raise only `OpenFailed`.
- An allocation is named by ``(id, generation)``; a reused address is a new generation. `open` may
  fail with ``BUSY`` while the mapping of an earlier one at that address is being closed.
- What `load` returns is private to the receiver where ``rung`` is ``copy``, and for host memory.

`dask_gpuipc.testing.check_memory` holds any implementation to this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from dask_gpuipc.wire import Announce, Layout


class Rung(StrEnum):
    """One way of moving a chunk."""

    SHARE = "share"
    """The consumer's array is the producer's memory."""
    COPY = "copy"
    """The consumer copies it, on the device, into memory of its own."""
    STAGE = "stage"
    """The producer first copied it, on the device, into a block that has a handle."""
    HOST = "host"
    """By way of pinned host memory that both sides have: down there, and up here."""
    BYTES = "bytes"
    """Dask's own way."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One base block, as its allocator got it."""

    id: int
    generation: int
    nbytes: int
    device: str = ""
    """UUID of the GPU; empty for host memory."""


@dataclass(frozen=True, slots=True)
class Handle:
    """The token that names an allocation to another process.

    ``fds`` belong to the memory and stay open while the allocation lives; the channel duplicates
    them into the peer.
    """

    payload: bytes = b""
    fds: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Pin:
    """An exporter's hold on one array's bytes. Hashed by identity.

    ``release`` gives the bytes back; it is called once, from any thread.
    """

    allocation: Allocation
    layout: Layout
    nbytes: int
    """Charged to the budget."""
    release: Callable[[], None]
    rung: Rung | None = None
    """On which it goes; None is the one that `Memory.rung` says."""
    keep: Any = field(default=None, repr=False)

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Names the pinned bytes: equal for two pins of the same bytes."""
        place = self.allocation
        return (place.id, place.generation, self.layout.extent()[0], self.nbytes)


class Mapping(Protocol):
    """An allocation of another process, opened in this one."""

    nbytes: int

    def close(self) -> None:
        """Unmap. Idempotent; raises nothing."""


@dataclass(slots=True)
class Imported:
    """An array made of a descriptor.

    Either ``owner`` is set, and the bytes are read until it dies (it is the root of the array's
    buffer; every view keeps it), or ``done`` is, and they are read until it completes.
    """

    array: Any
    rung: Rung
    owner: Any = None
    done: Future[None] | None = None


class Preparation(Protocol):
    """Arrays on their way to being finished."""

    @property
    def unproven(self) -> Collection[str]:
        """UUIDs of GPUs whose handles the peer would be sent if it was known to open them."""

    @property
    def allocations(self) -> Collection[Allocation]:
        """To be announced at once, so that the peer opens them while this is under way."""

    async def wait(self) -> None:
        """Return when every array that it covers holds its final bytes. Raises nothing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A block that only proves whether a peer can read what lies on a GPU."""

    nbytes: int
    handle: bytes
    digest: bytes
    """SHA-256 of its bytes."""


class Prover(Protocol):
    """Finds out what works between two processes and two GPUs, by doing it. Thread-safe."""

    def sample(self, device: str) -> Future[Sample]:
        """A block with random bytes on a GPU of this process; fails with any exception."""

    def examine(self, device: str, nbytes: int, handle: bytes) -> Future[bytes]:
        """The digest of a peer's sample as it is read here; empty where it cannot be. No error."""


class Memory(Protocol):
    """One kind of memory; see the module's contract. Thread-safe."""

    kind: str
    executor: Executor | None
    prepares: bool
    """Whether `prepare` can return something; if not, nobody need look for arrays."""
    prover: Prover | None
    """None where every peer on the node can open every handle."""

    def accepts(self, obj: object) -> bool:
        """Whether an object is an array of this memory, by its exact type."""

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs whose handles an importer here opens, proven or not.

        Empty for host memory. Creates no context.
        """

    def prepare(
        self, arrays: Sequence[Any], devices: Collection[str] | None = None
    ) -> Preparation | None:
        """Begin to finish these arrays; None when they are always finished. Raises nothing.

        ``devices`` are those whose handles the peer opens, as far as is known; None is all.
        """

    def wrap(self, buffer: Any) -> Any | None:
        """An array of bytes over a foreign buffer of this memory, without a copy.

        One axis of ``u1``; it keeps the buffer. None where the buffer is of another kind, or not
        contiguous; host memory takes no empty ones.
        """

    def download(self, array: Any) -> memoryview:
        """The bytes of an array of bytes, on the host."""

    def upload(self, data: Any) -> Any:
        """An array of bytes in this process's own memory, with a copy of host bytes."""

    def pin_copies(self, array: Any) -> bool:
        """Whether `pin` would make a copy of this array now."""

    def pin(self, array: Any, prepared: Preparation | None) -> Pin:
        """Find the allocation of an array and hold its bytes in place."""

    def protects(self, array: Any) -> bool:
        """Whether `load` gives what a read-only layout says: an array that cannot be written."""

    def handle(self, allocation: Allocation) -> Handle:
        """The token for an allocation that is pinned now; raises `Refused`."""

    def open(self, announcement: Announce, fds: Sequence[int]) -> Mapping:
        """Open an announced allocation. Takes ownership of the descriptors."""

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        """An array in a mapping; the importer has checked that it lies inside."""

    def owner_of(self, array: Any) -> Any | None:
        """The `Imported.owner` below an array, views included; None if `load` did not make it."""

    def own(self, array: Any) -> Any:
        """A copy that lies in this process's own memory, alike in every other way."""

    def rung(self, preferred: str) -> Rung:
        """The rung on which arrays of this memory go, for a ``transfer`` setting."""

    def fence(self) -> Future[None] | None:
        """Completes when every read that was begun before has ended; None when it has."""

    def trim(self) -> Sequence[Allocation]:
        """Give back what is not in use, quickly; called a few times a second. Raises nothing.

        Returns the allocations that have ceased to exist, so that peers can forget them.
        """

    def collect(self) -> Sequence[Allocation]:
        """As `trim`, but everything that is not in use, now."""

    def close(self) -> None:
        """Give everything back that no live pin or mapping needs. Idempotent."""
