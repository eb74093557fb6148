"""What floors above want of CuPy without importing it."""

from __future__ import annotations

from typing import Any

from dask_gpuipc.errors import MemoryUnavailable


def upload(array: Any) -> Any:
    """A ``cupy.ndarray`` with the elements of a NumPy array, on the current device."""
    try:
        import cupy
    except ImportError as error:
        raise MemoryUnavailable(f"a CuPy array came here: {error}") from error
    return cupy.asarray(array)
