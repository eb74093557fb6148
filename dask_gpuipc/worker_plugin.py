"""`GPUIPCPlugin`: puts everything together in a worker, and takes it out again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from distributed import Worker, WorkerPlugin

from dask_gpuipc import objects, serialize
from dask_gpuipc.comm import Hooks
from dask_gpuipc.config import Settings, Size, parse_min_bytes, parse_transfer
from dask_gpuipc.endpoint import Endpoint
from dask_gpuipc.errors import GPUIPCError, MemoryUnavailable
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.metrics import collector
from dask_gpuipc.stats import Snapshot

logger = logging.getLogger("distributed.gpuipc")

NAME: Final = "gpuipc"
LEAVING: Final = 2.0
"""Seconds that a teardown waits for peers to release what they hold; pins live on after it."""


class GPUIPCPlugin(WorkerPlugin):
    """Chunks cross between the workers of one node as handles instead of bytes.

    ``client.register_worker_plugin(GPUIPCPlugin())`` on a running cluster is all that is needed;
    ``client.register_plugin`` does the same. Registering again replaces the settings.

    Parameters
    ----------
    transfer : {"auto", "copy", "share"}, optional
        How CuPy chunks are received. ``copy`` (what ``auto`` does) copies device to device into
        the receiver's own pool. ``share`` moves no bytes: the receiver's array *is* the sender's
        memory, as between tasks of one worker, so no task may write into its inputs. NumPy chunks
        are always shared copy-on-write, which is private to the receiver.
    min_bytes : int, str or mapping, optional
        Smaller arrays go as bytes; one size, or one for each of ``host`` and ``cuda``.
    pinned_limit : float, int or str, optional
        Host memory that may be pinned for other workers at once: a fraction of the worker's memory
        limit up to 1, or a size. Beyond it chunks go as bytes.

    Raises
    ------
    ConfigError
        An argument is not of its kind.

    Notes
    -----
    What is not given comes from Dask's configuration on the worker, ``gpuipc.*``. A worker on which
    the set-up fails works on as under plain Dask; `dask_gpuipc.statistics` tells the reason.
    The plugin is used by the worker's event loop only.
    """

    name = NAME

    def __init__(
        self,
        transfer: str | None = None,
        min_bytes: Size | Mapping[str, Size] | None = None,
        pinned_limit: float | str | None = None,
    ) -> None:
        # Bad arguments are the caller's to see, not the workers' logs'.
        if transfer is not None:
            parse_transfer(transfer)
        if min_bytes is not None:
            parse_min_bytes(min_bytes)
        self.options: dict[str, Any] = {
            "transfer": transfer,
            "min_bytes": min_bytes,
            "pinned_limit": pinned_limit,
        }
        Settings.load(**self.options)
        self.state = "disabled: not set up"
        self.endpoint: Endpoint | None = None
        self._hooks: Hooks | None = None
        self._hide_metrics: Callable[[], None] = _nothing
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        given = ", ".join(f"{k}={v!r}" for k, v in self.options.items() if v is not None)
        return f"<GPUIPCPlugin({given}) {self.state}>"

    def __getstate__(self) -> dict[str, Any]:
        return self.options

    def __setstate__(self, options: dict[str, Any]) -> None:
        self.__init__(**options)  # type: ignore[misc]

    async def setup(self, worker: Worker) -> None:
        """Begin on a worker. Never raises: a worker without it is slower, not wrong."""
        self._hide_metrics = collector.expose(self.snapshot)
        try:
            await self._setup(worker)
        except GPUIPCError as error:
            self._disable(str(error))
        except Exception as error:  # noqa: BLE001 -- logged with its traceback, and shown
            self._disable(repr(error), exc_info=True)

    async def _setup(self, worker: Worker) -> None:
        settings = Settings.load(
            **self.options, memory_limit=worker.memory_manager.memory_limit or None
        )
        scheduler = (await worker.scheduler.identity())["id"]
        serialize.register()
        # Off the loop: importing the bindings and initialising the driver take a while.
        memories = await asyncio.to_thread(self.make_memories, settings)
        try:
            self.endpoint = Endpoint(settings, memories, scheduler)
        except BaseException:
            for memory in memories:
                memory.close()
            raise
        self.endpoint.on_producer_left = partial(self._producer_left, worker, self.endpoint)
        self._hooks = Hooks(worker, self.endpoint)
        self._hooks.install()
        self.state = "enabled"
        worker.metrics[NAME] = self._metric

    def make_memories(self, settings: Settings) -> list[Memory]:
        """The memories that this worker shares, by the settings and what the machine has.

        Raises
        ------
        MemoryUnavailable
            There is none.
        """
        return _memories(settings)

    def _disable(self, reason: str, exc_info: bool = False) -> None:
        self.state = f"disabled: {reason}"
        logger.warning("Chunks of this worker go as bytes: %s", reason, exc_info=exc_info)
        self._leave()

    async def teardown(self, worker: Worker) -> None:
        """End on a worker: no new offers; what is held is released as its readers end."""
        worker.metrics.pop(NAME, None)
        self._hide_metrics()
        endpoint = self.endpoint
        self._leave()
        if not self.state.startswith("disabled"):
            self.state = "disabled: unregistered"
        if endpoint is not None:
            await endpoint.wait_closed(LEAVING)

    def _leave(self) -> None:
        hooks, self._hooks = self._hooks, None
        endpoint, self.endpoint = self.endpoint, None
        if hooks is not None:
            hooks.remove()
        if endpoint is not None:
            endpoint.stop()

    def _producer_left(self, worker: Worker, endpoint: Endpoint, producer: str) -> None:
        copying = _copy_held(worker, endpoint, producer)
        task = asyncio.get_running_loop().create_task(copying)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _metric(self, worker: Worker) -> dict[str, Any]:
        return self.snapshot().to_dict()

    def snapshot(self) -> Snapshot:
        """Counters and holdings on this worker now."""
        if self.endpoint is None:
            return Snapshot(state=self.state, memories=[])
        return self.endpoint.snapshot(self.state)


async def _copy_held(worker: Worker, endpoint: Endpoint, producer: str) -> None:
    """A peer leaves: what this worker still has in its memory becomes its own."""
    data = getattr(worker.data, "memory", worker.data)  # what is spilled is no array now
    for key in list(data):
        value = data.get(key)
        own = await asyncio.to_thread(objects.owned, endpoint.importer, value, producer)
        if own is not value and data.get(key) is value:
            worker.data[key] = own
        del value, own


def _memories(settings: Settings) -> list[Memory]:
    """The memories that this process can share; `MemoryUnavailable` if there is none."""
    found: list[Memory] = []
    reasons: list[str] = []
    for enabled, make in (
        (settings.cuda_enabled, _cuda),
        (settings.host_enabled, _host),
    ):
        if enabled is False:
            continue
        try:
            found.append(make(settings))
        except MemoryUnavailable as error:
            reasons.append(str(error))
            logger.info("%s", error)
        except Exception as error:  # one memory's fault must not cost the other
            reasons.append(repr(error))
            logger.warning("A memory could not be set up", exc_info=True)
    if not found:
        raise MemoryUnavailable("; ".join(reasons) or "all memories are switched off in gpuipc.*")
    return found


def _host(settings: Settings) -> Memory:
    return HostMemory(
        arena_size=settings.host_arena_size,
        limit=settings.pinned_limit,
        resident_limit=settings.host_resident_limit,
        idle_timeout=settings.host_idle_timeout,
        watch_writes=settings.host_watch_writes,
    )


def _cuda(settings: Settings) -> Memory:
    try:
        from dask_gpuipc.memory.cuda import CudaMemory
    except ImportError as error:
        raise MemoryUnavailable(str(error)) from error

    memory: Memory = CudaMemory(settings)
    return memory


def _nothing() -> None:
    pass
