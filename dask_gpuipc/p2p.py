"""Shards of p2p rechunks and shuffles: those of the GPU are let through, and all are counted.

p2p sends shards in messages of its own, which go as bytes. It measures them by ``memoryview``,
which arrays on the GPU do not have, so that under Dask's default configuration a rechunk of CuPy
chunks fails (``distributed.shuffle._core._mean_shard_size``). While a plugin is set up in this
process, shards without the buffer protocol are measured by their ``nbytes`` instead; the rest of
p2p takes them as they are. Both patches are the process's, and go with its last worker's plugin.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from dask.core import flatten
from distributed.utils import nbytes as nbytes_of

logger = logging.getLogger("distributed.gpuipc")

MEASURED: Final = 10
"""Shards that p2p looks at for their mean size."""
Count = Callable[[int], None]
"""Takes the bytes of a shard that goes to another worker."""

_lock = threading.Lock()
_counters: dict[str, Count] = {}
_undo: list[Callable[[], None]] = []


def install(address: str, count: Count) -> None:
    """Let a worker of this process send shards of the GPU by p2p, and have its shards counted."""
    with _lock:
        _counters[address] = count
        if not _undo:
            _patch()


def remove(address: str) -> None:
    """Undo it. Idempotent. What somebody else has patched since stays, and calls through."""
    with _lock:
        _counters.pop(address, None)
        while _undo and not _counters:
            _undo.pop()()


def _patch() -> None:
    try:
        from distributed.shuffle import _core

        _replace(_core, "_mean_shard_size", _measuring)
        _replace(_core.ShuffleRun, "send", _counting)
    except (ImportError, AttributeError) as error:
        logger.info("p2p is left as it is: %s", error)


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    ours = wrap(original)
    setattr(owner, name, ours)

    def undo() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, original)

    _undo.append(undo)


def _measuring(original: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(original)
    def mean_shard_size(shards: Iterable[Any]) -> int:
        try:
            return original(shards)
        except TypeError:
            sizes = _sizes(shards)[:MEASURED]
            return sum(sizes) // len(sizes) if sizes else 0

    return mean_shard_size


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(run: Any, address: str, shards: Any) -> Any:
        count = _counters.get(run.local_address)
        if count is not None and address != run.local_address:
            with contextlib.suppress(TypeError):  # of a shard without a size
                for nbytes in _sizes(shards):
                    count(nbytes)
        return await original(run, address, shards)

    return send


def _sizes(shards: Iterable[Any]) -> list[int]:
    """Bytes of the shards among their indices."""
    found = flatten(shards, container=(tuple, list))
    return [nbytes_of(shard) for shard in found if not isinstance(shard, int)]
