"""A thread for calls that wait."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Calls in order on one daemon thread, which comes with work and goes without. Thread-safe.

    `concurrent.futures.ThreadPoolExecutor` joins its threads at interpreter exit, and a kernel that
    never ends would hang it there. What was submitted runs; it cannot be cancelled, since a device
    does not forget an event either. A shut-down one still takes calls, and its thread then ends
    with the last of them: a mapping may have to be closed long after its memory was.

    Parameters
    ----------
    name : str
        Of the thread.
    idle : float
        Seconds that the thread stays without work.
    """

    def __init__(self, name: str, idle: float = 10.0) -> None:
        self._name = name
        self._idle = idle
        self._changed = threading.Condition(threading.Lock())
        self._calls: deque[_Call] = deque()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<DaemonExecutor {self._name}: {len(self._calls)} waiting>"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called; its result or exception becomes the future's."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._calls.append(_Call(future, fn, args, kwargs))
            if self._thread is None:
                self._start()
            self._changed.notify()
        return future

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        # An interpreter that exits starts none: then the call is never made.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the thread end when its calls are done."""
        with self._changed:
            self._idle = 0.0
            self._changed.notify()
            thread = self._thread
        if wait and thread is not None:
            thread.join()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            del call  # it holds arrays and mappings, and the wait for the next may be long

    def _next(self) -> _Call | None:
        with self._changed:
            if not self._calls and self._idle:
                self._changed.wait(self._idle)
            if self._calls:
                return self._calls.popleft()
            self._thread = None
            return None


class _Call:
    """One submitted call."""

    __slots__ = ("args", "fn", "future", "kwargs")

    def __init__(
        self, future: Future[Any], fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.future = future
        self.fn = fn
        self.args = args
        self.kwargs = kwargs

    def run(self) -> None:
        future, fn, args, kwargs = self.future, self.fn, self.args, self.kwargs
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 -- it is the future's, as in the library
            future.set_exception(error)
            # The traceback holds this frame: leave nothing in it that leads back to the future.
            del self, future, fn, args, kwargs
        else:
            # Whoever waits may look at once whether what the call held is free.
            self.args, self.kwargs = (), {}
            del fn, args, kwargs
            future.set_result(result)
