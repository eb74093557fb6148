"""One process's end of the sharing: endpoints on an event loop of their own.

An endpoint needs a loop, and a program without Dask has none to spare. So a process that shares
gets one daemon thread, lazily, with one loop on it, and on that loop one `Endpoint` for each kind
of memory that was asked for, and one `Desk`. What blocks is done by the threads of the application,
so the loop is always free to answer others.

A forked child starts anew: it finds no node, and makes its own when it shares something itself.
What it inherited of its parent's node it never touches, since sockets and the loop's epoll are
still the parent's. Arrays that its parent had imported it may read: the parent keeps their leases
until the child has ended (`_Heirs`), as a slot that was recycled meanwhile would show through.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar

from dask_gpuipc.config import Settings
from dask_gpuipc.endpoint import Endpoint
from dask_gpuipc.errors import GPUIPCError, MemoryUnavailable, StillOpen
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.sharing.desk import Desk, Guest
from dask_gpuipc.sharing.shelf import Shelf

logger = logging.getLogger("distributed.gpuipc")

T = TypeVar("T")
THREAD: Final = "gpuipc-sharing"
GROUP: Final = "dask_gpuipc.sharing"
"""Stands where an endpoint of Dask has its scheduler's id: these two never meet."""
ANSWER: Final = 60.0
"""Seconds in which this process's own loop must have done what it was asked."""
LAST: Final = -100
"""Exit priority: after multiprocessing's queues have been flushed (-5)."""


class Node:
    """What this process shares with others, outside Dask. Thread-safe.

    Parameters
    ----------
    serve : callable
        Coroutine function of ``(node, guest)``: answers one visit.
    """

    def __init__(self, serve: Callable[[Node, Guest], Coroutine[Any, Any, None]]) -> None:
        settings = Settings.load(transfer="share", min_bytes=1)
        self.settings = replace(settings, dial_again=0.0)
        self.pid = os.getpid()
        self.shelf = Shelf()
        self.on_leave: list[Callable[[], None]] = []
        """Called at exit, while the endpoints still work; each must be quick."""
        self._making = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
        try:
            self.desk = self.run(self._open_desk(functools.partial(serve, self)))
        except BaseException:
            self._end_loop()
            raise

    def __repr__(self) -> str:
        return f"<Node of process {self.pid}: {self.shelf!r}, {list(self._endpoints.values())}>"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        with contextlib.closing(self._loop) as loop:
            loop.run_until_complete(_finish(loop))

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = ANSWER) -> T:
        """Have a coroutine run on the loop, and wait for it. Not on the loop's own thread."""
        assert threading.current_thread() is not self._thread
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def later(self, function: Callable[..., object], *args: Any) -> None:
        """Have a function called on the loop, soon; from any thread and from finalizers."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing matters any more
            self._loop.call_soon_threadsafe(function, *args)

    async def _open_desk(self, serve: Callable[[Guest], Coroutine[Any, Any, None]]) -> Desk:
        return Desk(self.settings.socket_directory, self._loop, serve)

    # -- endpoints --------------------------------------------------------------------------------

    def endpoint(self, kind: str) -> Endpoint:
        """The endpoint for one kind of memory, made when it is first asked for.

        Raises
        ------
        MemoryUnavailable
            This process cannot share that kind; the text says why.
        """
        with self._making:
            found = self._endpoints.get(kind)
            if found is None:
                memory = _make_memory(kind, self.settings)
                try:
                    found = self.run(self._open_endpoint(memory))
                except BaseException:
                    memory.close()
                    raise
                self._endpoints[kind] = found
        return found

    def endpoint_of(self, kind: str) -> Endpoint | None:
        """The same, if it was made."""
        return self._endpoints.get(kind)

    def endpoints(self) -> list[Endpoint]:
        """All that were made."""
        return list(self._endpoints.values())

    async def _open_endpoint(self, memory: Memory) -> Endpoint:
        return Endpoint(self.settings, [memory], GROUP)

    def held(self) -> tuple[int, int]:
        """Leases that others have here, and that this process has elsewhere."""
        endpoints = self.endpoints()
        leases = sum(e.exporter.leases for e in endpoints)
        return leases, sum(e.importer.holding for e in endpoints)

    # -- the end ----------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        """Close everything once nothing is held either way; `StillOpen` if that does not come."""
        for entry in self.shelf.entries():
            if not entry.once:  # what is in a message is dealt with in `leave`
                self.shelf.withdraw(entry)
        deadline = time.monotonic() + timeout
        while any(self.held()):
            if time.monotonic() > deadline:
                theirs, ours = self.held()
                raise StillOpen(
                    f"after {timeout:g} s other processes hold {theirs} arrays of this one, and "
                    f"this one {ours} arrays of others"
                )
            time.sleep(0.01)
        self.leave(wait=max(1.0, deadline - time.monotonic()))

    def leave(self, wait: float = 0.0) -> None:
        """Close everything now; memory that others have open lives on with them."""
        for call in self.on_leave:
            call()
        with contextlib.suppress(TimeoutError, GPUIPCError):
            self.run(self._close(wait), timeout=wait + 2.0)
        self._end_loop()

    async def _close(self, wait: float) -> None:
        await self.desk.close()
        for endpoint in self.endpoints():
            endpoint.stop()
        for endpoint in self.endpoints():
            await endpoint.wait_closed(wait)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2.0)


async def _finish(loop: asyncio.AbstractEventLoop) -> None:
    rest = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    await loop.shutdown_default_executor()


def _make_memory(kind: str, settings: Settings) -> Memory:
    if kind == "host":
        return HostMemory(
            arena_size=settings.host_arena_size,
            limit=settings.pinned_limit,
            idle_timeout=settings.host_idle_timeout,
            watch_writes=settings.host_watch_writes,
        )
    try:
        from dask_gpuipc.memory.cuda import CudaMemory
    except ImportError as error:
        raise MemoryUnavailable(str(error)) from error
    memory: Memory = CudaMemory(settings)
    return memory


# -- forks ----------------------------------------------------------------------------------------


class _Heirs:
    """Keeps what a forked child inherited leased until the child has ended.

    The child holds the writing end of a pipe, whose end of file its parent waits for; that comes
    also if the child calls exec, which ends its mappings too.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._owners: list[Any] = []

    def before(self, node: Node | None) -> None:
        """In the parent, before the fork."""
        self._owners = [o for e in node.endpoints() for o in e.importer.owners()] if node else []
        if self._owners:
            with contextlib.suppress(OSError):  # without a descriptor left, a fork is as before
                self._pipe = os.pipe()

    def after_in_parent(self, node: Node | None) -> None:
        """In the parent, after it."""
        owners, self._owners = self._owners, []
        pipe, self._pipe = self._pipe, None
        if node is not None and pipe is not None:
            os.close(pipe[1])
            node.later(_keep_until_end, node._loop, pipe[0], owners)

    def after_in_child(self) -> None:
        """In the child, which keeps its end for as long as it lives."""
        self._owners = []
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe[0])


