"""What was asked for, and the figures that came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dask_gpuipc.errors import GPUIPCError

PARTS: Final = ("readiness", "export", "wire", "import", "copy", "release")
"""Of a transfer, in the order in which they happen; see docs/benchmarks.md."""


class BenchError(GPUIPCError):
    """The benchmark cannot run here; the text says why and what helps."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for; None is the machine's default.

    Parameters
    ----------
    memory : {"host", "cuda"}, optional
    sides : tuple of str
        Names of `clusters.SIDES`; empty for the default ones.
    max_size : int, optional
        Bytes of the largest chunk.
    rounds, warm_up : int
        Counted rounds of each measure and side, and those before them.
    consumers : int
        Workers that fetch one chunk at the same time, at most; at least 2.
    many : int
        Number of small arrays.
    load_seconds : float
        For which event loops are watched, idle and while loads run.
    """

    memory: str | None = None
    sides: tuple[str, ...] = ()
    max_size: int | None = None
    rounds: int = 10
    warm_up: int = 2
    consumers: int = 4
    many: int = 200
    load_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """Chunks of one size on one side: medians, in seconds.

    ``transfer`` is what Dask logs of it, ``with_read`` the same and the first full read, ``wall``
    what a client waits. In ``first`` the allocation had to be opened, in ``repeated`` it was open;
    without the plugin all are repeated. ``again`` is another worker's fetch of a chunk that was
    fetched already. ``by_handle`` counts transfers.
    """

    side: str
    nbytes: int
    repeated: Mapping[str, float]
    first: Mapping[str, float]
    parts: Mapping[str, float]
    again: float
    by_handle: int
    rounds: int
    all: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerFigures:
    """So many workers that fetch one chunk at the same time, until the last one has it.

    ``copies`` is the number of chunks that the exporter has pinned for them, ``shared_bytes`` what
    its arenas take (host memory).
    """

    side: str
    consumers: int
    nbytes: int
    seconds: float
    copies: float
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class ManyFigures:
    """One task that takes so many arrays of one size: what Dask logs in all, and the wall clock."""

    side: str
    arrays: int
    nbytes: int
    transfer: float
    wall: float


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """How late a worker's event loop was, in seconds, idle or while chunks moved."""

    side: str
    worker: str
    loaded: bool
    transfers: int
    median: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class PairFigures:
    """One size between two GPUs."""

    side: str
    source: str
    target: str
    nbytes: int
    transfer: float
    by_handle: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All of it. Compare figures of one outcome only."""

    setting: Mapping[str, Any]
    options: Mapping[str, Any]
    sizes: tuple[SizeFigures, ...]
    copies: Mapping[int, float]
    """By size, the seconds of one copy in the same memory: the floor of what copies."""
    consumers: tuple[ConsumerFigures, ...]
    many: tuple[ManyFigures, ...]
    loops: tuple[LoopFigures, ...]
    pairs: tuple[PairFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers only; times are in seconds."""
        plain = asdict(self)
        setting = plain.pop("setting")
        plain["copies"] = {str(nbytes): taken for nbytes, taken in self.copies.items()}
        return {**setting, **plain}
