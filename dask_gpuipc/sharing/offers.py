"""What every handle is: an offer in the process that made it, a ticket everywhere else."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

from dask_gpuipc.errors import HandleClosed
from dask_gpuipc.sharing.fetching import TIMEOUT, Ticket
from dask_gpuipc.sharing.node import Node
from dask_gpuipc.sharing.shelf import Entry, Who


class Offer:
    """An entry on the shelf of the process that made it; a forked child may hold one, in vain."""

    def __init__(self, here: Node, entry: Entry) -> None:
        self._here = here
        self._entry = entry

    @property
    def is_here(self) -> bool:
        """Whether this process made it."""
        return self._here.pid == os.getpid()

    def holders(self) -> tuple[int, ...]:
        """Pids of those that have it."""
        return self._here.shelf.holders(self._entry)

    def wait(self, timeout: float) -> bool:
        """Wait until nobody has it; return whether nobody has."""
        return self._here.shelf.wait(self._entry, timeout)

    @property
    def array(self) -> Any:
        """What is given out; None once it was given up."""
        return self._entry.obj

    def allow(self, who: set[Who]) -> None:
        """Restrict it to these processes, or widen its list by them."""
        self._here.shelf.allow(self._entry, who)

    def set_readonly(self, readonly: bool) -> None:
        """Say whether others can write; `ValueError` where they always can."""
        memory = self._here.endpoint(self._entry.kind).memories[0]
        if readonly and not memory.protects(self._entry.obj):
            raise ValueError(
                "who opens memory of cudaMalloc can write to it; allocate it with "
                "dask_gpuipc.sharing.Pool to have it read-only"
            )
        self._entry.readonly = readonly

    def withdraw(self) -> None:
        """Let nobody else have it."""
        if self.is_here:
            self._here.shelf.withdraw(self._entry)

    def withdraw_later(self) -> None:
        """The same, wherever the garbage collector runs: takes no lock."""
        if self.is_here:
            self._here.later(self._here.shelf.withdraw, self._entry)


class Handle(ABC):
    """Opened at most once, until it is closed. Thread-safe.

    In the process that made it, it gives its object out until it is closed or dies.
    """

    def __init__(self, ticket: Ticket, offer: Offer | None = None) -> None:
        self._ticket = ticket
        self._offer = offer
        self._found: Any = None
        self._closed = False
        self._lock = threading.RLock()
        if offer is not None:
            weakref.finalize(self, offer.withdraw_later).atexit = False

    @property
    def source(self) -> int:
        """Pid of the process that made it."""
        return self._ticket.address.pid

    @abstractmethod
    def open(self, timeout: float = TIMEOUT) -> Any:
        """What it names."""

    @abstractmethod
    def _find(self, timeout: float) -> Any:
        """Get it, here or from its source."""

    def _open(self, timeout: float) -> Any:
        with self._lock:
            self._check_open()
            if self._found is None:
                self._found = self._find(timeout)
            return self._found

    def _check_open(self) -> None:
        if self._closed:
            raise HandleClosed(f"{self!r}; get another from its source")

    def close(self) -> None:
        """Be done with it. Idempotent; does not wait.

        In the process that made it: nobody else can open it any more.
        """
        with self._lock:
            self._closed, self._found = True, None
        if self._offer is not None:
            self._offer.withdraw()

    def __enter__(self) -> Any:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
