"""What a cluster did and holds, and why: the numbers, and a report of them for people.

- `gather` fetches the numbers of every worker.
"""

from __future__ import annotations

from dask_gpuipc.reports.gather import collect, statistics

__all__ = ["collect", "statistics"]
