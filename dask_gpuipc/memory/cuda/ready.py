"""Finished before offered: arrays on their way to holding their final bytes.

And the choice of the way on which each goes. Memory that the peer opens by handle is exported as it
is; what has no handle is copied into a block that has one (`staging`); and where the peer does not
open handles of that GPU, down into host memory that both have (`pinned`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dask_gpuipc.errors import Refusal, Refused
from dask_gpuipc.memory.base import Allocation, Pin, Rung
from dask_gpuipc.memory.cuda.allocations import Allocations, dense_layout
from dask_gpuipc.memory.cuda.copying import private_copy
from dask_gpuipc.memory.cuda.device import Device, Mark
from dask_gpuipc.memory.cuda.driver import Code, CudaError, as_refused
from dask_gpuipc.memory.cuda.mappings import BORROWED
from dask_gpuipc.memory.cuda.pinned import HostBlocks, Slot
from dask_gpuipc.memory.cuda.staging import Stage

logger = logging.getLogger("distributed.gpuipc")

QUICK_LOOKS: Final = 3
"""How often a mark is looked at on the event loop before a thread waits for it."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What arrays can be exported by.

    Parameters
    ----------
    devices : dict of int to Device
        By ordinal, as are the stages.
    ipc, peer_access : bool
        Whether handles are made at all, and for other GPUs.
    """

    devices: dict[int, Device]
    stages: dict[int, Stage]
    allocations: Allocations
    host: HostBlocks
    ipc: bool = True
    peer_access: bool = True

    def handles(self, device: Device, opened: Collection[str] | None) -> bool:
        """Whether a peer that opens these devices' handles gets one of this device's."""
        return self.ipc and (opened is None or device.uuid in opened)


@dataclass(frozen=True, slots=True)
class _Covered:
    """An array that was asked for, and what may be exported of it: itself, a copy, or nothing.

    The array is held so that its identity stays its own.
    """

    array: Any
    device: Device | None = None
    source: Any = None
    rung: Rung | None = None
    slot: Slot | None = None
    refused: Refused | None = None


class CudaPreparation:
    """Covers exactly the arrays it was made with, by identity, once it was awaited.

    Made and awaited on the event loop; `pin` may be called on any thread.

    Parameters
    ----------
    ways : Ways
    arrays : sequence of cupy.ndarray
    opened : collection of str, optional
        UUIDs of the devices whose handles the peer opens; None is all.
    """

    def __init__(
        self, ways: Ways, arrays: Sequence[Any], opened: Collection[str] | None = None
    ) -> None:
        self.unproven: set[str] = set()
        self.allocations: list[Allocation] = []
        self._ways = ways
        self._opened = opened
        self._covered: dict[int, _Covered] = {}
        self._marks: list[tuple[Device, Mark]] = []
        self._final = False
        by_device: dict[int, dict[int, Any]] = {}
        for array in arrays:
            by_device.setdefault(array.data.device_id, {})[id(array)] = array
        for ordinal, group in by_device.items():
            self._begin(ways.devices.get(ordinal), list(group.values()))

    def __repr__(self) -> str:
        state = "final" if self._final else f"behind {len(self._marks)} marks"
        return f"<CudaPreparation: {len(self._covered)} arrays, {state}>"

    async def wait(self) -> None:
        """Return when all of it is final, or refused. Raises nothing."""
        while self._marks:
            await self._pass(*self._marks[-1])
            self._marks.pop()
        for covered in list(self._covered.values()):
            if covered.slot is not None and covered.refused is None:
                await self._bring_down(covered)
        self._final = True

    def pin(self, array: Any) -> Pin:
        """Hold the bytes to export for an array that is covered.

        Raises
        ------
        Refused
            It is not covered, not final, or could not be made so.
        CudaError
            The driver knows nothing of its memory.
        """
        covered = self._covered.get(id(array))
        if covered is None or not self._final:
            raise Refused(Refusal.NOT_READY, "the array was not among those that were waited for")
        refused, device = covered.refused, covered.device
        if device is None or refused is not None:
            # A new one each time: a traceback on ours would hold the arrays in a cycle.
            reason = Refusal.NOT_EXPORTABLE if refused is None else refused.reason
            raise Refused(reason, "" if refused is None else refused.detail)
        if covered.slot is not None:
            return _pin_slot(covered.slot, array)
        pin = self._ways.allocations.pin(device, covered.source)
        pin.rung = covered.rung
        return pin

    # -- choice -----------------------------------------------------------------------------------

    def _begin(self, device: Device | None, arrays: list[Any]) -> None:
        if device is None:
            refused = Refused(Refusal.NOT_EXPORTABLE, "the array lives on no GPU that is visible")
            self._cover(_Covered(array, refused=refused) for array in arrays)
            return
        try:
            covered = [self._choose(device, array) for array in arrays]
            mark = device.mark()
        except CudaError as error:
            refused = as_refused(error)
            self._cover(_Covered(array, device, refused=refused) for array in arrays)
        else:
            self._cover(covered)
            self._marks.append((device, mark))

    def _choose(self, device: Device, array: Any) -> _Covered:
        """The best way for an array. Raises `CudaError` where none of the device's can go."""
        if array.size == 0:
            return _Covered(array, device, array)
        if not self._ways.handles(device, self._opened):
            if self._ways.ipc and self._ways.peer_access:
                self.unproven.add(device.uuid)
            return self._to_host(device, array)
        if array.data.ptr in BORROWED or not self._ways.allocations.exportable(device, array):
            return self._stage(device, array)
        return _Covered(array, device, array)

    def _stage(self, device: Device, array: Any) -> _Covered:
        """A copy in a block with a handle, for memory that has none or that another process lent.

        Without room for it, and if the peer is known, the array goes to the host.
        """
        stage = self._ways.stages[device.ordinal]
        try:
            copy, _ = private_copy(device, array, stage.allocate)
        except CudaError as error:
            if error.capturing or device.driver.unusable():
                raise
            if error.code == Code.OUT_OF_MEMORY and self._opened is not None:
                return self._to_host(device, array)
            return _Covered(array, device, refused=as_refused(error))
        return _Covered(array, device, copy, Rung.STAGE)

    def _to_host(self, device: Device, array: Any) -> _Covered:
        """A slot for an array, into which it is copied once it is finished."""
        try:
            dense_layout(array)  # or it has a dtype that does not travel
            slot = self._ways.host.take(array.nbytes, device)
        except Refused as refused:
            return _Covered(array, device, refused=Refused(refused.reason, refused.detail))
        self.allocations.append(slot.arena.allocation)
        return _Covered(array, device, array, Rung.HOST, slot)

    def _cover(self, covered: Iterable[_Covered]) -> None:
        self._covered.update({id(c.array): c for c in covered})

    # -- waiting ----------------------------------------------------------------------------------

    async def _pass(self, device: Device, mark: Mark) -> None:
        try:
            for _ in range(QUICK_LOOKS):
                if mark.passed():
                    return
                await asyncio.sleep(0)
            await asyncio.wrap_future(device.when(mark))
        except CudaError as error:
            self._refuse(device, as_refused(error))

    async def _bring_down(self, covered: _Covered) -> None:
        device, slot = covered.device, covered.slot
        assert device is not None
        assert slot is not None
        allocate = self._ways.stages[device.ordinal].allocate
        fill = self._ways.host.fill
        try:
            # No name for the first future: its error's traceback holds this frame, and so the slot.
            filled = await asyncio.wrap_future(fill(slot, device, covered.array, allocate))
            await asyncio.wrap_future(filled)
            refused = None
        except CudaError as error:
            refused = as_refused(error)
        except OSError as error:
            refused = Refused(Refusal.NO_MEMORY, f"pinned host memory: {error}")
        except Exception as error:  # an answer must not fail because of it
            logger.warning("An array could not be brought to the host", exc_info=error)
            refused = Refused(Refusal.ERROR, repr(error))
        if refused is not None:
            self._cover([replace(covered, slot=None, refused=refused)])

    def _refuse(self, device: Device, refused: Refused) -> None:
        self._cover(
            [_Covered(c.array, device, refused=refused) for c in self._covered.values()
             if c.device is device]
        )  # fmt: skip


def _pin_slot(slot: Slot, array: Any) -> Pin:
    layout = dense_layout(array)
    return Pin(
        slot.arena.allocation,
        replace(layout, offset=slot.offset),
        array.nbytes,
        _Dropped(slot),
        Rung.HOST,
    )


class _Dropped:
    """Holds a slot until it is called."""

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot

    def __call__(self) -> None:
        self._slot = None
