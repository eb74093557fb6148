"""One end of the sharing: what a worker (or any process) owns, put together.

Composes memories, exporter, importer and listener around one event loop, and keeps their peers:
dials consumers, accepts producers, watches processes, ticks. Knows no Dask.

Thread safety: `Endpoint` itself belongs to its loop's thread; exporter and importer, which the
serializers use, may be called from any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dask_gpuipc import process
from dask_gpuipc.channel import Channel, Listener, Watch, dial
from dask_gpuipc.config import Settings
from dask_gpuipc.consumers import Consumer
from dask_gpuipc.errors import ChannelBroken, ChannelError, MemoryUnavailable, Refusal, Refused
from dask_gpuipc.exporter import Exporter
from dask_gpuipc.importer import Importer
from dask_gpuipc.memory.base import Memory
from dask_gpuipc.producers import IdleLimits, Producer
from dask_gpuipc.stats import Snapshot, Statistics
from dask_gpuipc.wire import WIRE_VERSION, Advertisement, Hello, Leave, Message

logger = logging.getLogger("distributed.gpuipc")

TICK: Final = 0.1
"""Seconds between two looks at memory pressure and idleness, as often as Dask looks at memory."""
REDIAL: Final = (0.1, 30.0)
"""Seconds before a broken channel with leases on it is dialled again, first and at most."""


class Waker:
    """Has a callback called once, soon, on the loop; from any thread and from finalizers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._scheduled = False
        self.callback: Callable[[], None] = _nothing

    def __call__(self) -> None:
        """Have it called; while that is pending, further calls change nothing."""
        if self._scheduled:
            return
        self._scheduled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is leaving
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self.callback()


