"""Chunks of dask.array cross between the workers of one node as handles instead of bytes.

>>> from dask_gpuipc import GPUIPCPlugin
>>> client.register_worker_plugin(GPUIPCPlugin())  # doctest: +SKIP

Without Dask, `get_ipc_handle` and the rest of `dask_gpuipc.sharing` do it for any two processes.

Importing this package imports neither distributed nor any GPU library; its names do so when they
are first asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dask_gpuipc import sharing
    from dask_gpuipc.preload import dask_setup, register
    from dask_gpuipc.reports import collect, report, statistics
    from dask_gpuipc.sharing import IPCMemoryHandle, get_ipc_handle
    from dask_gpuipc.worker_plugin import GPUIPCPlugin

__version__ = "0.1.0"
__all__ = [
    "GPUIPCPlugin",
    "IPCMemoryHandle",
    "__version__",
    "collect",
    "dask_setup",
    "get_ipc_handle",
    "register",
    "report",
    "sharing",
    "statistics",
]

_HOMES: Final = {
    "GPUIPCPlugin": "worker_plugin",
    "dask_setup": "preload",
    "register": "preload",
    "statistics": "reports",
    "collect": "reports",
    "report": "reports",
    "IPCMemoryHandle": "sharing",
    "get_ipc_handle": "sharing",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "sharing":
        return importlib.import_module(f"{__name__}.sharing")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if name == "GPUIPCPlugin":
        from dask_gpuipc import _compat

        _compat.add_register_worker_plugin()
    globals()[name] = value
    return value


if hasattr(sys.modules.get("distributed"), "Client"):
    # Python looks ``client.register_worker_plugin`` up before its argument asks for the plugin.
    from dask_gpuipc._compat import add_register_worker_plugin

    add_register_worker_plugin()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
