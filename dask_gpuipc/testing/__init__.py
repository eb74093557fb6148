"""Tools for tests of this package, and of memories and plugins that others add to it.

- `check_memory` holds an implementation of `memory.base.Memory` to its contract, between two real
  processes. Whoever adds a kind of memory calls it in a test.
- `FaultyMemory`, `FaultyChannel` and `Fault` make things go wrong by wrapping; the product has no
  hooks for it. In worker processes, a subclass of the plugin wraps what it makes::

      class FaultyPlugin(GPUIPCPlugin):
          def make_memories(self, settings):
              stale = Fault("open", error=partial(OpenFailed, Failure.STALE))
              return [FaultyMemory(m, stale) for m in super().make_memories(settings)]

- `Gate` and `Keeper` hold a process in the middle of a step until a test lets it go.
- `poisoned_arenas` overwrites host memory the moment that it is recycled.
- `leak_check` compares what this process holds before and after.
- `ManualClock` is time that a test moves.

Nothing of the product imports this package.

Rooms: `clock`, `faults`, `gates`, `poison`, `leaks`, `bench` (two processes that share one kind of
memory), `conformance` (what is asked of it there).
"""

from __future__ import annotations

from dask_gpuipc.testing.clock import ManualClock
from dask_gpuipc.testing.conformance import check_memory
from dask_gpuipc.testing.faults import Fault, FaultyChannel, FaultyMemory, faulty_channels
from dask_gpuipc.testing.gates import Gate, Keeper
from dask_gpuipc.testing.leaks import leak_check
from dask_gpuipc.testing.poison import poisoned_arenas

__all__ = [
    "Fault",
    "FaultyChannel",
    "FaultyMemory",
    "Gate",
    "Keeper",
    "ManualClock",
    "check_memory",
    "faulty_channels",
    "leak_check",
    "poisoned_arenas",
]
