"""What the doctor finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from dask_gpuipc.probe import Fetched
from dask_gpuipc.reports.record import HANDLES


class Level(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    NOTE = "note"
    """Works, but somebody may want to know."""
    BAD = "bad"
    """Handles do not work because of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it is, what that means, and what to do about it."""

    level: Level
    what: str
    value: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class PairResult:
    """What one worker got from another, by each way that was asked for.

    ``ways`` maps what was wanted (a rung, or ``handle`` for whatever the cluster is set to) to how
    it came; ``reasons`` are refusals that the source counted meanwhile.
    """

    source: str
    target: str
    memory: str
    ways: Mapping[str, Fetched] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    error: str = ""
    """Why it could not be tried, where it could not."""

    @property
    def works(self) -> bool:
        """Whether every way but bytes came by some handle, with the right values."""
        handles = [fetched for wanted, fetched in self.ways.items() if wanted != "bytes"]
        return (
            not self.error
            and bool(handles)
            and all(one.right and one.rung in HANDLES for one in handles)
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found."""

    subject: str
    versions: Mapping[str, str]
    findings: tuple[Finding, ...]
    pairs: tuple[PairResult, ...]

    @property
    def works(self) -> bool:
        """Whether chunks went by handle between each two workers that were tried."""
        return bool(self.pairs) and all(pair.works for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers only."""
        return {
            **asdict(self),
            "works": self.works,
            "pairs": [{**asdict(pair), "works": pair.works} for pair in self.pairs],
        }
