"""Whoever dies, stops or leaves, at whatever step of a transfer: nothing is lost, nothing left.

The cells are in kill_cells.py; docs/kill-matrix.md is written from a run of them (``make matrix``).
Here run as many as it takes to have every way to strike every victim, and every step; the others
carry the marker ``stress``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_cells import ACTIONS, KILLS, STEPS, Cell, Sites, cells, short_directory

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sites]:
    with short_directory() as directory:
        sites = Sites(directory)
        yield sites
        sites.close()


def plain(sites: Sites, cell: Cell) -> str:
    """What plain Dask gives: the result; or when the scheduler goes, an error, which is looked up.

    Without the plugin there are but two steps that tell: something is under way, or nothing is.
    """
    if cell.victim != "scheduler":
        return "result"
    idle = cell.step in ("while the array is held", "while releases are queued")
    step = "while the array is held" if idle else "after the OK"
    alike = Cell(cell.victim, step, cell.action)
    if alike not in sites.plain:
        sites.plain[alike] = sites.run(alike, plugin=False)
    return sites.plain[alike]


def in_default_suite(cell: Cell) -> bool:
    """One step for every way to strike a worker, another one each time."""
    pairs = [(victim, action) for victim, actions in ACTIONS.items() for action in actions]
    turn = pairs.index((cell.victim, cell.action))
    return cell.step == [*STEPS][(3 * turn) % len(STEPS)] and (
        cell.victim != "scheduler" or cell.action == "SIGSTOP and SIGCONT"
    )


def params() -> list[Any]:
    return [
        pytest.param(cell, id=str(cell), marks=[] if in_default_suite(cell) else pytest.mark.stress)
        for cell in cells()
    ]


@pytest.mark.parametrize("cell", params())
def test_cell(cluster: Sites, cell: Cell, record_property: Any) -> None:
    wanted = plain(cluster, cell)
    outcome = cluster.run(cell)
    assert outcome == wanted
    record_property("cell", (cell, outcome))


def test_the_committed_table_names_every_cell_and_all_are_green() -> None:
    text = (Path(__file__).parent.parent / "docs" / "kill-matrix.md").read_text()
    sections = {part.splitlines()[0]: part for part in text.split("\n## ")[1:]}
    for victim, actions in ACTIONS.items():
        rows = [
            [column.strip() for column in line.strip("|").split("|")]
            for line in sections[f"The {victim} is the victim"].splitlines()
            if line.startswith("|")
        ]
        assert rows[0] == ["step", *actions]
        assert [row[0] for row in rows[2:]] == [*STEPS]
        green = {"result"}
        if victim == "scheduler":
            green |= {"FutureCancelledError", "ClosedClientError"}
        assert {column for row in rows[2:] for column in row[1:]} <= green


def test_the_default_suite_has_every_strike_and_every_step() -> None:
    chosen = [cell for cell in cells() if in_default_suite(cell)]
    workers = [c for c in chosen if c.victim != "scheduler"]
    assert len({(c.victim, c.action) for c in workers}) == 12
    assert {c.step for c in workers} == {*STEPS}
    assert {c.action for c in chosen} >= {*KILLS}
