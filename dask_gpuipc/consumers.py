"""What an exporter knows of one peer: its channel, what it was told of, what it can open."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from dask_gpuipc.channel import Channel
from dask_gpuipc.errors import ChannelError, ChannelFull, Failure, Refusal, Refused
from dask_gpuipc.memory.base import Allocation, Memory, Sample
from dask_gpuipc.wire import Advertisement, Announce, Probe, Proof, Withdraw

logger = logging.getLogger("distributed.gpuipc")

Place = tuple[str, int, int]
"""Memory, allocation, generation."""

MAX_FAILURES: Final = 3
"""Failures of one allocation by bad luck, after which it is denied for a while."""
DENIED: Final = 10.0
"""Seconds that bad luck is remembered for."""
# What one failed open says about the next: the handle is bad. All else is bad luck.
_DENYING = (Failure.STALE, Failure.OPEN_FAILED, Failure.OUT_OF_BOUNDS, Failure.ERROR)


class Consumer:
    """One peer that is sent handles. Thread-safe; its lock is held over a send, and no other call.

    Parameters
    ----------
    them : Advertisement
    channel : Channel
        The one that is up; another one takes its place after a redial.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self, them: Advertisement, channel: Channel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.peer = them.peer
        self.them = them
        self.channel = channel
        self.left = False
        """Whether it said that it takes no more."""
        self._clock = clock
        self._lock = threading.Lock()
        self._announced: set[Place] = set()
        self._denied: dict[Place, float] = {}
        """Allocations that failed to open there, and until when they go as bytes."""
        self._failures: Counter[Place] = Counter()
        self._unconfirmed: set[int] = set()
        """Leases that its list of what it holds has not named yet."""
        self._opens = set(them.devices)
        """UUIDs of the GPUs whose handles it opens: said so, or proven."""
        self._probed: dict[str, bytes] = {}
        """By UUID, the digest that proves it; empty until the sample is made."""

    def __repr__(self) -> str:
        state = "left" if self.left else "here"
        return f"<Consumer {self.peer[:8]} {state}: {len(self._announced)} announced>"

    def connect(self, channel: Channel, unconfirmed: set[int]) -> None:
        """Begin, or go on over a new channel, on which it begins with a list of what it holds."""
        with self._lock:
            self.channel = channel
            self._announced.clear()
            self._unconfirmed = unconfirmed
            self._probed.clear()  # an answer may have been lost with the old one

    def confirm(self, leases: tuple[int, ...], last: bool) -> set[int]:
        """Take a part of that list in; after the last, the leases that it does not name."""
        with self._lock:
            self._unconfirmed.difference_update(leases)
            if not last:
                return set()
            lost, self._unconfirmed = self._unconfirmed, set()
        return lost

    # -- allocations ------------------------------------------------------------------------------

    def announce(self, memory: Memory, allocation: Allocation) -> None:
        """Send the handle of an allocation, unless it has it; raises `Refused`."""
        if allocation.device and allocation.device not in self._opens:
            raise Refused(Refusal.OTHER_DEVICE, allocation.device)
        place = (memory.kind, allocation.id, allocation.generation)
        with self._lock:
            if self._denied.get(place, 0.0) > self._clock():
                raise Refused(Refusal.DENIED, f"{memory.kind} allocation {allocation.id}")
            self._denied.pop(place, None)
            if place in self._announced:
                return
            handle = memory.handle(allocation)
            announcement = Announce(*place, allocation.nbytes, allocation.device, handle.payload)
            try:
                self.channel.send(announcement, handle.fds)
            except ChannelFull as error:
                raise Refused(Refusal.CHANNEL_FULL, str(error)) from error
            except ChannelError as error:
                raise Refused(Refusal.PEER_LEFT, str(error)) from error
            self._announced.add(place)

    def evicted(self, place: Place, failure: Failure | None = None) -> None:
        """It has closed an allocation, or failed to open it: another announcement is needed."""
        with self._lock:
            self._announced.discard(place)
            if failure is not None:
                self._deny(place, failure)

    def _deny(self, place: Place, failure: Failure) -> None:
        # Bad luck too must end some time: whoever asks for handles again and again, as
        # Scheduler.replicate does, would do so for ever.
        self._failures[place] += 1
        if failure in _DENYING:
            self._denied[place] = math.inf
        elif self._failures[place] >= MAX_FAILURES:
            del self._failures[place]
            self._denied.setdefault(place, self._clock() + DENIED)

    def withdraw(self, place: Place) -> None:
        """Have it forget an allocation that is gone."""
        with self._lock:
            known = place in self._announced
            self._announced.discard(place)
            self._denied.pop(place, None)
            self._failures.pop(place, None)
        if known:
            self.channel.post(Withdraw(*place))

    # -- devices ----------------------------------------------------------------------------------

    @property
    def opens(self) -> frozenset[str]:
        """UUIDs of the GPUs whose handles it opens."""
        with self._lock:
            return frozenset(self._opens)

    def probe(self, memory: Memory, device: str) -> None:
        """Have it read a sample of a device's memory, once for each channel to it."""
        prover = memory.prover
        with self._lock:
            if prover is None or device in self._probed:
                return
            self._probed[device] = b""
        sample = prover.sample(device)
        sample.add_done_callback(partial(self._send_probe, memory.kind, device))

    def _send_probe(self, kind: str, device: str, made: Future[Sample]) -> None:
        error = made.exception()
        if error is not None:
            logger.info("%s cannot be proven to anybody: %s", device, error)
            return
        sample = made.result()
        with self._lock:
            self._probed[device] = sample.digest
        self.channel.post(Probe(kind, device, sample.nbytes, sample.handle))

    def proved(self, proof: Proof) -> None:
        """It tells what it read of a sample."""
        with self._lock:
            digest = self._probed.get(proof.device)
            good = bool(digest) and digest == proof.digest
            if good:
                self._opens.add(proof.device)
        logger.info("Process %d can read %s: %s", self.them.pid, proof.device, good)
