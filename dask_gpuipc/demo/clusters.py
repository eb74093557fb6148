"""What the machine has, and worker processes on it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Final, Literal

import psutil
from distributed import Client, LocalCluster

from dask_gpuipc.demo.errors import InputError

MiB: Final = 2**20

IDLE: Final = 150 * MiB
"""Bytes of host memory that a worker takes before it has work."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Which memory the chunks live in, and on how many GPUs (0 for host memory)."""

    memory: Literal["host", "cuda"]
    gpus: int

    @classmethod
    def detect(cls) -> Machine:
        """CUDA where CuPy is installed and finds a GPU, else host memory. Makes no context."""
        try:
            cupy = importlib.import_module("cupy")
            gpus = int(cupy.cuda.runtime.getDeviceCount())
        # No CuPy, one that cannot load its libraries, no driver, no GPU: the reason is all one.
        except Exception:  # noqa: BLE001
            gpus = 0
        return cls("cuda" if gpus else "host", gpus)

    @property
    def backend(self) -> Literal["numpy", "cupy"]:
        """Dask's name for the kind of array."""
        return "cupy" if self.memory == "cuda" else "numpy"

    @property
    def spread(self) -> bool:
        """Whether each worker gets a GPU of its own."""
        return self.gpus >= 2 and importlib.util.find_spec("dask_cuda") is not None

    @property
    def default_nbytes(self) -> int:
        """Size of the image, in bytes, that makes a job of seconds here."""
        return 512 * MiB if self.memory == "cuda" else 128 * MiB

    def workers(self, wanted: int | None) -> int:
        """How many worker processes; more than one for each GPU only where they share one."""
        if not self.spread:
            return wanted or (2 if self.memory == "cuda" else 4)
        if wanted is not None and wanted > self.gpus:
            raise InputError(
                f"{wanted} workers were asked for, one for each GPU, and there are {self.gpus} "
                "GPUs; ask for fewer",
                option="--workers",
            )
        return wanted or min(4, self.gpus)

    def memory_limit(self, nbytes: int, workers: int) -> int:
        """Bytes of host memory for each worker, far from where Dask spills.

        Raises
        ------
        InputError
            The machine has less memory free than the job takes.
        """
        # On a GPU machine the image is in host memory only while its chunks are read.
        held = nbytes // 2 if self.memory == "cuda" else 6 * nbytes
        needed, free = 2 * workers * IDLE + held, psutil.virtual_memory().available
        if needed > free:
            raise InputError(
                f"the job needs about {needed // MiB} MiB of memory and {free // MiB} MiB are "
                "free; ask for a smaller image or fewer workers",
                option="--size",
            )
        # The CUDA libraries alone take what a limit would be sized by; 0 is none.
        return 0 if self.memory == "cuda" else max(1024 * MiB, 4 * held // workers)

    @contextmanager
    def start(self, workers: int, memory_limit: int) -> Iterator[Client]:
        """Start a cluster of ``workers`` processes with one thread each; it is closed at the end.

        The client does not become Dask's default.
        """
        options: dict[str, Any] = {
            "n_workers": workers,
            "threads_per_worker": 1,
            "memory_limit": memory_limit,
            "dashboard_address": ":0",
            "scheduler_kwargs": {"dashboard": False},
            "silence_logs": logging.CRITICAL,
        }
        with ExitStack() as stack:
            with interrupts_held():
                cluster = stack.enter_context(self._cluster_class()(**options))
                client = stack.enter_context(Client(cluster, set_as_default=False))
            yield client

    def _cluster_class(self) -> Any:
        if self.spread:
            return importlib.import_module("dask_cuda").LocalCUDACluster
        return LocalCluster


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block.

    Processes started meanwhile never get it: the terminal sends it to all of them, and a worker's
    death by it is pages of traceback. The one process that does get it closes the others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _frame: waiting.append(number))
    # A mask outlives exec, which a handler does not; the tracker's start would clear it.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)