class Endpoint:
    """Everything that one worker shares with its peers.

    Parameters
    ----------
    settings : Settings
    memories : sequence of Memory
        At least one; closed with the endpoint.
    scheduler : str
        Peers under another scheduler are refused.

    Raises
    ------
    ConfigError
        The socket directory does not serve.
    MemoryUnavailable
        The kernel lacks what is needed.
    """

    def __init__(self, settings: Settings, memories: Sequence[Memory], scheduler: str) -> None:
        self.settings = settings
        self.memories = tuple(memories)
        self.stats = Statistics()
        self.peer = secrets.token_hex(16)
        self.on_producer_left: Callable[[str], None] = _nothing
        self._loop = asyncio.get_running_loop()
        self._watches: dict[tuple[str, str], Watch] = {}  # by direction and peer
        self._channels: set[Channel] = set()
        self._dialling: dict[str, asyncio.Future[Consumer]] = {}
        self._failed_dials: dict[str, float] = {}
        self._redials: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._closed = asyncio.Event()
        waker = Waker(self._loop)
        self.exporter = Exporter(
            self.peer,
            self.memories,
            self.stats,
            min_bytes=settings.min_bytes,
            transfer=settings.transfer,
            pinned_limits={"host": settings.pinned_limit, "cuda": settings.cuda_pinned_limit},
        )
        self.importer = Importer(
            self.peer,
            self.memories,
            self.stats,
            waker,
            idle={
                "host": IdleLimits(64, 60.0),
                "cuda": IdleLimits(settings.cuda_idle_mappings, settings.cuda_idle_timeout),
            },
        )
        waker.callback = self.importer.flush
        os.close(process.open_pidfd(os.getpid(), process.start_time(os.getpid())))  # or raise now
        devices = tuple(d for m in self.memories for d in m.devices())
        self._listener = Listener(settings.socket_directory, self._loop, self._accept)
        self.advertisement = self._advertise(scheduler, devices)
        self._ticker = self._loop.call_later(TICK, self._tick)

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "stopping" if self._stopping else "open"
        return f"<Endpoint {self.peer[:8]} {state}: {self.exporter!r}, {self.importer!r}>"

    def _advertise(self, scheduler: str, devices: tuple[str, ...]) -> Advertisement:
        return Advertisement(
            version=WIRE_VERSION,
            peer=self.peer,
            scheduler=scheduler,
            pid=os.getpid(),
            start_time=process.start_time(os.getpid()),
            boot_id=process.boot_id(),
            namespaces=process.namespaces(),
            socket_path=self._listener.path,
            token=self._listener.token,
            memories=tuple(m.kind for m in self.memories),
            devices=devices,
        )

    def snapshot(self, state: str) -> Snapshot:
        """What it did and holds."""
        mappings, mapped_bytes = self.importer.mappings()
        return self.stats.snapshot(
            state=state,
            memories=[m.kind for m in self.memories],
            leases=self.exporter.leases,
            pinned_bytes=self.exporter.pinned_bytes,
            holding=self.importer.holding,
            mappings=mappings,
            mapped_bytes=mapped_bytes,
        )

    # -- as producer ------------------------------------------------------------------------------

    async def consumer(self, them: Advertisement) -> Consumer:
        """The peer that advertised itself, with its channel up.

        Raises
        ------
        Refused
            It does not match, has left, or cannot be reached.
        """
        reason = self._mismatch(them)
        if reason is not None:
            raise Refused(reason)
        known = self.exporter.consumer(them.peer)
        if known is not None:
            if known.left:
                raise Refused(Refusal.PEER_LEFT)
            if known.channel.usable:
                return known
        pending = self._dialling.get(them.peer)
        if pending is None:
            self._check_failed(them.peer)
            pending = asyncio.ensure_future(self._dial(them))
            self._dialling[them.peer] = pending
            pending.add_done_callback(partial(self._dialled, them.peer))
        # Shielded: others wait for the same dial when one of them is cancelled.
        return await asyncio.shield(pending)

    def _mismatch(self, them: Advertisement) -> Refusal | None:
        me = self.advertisement
        if self._stopping:
            return Refusal.STOPPING
        if them.scheduler != me.scheduler:
            return Refusal.OTHER_SCHEDULER
        if them.boot_id != me.boot_id:
            return Refusal.OTHER_NODE
        if them.namespaces != me.namespaces:
            return Refusal.OTHER_NAMESPACE
        if them.pid == me.pid:
            return Refusal.SAME_PROCESS
        if not set(them.memories) & set(me.memories):
            return Refusal.NO_COMMON_MEMORY
        return None

    def _check_failed(self, peer: str) -> None:
        failed = self._failed_dials.get(peer)
        if failed is None:
            return
        if time.monotonic() - failed < self.settings.dial_again:
            raise Refused(Refusal.DIAL_FAILED, "not tried again yet")
        del self._failed_dials[peer]

    def _dialled(self, peer: str, future: asyncio.Future[Consumer]) -> None:
        self._dialling.pop(peer, None)
        if not future.cancelled() and future.exception() is not None:
            self._failed_dials[peer] = time.monotonic()

    async def _dial(self, them: Advertisement) -> Consumer:
        me = self.advertisement
        hello = Hello(them.token, me.peer, them.peer, me.pid, me.start_time)
        granted = self.exporter.granted_to(them.peer)
        try:
            died = partial(self._consumer_died, them)
            self._watch(("to", them.peer), them.pid, them.start_time, died)
            sock = await dial(them, hello, self._loop, self.settings.dial_timeout)
        except (ChannelError, ProcessLookupError, MemoryUnavailable) as error:
            logger.info("No channel to worker process %d: %s", them.pid, error)
            raise Refused(Refusal.DIAL_FAILED, str(error)) from error
        channel = Channel(
            sock,
            self._loop,
            partial(self._from_consumer, them.peer),
            partial(self._consumer_broke, them),
        )
        self._channels.add(channel)
        return self.exporter.attach(them, channel, granted)

    def _from_consumer(
        self, peer: str, channel: Channel, message: Message, fds: tuple[int, ...]
    ) -> None:
        for fd in fds:
            os.close(fd)
        self.exporter.receive(peer, message)

    def _consumer_broke(self, them: Advertisement, channel: Channel, error: Exception) -> None:
        logger.info("Channel to worker process %d ended: %s", them.pid, error)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._start_redial, them, channel)

    def _start_redial(self, them: Advertisement, channel: Channel) -> None:
        self._channels.discard(channel)
        if self.exporter.holds(them.peer):
            task = self._loop.create_task(self._redial(them))
            self._redials.add(task)
            task.add_done_callback(self._redials.discard)
        elif them.peer not in self._dialling:
            self.exporter.forget(them.peer)
            self._forget_peers()

    async def _redial(self, them: Advertisement) -> None:
        """A peer that lives and holds leases must be able to release them."""
        pause, longest = REDIAL
        while self.exporter.holds(them.peer):
            await asyncio.sleep(pause)
            consumer = self.exporter.consumer(them.peer)
            if consumer is None or consumer.channel.usable:
                return
            with contextlib.suppress(Refused):
                await self._dial(them)
                return
            pause = min(2 * pause, longest)

    def _consumer_died(self, them: Advertisement) -> None:
        consumer = self.exporter.consumer(them.peer)
        if consumer is not None:
            # Releases that it sent before it died change nothing; the channel is done with.
            self._channels.discard(consumer.channel)
            consumer.channel.close()
        self.exporter.died(them.peer)
        self._failed_dials.pop(them.peer, None)

    # -- as consumer ------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket, hello: Hello) -> None:
        if hello.consumer != self.peer or self._stopping:
            raise ChannelBroken(f"Hello for {hello.consumer[:8]}; this is {self.peer[:8]}")
        producer = self.importer.attach(hello.peer)
        try:
            died = partial(self._producer_died, producer)
            self._watch(("from", hello.peer), hello.pid, hello.start_time, died)
        except (ProcessLookupError, MemoryUnavailable) as error:
            self.importer.died(producer)
            raise ChannelBroken(f"process {hello.pid}: {error}") from error
        channel = Channel(
            sock,
            self._loop,
            partial(self._from_producer, producer),
            partial(self._producer_broke, producer),
        )
        self._channels.add(channel)
        self.importer.connect(producer, channel)

    def _from_producer(
        self, producer: Producer, channel: Channel, message: Message, fds: tuple[int, ...]
    ) -> None:
        self.importer.receive(producer, message, fds)
        if isinstance(message, Leave):
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.on_producer_left, producer.peer)

    def _producer_broke(self, producer: Producer, channel: Channel, error: Exception) -> None:
        logger.info("Channel from %r ended: %s", producer, error)
        self.importer.detach(producer, channel)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._producer_gone, channel)

    def _producer_gone(self, channel: Channel) -> None:
        self._channels.discard(channel)
        self._forget_peers()

    def _producer_died(self, producer: Producer) -> None:
        if producer.channel is not None:
            # What it sent before it died still counts: a dead process's memory can be read.
            producer.channel.drain()
        if producer.channel is not None:
            self._channels.discard(producer.channel)
            producer.channel.close()
        self.importer.died(producer)

    # -- both -------------------------------------------------------------------------------------

    def _watch(
        self, key: tuple[str, str], pid: int, started: int, on_death: Callable[[], None]
    ) -> None:
        def died() -> None:
            self._watches.pop(key, None)
            on_death()

        if key not in self._watches:
            self._watches[key] = Watch(pid, started, self._loop, died)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK, self._tick)
        self.trim()
        self.importer.trim()
        self._forget_peers()
        if self._stopping:
            self._finish()

    def _forget_peers(self) -> None:
        """Watch no process, and remember no failed dial, for longer than it is of use."""
        peers = len(self.exporter.consumers()) + self.importer.producers + len(self._dialling)
        if len(self._watches) > peers:
            for key in [k for k in self._watches if not self._wanted(*k)]:
                self._watches.pop(key).close()
        oldest = time.monotonic() - self.settings.dial_again
        for peer in [p for p, failed in self._failed_dials.items() if failed < oldest]:
            del self._failed_dials[peer]

    def _wanted(self, way: str, peer: str) -> bool:
        if way == "from":
            return self.importer.knows(peer)
        return self.exporter.consumer(peer) is not None or peer in self._dialling

    def trim(self) -> None:
        """Have the memories leave the RSS if it is high, and give idle memory back. On the loop."""
        for memory in self.memories:
            self._withdraw(memory, collect=False)

    def _withdraw(self, memory: Memory, *, collect: bool) -> None:
        for allocation in memory.collect() if collect else memory.trim():
            self.exporter.withdraw(memory.kind, allocation.id, allocation.generation)

    def collect(self) -> None:
        """Free what can be freed: idle mappings here, free arenas, and all that nobody holds."""
        self.importer.flush()
        self.importer.collect()
        for memory in self.memories:
            self._withdraw(memory, collect=True)

    def stop(self) -> None:
        """Begin no more transfers and say good-bye. Pins and held arrays live on.

        The channels stay until nothing is held either way; `wait_closed` waits for that.
        """
        if self._stopping:
            return
        self._stopping = True
        self.exporter.stopping = True
        self._listener.close()
        for channel in self._channels:
            channel.post(Leave(self.peer))
        _lingering.add(self)
        self._finish()

    def _finish(self) -> None:
        if self._closed.is_set() or not self._end():
            return
        self._closed.set()
        self._ticker.cancel()
        for task in self._redials:
            task.cancel()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        for memory in self.memories:
            memory.close()
        _lingering.discard(self)

    def _end(self) -> bool:
        """End each side once it holds nothing; whether both have."""
        imports, exports = self.importer.close(), self.exporter.close()
        if imports:
            self.importer.clear()
        return imports and exports

    @property
    def closed(self) -> bool:
        """Whether it was stopped and holds nothing any more, either way."""
        return self._closed.is_set()

    async def wait_closed(self, timeout: float) -> bool:
        """Wait for at most so many seconds until it is closed; return whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._closed.wait()
        return self._closed.is_set()


_lingering: set[Endpoint] = set()
"""Stopped, but something is still held: kept until it is released or the process ends."""


def _nothing(*_: object) -> None:
    pass
