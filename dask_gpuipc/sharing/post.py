"""Arrays on their way in messages: kept until they are received, or surely never will be.

A *parcel* is one array in one message. It is tied to what its message travels in (`carriers`) when
multiprocessing writes the message. Two small wrappers see that: one around the pickling, so that a
message that could not be pickled leaves no parcels, and one around the writing. From time to time,
and less often while nothing new is sent, parcels that nobody can receive any more are let go.

What is left when this process ends is moved into segments with a name if it is host memory, and
waited for, with a limit, if it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import re
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from dask_gpuipc import process
from dask_gpuipc.memory.host import flat
from dask_gpuipc.sharing import segments
from dask_gpuipc.sharing.carriers import UNKNOWN, Carrier, Kind, carrier_of, carrier_to, readable
from dask_gpuipc.sharing.node import Node
from dask_gpuipc.sharing.shelf import Entry, Shelf

logger = logging.getLogger("distributed.gpuipc")

PAUSES: Final = (1.0, 30.0)
"""Seconds between two looks at whether parcels can be received: the first, and at most."""
LOOKS: Final = 2
"""So many looks, one after the other, must agree that nobody can."""
LINGER: Final = 10.0
"""Seconds that a process waits at its end for CUDA memory to be received."""
NOBODY: Final = Carrier(Kind.PROCESS)


@dataclass(eq=False, slots=True)
class Parcel:
    """One array or event in one message.

    ``entry`` is None for a segment, which needs nobody to give it out.
    """

    key: bytes
    shelf: Shelf
    entry: Entry | None
    carrier: Carrier = UNKNOWN
    starting: weakref.ref[Any] | None = None
    """What starts the process that the message is for, while that has no pid."""
    missed: int = 0

    @property
    def received(self) -> bool:
        """Whether it is not here to be had any more."""
        return not segments.exists(self.key) if self.entry is None else self.entry.withdrawn

    @property
    def on_host(self) -> bool:
        """Whether it can be moved into a segment."""
        return self.entry is not None and self.entry.kind == "host"

    def tie(self, carrier: Carrier) -> None:
        """Say what its message travels in."""
        self.carrier, self.starting = carrier, None
        if self.entry is None:
            segments.tie(self.key, carrier)

    def look_at_start(self) -> None:
        """Tie it to the process that it was to start: by now it has a pid, or never will."""
        if self.starting is None:
            return
        popen = self.starting()
        pid = getattr(popen, "pid", None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self.tie(carrier_to(pid))
                return
        if pid is not None or popen is None:
            self.tie(NOBODY)

    def drop(self) -> None:
        """Let it go: its message was not sent, or cannot be received."""
        if self.entry is None:
            segments.remove(self.key)
        else:
            self.shelf.withdraw(self.entry)

    def park(self) -> None:
        """Move it into a segment, which this process need not live for."""
        array = None if self.entry is None else self.entry.obj
        if array is None:
            return  # it was received this very moment
        try:
            segments.create(self.key, flat(array), self.carrier)
        except OSError as error:
            logger.warning("%d bytes that were sent are lost: %s", array.nbytes, error)
        self.drop()


class Post:
    """The parcels of one node. Thread-safe."""

    def __init__(self, here: Node) -> None:
        self.node = here
        self._lock = threading.Lock()
        self._parcels: list[Parcel] = []
        self._fresh = False
        self._looking: asyncio.Task[None] | None = None
        here.on_leave.append(self.leave)

    def __len__(self) -> int:
        return len(self._parcels)

    def __repr__(self) -> str:
        return f"<Post: {len(self._parcels)} parcels>"

    def send(self, key: bytes, entry: Entry | None = None) -> None:
        """Care for what this thread is pickling."""
        popen = get_spawning_popen()
        starting = None if popen is None else weakref.ref(popen)
        parcel = Parcel(key, self.node.shelf, entry, starting=starting)
        if popen is None:
            _pickled.parcels.append(parcel)
        with self._lock:
            self._parcels.append(parcel)
            self._fresh = True
        self.node.later(self._start)

    def _start(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_on())

    async def _look_on(self) -> None:
        pause = PAUSES[0]
        while self._parcels:
            await asyncio.sleep(pause)
            fresh, self._fresh = self._fresh, False
            await asyncio.to_thread(self.look)
            pause = PAUSES[0] if fresh else min(2 * pause, PAUSES[1])

    def look(self) -> None:
        """Forget what was received, and let go of what was found lost often enough."""
        parcels = self._waiting()
        alive = _alive(parcels)
        for parcel in parcels:
            parcel.missed = 0 if parcel.carrier in alive else parcel.missed + 1
            if parcel.missed >= LOOKS:
                logger.info("Nobody can receive %r any more", parcel.entry or parcel.key.hex())
                parcel.drop()
        self._waiting()

    def _waiting(self) -> list[Parcel]:
        with self._lock:
            self._parcels = [p for p in self._parcels if not p.received]
            return list(self._parcels)

    def leave(self) -> None:
        """Deal with what is left when this process ends."""
        parcels = [p for p in self._waiting() if p.entry is not None]
        alive = _alive(parcels) - {UNKNOWN}
        for parcel in parcels:
            if parcel.carrier not in alive:
                parcel.drop()
            elif parcel.on_host:
                parcel.park()
        _linger([p for p in parcels if not p.received])


def _linger(parcels: list[Parcel]) -> None:
    deadline = time.monotonic() + LINGER
    while parcels and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = _alive(parcels)
        parcels = [p for p in parcels if not p.received and p.carrier in alive]
    if parcels:
        logger.warning(
            "This process ends, and %d CUDA arrays or events that it sent were not received; keep "
            "it alive until they are",
            len(parcels),
        )


def _alive(parcels: Iterable[Parcel]) -> set[Carrier]:
    """Of their carriers those that can be read, and the unknown one."""
    for parcel in parcels:
        parcel.look_at_start()
    known = {p.carrier for p in parcels} - {UNKNOWN}
    return {UNKNOWN} | (readable(known, process.start_time(os.getpid())) if known else set())


_lock = threading.Lock()
_post: Post | None = None


def post_of(here: Node) -> Post:
    """The post of this process's node."""
    global _post
    with _lock:
        if _post is None or _post.node is not here:
            _post = Post(here)
        return _post