def _keep_until_end(loop: asyncio.AbstractEventLoop, fd: int, owners: list[Any]) -> None:
    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        owners.clear()

    loop.add_reader(fd, ended)


_lock = threading.Lock()
_node: Node | None = None
_abandoned: list[Node] = []
"""Of this process's parents: kept for ever, as closing them would close what is the parent's."""
_heirs = _Heirs()


def node() -> Node:
    """The node of this process; made, with its thread, when it is first asked for.

    Raises
    ------
    ConfigError
        The socket directory does not serve.
    """
    global _node
    found = _node
    if found is None:
        from dask_gpuipc.sharing.serving import serve

        with _lock:
            if _node is None:
                _node = Node(serve)
            found = _node
    return found


def current() -> Node | None:
    """The node of this process, if it was made."""
    return _node


def stop(timeout: float = 10.0) -> None:
    """End this process's sharing: its thread, sockets and memory. Idempotent.

    Handles and keys of this process can be opened no more. The next use begins anew. Without this,
    all of it ends with the process.

    Parameters
    ----------
    timeout : float
        Seconds to wait until nothing is held, by others or of others.

    Raises
    ------
    StillOpen
        Something still is; what was begun goes on.
    """
    global _node
    found = _node
    if found is not None:
        found.stop(timeout)
        with _lock:
            if _node is found:
                _node = None


def _leave() -> None:
    global _node
    found, _node = _node, None
    if found is not None and found.pid == os.getpid():
        found.leave()


def _leave_at_exit(_: object) -> None:
    multiprocessing.util.Finalize(None, _leave, exitpriority=LAST)


# Now, and not with the first node: that may be made while the process is ending already, by the
# thread of a queue. In its children multiprocessing forgets what was registered.
_leave_at_exit(None)
multiprocessing.util.register_after_fork(_heirs, _leave_at_exit)


def _before_fork() -> None:
    _lock.acquire()
    _heirs.before(_node)


def _after_fork_in_parent() -> None:
    _heirs.after_in_parent(_node)
    _lock.release()


def _after_fork_in_child() -> None:
    global _node, _lock
    _heirs.after_in_child()
    if _node is not None:
        _abandoned.append(_node)
    _node = None
    _lock = threading.Lock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
