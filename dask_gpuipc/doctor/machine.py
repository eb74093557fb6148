"""What this machine allows: kernel, limits, namespaces, drivers. Creates no CUDA context."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil
from dask.utils import format_bytes

from dask_gpuipc import process
from dask_gpuipc.channel import private_folder
from dask_gpuipc.config import Settings
from dask_gpuipc.doctor.record import Finding, Level
from dask_gpuipc.errors import GPUIPCError

PACKAGES: Final = (
    "dask-gpuipc", "dask", "distributed", "numpy", "cupy", "cupy-cuda12x", "cupy-cuda13x",
    "cuda-python", "dask-cuda", "rmm-cu12", "rmm-cu13", "bokeh", "prometheus_client", "rich",
)  # fmt: skip
FEW: Final = 1024
"""Descriptors below which a busy worker may run out: each arena and each peer takes some."""
NO_LIMIT: Final = 1 << 60


def versions() -> dict[str, str]:
    """Of Python, the kernel, and of what is installed of the packages that matter."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def findings() -> tuple[Finding, ...]:
    """All findings about this machine; one that cannot be made is a finding too."""
    looks: tuple[Callable[[], Finding], ...] = (
        _pidfd, _memfd, _socket_folder, _descriptors, _locked, _memory, _namespaces,
    )  # fmt: skip
    return (*(_safely(look) for look in looks), *_gpus())


def gpus() -> list[str]:
    """UUIDs of the GPUs that CuPy arrays can be shared on; empty without any, or without cupy."""
    if importlib.util.find_spec("cupy") is None:
        return []
    try:
        from dask_gpuipc.memory.cuda.driver import driver

        return [identity.uuid for identity in driver().devices()]
    except GPUIPCError:
        return []


def _safely(look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:  # noqa: BLE001 -- it is shown
        return Finding(Level.NOTE, look.__name__.strip("_"), f"could not be looked at: {error!r}")


def _pidfd() -> Finding:
    what = "death of a peer"
    try:
        os.close(process.open_pidfd(os.getpid(), process.start_time(os.getpid())))
    except GPUIPCError as error:
        return Finding(Level.BAD, what, str(error), "leases could not end", "a newer kernel")
    return Finding(Level.GOOD, what, "pidfd")


def _memfd() -> Finding:
    what = "shared host memory"
    try:
        os.close(os.memfd_create("dask-gpuipc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Finding(
            Level.BAD, what, str(error), "NumPy chunks go as bytes",
            "allow memfd_create (a container's seccomp profile may forbid it)",
        )  # fmt: skip
    return Finding(Level.GOOD, what, "memfd, sealable")


def _socket_folder() -> Finding:
    what = "socket directory"
    try:
        folder = private_folder(Settings.load().socket_directory)
    except (GPUIPCError, OSError) as error:
        remedy = "set gpuipc.socket-directory to a short path that all workers can write to"
        return Finding(Level.BAD, what, str(error), "workers have no channel", remedy)
    os.rmdir(folder)
    return Finding(Level.GOOD, what, os.path.dirname(folder))


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} (at most {hard})"
    if 0 <= soft < FEW:
        return Finding(
            Level.NOTE, "open files", value, "a busy worker may run out: no_memory", "ulimit -n"
        )
    return Finding(Level.GOOD, "open files", value)


def _locked() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "no limit" if soft < 0 else format_bytes(soft)
    meaning = "the driver pins host memory itself; this limit is for the rest of the process"
    return Finding(Level.GOOD, "locked memory", value, meaning)


def _memory() -> Finding:
    whole = psutil.virtual_memory()
    value = f"{format_bytes(whole.available)} of {format_bytes(whole.total)} free"
    limit = _cgroup_limit()
    if limit is None or limit >= whole.total:
        return Finding(Level.GOOD, "memory", f"{value}, no cgroup limit")
    return Finding(
        Level.NOTE, "memory", f"{value}, cgroup limit {format_bytes(limit)}",
        "shared host memory is charged to the cgroup of whoever wrote it",
    )  # fmt: skip


def _cgroup_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            text = path.read_text().strip()
            limit = None if text == "max" else int(text)
            return None if limit is None or limit > NO_LIMIT else limit
    return None


def _namespaces() -> Finding:
    named = zip(process.NAMESPACES, process.namespaces(), strict=True)
    value = ", ".join(f"{name} {text.partition('[')[2].rstrip(']')}" for name, text in named)
    return Finding(Level.GOOD, "namespaces", value, "workers must have the same ones")


def _gpus() -> Iterator[Finding]:
    from dask_gpuipc.memory.cuda.driver import driver

    try:
        api = driver()
        identities = api.devices()
    except GPUIPCError as error:
        yield Finding(Level.NOTE, "CUDA", str(error), "NumPy chunks only")
        return
    if importlib.util.find_spec("cupy") is None:
        yield Finding(
            Level.NOTE, "CUDA", "cupy is not installed", "NumPy chunks only",
            "pip install cupy-cuda13x (or 12x, as nvidia-smi says)",
        )  # fmt: skip
    if not api.context_events:
        yield Finding(
            Level.NOTE, "CUDA driver", "before 12.5",
            "work on non-blocking streams is not waited for",
            "a newer driver, or gpuipc.cuda.synchronize: true",
        )  # fmt: skip
    for identity in identities:
        kind = "MIG instance: no CUDA IPC is documented" if identity.mig else ""
        level = Level.NOTE if identity.mig else Level.GOOD
        yield Finding(level, f"GPU {identity.ordinal}", identity.uuid, kind)
