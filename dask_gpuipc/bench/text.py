"""An outcome as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dask.utils import format_bytes, format_time

from dask_gpuipc.bench.record import PARTS, Outcome, SizeFigures
from dask_gpuipc.terminal import Cell, Mood, Screen, Table

Row = Sequence[str | Cell]

HEADS: Final = ("chunk", "side", ">transfer", ">with read", ">first", ">again", ">wall", ">faster")


def show(outcome: Outcome, screen: Screen) -> None:
    """Write an outcome to a screen."""
    hardware, options = outcome.setting["hardware"], outcome.options
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"])
    screen.line(f"{options['memory']} memory on {gpus or hardware['cpu']}", Mood.STRONG)
    versions = outcome.setting["versions"]
    screen.line(", ".join(f"{name} {number}" for name, number in versions.items()))
    for table in (
        _sizes(outcome), _parts(outcome), _consumers(outcome), _many(outcome), _loops(outcome),
        _pairs(outcome),
    ):  # fmt: skip
        if table.rows:
            screen.table(table)


def _sizes(outcome: Outcome) -> Table:
    rows: list[Row] = []
    for nbytes, copied in outcome.copies.items():
        rows += [_size(one, outcome) for one in outcome.sizes if one.nbytes == nbytes]
        rows.append([format_bytes(nbytes), Cell("one copy", Mood.DIM), time_of(copied)])
    note = (
        "Medians. transfer: as Dask logs it; with read: and the first full read; first: with an "
        "allocation that had to be opened; again: of another worker's fetch of the same chunk; "
        "faster: how many times with read is below plain's."
    )
    full = [[*row, *[""] * (len(HEADS) - len(row))] for row in rows]
    return Table("One chunk from one worker to another", HEADS, full, note=note)


def _size(one: SizeFigures, outcome: Outcome) -> Row:
    plain = [p for p in outcome.sizes if p.side == "plain" and p.nbytes == one.nbytes]
    ratio = plain[0].repeated["with_read"] / one.repeated["with_read"] if plain else None
    return [
        format_bytes(one.nbytes),
        one.side if not one.by_handle else f"{one.side} (by handle)",
        time_of(one.repeated["transfer"]),
        time_of(one.repeated["with_read"]),
        time_of(one.first.get("transfer")),
        time_of(one.again),
        time_of(one.repeated["wall"]),
        "" if ratio is None or one.side == "plain" else f"{ratio:.2f}",
    ]


def _parts(outcome: Outcome) -> Table:
    rows: list[Row] = [
        [format_bytes(one.nbytes), one.side, *(time_of(one.parts[part]) for part in PARTS)]
        for one in outcome.sizes
        if one.by_handle
    ]
    note = "Medians of each; wire is what is left of the transfer, Dask's own work included."
    return Table("Parts", ("chunk", "side", *(f">{part}" for part in PARTS)), rows, note=note)


def _consumers(outcome: Outcome) -> Table:
    rows: list[Row] = [
        [
            str(one.consumers),
            one.side,
            time_of(one.seconds),
            f"{one.copies:.2f}" if one.copies else "-",
            format_bytes(one.shared_bytes) if one.shared_bytes else "-",
        ]
        for one in outcome.consumers
    ]
    size = format_bytes(outcome.consumers[0].nbytes) if outcome.consumers else ""
    heads = (">workers", "side", ">until all have it", ">chunks pinned", ">arenas")
    return Table(f"Workers that fetch one chunk of {size} at once", heads, rows)


def _many(outcome: Outcome) -> Table:
    rows: list[Row] = [
        [
            f"{one.arrays} of {format_bytes(one.nbytes)}",
            one.side,
            time_of(one.transfer),
            time_of(one.wall),
        ]
        for one in outcome.many
    ]
    return Table("Many arrays for one task", ("arrays", "side", ">transfers", ">wall"), rows)


def _loops(outcome: Outcome) -> Table:
    rows: list[Row] = [
        [
            one.side,
            one.worker,
            f"{one.transfers} chunks" if one.loaded else "idle",
            *map(time_of, (one.median, one.p99, one.most)),
        ]
        for one in outcome.loops
    ]
    heads = ("side", "worker", "meanwhile", ">median", ">99 %", ">most")
    return Table("How late event loops were", heads, rows)


def _pairs(outcome: Outcome) -> Table:
    rows: list[Row] = [
        [one.source, one.target, one.side, time_of(one.transfer),
         f"{format_bytes(int(one.nbytes / one.transfer))}/s"]
        for one in outcome.pairs
    ]  # fmt: skip
    size = format_bytes(outcome.pairs[0].nbytes) if outcome.pairs else ""
    heads = ("from", "to", "side", ">transfer", ">pace")
    return Table(f"{size} between GPUs", heads, rows)


def time_of(seconds: float | None) -> str:
    """For people; a dash where there is none."""
    return "-" if seconds is None else format_time(seconds)
