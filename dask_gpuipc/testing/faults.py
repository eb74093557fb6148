"""Faults, injected by wrappers around a memory and a channel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

from dask_gpuipc import endpoint
from dask_gpuipc.channel import Channel, OnBroken, OnMessage
from dask_gpuipc.memory.base import (
    Allocation,
    Handle,
    Imported,
    Mapping,
    Memory,
    Pin,
    Preparation,
    Prover,
    Rung,
)
from dask_gpuipc.testing.clock import LIMIT
from dask_gpuipc.testing.gates import Gate
from dask_gpuipc.wire import Announce, Layout, Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall go wrong with the calls of one method.

    Parameters
    ----------
    call : str
        The method's name. For a channel's ``send`` and ``post``, the message's type may follow:
        ``"post Release"``.
    first : int
        The call that it begins with, counted from 1.
    times : int or None
        How many calls it lasts; None is for good.
    error : callable, optional
        Makes the exception to raise, such as ``partial(OpenFailed, Failure.STALE)``.
    after : bool
        Raise when the call has been made (and undone), instead of in its place.
    change : callable, optional
        Takes the call's result and gives the one to return.
    skip : bool
        The call is not made and returns None: a posted message is lost.
    hold : threading.Event or Gate, optional
        The call waits until it is set, or another process lets it go.
    """

    call: str
    first: int = 1
    times: int | None = 1
    error: Callable[[], BaseException] | None = None
    after: bool = False
    change: Callable[[Any], Any] | None = None
    skip: bool = False
    hold: threading.Event | Gate | None = None

    def strikes(self, number: int) -> bool:
        """Whether it has to do with the call of this number."""
        return number >= self.first and (self.times is None or number < self.first + self.times)


