"""A diagnosis as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dask.utils import format_bytes, format_time

from dask_gpuipc.doctor.record import Diagnosis, Finding, Level, PairResult
from dask_gpuipc.errors import Refusal
from dask_gpuipc.explain import explain
from dask_gpuipc.probe import Fetched
from dask_gpuipc.reports.record import RUNGS
from dask_gpuipc.terminal import Cell, Mood, Screen, Table

MOODS: Final = {Level.GOOD: Mood.GOOD, Level.NOTE: Mood.WARN, Level.BAD: Mood.BAD}


def show(diagnosis: Diagnosis, screen: Screen) -> None:
    """Write a diagnosis to a screen; the verdict comes last, where people look."""
    screen.line(diagnosis.subject, Mood.STRONG)
    screen.line(", ".join(f"{name} {number}" for name, number in diagnosis.versions.items()))
    screen.table(_findings(diagnosis.findings))
    for memory in dict.fromkeys(pair.memory for pair in diagnosis.pairs):
        screen.table(_pairs(memory, [p for p in diagnosis.pairs if p.memory == memory]))
    _reasons(diagnosis, screen)
    screen.line()
    if diagnosis.works:
        screen.line("Handles work between each two that were tried.", Mood.GOOD)
    else:
        screen.line("Handles do not work everywhere; see above.", Mood.BAD)


def _findings(findings: Sequence[Finding]) -> Table:
    rows: list[list[str | Cell]] = [
        [Cell(one.level.value, MOODS[one.level]), one.what, one.value, _advice(one)]
        for one in findings
    ]
    return Table("Findings", ("", "what", "is", "meaning"), rows)


def _advice(finding: Finding) -> str:
    if finding.meaning and finding.remedy:
        return f"{finding.meaning}. What to do: {finding.remedy}."
    return finding.meaning or finding.remedy


def _pairs(memory: str, pairs: Sequence[PairResult]) -> Table:
    wanted = {name for pair in pairs for name in pair.ways}
    ways = [name for name in ("handle", *RUNGS) if name in wanted]
    size = max((one.nbytes for pair in pairs for one in pair.ways.values()), default=0)
    rows: list[list[str | Cell]] = [
        [pair.source, pair.target, *(_way(name, pair.ways.get(name)) for name in ways),
         Cell("works", Mood.GOOD) if pair.works else Cell(pair.error or "does not work", Mood.BAD)]
        for pair in pairs
    ]  # fmt: skip
    heads = ("from", "to", *(f">{name}" for name in ways), "verdict")
    note = f"Chunks of {format_bytes(size)}: bytes by time from asking to having, and that time."
    return Table(f"{memory} memory", heads, rows, note=note)


def _way(wanted: str, fetched: Fetched | None) -> Cell:
    if fetched is None:
        return Cell("-", Mood.DIM)
    if fetched.failed:
        return Cell(fetched.failed, Mood.BAD)
    if not fetched.right:
        return Cell("wrong values", Mood.BAD)
    pace = f"{format_bytes(int(fetched.bandwidth))}/s, {format_time(fetched.seconds)}"
    if wanted in ("handle", fetched.rung):
        return Cell(pace if wanted != "handle" else f"{fetched.rung}: {pace}")
    return Cell(f"{fetched.rung}: {pace}", Mood.WARN)


def _reasons(diagnosis: Diagnosis, screen: Screen) -> None:
    """What the refusals of pairs that do not work mean."""
    reasons = {reason for pair in diagnosis.pairs if not pair.works for reason in pair.reasons}
    rows = [[reason, *_explained(reason)] for reason in sorted(reasons)]
    if rows:
        screen.table(Table("Refused meanwhile", ("reason", "meaning", "what to do"), rows))


def _explained(reason: str) -> tuple[str, str]:
    try:
        explanation = explain(Refusal(reason))
    except ValueError:  # of a worker with a later version
        return "", ""
    return explanation.meaning, explanation.remedy
