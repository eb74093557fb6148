"""Finished before offered: arrays on their way to holding their final bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dask_gpuipc.errors import Refusal, Refused
from dask_gpuipc.memory.cuda.copying import private_copy
from dask_gpuipc.memory.cuda.device import Device, Mark
from dask_gpuipc.memory.cuda.driver import CudaError, as_refused
from dask_gpuipc.memory.cuda.mappings import BORROWED

QUICK_LOOKS: Final = 3
"""How often a mark is looked at on the event loop before a thread waits for it."""


@dataclass(frozen=True, slots=True)
class _Covered:
    """An array that was asked for, and what may be exported of it: itself, a copy, or nothing.

    The array is held so that its identity stays its own.
    """

    array: Any
    device: Device | None = None
    source: Any = None
    refused: Refused | None = None


class CudaPreparation:
    """Covers exactly the arrays it was made with, by identity, once it was awaited.

    Made and awaited on the event loop; `source` may be called on any thread.

    Parameters
    ----------
    devices : mapping of int to Device
    arrays : sequence of cupy.ndarray
    """

    def __init__(self, devices: dict[int, Device], arrays: Sequence[Any]) -> None:
        self._covered: dict[int, _Covered] = {}
        self._marks: list[tuple[Device, Mark]] = []
        self._final = False
        by_device: dict[int, dict[int, Any]] = {}
        for array in arrays:
            by_device.setdefault(array.data.device_id, {})[id(array)] = array
        for ordinal, group in by_device.items():
            self._begin(devices.get(ordinal), list(group.values()))

    def __repr__(self) -> str:
        state = "final" if self._final else f"behind {len(self._marks)} marks"
        return f"<CudaPreparation: {len(self._covered)} arrays, {state}>"

    async def wait(self) -> None:
        """Return when all of it is final, or refused. Raises nothing."""
        while self._marks:
            await self._pass(*self._marks[-1])
            self._marks.pop()
        self._final = True

    def source(self, array: Any) -> tuple[Device, Any]:
        """The array to export for one that is covered, and its device.

        Raises
        ------
        Refused
            It is not covered, not final, or could not be made so.
        """
        covered = self._covered.get(id(array))
        if covered is None or not self._final:
            raise Refused(Refusal.NOT_READY, "the array was not among those that were waited for")
        refused = covered.refused
        if covered.device is None or refused is not None:
            # A new one each time: a traceback on ours would hold the arrays in a cycle.
            reason = Refusal.NOT_EXPORTABLE if refused is None else refused.reason
            raise Refused(reason, "" if refused is None else refused.detail)
        return covered.device, covered.source

    def _begin(self, device: Device | None, arrays: list[Any]) -> None:
        if device is None:
            refused = Refused(Refusal.NOT_EXPORTABLE, "the array lives on no GPU with CUDA IPC")
            self._cover(_Covered(array, refused=refused) for array in arrays)
            return
        try:
            covered = [_stage(device, array) for array in arrays]
            mark = device.mark()
        except CudaError as error:
            refused = as_refused(error)
            self._cover(_Covered(array, device, refused=refused) for array in arrays)
        else:
            self._cover(covered)
            self._marks.append((device, mark))

    def _cover(self, covered: Any) -> None:
        self._covered.update({id(c.array): c for c in covered})

    async def _pass(self, device: Device, mark: Mark) -> None:
        try:
            for _ in range(QUICK_LOOKS):
                if mark.passed():
                    return
                await asyncio.sleep(0)
            await asyncio.wrap_future(device.when(mark))
        except CudaError as error:
            self._refuse(device, as_refused(error))

    def _refuse(self, device: Device, refused: Refused) -> None:
        self._cover(
            [_Covered(c.array, device, refused=refused) for c in self._covered.values()
             if c.device is device]
        )  # fmt: skip


def _stage(device: Device, array: Any) -> _Covered:
    """What to export of an array: a copy where it lies in memory that another process lent.

    The place for the rung ``stage``: memory that has no handle would be copied here too.
    """
    if array.size == 0 or array.data.ptr not in BORROWED:
        return _Covered(array, device, array)
    try:
        copy, _ = private_copy(device, array)
    except CudaError as error:
        if error.capturing or device.driver.unusable():
            raise
        return _Covered(array, device, refused=as_refused(error))
    return _Covered(array, device, copy)
