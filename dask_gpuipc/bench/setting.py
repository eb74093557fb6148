"""What runs, and on what."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from dask_gpuipc.doctor import machine

SIZES: Final = tuple(
    1 << bits for bits in (10, 14, 16, 18, 20, 22, 24, 26, 28, 30, 31, 32, 33)
)  # fmt: skip
"""Bytes of the chunks that are measured: 1 KiB to 8 GiB."""
UCX: Final = ("distributed-ucxx-cu12", "distributed-ucxx-cu13")
SHARE: Final = {"host": 16, "cuda": 8}
"""By memory, how many of the largest chunk must fit into what is free."""


def describe(memory: str) -> dict[str, Any]:
    """Commit, versions and hardware, as somebody needs them to repeat a run."""
    found = machine.versions()
    for name in UCX:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "versions": found,
        "hardware": {
            "cpu": cpu(),
            "cpus": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": gpus() if memory == "cuda" else [],
            "gpu_driver": gpu_driver(),
        },
    }


def sizes(memory: str, max_size: int | None) -> tuple[int, ...]:
    """Bytes of the chunks to measure, the largest one included."""
    largest = max_size or min(SIZES[-1], room(memory) // SHARE[memory])
    below = tuple(nbytes for nbytes in SIZES if nbytes <= largest)
    return below if max_size in (None, *below) else (*below, largest)


def room(memory: str) -> int:
    """Bytes that are free now, on the smallest GPU or on the host."""
    if memory == "host":
        return int(psutil.virtual_memory().available)
    import importlib

    runtime = importlib.import_module("cupy").cuda.runtime
    frees = []
    for ordinal in range(runtime.getDeviceCount()):
        runtime.setDevice(ordinal)
        frees.append(int(runtime.memGetInfo()[0]))
    runtime.setDevice(0)
    return min(frees)


def gpus() -> list[dict[str, Any]]:
    """Name and UUID of each GPU; creates no context."""
    import importlib

    from dask_gpuipc.memory.cuda.driver import driver

    runtime = importlib.import_module("cupy").cuda.runtime
    return [
        {
            "uuid": identity.uuid,
            "name": runtime.getDeviceProperties(identity.ordinal)["name"].decode(),
        }
        for identity in driver().devices()
    ]


def commit() -> str | None:
    """The commit of this checkout, with ``+changes`` where its tree has some; None elsewhere."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu() -> str:
    """The processor's name, where the kernel tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_driver() -> str | None:
    """The release of the GPU's kernel driver, where the kernel tells."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/driver/nvidia/version").read_text().partition("Module")[2].split()[0]
    return None
