"""Sharing without Dask: arrays of one process, opened by others of the same user and host.

For multiprocessing, a service and its clients, or C++ in another process. It is the same core as
under Dask (`endpoint`, `exporter`, `importer`, the memories), so the same promises hold: memory
that another process can read is neither freed nor reused, and is kept no longer than that; nothing
stays behind whoever dies.

- `get_ipc_handle` makes an `IPCMemoryHandle`, which is pickled and opened elsewhere;
  `IPCEventHandle` does it for CuPy's events.
- `init_reductions` has multiprocessing send arrays as handles, by itself.
- `export_key`, `open_key`, `close_key`, `allow`, `set_attributes`: by a short text, with a list of
  the processes that may.
- `Pool` allocates CUDA memory whose importers survive its exporter.
- `stop` ends all of it in this process.

Rooms: `node` (the endpoints and their thread), `desk` (where others ask), `shelf` (what they may
have), `serving` and `fetching` (the two sides of a visit), `handles`, `keys`, `events`,
`reductions`, with `post` (what is on its way), `carriers` (what messages travel in) and `segments`
(memory with a name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpuipc.sharing.events import IPCEventHandle
from dask_gpuipc.sharing.handles import IPCMemoryHandle, OpenedArray, get_ipc_handle
from dask_gpuipc.sharing.keys import allow, close_key, export_key, open_key, set_attributes
from dask_gpuipc.sharing.node import stop
from dask_gpuipc.sharing.reductions import init_reductions
from dask_gpuipc.sharing.segments import sweep

if TYPE_CHECKING:
    from dask_gpuipc.memory.cuda.pool import Pool

__all__ = [
    "IPCEventHandle",
    "IPCMemoryHandle",
    "OpenedArray",
    "Pool",
    "allow",
    "close_key",
    "export_key",
    "get_ipc_handle",
    "init_reductions",
    "open_key",
    "set_attributes",
    "stop",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "Pool":  # with it comes cupy
        from dask_gpuipc.memory.cuda.pool import Pool

        return Pool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