class _Faults:
    """Counts calls, and lets faults strike them. Thread-safe."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.calls: Counter[str] = Counter()
        self._seen: list[tuple[Fault, Counter[str]]] = [(f, Counter()) for f in faults]
        self._lock = threading.Lock()

    def run(
        self,
        name: str,
        call: Callable[[], T],
        *,
        undo: Callable[[T], None] | None = None,
        decline: Callable[[], None] | None = None,
    ) -> T:
        """Make a call as the faults will have it.

        ``undo`` gives back what the call got, where an error follows it; ``decline`` does what it
        owes its caller even though it was not made.
        """
        faults = self._struck(name)
        for fault in faults:
            if fault.hold is not None and not fault.hold.wait(LIMIT):
                raise AssertionError(f"{name} was held for {LIMIT:.0f} s and nobody let it go")
        early = [f.error for f in faults if f.error is not None and not f.after]
        if early or any(f.skip for f in faults):
            if decline is not None:
                decline()
            for error in early:
                raise error()
            return None  # type: ignore[return-value]  # only where a method returns nothing
        return self._finish(faults, call(), undo)

    def _struck(self, name: str) -> list[Fault]:
        with self._lock:
            self.calls[name] += 1
            struck = []
            for fault, seen in self._seen:
                if fault.call in (name, name.partition(" ")[0]):
                    seen[fault.call] += 1
                    if fault.strikes(seen[fault.call]):
                        struck.append(fault)
            return struck

    @staticmethod
    def _finish(faults: Sequence[Fault], result: T, undo: Callable[[T], None] | None) -> T:
        for fault in faults:
            if fault.error is not None and fault.after:
                if undo is not None:
                    undo(result)
                raise fault.error()
            if fault.change is not None:
                result = fault.change(result)
        return result


class FaultyMemory:
    """A memory whose `pin`, `handle`, `open`, `load` and the rest fail as told. Thread-safe.

    Parameters
    ----------
    inner : Memory
        Does the work. Whatever a fault keeps from it is given back, so that a fault by itself
        leaks nothing.
    *faults : Fault
        By the names of `Memory`'s methods.

    Attributes
    ----------
    calls : collections.Counter
        Calls so far, by the method's name.
    """

    def __init__(self, inner: Memory, *faults: Fault) -> None:
        self.inner = inner
        self.kind = inner.kind
        self.executor: Executor | None = inner.executor
        self.prepares = inner.prepares
        self.prover: Prover | None = inner.prover
        self._faults = _Faults(faults)
        self.calls = self._faults.calls

    def __repr__(self) -> str:
        return f"<FaultyMemory around {self.inner!r}>"

    def accepts(self, obj: object) -> bool:
        """As the inner one; no fault strikes it."""
        return self.inner.accepts(obj)

    def devices(self) -> tuple[str, ...]:
        """As the inner one."""
        return self._faults.run("devices", self.inner.devices)

    def prepare(
        self, arrays: Sequence[Any], devices: Collection[str] | None = None
    ) -> Preparation | None:
        """As the inner one."""
        return self._faults.run("prepare", partial(self.inner.prepare, arrays, devices))

    def wrap(self, buffer: Any) -> Any | None:
        """As the inner one."""
        return self._faults.run("wrap", partial(self.inner.wrap, buffer))

    def download(self, array: Any) -> memoryview:
        """As the inner one."""
        return self._faults.run("download", partial(self.inner.download, array))

    def upload(self, data: Any) -> Any:
        """As the inner one."""
        return self._faults.run("upload", partial(self.inner.upload, data))

    def pin_copies(self, array: Any) -> bool:
        """As the inner one."""
        return self._faults.run("pin_copies", partial(self.inner.pin_copies, array))

    def pin(self, array: Any, prepared: Preparation | None) -> Pin:
        """As the inner one; an error after it releases the pin."""
        return self._faults.run(
            "pin", partial(self.inner.pin, array, prepared), undo=lambda pin: pin.release()
        )

    def protects(self, array: Any) -> bool:
        """As the inner one; no fault strikes it."""
        return self.inner.protects(array)

    def handle(self, allocation: Allocation) -> Handle:
        """As the inner one."""
        return self._faults.run("handle", partial(self.inner.handle, allocation))

    def open(self, announcement: Announce, fds: Sequence[int]) -> Mapping:
        """As the inner one; it owns the descriptors whatever happens."""
        return self._faults.run(
            "open",
            partial(self.inner.open, announcement, fds),
            undo=lambda mapping: mapping.close(),
            decline=partial(_close_all, fds),
        )

    def load(self, mapping: Mapping, layout: Layout, rung: Rung) -> Imported:
        """As the inner one."""
        return self._faults.run("load", partial(self.inner.load, mapping, layout, rung))

    def owner_of(self, array: Any) -> Any | None:
        """As the inner one."""
        return self._faults.run("owner_of", partial(self.inner.owner_of, array))

    def own(self, array: Any) -> Any:
        """As the inner one."""
        return self._faults.run("own", partial(self.inner.own, array))

    def rung(self, preferred: str) -> Rung:
        """As the inner one."""
        return self._faults.run("rung", partial(self.inner.rung, preferred))

    def fence(self) -> Future[None] | None:
        """As the inner one."""
        return self._faults.run("fence", self.inner.fence)

    def trim(self) -> Sequence[Allocation]:
        """As the inner one."""
        return self._faults.run("trim", self.inner.trim)

    def collect(self) -> Sequence[Allocation]:
        """As the inner one."""
        return self._faults.run("collect", self.inner.collect)

    def close(self) -> None:
        """As the inner one."""
        self._faults.run("close", self.inner.close)


class FaultyChannel(Channel):
    """A channel whose `send`, `post` and `drain` fail as told; made as a `Channel` is.

    Parameters
    ----------
    faults : iterable of Fault
        By the names ``send``, ``post`` and ``drain``, or with a message: ``"send Announce"``.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_message: OnMessage,
        on_broken: OnBroken,
        faults: Iterable[Fault] = (),
    ) -> None:
        self._faults = _Faults(faults)
        self.calls = self._faults.calls
        super().__init__(sock, loop, on_message, on_broken)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """As `Channel.send`."""
        name = f"send {type(message).__name__}"
        self._faults.run(name, partial(super().send, message, fds))

    def post(self, message: Message) -> None:
        """As `Channel.post`."""
        name = f"post {type(message).__name__}"
        self._faults.run(name, partial(super().post, message))

    def drain(self) -> None:
        """As `Channel.drain`."""
        self._faults.run("drain", super().drain)


@contextlib.contextmanager
def faulty_channels(*faults: Fault) -> Iterator[list[FaultyChannel]]:
    """Within, all endpoints of this process make `FaultyChannel`; gives the list of those made.

    Each channel counts for itself.
    """
    made: list[FaultyChannel] = []

    def make(
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_message: OnMessage,
        on_broken: OnBroken,
    ) -> FaultyChannel:
        made.append(FaultyChannel(sock, loop, on_message, on_broken, faults))
        return made[-1]

    with mock.patch.object(endpoint, "Channel", make):
        yield made


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
