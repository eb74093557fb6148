"""Settings: ``gpuipc.*`` in Dask's configuration, overridden by the plugin's arguments."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_gpuipc.errors import ConfigError

TransferMode = Literal["auto", "copy", "share"]
Size = int | str
MEMORIES = ("host", "cuda")


@functools.cache
def load_defaults() -> None:
    """Make ``gpuipc.yaml`` part of Dask's configuration, below what the user set."""
    path = os.path.join(os.path.dirname(__file__), "gpuipc.yaml")
    with open(path) as file:
        defaults = yaml.safe_load(file)
    single = dask.config.get("gpuipc.min-bytes", None)
    if single is not None and not isinstance(single, Mapping):
        # A mapping among the defaults would replace the user's one size for all.
        dask.config.set({"gpuipc.min-bytes": dict.fromkeys(MEMORIES, single)})
    dask.config.ensure_file(source=path)
    dask.config.update_defaults(defaults)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one endpoint, parsed: sizes in bytes, times in seconds."""

    transfer: TransferMode
    min_bytes: Mapping[str, int]
    pinned_limit: int | None
    socket_directory: str | None
    dial_timeout: float
    dial_again: float
    host_enabled: bool
    host_arena_size: int
    host_resident_limit: int | None
    host_idle_timeout: float
    host_watch_writes: bool
    cuda_enabled: bool | None
    """None is wherever it can be had."""
    cuda_idle_mappings: int
    cuda_idle_timeout: float
    cuda_pinned_limit: int | None
    cuda_ipc: bool
    cuda_peer_access: bool
    cuda_host_limit: int | None
    cuda_synchronize: bool

    @classmethod
    def load(
        cls,
        *,
        transfer: str | None = None,
        min_bytes: Size | Mapping[str, Size] | None = None,
        pinned_limit: float | str | None = None,
        memory_limit: int | None = None,
    ) -> Settings:
        """From Dask's configuration; arguments that are not None win.

        Parameters
        ----------
        transfer, min_bytes, pinned_limit
            As in `dask_gpuipc.GPUIPCPlugin`.
        memory_limit : int, optional
            The worker's memory limit in bytes, for settings that are a fraction of it.

        Raises
        ------
        ConfigError
            A value is not of its kind; the text names the setting.
        """
        load_defaults()
        resident = _get("host.resident-fraction")
        enabled = _get("cuda.enabled")
        return cls(
            transfer=parse_transfer(_get("transfer") if transfer is None else transfer),
            min_bytes=parse_min_bytes(min_bytes),
            pinned_limit=parse_limit(
                _get("pinned-limit") if pinned_limit is None else pinned_limit, memory_limit
            ),
            socket_directory=_get("socket-directory"),
            dial_timeout=_seconds("dial-timeout"),
            dial_again=_seconds("dial-again"),
            host_enabled=bool(_get("host.enabled")),
            host_arena_size=parse_size("host.arena-size", _get("host.arena-size")),
            host_resident_limit=int(resident * memory_limit) if memory_limit else None,
            host_idle_timeout=_seconds("host.idle-timeout"),
            host_watch_writes=bool(_get("host.watch-writes")),
            cuda_enabled=None if enabled == "auto" else bool(enabled),
            cuda_idle_mappings=int(_get("cuda.idle-mappings")),
            cuda_idle_timeout=_seconds("cuda.idle-timeout"),
            cuda_pinned_limit=parse_limit(_get("cuda.pinned-limit"), None),
            cuda_ipc=bool(_get("cuda.ipc")),
            cuda_peer_access=bool(_get("cuda.peer-access")),
            cuda_host_limit=parse_limit(
                _get("cuda.host-limit"), memory_limit, "gpuipc.cuda.host-limit"
            ),
            cuda_synchronize=bool(_get("cuda.synchronize")),
        )


def parse_transfer(value: object) -> TransferMode:
    """One of the three modes."""
    if value not in ("auto", "copy", "share"):
        raise ConfigError(f"transfer is {value!r}; it must be 'auto', 'copy' or 'share'")
    return value


def parse_size(name: str, value: object) -> int:
    """A size in bytes, from a number or text such as ``64 KiB``."""
    try:
        size = int(parse_bytes(value))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is {value!r}; it must be a number of bytes or text such as '64 KiB'"
        ) from error
    if size < 0:
        raise ConfigError(f"{name} is {value!r}; it must not be negative")
    return size


def parse_min_bytes(value: Size | Mapping[str, Size] | None) -> Mapping[str, int]:
    """The smallest array to go by handle, for each memory."""
    configured = _get("min-bytes")
    base = configured if isinstance(configured, Mapping) else dict.fromkeys(MEMORIES, configured)
    override = value if isinstance(value, Mapping) else dict.fromkeys(MEMORIES, value)
    unknown = set(override) - set(MEMORIES)
    if unknown:
        raise ConfigError(f"min_bytes names {sorted(unknown)}; the memories are {list(MEMORIES)}")
    merged = {**base, **{k: v for k, v in override.items() if v is not None}}
    return {k: max(1, parse_size(f"min-bytes.{k}", merged[k])) for k in MEMORIES}


def parse_limit(value: object, memory_limit: int | None, name: str = "pinned-limit") -> int | None:
    """A limit in bytes: a fraction of the memory limit, a size, or None."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return int(value * memory_limit) if memory_limit else None
    return parse_size(name, value)


def _get(name: str) -> Any:
    load_defaults()
    return dask.config.get(f"gpuipc.{name}")


def _seconds(name: str) -> float:
    value = _get(name)
    try:
        return float(parse_timedelta(value, default="s"))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"gpuipc.{name} is {value!r}; it must be a number of seconds or text such as '5s'"
        ) from error
