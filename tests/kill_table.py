"""docs/kill-matrix.md, from the outcomes of a run of all cells."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

from kill_cells import ACTIONS, STEPS, Cell, cells

HEAD = """\
# Kill matrix

Written by `make matrix` from a run of tests/test_kill_matrix.py; do not edit.

A producer sends two chunks to a consumer, and is held at a step of the transfer by a gate. The
victim is struck; the gate opens. A cell is green when all of this holds:

- The workflow gives what plain Dask gives: the `result`, or, where the scheduler is lost, the same
  error as on the same cluster without the plugin.
- The next transfers, between all workers, those that took the victim's place too, go by handle and
  are right. Memory is poisoned when it is recycled, so that a late reader would see it.
- No task is left on the scheduler, and no worker counts an outgoing transfer.
- With the plugin still on: no lease, no pinned byte, no array held, and after `dask_gpuipc.collect`
  no mapping and no memfd in any process. With the plugin off: no descriptor, no socket, no pidfd,
  no socket folder either.

Where a forked child of the victim lives, it keeps all sockets of its parent; the consumer's leases
end all the same. Plain Dask waits for such a child's connections, so it is ended before the result
is asked for.
"""


def render(outcomes: Mapping[Cell, str]) -> str:
    """The whole document; raises ValueError for a cell without an outcome."""
    missing = [str(cell) for cell in cells() if cell not in outcomes]
    if missing:
        raise ValueError(f"{len(missing)} cells did not pass: {missing}")
    parts = [HEAD, versions()]
    for victim in ACTIONS:
        parts += [f"## The {victim} is the victim", "\n".join(table(victim, outcomes))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def versions() -> str:
    named = ", ".join(f"{name} {version(name)}" for name in ("dask", "distributed", "numpy"))
    release = platform.release().partition("-")[0]
    return f"This run: Python {platform.python_version()}, {named}, Linux {release}."


def table(victim: str, outcomes: Mapping[Cell, str]) -> list[str]:
    actions = ACTIONS[victim]
    rows = [
        ["step", *actions],
        ["---"] * (len(actions) + 1),
        *([step, *(outcomes[Cell(victim, step, a)] for a in actions)] for step in STEPS),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]
