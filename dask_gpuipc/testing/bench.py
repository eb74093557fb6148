"""Two processes that share one kind of memory: one exports, a spawned one imports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from dask_gpuipc.errors import Failure, OpenFailed
from dask_gpuipc.memory.base import Allocation, Mapping, Memory, Pin, Rung
from dask_gpuipc.testing.clock import LIMIT
from dask_gpuipc.testing.leaks import counts
from dask_gpuipc.wire import Announce, Layout


class Arrays:
    """Arrays of the library that a kind of memory is for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.xp = importlib.import_module({"host": "numpy", "cuda": "cupy"}[kind])

    def fill(self, value: int, count: int = 40_000) -> Any:
        """A new array full of one value."""
        return self.xp.full(count, value, dtype="i4")

    def values(self, array: Any) -> np.ndarray[Any, Any]:
        """The same values in NumPy."""
        return np.asarray(array.get() if self.kind == "cuda" else array)

    def free(self) -> None:
        """Have the library give back to its allocator what no array is in."""
        gc.collect()
        if self.kind == "cuda":
            self.xp.cuda.runtime.deviceSynchronize()
            self.xp.get_default_memory_pool().free_all_blocks()

    def layouts(self) -> Iterator[tuple[str, Any]]:
        """Arrays of many dtypes and layouts, named."""
        xp = self.xp
        base = xp.arange(24 * 30 * 5, dtype="f8").reshape(24, 30, 5)
        yield "C order", base
        yield "F order", xp.asfortranarray(base[:, :, 0])
        yield "F order 2x2", xp.asfortranarray(base[:2, :2, 0])
        yield "transposed", base.transpose(2, 0, 1)
        yield "interior", base[3:20, 4:25, 1:4]
        yield "reversed", base[::-1]
        yield "every third, backwards", base[::-3, :, ::2]
        yield "broadcast", xp.broadcast_to(base[:, :, :1], base.shape)
        yield "one element", base[2:3, 5:6, 1:2]
        yield "no axes", base[2, 5, 1:2].reshape(())
        for dtype in ("?", "i1", "u2", "i8", "f2", "f4", "c8", "c16"):
            yield dtype, base.astype(dtype)
        if self.kind == "host":
            yield from _numpy_layouts()


