"""What came out: both sides together, and as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, Final, Literal

import numpy as np
from dask.utils import format_bytes

from dask_gpuipc.demo.rounds import PluginCounts, Round, Transfers
from dask_gpuipc.demo.workflow import GRID, is_exact

RTOL: Final = 1e-12
"""Relative tolerance where the job's numbers are too large to be exact."""

PACKAGES: Final = (
    "dask-gpuipc",
    "dask",
    "distributed",
    "numpy",
    "scikit-image",
    "dask-cuda",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


@dataclass(frozen=True, slots=True)
class Job:
    """What runs: the image, and where."""

    picture: str
    side: int
    workers: int
    gpus: int
    memory: Literal["host", "cuda"]
    min_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tiled image."""
        return 8 * self.side**2

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one of its chunks."""
        return self.nbytes // GRID**2

    def describe(self) -> str:
        """Return two lines for people."""
        place = f"CuPy, {self.gpus} GPU(s)" if self.memory == "cuda" else "NumPy"
        return (
            f"{self.picture}, tiled to {self.side} x {self.side} float64: "
            f"{format_bytes(self.nbytes)} in {GRID**2} chunks of "
            f"{format_bytes(self.chunk_nbytes)}\n"
            f"{self.workers} worker processes of one thread, {self.memory} memory ({place}); two "
            "equal clusters, both alive, take turns"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rounds of both sides and the plugin's counts over its own."""

    job: Job
    plain: list[Round]
    plugin: list[Round]
    counts: PluginCounts

    @property
    def exact(self) -> bool:
        """Whether results are compared exactly, or to `RTOL`."""
        return is_exact(self.job.side)

    @property
    def equal(self) -> bool:
        """Whether all rounds of both sides gave the same result."""
        first, *others = (one.result for one in self.plain + self.plugin)
        if self.exact:
            return all(np.array_equal(other, first) for other in others)
        return all(np.allclose(other, first, rtol=RTOL, atol=0.0) for other in others)

    @property
    def moved_bytes(self) -> int:
        """Bytes that moved between workers in the round where least moved."""
        return min(one.transfers.nbytes for one in self.plain + self.plugin)

    def handle_bytes(self, *rungs: str) -> int:
        """Bytes that the plugin's side received by these rungs."""
        return sum(self.counts.received.get(rung, {}).get("bytes", 0) for rung in rungs)

    @property
    def handle_fraction(self) -> float | None:
        """Part of the bytes in chunks at or above min-bytes that crossed by handle.

        The whole is what Dask's own transfer log says; None where no chunk was large enough.
        """
        large = total(self.plugin).large_nbytes
        return min(1.0, self.handle_bytes("share", "copy") / large) if large else None

    @property
    def rungs(self) -> dict[str, dict[str, int]]:
        """Arrays and bytes by rung on the plugin's side, of what could have gone by handle."""
        handles = {k: v for k, v in self.counts.received.items() if k != "bytes"}
        return {k: dict(v) for k, v in {**self.counts.sent, **handles}.items()}

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, texts, lists and dicts."""
        return {
            "equal": self.equal,
            "exact": self.exact,
            "plain_s": seconds(self.plain),
            "plugin_s": seconds(self.plugin),
            "transfer_ratio": ratio(total(self.plain).seconds, total(self.plugin).seconds),
            "moved_bytes": self.moved_bytes,
            "handle_fraction": self.handle_fraction,
            "min_bytes": self.job.min_bytes,
            "memory": self.job.memory,
            "job": {**asdict(self.job), "nbytes": self.job.nbytes},
            "rounds": {
                name: [one.to_dict() for one in rounds]
                for name, rounds in (("plain", self.plain), ("plugin", self.plugin))
            },
            "rungs": self.rungs,
            "refused": dict(self.counts.refused),
            "states": self.counts.states,
            "versions": versions(),
        }


def seconds(rounds: list[Round]) -> float:
    """Median wall clock of a round."""
    return median(one.seconds for one in rounds)


def total(rounds: list[Round]) -> Transfers:
    """All transfers of all rounds."""
    return sum((one.transfers for one in rounds), Transfers())


def ratio(plain: float, plugin: float) -> float | None:
    """How many times less the plugin took; None if it took nothing."""
    return plain / plugin if plugin else None


def versions() -> dict[str, str]:
    """Of Python and of what the demo uses, where installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
