"""Poison on recycle: whoever reads what was given back reads nonsense, not the old bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final
from unittest import mock

from dask_gpuipc.memory import host
from dask_gpuipc.memory.extents import Extents
from dask_gpuipc.memory.host import Arena

POISON: Final = 0xDB
"""Every byte of memory that was given back."""


class _PoisonedExtents(Extents):
    """Overwrites what it takes back."""

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(size)
        self._fd = fd

    def give(self, offset: int, nbytes: int) -> None:
        os.pwrite(self._fd, bytes([POISON]) * nbytes, offset)
        super().give(offset, nbytes)


class _PoisonedArena(Arena):
    def __init__(self, number: int, size: int) -> None:
        super().__init__(number, size)
        self.extents = _PoisonedExtents(self.fd, size)


@contextlib.contextmanager
def poisoned_arenas() -> Iterator[None]:
    """Within, all arenas that this process makes poison a slot the moment that it is free.

    A consumer that still has the slot mapped, and has not written to it, then reads poison.
    """
    with mock.patch.object(host, "Arena", _PoisonedArena):
        yield
