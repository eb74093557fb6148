"""GPU memory that CuPy arrays live in, shared by legacy CUDA IPC.

The rules of the driver that everything in here follows
-------------------------------------------------------
- A handle names a whole base allocation (`cuIpcGetMemHandle`), so arrays travel as a handle and an
  offset. A reused address is told apart by ``CU_POINTER_ATTRIBUTE_BUFFER_ID``: the generation.
- Only memory of `cuMemAlloc` has a handle; managed and stream-ordered memory has none, and memory
  that another process lent is never lent on. What cannot be exported is refused, or staged.
- One event over a whole context (`cuCtxRecordEvent`, CUDA 12.5) covers every stream of it, those
  that do not block the default stream among them. Without it, an event on the legacy default stream
  stands in, which does not cover non-blocking streams; ``gpuipc.cuda.synchronize`` then waits for
  the device instead.
- Recording such an event breaks a graph capture in the context. A capture on a blocking stream can
  be seen beforehand and is left alone. One on a non-blocking stream can not: it fails, loudly, at
  its end, and that is a limit.
- `cuIpcCloseMemHandle` waits for every running kernel, so it runs on a thread of its own, in a
  moment when the context is idle.
- Neither Dask's event loop nor its offload thread has a current context, so each call pushes the
  device's primary context and pops it again. Set-up retains none: it asks for UUIDs only.
- After interpreter exit has begun, in a forked child, and once a context is lost, no CUDA call is
  made: pins are refused, opens fail, closes do nothing.

Rooms: `driver` (the API, typed, errors translated once), `device` (a context: order, marks, idle),
`threads` (the thread that waits), `copying` (device to device), `buffers` (other libraries'),
`ready` (finished before offered), `allocations` (exporter's side), `mappings` (importer's side),
`memory` (the `Memory` itself).
"""

from __future__ import annotations

from dask_gpuipc.memory.cuda.memory import CudaMemory

__all__ = ["CudaMemory"]
