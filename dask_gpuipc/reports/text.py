"""A report as text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence

from dask.utils import format_bytes, format_time

from dask_gpuipc.reports.layout import Field, busiest, label, labels, matrix, ordered
from dask_gpuipc.reports.record import (
    HANDLES,
    RUNGS,
    Cause,
    Report,
    Saving,
    WorkerRow,
    percent,
)
from dask_gpuipc.terminal import Cell, Mood, PlainScreen, Screen, Table


def as_text(report: Report) -> str:
    """The whole report as plain text."""
    stream = io.StringIO()
    show(report, PlainScreen(stream))
    return stream.getvalue()


def show(report: Report, screen: Screen) -> None:
    """Write a report to a screen."""
    on = all(worker.enabled for worker in report.workers)
    screen.line(report.headline, Mood.GOOD if on and report.workers else Mood.WARN)
    for table in _tables(report):
        screen.table(table)
    for note in report.notes:
        screen.line(note, Mood.WARN)


def _tables(report: Report) -> Iterator[Table]:
    workers = ordered(report)
    names = labels(workers)
    yield _workers(workers, names)
    if report.totals:
        yield _rungs(report)
        yield _pairs(report, workers, names)
    if report.savings:
        yield _savings(report)
    for title, causes in (
        ("Refused: why something went as bytes", report.refused),
        ("Failed: why a handle did not open", report.failed),
    ):
        if causes:
            yield _causes(title, causes)


def _workers(workers: Sequence[WorkerRow], names: Mapping[str, str]) -> Table:
    heads = (
        "worker", "host", "memories", ">leases", ">pinned", ">holding", ">mappings", ">mapped",
        ">hits", "state",
    )  # fmt: skip
    return Table("Workers", heads, [_worker(worker, names) for worker in workers])


def _worker(worker: WorkerRow, names: Mapping[str, str]) -> list[str | Cell]:
    found = worker.opens + worker.hits
    return [
        names[worker.address],
        worker.host,
        ", ".join(worker.memories) or "-",
        str(worker.leases),
        size(worker.pinned_bytes),
        str(worker.holding),
        str(worker.mappings),
        size(worker.mapped_bytes),
        percent(worker.hits / found) if found else "-",
        Cell(worker.state, Mood.GOOD if worker.enabled else Mood.BAD),
    ]


def _rungs(report: Report) -> Table:
    moved = sum(traffic.bytes for traffic in report.totals.values())
    rows: list[list[str | Cell]] = [
        [
            Cell(rung, Mood.GOOD if rung in HANDLES else Mood.WARN),
            f"{traffic.arrays}",
            size(traffic.bytes),
            percent(traffic.bytes / moved) if moved else "-",
        ]
        for rung, traffic in report.totals.items()
    ]
    return Table("Between workers, by rung", ("rung", ">arrays", ">bytes", ">part"), rows)


def _pairs(report: Report, workers: Sequence[WorkerRow], names: Mapping[str, str]) -> Table:
    fields = matrix(report, workers)
    if fields is None:
        return _busiest(report, names)
    short = [names[worker.address] for worker in workers]
    return Table(
        "Bytes by handle, from row to column",
        ("from \\ to", *(f">{name}" for name in short)),
        [[name, *map(_cell, row)] for name, row in zip(short, fields, strict=True)],
        note="A percentage is the part that went by handle, where it is not all.",
    )


def _cell(field: Field) -> Cell:
    if not field.moved:
        return Cell("." if field.moved is None else "-", Mood.DIM)
    fraction = field.fraction or 0.0
    if fraction == 1:
        return Cell(size(field.handles), Mood.GOOD)
    mood = Mood.WARN if fraction else Mood.BAD
    return Cell(f"{size(field.handles)} ({percent(fraction)})", mood)


def _busiest(report: Report, names: Mapping[str, str]) -> Table:
    rows = [
        [
            label(names, pair.source),
            label(names, pair.target),
            *(size(pair.bytes(rung)) for rung in RUNGS),
        ]
        for pair in busiest(report)
    ]
    heads = ("from", "to", *(f">{rung}" for rung in RUNGS))
    return Table("The busiest pairs, bytes by rung", heads, rows)


def _savings(report: Report) -> Table:
    return Table(
        "Time in transfers by handle",
        ("memory", ">transfers", ">bytes", ">took", ">by handle", ">as bytes", ">saved"),
        [_saving(saving) for saving in report.savings],
        note="By handle and as bytes are estimates, by what both ways took in turn just now; took "
        "is what the transfers really took, with all that the workers did meanwhile.",
    )


def _saving(saving: Saving) -> list[str | Cell]:
    timing, saved = saving.timing, saving.seconds
    return [
        saving.memory,
        str(timing.transfers),
        size(timing.bytes),
        format_time(timing.seconds),
        _seconds(saving.handle_seconds),
        _seconds(saving.bytes_seconds),
        Cell(_seconds(saved), Mood.PLAIN if not saved else Mood.GOOD if saved > 0 else Mood.WARN),
    ]


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return format_time(seconds) if seconds >= 0 else f"-{format_time(-seconds)}"


def _causes(title: str, causes: Sequence[Cause]) -> Table:
    rows: list[list[str | Cell]] = [
        [
            Cell(cause.reason, Mood.WARN if cause.explanation.warns else Mood.PLAIN),
            str(cause.count),
            str(cause.workers),
            f"{cause.explanation.meaning}. What to do: {cause.explanation.remedy}.",
        ]
        for cause in causes
    ]
    return Table(title, ("reason", ">times", ">workers", "meaning"), rows)


def size(nbytes: int) -> str:
    """Bytes for people."""
    return format_bytes(nbytes)
