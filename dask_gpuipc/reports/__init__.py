"""What a cluster did and holds, and why: the numbers, and a report of them for people.

- `gather` fetches the numbers of every worker;
- `record` is what a report holds, `make` puts one together;
- `layout` says what stands where; `text` and `html` write it.
"""

from __future__ import annotations

from dask_gpuipc.reports.gather import collect, statistics
from dask_gpuipc.reports.make import report
from dask_gpuipc.reports.record import Cause, Pace, Paces, Pair, Report, Saving, WorkerRow

__all__ = [
    "Cause",
    "Pace",
    "Paces",
    "Pair",
    "Report",
    "Saving",
    "WorkerRow",
    "collect",
    "report",
    "statistics",
]
