"""``dask gpuipc demo``: the package's main job on a real image, beside plain Dask.

One call, `run_demo`, with a `Request`, gives an `Outcome`; nothing here knows of the command line.

- `picture` reads an image and makes it a plane of whole gray values, 0 to 255;
- `workflow` tiles it to a large dask array and describes the job;
- `clusters` finds out what the machine has and starts worker processes on it;
- `rounds` runs the job on one cluster and reads what moved;
- `outcome` puts both sides together, `table` writes them down for people.
"""

from __future__ import annotations

from dask_gpuipc.demo.errors import DemoError, InputError
from dask_gpuipc.demo.outcome import Outcome
from dask_gpuipc.demo.run import Request, run_demo
from dask_gpuipc.demo.table import as_table

__all__ = ["DemoError", "InputError", "Outcome", "Request", "as_table", "run_demo"]
