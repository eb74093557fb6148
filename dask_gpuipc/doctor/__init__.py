"""``dask gpuipc doctor``: whether handles work here, found out by doing it.

- `machine` looks at what the kernel, the limits and the drivers allow, as `Finding`s;
- `pairs` has workers fetch chunks from each other, and times every way;
- `examine` does both: on this machine, with worker processes of its own, or on a running cluster;
- `text` writes the `Diagnosis`.
"""

from __future__ import annotations

from dask_gpuipc.doctor.examine import examine_cluster, examine_machine
from dask_gpuipc.doctor.record import Diagnosis, Finding, Level, PairResult

__all__ = [
    "Diagnosis",
    "Finding",
    "Level",
    "PairResult",
    "examine_cluster",
    "examine_machine",
]