def _numpy_layouts() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    numbers = np.arange(3000)
    padded = np.zeros(1000, np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", 3)], align=True))
    padded["a"], padded["b"], padded["c"] = numbers[:1000], numbers[1000:2000], numbers[:1000, None]
    yield "structured and padded", padded
    yield "every second record", padded[::2]
    yield "big-endian", numbers.astype(">i8")
    yield "moments", numbers.astype("M8[ms]")
    yield "durations", numbers.astype("m8[ns]")
    yield "text", numbers.astype("U7")
    yield "byte strings", numbers.astype("S5")
    yield "void", numbers.astype("i8").view("V8")
    locked = numbers.copy()
    locked.flags.writeable = False
    yield "read-only", locked


class Bench:
    """The exporter, the second process, and what the checks do with them."""

    def __init__(self, make_memory: Callable[[], Memory]) -> None:
        self.memory = make_memory()
        self.arrays = Arrays(self.memory.kind)
        self.second = Second(make_memory)
        self.rungs = sorted({self.memory.rung(wish) for wish in ("auto", "copy", "share")})
        self._opened: set[str] = set()

    def private(self, rung: Rung) -> bool:
        """Whether an import may be written into without anybody else seeing it."""
        return rung is Rung.COPY or self.memory.kind == "host"

    def pin(self, array: Any) -> Pin:
        """Finish an array and pin it."""
        prepared = self.memory.prepare([array])
        if prepared is not None:
            asyncio.run(prepared.wait())
        return self.memory.pin(array, prepared)

    @contextlib.contextmanager
    def pinned(self, array: Any) -> Iterator[Pin]:
        """Have an array pinned within."""
        pin = self.pin(array)
        try:
            yield pin
        finally:
            pin.release()

    def announce(self, pin: Pin) -> tuple[Announce, tuple[int, ...]]:
        """The announcement of a pin's allocation, and the descriptors that go with it."""
        place, handle = pin.allocation, self.memory.handle(pin.allocation)
        names = (self.memory.kind, place.id, place.generation)
        return Announce(*names, place.nbytes, place.device, handle.payload), handle.fds

    def load(self, pin: Pin, rung: Rung) -> Remote:
        """Import a pinned array in the second process; opens its allocation if need be."""
        mapping = name_of(pin.allocation)
        if mapping not in self._opened:
            if pin.allocation.device:
                # It may lie at the address of one that is gone and is still mapped there.
                self._close_gone()
            announcement, fds = self.announce(pin)
            self.second.call("open", mapping, announcement, fds=fds)
            self._opened.add(mapping)
        return Remote(self.second, mapping, pin.layout, rung)

    def forget_all(self) -> None:
        """Close all mappings, and give back all that no array is in."""
        self._close(self._opened)
        self.collect()

    def collect(self) -> set[str]:
        """Have all freed that no array is in; names of the allocations that are gone."""
        self.arrays.free()
        return self._close_gone()

    def _close_gone(self) -> set[str]:
        """Close the mappings of allocations that are gone, as an importer does when told."""
        gone = {name_of(allocation) for allocation in self.memory.collect()}
        self._close(gone & self._opened)
        return gone

    def _close(self, mappings: set[str]) -> None:
        for mapping in mappings:
            self.second.call("close", mapping)
        self._opened -= mappings

    def warm_up(self) -> None:
        """Go through it once, for what a library or driver opens once and keeps."""
        array = self.arrays.fill(1)
        with self.pinned(array) as pin:
            for rung in self.rungs:
                self.load(pin, rung).forget()
        del array, pin
        self.forget_all()

    def close(self) -> None:
        """Close both sides."""
        self.memory.close()
        self.second.close()


def name_of(allocation: Allocation) -> str:
    """Name of an allocation, its generation included."""
    return f"{allocation.id}:{allocation.generation}"


def flags_of(array: Any) -> tuple[bool, bool, bool]:
    """C-contiguous, F-contiguous, writeable (as all CuPy arrays are)."""
    flags = array.flags
    return flags.c_contiguous, flags.f_contiguous, getattr(flags, "writeable", True)


class Second:
    """The process that imports. Calls go over a packet socket, descriptors beside them."""

    PACKET: Final = 1 << 18

    def __init__(self, make_memory: Callable[[], Memory]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LIMIT)
        context = multiprocessing.get_context("spawn")
        with theirs:
            self._process = context.Process(target=_serve, args=(make_memory, theirs), daemon=True)
            self._process.start()

    def call(self, name: str, *arguments: Any, fds: Sequence[int] = ()) -> Any:
        """Call a method of `_Imports` there.

        Raises
        ------
        OpenFailed
            It was raised there.
        AssertionError
            Anything else was.
        """
        socket.send_fds(self._socket, [pickle.dumps((name, arguments))], list(fds))
        outcome, value = pickle.loads(self._socket.recv(self.PACKET))
        if outcome == "failed":
            raise OpenFailed(*value)
        assert outcome == "done", f"{name} raised {value}; the contract allows OpenFailed only"
        return value

    def close(self) -> None:
        """Have the process end; kills it if it does not."""
        self._socket.close()
        self._process.join(LIMIT)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise AssertionError("the importing process did not end")
        self._process.close()


class Remote:
    """An array that was imported in the second process."""

    def __init__(self, second: Second, mapping: str, layout: Layout, rung: Rung) -> None:
        self._second = second
        self.name, self.rung, self.flags = second.call("load", mapping, layout, rung)

    def own(self) -> np.ndarray[Any, Any]:
        """Values of a copy that the second process makes of it for itself."""
        return _unpacked(*self._second.call("own", self.name))

    def values(self) -> np.ndarray[Any, Any]:
        """Its values now."""
        return _unpacked(*self._second.call("values", self.name))

    def write(self, value: Any) -> None:
        """Fill it with a value."""
        self._second.call("write", self.name, value)

    def forget(self) -> None:
        """Drop it, and return when it is not read any more."""
        self._second.call("forget", self.name)


class _Imports:
    """What the second process does."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.arrays = Arrays(memory.kind)
        self._mappings: dict[str, Mapping] = {}
        self._arrays: dict[int, Any] = {}

    def descriptors(self) -> Counter[str]:
        return counts()

    def open(self, name: str, announcement: Announce, fds: Sequence[int] = ()) -> None:
        end = time.monotonic() + LIMIT
        while name not in self._mappings:
            try:
                self._mappings[name] = self.memory.open(announcement, fds)
            except OpenFailed as failed:
                # What was at that address before is closed when the memory is idle.
                if failed.reason is not Failure.BUSY or fds or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def load(self, mapping: str, layout: Layout, rung: Rung) -> tuple[int, Rung, Any]:
        imported = self.memory.load(self._mappings[mapping], layout, rung)
        array, owner = imported.array, imported.owner
        assert (owner is None) != (imported.done is None), "either owner or done must be set"
        assert self.memory.owner_of(array[...]) is owner, "owner_of does not find the owner"
        if imported.done is not None:
            imported.done.result(LIMIT)
        self._arrays[id(array)] = array
        return id(array), imported.rung, flags_of(array)

    def values(self, name: int) -> tuple[Any, ...]:
        return _packed(self.arrays.values(self._arrays[name]))

    def write(self, name: int, value: Any) -> None:
        self._arrays[name][...] = value

    def own(self, name: int) -> tuple[Any, ...]:
        array = self._arrays[name]
        copy = self.memory.own(array)
        assert self.memory.owner_of(copy) is None, "own() gave a borrowed array"
        assert flags_of(copy) == flags_of(array) or not any(flags_of(array)[:2])
        return _packed(self.arrays.values(copy))

    def forget(self, name: int) -> None:
        del self._arrays[name]
        fence = self.memory.fence()
        if fence is not None:
            fence.result(LIMIT)

    def close(self, mapping: str) -> None:
        mapped = self._mappings.pop(mapping)
        if self.memory.executor is None:
            mapped.close()
            mapped.close()
        else:
            self.memory.executor.submit(mapped.close).result(LIMIT)

    def serve(self, sock: socket.socket) -> None:
        while True:
            data, fds, *_ = socket.recv_fds(sock, Second.PACKET, 8, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            name, arguments = pickle.loads(data)
            sock.sendall(pickle.dumps(self._call(name, arguments, fds)))

    def _call(self, name: str, arguments: Any, fds: list[int]) -> tuple[str, Any]:
        try:
            call = getattr(self, name)
            return "done", call(*arguments, fds) if name == "open" else call(*arguments)
        except OpenFailed as failed:
            return "failed", (failed.reason, failed.detail)
        except Exception as error:  # noqa: BLE001 -- it is raised again at the other end
            return "broken", repr(error)


def _packed(array: np.ndarray[Any, Any]) -> tuple[np.dtype[Any], tuple[int, ...], bytes]:
    # not the array itself: unpickling gives native byte order
    return array.dtype, array.shape, array.tobytes()


def _unpacked(dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype).reshape(shape)


def _serve(make_memory: Callable[[], Memory], sock: socket.socket) -> None:
    with sock:
        imports = _Imports(make_memory())
        imports.serve(sock)
        imports.memory.close()
