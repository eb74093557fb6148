"""An outcome for people."""

from __future__ import annotations

from typing import Final

from dask.utils import format_bytes

from dask_gpuipc.demo.outcome import RTOL, Outcome, ratio, seconds, total
from dask_gpuipc.demo.rounds import Round

Row = tuple[str, str, str, str]

EXPLAINED: Final = {"no_advertisement": " (results that the client fetched)"}
"""Refusals that belong to the job and might look like faults."""


def as_table(outcome: Outcome) -> str:
    """Return times, transfers, bytes by rung, ratios, and whether the results are equal."""
    rows = [("each round", "plain", "plugin", "plain / plugin"), *_times(outcome), *_bytes(outcome)]
    lines = [f"{a:<27}{b:>12}{c:>12}{d:>17}" for a, b, c, d in rows]
    return "\n".join(["", *lines, "", *_remarks(outcome)])


def _times(outcome: Outcome) -> list[Row]:
    plain, plugin = outcome.plain, outcome.plugin
    walls = seconds(plain), seconds(plugin)
    moves = _mean(plain, "seconds"), _mean(plugin, "seconds")
    return [
        ("time (median)", f"{walls[0]:.2f} s", f"{walls[1]:.2f} s", _ratio(*walls)),
        ("time in transfers (sum)", f"{moves[0]:.2f} s", f"{moves[1]:.2f} s", _ratio(*moves)),
        ("transfers", f"{_mean(plain, 'count'):.0f}", f"{_mean(plugin, 'count'):.0f}", ""),
    ]


def _bytes(outcome: Outcome) -> list[Row]:
    plain, plugin = _mean(outcome.plain, "nbytes"), _mean(outcome.plugin, "nbytes")
    handles = {rung: outcome.handle_bytes(rung) / len(outcome.plugin) for rung in ("share", "copy")}
    return [
        ("moved between workers", _size(plain), _size(plugin), _ratio(plain, plugin)),
        *((f"  by {rung}", "", _size(nbytes), "") for rung, nbytes in handles.items()),
        ("  by bytes", _size(plain), _size(plugin - sum(handles.values())), ""),
    ]


def _remarks(outcome: Outcome) -> list[str]:
    job = outcome.job
    large = total(outcome.plugin).large_nbytes
    fraction = outcome.handle_fraction
    part = "nothing to say" if fraction is None else f"{fraction:.1%} of {_size(large)}"
    refused = ", ".join(
        f"{reason} {n}{EXPLAINED.get(reason, '')}" for reason, n in outcome.counts.refused.items()
    )
    how = "exactly" if outcome.exact else f"to a relative {RTOL}"
    rounds = len(outcome.plain) + len(outcome.plugin)
    return [
        f"at least {_size(outcome.moved_bytes)} moved between workers in every round",
        f"by handle, of chunks from {_size(job.min_bytes)} on: {part}",
        f"refused: {refused or 'nothing'}",
        f"plugin: {', '.join(outcome.counts.states)}",
        f"results of {rounds} rounds, compared {how}: {'equal' if outcome.equal else 'DIFFERENT'}",
    ]


def _mean(rounds: list[Round], what: str) -> float:
    return float(getattr(total(rounds), what)) / len(rounds)


def _ratio(plain: float, plugin: float) -> str:
    value = ratio(plain, plugin)
    return "" if value is None else f"{value:.2f}"


def _size(nbytes: float) -> str:
    return format_bytes(int(nbytes))
