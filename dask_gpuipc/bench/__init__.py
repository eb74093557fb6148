"""``dask gpuipc bench``: what a transfer costs here, beside plain Dask and UCX.

One call, `run_bench`, with `Options`, gives an `Outcome`; nothing here knows of the command line.

- `setting` tells what runs: commit, versions, hardware, and how large a chunk can be;
- `clusters` starts one cluster for each side; all are alive at once and take turns;
- `remote` is what runs on the workers;
- `measures` goes through sizes, consumers, small arrays, event loops and pairs of GPUs;
- `record` holds the figures, `text` and `plot` show them.
"""

from __future__ import annotations

from dask_gpuipc.bench.record import BenchError, Options, Outcome
from dask_gpuipc.bench.run import run_bench

__all__ = ["BenchError", "Options", "Outcome", "run_bench"]
