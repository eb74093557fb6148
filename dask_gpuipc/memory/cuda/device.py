"""One GPU: its primary context, and what is before and after what on it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final

from dask_gpuipc.memory.cuda.driver import Code, CudaError, Driver, Identity
from dask_gpuipc.memory.cuda.threads import DaemonExecutor

SETTLE: Final = 0.0002
"""Seconds in which an event on an idle device surely passes."""
PAUSES: Final = (0.001, 0.05)
"""Seconds between two looks at whether the context is idle: the first, and the longest."""


class Device:
    """A GPU by its ordinal in this process. Thread-safe; its lock is a leaf.

    Nothing is retained or created before it is used: a device that no array lives on, and that no
    mapping was opened on, costs nothing.

    Parameters
    ----------
    driver : Driver
    identity : Identity
    synchronize : bool
        Wait for the whole device instead of for an event over the context.
    patience : float
        Seconds to wait for an idle moment before a mapping is closed in a busy one.
    """

    def __init__(
        self, driver: Driver, identity: Identity, synchronize: bool, patience: float = 5.0
    ) -> None:
        self.driver = driver
        self.ordinal = identity.ordinal
        self.uuid = identity.uuid
        self.mig = identity.mig
        self.synchronize = synchronize
        self.waiter = DaemonExecutor(f"gpuipc-cuda-wait-{self.ordinal}")
        """Waits for marks."""
        self.closer = DaemonExecutor(f"gpuipc-cuda-close-{self.ordinal}")
        """Waits for idle moments, and closes mappings in them."""
        self.imports = False
        """Whether a mapping was ever opened on it."""
        self._patience = patience
        self._give_up: float | None = None  # of the closing thread alone
        self._lock = threading.Lock()
        self._context: Any = None
        self._events: deque[Any] = deque()

    def __repr__(self) -> str:
        return f"<Device {self.ordinal}: {self.uuid}>"

    # -- the context ------------------------------------------------------------------------------

    @property
    def context(self) -> Any:
        """The primary context, retained for the life of the process. May be created by this."""
        if self._context is None:
            with self._lock:
                if self._context is None:
                    self._context = self.driver.retain(self.ordinal)
        return self._context

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current in this thread; see `Driver.current`."""
        with self.driver.current(self.context):
            yield

    @property
    def stream(self) -> Any:
        """The private stream for copies. Context current."""
        with self.driver.cupy_errors("cudaStreamCreate"):
            return _private_stream(self.ordinal)

    # -- marks ------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """A mark behind all that was submitted so far, on any stream.

        Raises
        ------
        CudaError
            With ``capturing`` where a graph capture is in progress, which recording would break.
        """
        with self.current():
            return self.mark_all(drain=self.synchronize)

    def mark_all(self, drain: bool = False) -> Mark:
        """`mark`, by an event or by draining the device. Context current."""
        self.refuse_capture()
        if drain:
            return Mark(self, None)
        mark = self._new_mark()
        self.driver.record_all(self.context, mark.event)
        return mark

    def mark_stream(self, stream: int) -> Mark:
        """A mark behind the work of one stream. Context current."""
        mark = self._new_mark()
        self.driver.record(stream, mark.event)
        return mark

    def refuse_capture(self) -> None:
        """Raise if a blocking stream captures. Context current."""
        if self.driver.capturing():
            raise CudaError("graph capture", Code.CAPTURE_IMPLICIT, "one is in progress")

    def when(self, mark: Mark, *keep: Any) -> Future[None]:
        """Completes, without an exception, when a mark has passed; holds ``keep`` until then.

        The marks of one device pass in the order in which they were made, near enough, so that one
        thread takes them in turn. One that has passed already needs no thread: for a small copy,
        waking it would take longer than the copy.
        """
        if _has_passed(mark):
            return _done()
        return self.waiter.submit(_settle, mark, keep)

    def fence(self) -> Future[None] | None:
        """Completes when every kernel submitted before has ended; None where none can run.

        During a graph capture it waits for the capture, and for the device then.
        """
        try:
            return self.when(self.mark())
        except CudaError:
            if self.driver.disabled:
                return None  # with the context, its kernels are gone
            if self.driver.unusable():
                return Future()  # a process that ends or was forked gives nothing back
            return self.waiter.submit(self.drain)

    def drain(self) -> None:
        """Wait for the whole device (`cudaDeviceSynchronize`), after a capture if there is one.

        Raises nothing: a device that cannot be waited for is of no more use.
        """
        while not self._drained():
            time.sleep(PAUSES[1])

    def _drained(self) -> bool:
        try:
            with self.current(), self.driver.cupy_errors("cudaDeviceSynchronize"):
                import cupy

                self.refuse_capture()
                cupy.cuda.runtime.deviceSynchronize()
        except CudaError as error:
            if error.capturing:
                return False
            if self.driver.unusable():
                _park_at_exit(self.driver)
            self.driver.disable(str(error))
        return True

    # -- idle -------------------------------------------------------------------------------------

    def wait_idle(self) -> None:
        """Return in a moment when the context is idle, or when patience has run out.

        Patience is the device's, not the caller's: on one that is never idle, the first mapping to
        close waits for it all, and the next ones do not wait again. A graph capture is waited for
        without end, as a close would break it.
        """
        pause, longest = PAUSES
        while True:
            try:
                if self._idle():
                    self._give_up = None
                    return
                if self._impatient():
                    return
            except CudaError as error:
                if not error.capturing:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _idle(self) -> bool:
        """Whether what was submitted until a blink ago has ended."""
        with self.current():
            mark = self.mark_all()
        time.sleep(SETTLE)
        return mark.passed()

    def _impatient(self) -> bool:
        now = time.monotonic()
        if self._give_up is None:
            self._give_up = now + self._patience
        return now >= self._give_up

    def _new_mark(self) -> Mark:
        try:
            event = self._events.popleft()
        except IndexError:
            event = self.driver.new_event()
        return Mark(self, event, self._events)


class Mark:
    """A point in a device's work. Thread-safe.

    Its event goes back to its device's store when the mark dies, and is recorded anew: no event is
    ever destroyed, so that no finalizer calls CUDA. Without an event, the point is passed once the
    whole device was waited for.
    """

    __slots__ = ("_device", "_drained", "_store", "event")

    def __init__(self, device: Device, event: Any, store: deque[Any] | None = None) -> None:
        self.event = event
        self._device = device
        self._store = store
        self._drained = False

    def __del__(self) -> None:
        if self._store is not None:
            self._store.append(self.event)  # atomic, and takes no lock

    def passed(self) -> bool:
        """Whether all before it has ended. Does not wait."""
        if self.event is None:
            return self._drained
        with self._device.current():
            return self._device.driver.passed(self.event)

    def wait(self) -> None:
        """Block this thread until all before it has ended; the GIL is released."""
        if self.event is None:
            self._device.drain()
            self._drained = True
            return
        # CuPy's: the driver bindings before 12.9 block with the GIL held.
        with self._device.current(), self._device.driver.cupy_errors("cudaEventSynchronize"):
            import cupy

            cupy.cuda.runtime.eventSynchronize(int(self.event))

    def settle(self) -> None:
        """`wait`, and raise nothing: after an error the device is drained, or is lost."""
        try:
            self.wait()
        except CudaError:
            self._device.drain()


@functools.cache
def _private_stream(ordinal: int) -> Any:
    """A non-blocking stream of CuPy's, one for each device, for the life of the process.

    Its device is the current one. It is never destroyed, so that no finalizer calls CUDA.
    """
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def _park_at_exit(driver: Driver) -> None:
    """In a process that ends, stop this thread for good: nothing was seen to end."""
    if not driver.disabled:
        threading.Event().wait()


def _has_passed(mark: Mark) -> bool:
    try:
        return mark.passed()
    except CudaError:
        return False  # settled by the thread


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _settle(mark: Mark, keep: tuple[Any, ...]) -> None:
    """Wait; the job holds ``keep`` meanwhile."""
    mark.settle()
