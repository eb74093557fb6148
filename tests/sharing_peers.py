"""What processes that share without Dask are told to do, for the tests of `dask_gpuipc.sharing`.

`Child` of tests/helpers.py calls these functions in other processes; `peers` gives a test some of
them, and holds each to leave nothing behind.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
from helpers import Child, child

from dask_gpuipc import sharing
from dask_gpuipc.errors import GPUIPCError
from dask_gpuipc.sharing import node as nodes
from dask_gpuipc.sharing import post, segments
from dask_gpuipc.testing import leak_check

here: dict[str, Any] = {}
"""What this process keeps, by name."""

_stack = contextlib.ExitStack()


def begin(directory: str) -> None:
    """Start a test in this process: what is left at its end is a leak."""
    dask.config.set({"gpuipc.socket-directory": directory})
    ignore = ["resource_tracker", "forkserver", "gpuipc-cuda"]
    _stack.enter_context(leak_check(ignore=ignore))


def clear() -> None:
    here.clear()
    gc.collect()


def end() -> None:
    """Drop everything; nothing may be held either way, and nothing may be left."""
    clear()
    sharing.stop(10)
    _stack.close()


@contextlib.contextmanager
def session(*children: Child) -> Iterator[None]:
    """A test of some processes, in a socket directory of their own."""
    with tempfile.TemporaryDirectory(prefix="gpuipc-") as directory:
        for c in children:
            c.call(begin, directory)
        yield
        for step in (clear, end):
            for c in children:
                c.call(step)
        assert all(f"-{c.pid}-" not in name for c in children for name in os.listdir(directory))


@contextlib.contextmanager
def helper_child(directory: str, *, daemon: bool = True) -> Iterator[Child]:
    """One more process, of which a test may make an end."""
    with child(daemon=daemon) as c:
        c.call(begin, directory)
        yield c


def directory() -> str:
    return dask.config.get("gpuipc.socket-directory")


# -- arrays --------------------------------------------------------------------------------------


def make(name: str, value: int, count: int = 5000) -> None:
    here[name] = np.full(count, value, "i4")


def fill(name: str, value: int) -> None:
    here[name][...] = value


def values(name: str) -> list[int]:
    """The values that elements of an array have."""
    return sorted(set(np.asarray(here[name]).ravel().tolist()))


def keep(name: str, value: Any) -> None:
    here[name] = value


def give(name: str) -> Any:
    return here[name]


def drop(*names: str) -> None:
    for name in names:
        del here[name]
    gc.collect()


def keep_as(name: str, as_: str) -> None:
    here[as_] = here[name]


def same_memory(one: str, other: str) -> bool:
    return np.shares_memory(here[one], here[other])


def type_of(name: str) -> str:
    return type(here[name]).__name__


# -- the node ------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Leases of others here, and of this process elsewhere."""
    node = nodes.current()
    return (0, 0) if node is None else node.held()


def nothing_held() -> bool:
    return held() == (0, 0)


def pinned() -> int:
    node = nodes.current()
    return 0 if node is None else sum(e.exporter.pinned_bytes for e in node.endpoints())


def traffic(which: str) -> dict[str, int]:
    """Arrays by rung that this process sent or received, or refusals by reason."""
    node = nodes.current()
    total: dict[str, int] = {}
    for endpoint in [] if node is None else node.endpoints():
        for name, count in endpoint.snapshot("").to_dict()[which].items():
            arrays = count["arrays"] if isinstance(count, dict) else count
            total[name] = total.get(name, 0) + arrays
    return total


def shelf() -> int:
    node = nodes.current()
    return 0 if node is None else len(node.shelf)


# -- forks ---------------------------------------------------------------------------------------


def in_a_fork(function, *args):
    """Call a function in a forked child; its result by a pipe."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send_result, args=(theirs, function, args)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it has threads: from 3.12 on
        process.start()
    theirs.close()
    result = mine.recv()
    process.join()
    mine.close()
    process.close()
    return result


def _send_result(pipe, function, args):
    pipe.send(function(*args))


# -- messages -------------------------------------------------------------------------------------


def segments_left() -> list[str]:
    return glob.glob(f"{segments.FOLDER}/dask-gpuipc-*")


def look(times: int = 1) -> int:
    """Look for messages that nobody can receive."""
    for _ in range(times):
        post._post.look()
    return on_the_way()


def on_the_way() -> int:
    return 0 if post._post is None else len(post._post)


def nothing_kept() -> bool:
    post._post.look()
    return on_the_way() == 0 and shelf() == 0 and held()[0] == 0 and slots() == 0


def slots() -> int:
    """Slots in use in this process's arenas."""
    here = nodes.current()
    endpoint = here and here.endpoint_of("host")
    return int(repr(endpoint.memories[0]).split()[3]) if endpoint else 0


# -- handles -------------------------------------------------------------------------------------


def handle_of(name: str, as_: str) -> Any:
    """Make a handle, keep it, and give a copy to the test to pass on."""
    here[as_] = sharing.get_ipc_handle(here[name])
    return here[as_]


def open_(handle: str, as_: str, timeout: float = 20.0) -> str:
    """Open a kept handle; the error's name and text, or nothing."""
    try:
        here[as_] = here[handle].open(timeout)
    except GPUIPCError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def close(handle: str) -> None:
    here[handle].close()


def holders(handle: str) -> tuple[int, ...]:
    return here[handle].holders
