"""Differences between releases of distributed."""

from __future__ import annotations

from typing import Any

from distributed import Client


def add_register_worker_plugin() -> None:
    """Give `Client.register_worker_plugin` back to releases that dropped it.

    Those after 2026.1 have only ``register_plugin``, which does the same. A method that is there is
    left alone.
    """
    if not hasattr(Client, "register_worker_plugin"):
        setattr(Client, "register_worker_plugin", _register_worker_plugin)  # noqa: B010


def _register_worker_plugin(
    self: Client, plugin: Any = None, name: str | None = None, nanny: bool | None = None
) -> Any:
    """Register a worker plugin; the same as ``register_plugin`` (added by dask_gpuipc)."""
    return self.register_plugin(plugin, name=name)
