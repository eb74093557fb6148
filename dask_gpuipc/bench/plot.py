"""An outcome as pictures, by matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from dask.utils import format_bytes

from dask_gpuipc.bench.record import PARTS, BenchError, Outcome

COLOURS: Final = ("tab:gray", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:red")


def check(file: Path) -> None:
    """Raise `BenchError` if a plot could not be written there, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot wants matplotlib: pip install 'dask-gpuipc[bench]'")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise BenchError(f"--plot {file}: the name must end in one of .{', .'.join(sorted(known))}")
    if not file.absolute().parent.is_dir():
        raise BenchError(f"--plot {file}: there is no such folder")


def draw(outcome: Outcome, file: Path) -> None:
    """Write four pictures to one file, in the format that its name ends in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    times, parts, consumers, loops = figure.subplots(2, 2).flat
    colours = dict(zip(outcome.options["sides"], COLOURS, strict=False))
    _times(times, outcome, colours)
    _parts(parts, outcome)
    _consumers(consumers, outcome, colours)
    _loops(loops, outcome, colours)
    figure.savefig(file, dpi=150)


def _times(axes: Any, outcome: Outcome, colours: dict[str, str]) -> None:
    for side, colour in colours.items():
        mine = [one for one in outcome.sizes if one.side == side]
        sizes = [one.nbytes for one in mine]
        for what, style in (("transfer", "--"), ("with_read", "-")):
            label = side if what == "with_read" else None
            times = [1e3 * one.repeated[what] for one in mine]
            axes.plot(sizes, times, style, color=colour, label=label)
    axes.plot(
        list(outcome.copies), [1e3 * t for t in outcome.copies.values()], ":k", label="one copy"
    )
    axes.set(xscale="log", yscale="log", ylabel="ms", title="Transfer (--), and first full read")
    sizes = list(outcome.copies)
    axes.set_xticks(sizes, [format_bytes(n) for n in sizes], rotation=45, fontsize="small")
    axes.minorticks_off()
    axes.legend()


def _parts(axes: Any, outcome: Outcome) -> None:
    mine = [one for one in outcome.sizes if one.by_handle]
    names = [f"{format_bytes(one.nbytes)}\n{one.side}" for one in mine]
    bottom = [0.0] * len(mine)
    for part in PARTS:
        heights = [1e3 * one.parts[part] for one in mine]
        axes.bar(range(len(mine)), heights, bottom=bottom, label=part)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set(ylabel="ms", title="Parts of a transfer by handle")
    axes.set_xticks(range(len(mine)), names, rotation=90, fontsize="small")
    if mine:
        axes.legend()


def _consumers(axes: Any, outcome: Outcome, colours: dict[str, str]) -> None:
    for side, colour in colours.items():
        mine = [one for one in outcome.consumers if one.side == side]
        times = [1e3 * one.seconds for one in mine]
        axes.plot([one.consumers for one in mine], times, "o-", color=colour, label=side)
    axes.set(xlabel="workers", ylabel="ms", ylim=(0, None), title="One chunk, until all have it")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def _loops(axes: Any, outcome: Outcome, colours: dict[str, str]) -> None:
    mine = outcome.loops
    names = [f"{one.side}\n{one.worker}\n{'loaded' if one.loaded else 'idle'}" for one in mine]
    for number, one in enumerate(mine):
        axes.bar(number, 1e3 * one.p99, color=colours[one.side])
        axes.plot(number, 1e3 * one.most, "k_")
    axes.set(ylabel="ms", yscale="log", title="Event loops late: 99 %, and most (_)")
    axes.set_xticks(range(len(mine)), names, rotation=90, fontsize="small")
