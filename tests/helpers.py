"""What several test modules need: waiting without sleeping, and processes to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT = 20.0
"""Seconds after which whatever a test waits for counts as not coming."""


def wait_until(condition: Callable[[], T], what: str = "", timeout: float = LIMIT) -> T:
    """Poll until a condition holds; its value. Fails after so many seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition}: not within {timeout:.0f} s"
        time.sleep(0.002)
    return value


async def until(condition: Callable[[], T], what: str = "", timeout: float = LIMIT) -> T:
    """As `wait_until`, while the event loop runs."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition}: not within {timeout:.0f} s"
        await asyncio.sleep(0.002)
    return value


def run(main: Awaitable[T]) -> T:
    """`asyncio.run` with a limit, and with errors that only a callback saw made the test's."""

    async def limited() -> T:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with asyncio.timeout(3 * LIMIT):
            result = await main
        assert not errors, errors
        return result

    return asyncio.run(limited())


@contextlib.contextmanager
def descriptors_used_up(free: int = 0) -> Iterator[None]:
    """Within, so many more descriptors can be opened, and not one more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    used = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(used.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in used:
            os.close(fd)


class Child:
    """A spawned process that calls functions of test modules, on an event loop if they want one.

    A coroutine function runs on its loop; a plain function too, so both may touch what lives there.
    Only one that is no daemon may have children of its own.
    """

    def __init__(self, *, daemon: bool = True) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs,), daemon=daemon)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result there; what it raises there is an AssertionError here."""
        self.start(function, *args)
        return self.finish()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call that `finish` ends; the other process works on meanwhile."""
        self._pipe.send((function, args))

    def finish(self) -> Any:
        assert self._pipe.poll(3 * LIMIT), f"process {self.pid} does not answer"
        good, value = self._pipe.recv()
        assert good, f"in process {self.pid}:\n{value}"
        return value

    def until(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call again until the result is true."""
        return wait_until(lambda: self.call(function, *args), f"{function.__name__}{args}")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        # Not join, which waits for a pipe that a process forked there would keep open.
        wait_until(lambda: not self.process.is_alive(), f"the end of process {self.pid}")

    def end(self) -> None:
        """Have it end in good order, and do not wait for that."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.end()
            self.process.join(LIMIT)
        stuck = self.process.is_alive()
        if stuck:
            self.kill()
        self._pipe.close()
        self.process.close()
        assert not stuck, "a child process did not end and was killed"


@contextlib.contextmanager
def child(*, daemon: bool = True) -> Iterator[Child]:
    process = Child(daemon=daemon)
    try:
        yield process
    finally:
        process.close()


def _serve(pipe: Any) -> None:
    asyncio.run(_serve_on_loop(pipe))


async def _serve_on_loop(pipe: Any) -> None:
    # The pipe is read on the loop, so a stopped loop answers nothing.
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    while True:
        await ready.wait()
        ready.clear()
        while pipe.poll():
            try:
                message = pipe.recv()
            except EOFError:
                return
            if message is None:
                return
            pipe.send(await _answer(*message))


async def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        result = function(*args)
        if asyncio.iscoroutine(result):
            result = await result
    except BaseException:  # noqa: BLE001 -- it is raised again at the other end
        return False, traceback.format_exc()
    return True, result
