"""What the heartbeats of all workers tell, as a `Report`.

Every open page asks for it a few times a second, on the scheduler's event loop. So it is made once
for all of them, not more often than every `OFTEN` seconds, and less often where it takes long.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from distributed import Scheduler

from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.reports.record import Report, causes, pairs, savings, worker_row
from dask_gpuipc.worker_plugin import NAME

OFTEN: Final = 0.4
"""Seconds."""
SHARE: Final = 0.03
"""Of the event loop's time, at most."""

Numbers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Made:
    report: Report
    until: float


_made: weakref.WeakKeyDictionary[Scheduler, _Made] = weakref.WeakKeyDictionary()


def numbers(scheduler: Scheduler) -> Numbers:
    """The last numbers of each worker that has the plugin."""
    return {
        address: worker.metrics[NAME]
        for address, worker in scheduler.workers.items()
        if NAME in worker.metrics
    }


def report(scheduler: Scheduler) -> Report:
    """A report of these numbers; at most a moment old."""
    made = _made.get(scheduler)
    begin = time.monotonic()
    if made is None or begin >= made.until:
        new = _report(scheduler)
        took = time.monotonic() - begin
        made = _made[scheduler] = _Made(new, begin + max(OFTEN, took / SHARE))
    return made.report


def _report(scheduler: Scheduler) -> Report:
    all_numbers = numbers(scheduler)
    absent = {"state": "disabled: not registered"}
    return Report(
        workers=tuple(
            worker_row(address, str(w.name), w.host, all_numbers.get(address, absent))
            for address, w in scheduler.workers.items()
        ),
        pairs=pairs(all_numbers),
        refused=causes(all_numbers, Refusal),
        failed=causes(all_numbers, Failure),
        savings=savings(all_numbers, {}),
    )