# -- what multiprocessing does --------------------------------------------------------------------


class _Pickled(threading.local):
    """Parcels that this thread has pickled and not sent yet."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []


_pickled = _Pickled()


@functools.cache
def watch_messages() -> None:
    """Wrap how multiprocessing pickles and writes messages, once for this process."""
    connection: Any = Connection  # for the type checker, as what is changed is no public part
    pickler: Any = ForkingPickler
    write = connection._send_bytes

    def send_bytes(self: Any, buf: Any) -> None:
        if _pickled.parcels:
            _tie(self.fileno(), buf)
        write(self, buf)

    def dump(self: Any, obj: Any) -> None:
        before = len(_pickled.parcels)
        try:
            pickle.Pickler.dump(self, obj)
        except BaseException:
            for parcel in _pickled.parcels[before:]:
                parcel.drop()
            del _pickled.parcels[before:]
            raise

    connection._send_bytes, pickler.dump = send_bytes, dump


def _tie(fd: int, message: Any) -> None:
    """Tie the parcels that are in a message to what it is written to."""
    sent = [p for p in _pickled.parcels if re.search(re.escape(p.key), message)]
    if sent:
        _pickled.parcels = [p for p in _pickled.parcels if p not in sent]
        carrier = carrier_of(fd)
        for parcel in sent:
            parcel.tie(carrier)


def _after_fork_in_child() -> None:
    global _lock, _post
    _lock, _post = threading.Lock(), None  # the parent's parcels are the parent's
    _pickled.parcels = []


os.register_at_fork(after_in_child=_after_fork_in_child)
