"""Host memory: the contract, its arenas, and what happens when there is no room."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import mmap
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from helpers import descriptors_used_up
from hypothesis import given
from hypothesis import strategies as st

from dask_gpuipc import process
from dask_gpuipc.errors import Failure, MemoryUnavailable, OpenFailed, Refusal, Refused
from dask_gpuipc.memory.base import Pin, Rung
from dask_gpuipc.memory.host import PAGE, SEALS, Extents, HostMemory
from dask_gpuipc.testing import Fault, FaultyMemory, ManualClock, check_memory
from dask_gpuipc.wire import Announce, Layout

MIB = 1 << 20


@pytest.fixture
def memory():
    with closing(HostMemory(arena_size=4 * MIB)) as memory:
        yield memory


@contextmanager
def pinned(memory, *arrays):
    with ExitStack() as stack:
        pins = [memory.pin(array, None) for array in arrays]
        for pin in pins:
            stack.callback(pin.release)
        yield pins


def announce(memory, pin: Pin) -> tuple[Announce, list[int]]:
    """As it arrives at a peer: the descriptors are the peer's own."""
    place, handle = pin.allocation, memory.handle(pin.allocation)
    announcement = Announce("host", place.id, place.generation, place.nbytes, "", handle.payload)
    return announcement, [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in handle.fds]


@contextmanager
def opened(memory, pin):
    with closing(memory.open(*announce(memory, pin))) as mapping:
        yield mapping


def load(memory, pin):
    with opened(memory, pin) as mapping:
        return memory.load(mapping, pin.layout, Rung.SHARE).array


def arenas(memory) -> list:
    return list(memory._arenas.values())


def memfd_bytes(memory) -> int:
    """What the kernel has given to the arenas so far."""
    return sum(os.fstat(arena.fd).st_blocks * 512 for arena in arenas(memory))


def memfds() -> int:
    return sum("memfd:dask-gpuipc" in link for link in links())


def links() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return found


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:dask-gpuipc" in line for line in maps)


# -- the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        HostMemory,
        partial(HostMemory, arena_size=1 << 16, limit=1 << 18),
        partial(HostMemory, resident_limit=1),
    ],
    ids=["as it comes", "small arenas", "under pressure"],
)
def test_it_is_a_memory(make):
    check_memory(make)


class WrongPlace(HostMemory):
    def pin(self, array, prepared):
        pin = super().pin(array, prepared)
        pin.layout = replace(pin.layout, offset=pin.layout.offset + pin.layout.itemsize)
        return pin


class OnePrivateMapping(HostMemory):
    """Keeps the private pages of an import for the next."""

    def load(self, mapping, layout, rung):
        kept = self.__dict__.setdefault("kept", {})
        if (id(mapping), layout) not in kept:
            kept[id(mapping), layout] = super().load(mapping, layout, rung)
        return kept[id(mapping), layout]


class RecyclesEarly(HostMemory):
    def pin(self, array, prepared):
        pin = super().pin(array, prepared)
        pin.release()
        return replace(pin, release=lambda: None)


class KeepsBadDescriptors(HostMemory):
    def open(self, announcement, fds):
        if len(fds) != 1:
            raise OpenFailed(Failure.OPEN_FAILED)
        return super().open(announcement, fds)


class RaisesWhatItMet(HostMemory):
    def open(self, announcement, fds):
        try:
            return super().open(announcement, fds)
        except OpenFailed as error:
            raise ValueError(str(error)) from error


class TellsNothingGone(HostMemory):
    def collect(self):
        super().collect()
        return ()


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (WrongPlace, "layouts_round_trip"),
        (OnePrivateMapping, "imports_are_private"),
        (RecyclesEarly, "names_are_unique|recycling_shows_nothing|slices_keep"),
        (KeepsBadDescriptors, "bad_handles_are_refused"),
        (RaisesWhatItMet, "bad_handles_are_refused"),
        (TellsNothingGone, "names_are_unique"),
    ],
)
def test_the_contract_is_held_against_what_breaks_it(make, check):
    with pytest.raises(AssertionError) as caught:
        check_memory(make)
    assert pytest.raises(AssertionError, match=check).matches(
        AssertionError(" ".join(caught.value.__notes__))
    )


# -- what arrives --------------------------------------------------------------------------------


def locked(array):
    array = array.view()
    array.flags.writeable = False
    return array


BASE = np.arange(24 * 30 * 5, dtype="f8").reshape(24, 30, 5)
PADDED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", 3)], align=True)
ARRAYS = {
    "C order": BASE,
    "F order": np.asfortranarray(BASE[:, :, 0]),
    "F order 2x2": np.asfortranarray(BASE[:2, :2, 0]),
    "transposed": BASE.transpose(2, 0, 1),
    "interior": BASE[3:20, 4:25, 1:4],
    "interior of F order": np.asfortranarray(BASE)[3:20, 4:25, 1:4],
    "reversed": BASE[::-1],
    "every third, backwards": BASE[::-3, :, ::2],
    "broadcast": np.broadcast_to(BASE[:, :1, :], BASE.shape),
    "broadcast in front": np.broadcast_to(BASE, (3, *BASE.shape)),
    "broadcast number": np.broadcast_to(np.float64(7.5), (100, 100)),
    "broadcast and F order": np.broadcast_to(np.asfortranarray(BASE[:, :, 0]), (4, 24, 30)),
    "windows": np.lib.stride_tricks.sliding_window_view(BASE[:, 0, 0], 7),
    "no axes": np.array(3.5),
    "one element": BASE[2:3, 5:6, 1:2],
    "padded records": np.frombuffer(bytes(range(24)) * 50, PADDED),
    "big-endian": BASE.astype(">f4"),
    "moments": BASE.astype("M8[ms]"),
    "text": BASE.astype("U9"),
    "read-only": locked(BASE),
    "read-only and strided": locked(BASE)[::2, ::-1],
    "read-only and in F order": locked(BASE.T),
    "windows that may be written": np.lib.stride_tricks.sliding_window_view(
        BASE[:, 0, 0].copy(), 7, writeable=True
    ),
}


def steps(array) -> list[int]:
    """Strides that mean something."""
    return [s for s, n in zip(array.strides, array.shape, strict=True) if n > 1]


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
@pytest.mark.parametrize("recycled", [False, True], ids=["fresh pages", "recycled pages"])
def test_an_array_arrives_as_from_plain_dask(memory, array, recycled):
    from distributed.protocol import deserialize, serialize

    if recycled:
        with pinned(memory, np.full(array.nbytes + 1, 0xEE, "u1")):
            pass
    expected = deserialize(*serialize(array))
    with pinned(memory, array) as [pin]:
        got = load(memory, pin)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert steps(got) == steps(expected)
    assert got.flags.writeable == expected.flags.writeable
    assert got.tobytes() == expected.tobytes()
    del got


def test_what_is_broadcast_costs_its_own_bytes_only(memory):
    with pinned(memory, np.broadcast_to(np.arange(10.0), (1 << 40, 10))) as [pin]:
        assert pin.nbytes == PAGE
        got = load(memory, pin)
        assert (got[1 << 39] == np.arange(10.0)).all()
        del got


@pytest.mark.parametrize("nbytes", [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5])
def test_writing_into_an_import_changes_neither_neighbours_nor_source(memory, nbytes):
    arrays = [np.full(nbytes, value, "u1") for value in (1, 2, 3)]
    with pinned(memory, *arrays) as pins:
        imports = [load(memory, pin) for pin in pins]
        imports[1][:] = 77
        again = [load(memory, pin) for pin in pins]
        assert [set(a.tolist()) for a in imports] == [{1}, {77}, {3}]
        assert [set(a.tolist()) for a in again] == [{1}, {2}, {3}]
        assert [set(a.tolist()) for a in arrays] == [{1}, {2}, {3}]
        del imports, again


def test_a_recycled_slot_shows_what_is_new_though_its_import_was_written(memory):
    for value in range(50):
        array = np.full(PAGE * 2 + 8, value, "u1")
        with pinned(memory, array) as [pin]:
            got = load(memory, pin)
            assert (got == value).all()
            got[:] = 200
            assert pin.layout.offset == 0, "it was not recycled: this shows nothing"
            del got


def test_an_import_outlives_mapping_pin_and_memory(memory):
    with pinned(memory, BASE) as [pin]:
        got = load(memory, pin)
    memory.close()
    assert got.tobytes() == BASE.tobytes()
    view = got[3:, ::2]
    owner = memory.owner_of(view)
    assert owner is memory.owner_of(got)
    del got
    assert (view == BASE[3:, ::2]).all()
    assert mapped() == 1
    del view, owner
    assert mapped() == 0


def test_own_makes_an_ordinary_array(memory):
    for array in ARRAYS.values():
        with pinned(memory, array) as [pin]:
            got = load(memory, pin)
        own = memory.own(got)
        assert (own == got).all()  # padding is nobody's value
        assert (own.strides, own.dtype) == (got.strides, got.dtype)
        assert own.flags.writeable == got.flags.writeable
        assert memory.owner_of(own) is None
        del got


# -- slots ---------------------------------------------------------------------------------------


def test_slots_are_recycled(memory):
    for i in range(500):
        with pinned(memory, np.full(20_000 + 400 * i, 1, "u1")):
            assert len(arenas(memory)) == 1
    assert memfd_bytes(memory) <= 256 * 1024


def test_freed_neighbours_join(memory):
    small = [np.zeros(MIB, "u1") for _ in range(4)]
    with pinned(memory, *small):
        assert len(arenas(memory)) == 1
    with pinned(memory, np.zeros(4 * MIB, "u1")):
        assert len(arenas(memory)) == 1


def test_an_array_larger_than_an_arena_gets_one_of_its_own(memory):
    array = np.arange(5 * MIB // 8)
    with pinned(memory, array, BASE) as [large, small]:
        assert large.allocation.nbytes == 5 * MIB
        assert small.allocation.id != large.allocation.id
        assert (load(memory, large) == array).all()


@given(st.lists(st.tuples(st.integers(1, 8), st.randoms(use_true_random=False)), max_size=60))
def test_extents_never_give_what_is_taken_and_lose_nothing(steps):
    size, extents = 40, Extents(40)
    taken: dict[int, int] = {}
    for want, rng in steps:
        if taken and rng.random() < 0.4:
            offset = rng.choice(list(taken))
            extents.give(offset, taken.pop(offset))
        else:
            offset = extents.take(want)
            if offset is not None:
                taken[offset] = want
        used = {b for offset, n in taken.items() for b in range(offset, offset + n)}
        assert len(used) == sum(taken.values()), "two have the same byte"
        free = list(extents)
        assert {b for start, stop in free for b in range(start, stop)} == set(range(size)) - used
        assert all(a[1] < b[0] for a, b in itertools.pairwise(free)), "neighbours apart"


# -- a live array is copied once -----------------------------------------------------------------


def test_a_live_array_has_one_copy_however_often_it_is_exported(memory):
    with pinned(memory, BASE, BASE) as [one, two]:
        assert (one.allocation, one.layout, one.block) == (two.allocation, two.layout, two.block)
        assert arenas(memory)[0].live == 1
        assert not memory.pin_copies(BASE)
        with pinned(memory, BASE.copy()) as [three]:
            assert three.block != one.block
    assert memory.pin_copies(BASE)
    assert arenas(memory)[0].live == 0


def test_the_copy_ends_with_its_last_lease(memory):
    array = np.zeros(1000)
    first, second = memory.pin(array, None), memory.pin(array, None)
    first.release()
    with pinned(memory, np.ones(1000)):
        assert (load(memory, second) == 0).all()
    second.release()
    array[:] = 5
    with pinned(memory, array) as [pin]:
        assert (load(memory, pin) == 5).all(), "an old copy was found"


def test_another_array_with_the_same_id_is_copied(memory):
    array = np.zeros(1000)
    key = id(array)
    first = memory.pin(array, None)
    with ExitStack() as stack:
        stack.callback(first.release)
        del array
        others = [np.ones(1000)]
        while id(others[-1]) != key:
            assert len(others) < 10_000, "ids are not reused: this shows nothing"
            others.append(np.ones(1000))
        other = others[-1]
        assert memory.pin_copies(other)
        with pinned(memory, other) as [pin]:
            assert (load(memory, pin) == 1).all()
            assert (load(memory, first) == 0).all()
    assert arenas(memory)[0].live == 0


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[::2, 1::3]])
def test_values_that_were_changed_in_place_are_copied_again(memory, view):
    """A task may return the input that it wrote into: the same object, with other bytes."""
    array = view(np.arange(6000).reshape(60, 100))
    with pinned(memory, array) as [before]:
        old, array[-1, -1] = array.copy(), -1
        with pinned(memory, array, array) as [after, again]:
            assert (load(memory, before) == old).all()
            assert (load(memory, after) == array).all()
            assert again.block == after.block != before.block, "and once more is once"
    assert arenas(memory)[0].live == 0


def test_an_array_that_was_changed_in_place_is_copied_again(memory):
    array = np.arange(1000)
    with pinned(memory, array) as [before]:
        array.resize((50, 20), refcheck=False)
        with pinned(memory, array) as [shaped]:
            array.flags.writeable = False
            with pinned(memory, array) as [locked]:
                assert load(memory, before).shape == (1000,)
                assert load(memory, shaped).shape == (50, 20)
                assert load(memory, shaped).flags.writeable
                assert not load(memory, locked).flags.writeable
    assert arenas(memory)[0].live == 0


# -- memory goes back ----------------------------------------------------------------------------


def test_free_memory_goes_back_though_a_neighbour_lives(memory):
    arrays = [np.full(MIB // 2, value, "u1") for value in range(6)]
    pins = [memory.pin(array, None) for array in arrays]
    assert memfd_bytes(memory) == 3 * MIB
    for pin in pins[:2] + pins[3:]:
        pin.release()
    assert memfd_bytes(memory) == 3 * MIB
    assert memory.collect() == []
    assert memfd_bytes(memory) == MIB // 2
    assert (load(memory, pins[2]) == 2).all()
    with pinned(memory, *arrays[3:]) as again:
        for value, pin in enumerate(again, 3):
            assert (load(memory, pin) == value).all()
    pins[2].release()
    [gone] = memory.collect()
    assert gone == pins[0].allocation
    assert memfds() == 0
    assert memory.collect() == []


def test_idle_memory_goes_back_after_a_while():
    clock = ManualClock()
    with closing(HostMemory(arena_size=MIB, idle_timeout=5, clock=clock)) as memory:
        with pinned(memory, BASE) as [pin]:
            clock.advance(100)
            assert memory.trim() == []
        clock.advance(-0.0)
        with pinned(memory, BASE):
            pass
        clock.advance(4.9)
        assert memory.trim() == ()
        assert memfds() > 0
        clock.advance(0.2)
        assert memory.trim() == [pin.allocation]
        assert memfds() == 0
        assert memory.trim() == ()


def test_at_the_limit_free_memory_goes_back_before_more_is_taken():
    with closing(HostMemory(arena_size=MIB, limit=4 * MIB)) as memory:
        with pinned(memory, *(np.zeros(MIB, "u1") for _ in range(3))):
            pass
        assert memfd_bytes(memory) == 3 * MIB
        with pinned(memory, np.zeros(2 * MIB, "u1")):
            assert memfd_bytes(memory) == 2 * MIB


def test_closing_leaves_what_is_pinned_until_its_release(memory):
    pin = memory.pin(BASE, None)
    with pinned(memory, np.zeros(5 * MIB, "u1")):
        pass
    memory.close()
    assert len(arenas(memory)) == 1
    assert (load(memory, pin) == BASE).all()
    with pytest.raises(Refused) as caught:
        memory.pin(BASE[1:], None)
    assert caught.value.reason is Refusal.STOPPING
    pin.release()
    assert memfds() == 0
    memory.close()


# -- pressure ------------------------------------------------------------------------------------

LARGE = 96 * MIB


def growth(memory, array) -> int:
    """By how much exporting into recycled pages makes this process's RSS grow."""
    with pinned(memory, array):
        pass
    before = process.rss()
    with pinned(memory, array) as [pin]:
        grown = process.rss() - before
        assert memory.handle(pin.allocation)
    return grown


def test_under_pressure_exporting_does_not_grow_the_rss():
    array = np.ones(LARGE, "u1")
    with closing(HostMemory(arena_size=LARGE)) as memory:
        assert growth(memory, array) > LARGE // 2, "mapped pages count: else this shows nothing"
    with closing(HostMemory(arena_size=LARGE, resident_limit=process.rss() + MIB)) as memory:
        assert growth(memory, array) < LARGE // 8


def test_when_pressure_comes_later_arenas_leave_the_rss_and_keep_their_bytes():
    array = np.ones(LARGE, "u1")
    limit = process.rss() + 2 * LARGE + MIB
    with closing(HostMemory(arena_size=LARGE, resident_limit=limit)) as memory:
        assert growth(memory, array) > LARGE // 2
        with pinned(memory, array) as [pin]:
            assert memory.trim() == ()
            ballast = np.ones(LARGE * 3 // 2, "u1")
            high = process.rss()
            assert memory.trim() == ()
            assert process.rss() < high - LARGE // 2
            assert (load(memory, pin) == 1).all()
            del ballast


def test_exporting_under_pressure_takes_the_arenas_out_of_the_rss():
    array = np.ones(LARGE, "u1")
    limit = process.rss() + 2 * LARGE + MIB
    with closing(HostMemory(arena_size=LARGE, resident_limit=limit)) as memory:
        assert growth(memory, array) > LARGE // 2
        ballast = np.ones(LARGE * 3 // 2, "u1")
        high = process.rss()
        with pinned(memory, array) as [pin]:
            assert process.rss() < high - LARGE // 2
            assert (load(memory, pin) == 1).all()
        del ballast


def test_importing_without_reading_does_not_grow_the_rss(memory):
    array = np.ones(LARGE, "u1")
    with pinned(memory, array) as [pin]:
        before = process.rss()
        got = load(memory, pin)
        assert process.rss() - before < LARGE // 8
        del got


# -- no room -------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [0, 1, 2])
def test_without_descriptors_it_is_refused_and_nothing_leaks(memory, free):
    with descriptors_used_up(free), pytest.raises(Refused) as caught:
        memory.pin(BASE, None)
    assert caught.value.reason is Refusal.NO_MEMORY
    assert memfds() == 0
    with pinned(memory, BASE) as [pin]:
        assert (load(memory, pin) == BASE).all()


def test_without_room_for_an_arena_it_is_refused_and_nothing_leaks(memory):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(Refused) as caught:
            memory.pin(BASE, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.reason is Refusal.NO_MEMORY
    assert memfds() == 0


class Disk:
    """Stands in for os.pwrite: writes at most so many bytes, then there is no room."""

    def __init__(self, monkeypatch, room: int, at_once: int = 1 << 30) -> None:
        self.room, self.at_once, self.calls, self._pwrite = room, at_once, 0, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd, data, offset):
        self.calls += 1
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(fd, data[: min(self.room, self.at_once)], offset)
        self.room -= written
        return written


def test_without_room_for_pages_it_is_refused_and_never_a_fault(memory, monkeypatch):
    disk = Disk(monkeypatch, room=PAGE)
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            memory.pin(BASE, None)
        assert caught.value.reason is Refusal.NO_MEMORY
        assert arenas(memory)[0].live == 0
        assert memory.pin_copies(BASE)
    # The pages are as they were: writing through a mapping might still be a SIGBUS.
    disk.room, disk.calls = MIB, 0
    with pinned(memory, BASE) as [pin]:
        assert disk.calls, "pages that were never there are written through a mapping"
        assert (load(memory, pin) == BASE).all()


def test_pages_that_were_given_back_are_written_like_new_ones(memory, monkeypatch):
    with pinned(memory, BASE):
        with pinned(memory, np.zeros(MIB, "u1")):
            pass
        memory.collect()
        disk = Disk(monkeypatch, room=MIB)
        with pinned(memory, np.ones(MIB, "u1")) as [pin]:
            assert disk.calls, "the kernel may have no page for a mapping: that is a SIGBUS"
            assert (load(memory, pin) == 1).all()


def test_short_writes_are_continued(memory, monkeypatch):
    disk = Disk(monkeypatch, room=MIB, at_once=1000)
    with pinned(memory, BASE, BASE[::-2]) as pins:
        assert disk.calls > BASE.nbytes // 1000
        assert (load(memory, pins[0]) == BASE).all()
        assert (load(memory, pins[1]) == BASE[::-2]).all()


def test_a_system_without_memfds_is_told(monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", missing)
    with pytest.raises(MemoryUnavailable, match="memfd"):
        HostMemory()


# -- what a peer may do --------------------------------------------------------------------------


def test_a_peer_can_neither_write_nor_resize(memory):
    with pinned(memory, BASE) as [pin]:
        _, [fd] = announce(memory, pin)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        for attempt in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED),
            lambda: os.ftruncate(arenas(memory)[0].fd, 0),
            lambda: os.ftruncate(arenas(memory)[0].fd, 1 << 40),
        ):
            with pytest.raises(OSError, match=r"not permitted|Permission denied|Bad file|Invalid"):
                attempt()
        os.close(fd)


def test_the_handle_of_what_is_gone_is_refused(memory):
    with pinned(memory, BASE) as [pin]:
        pass
    memory.collect()
    with pytest.raises(Refused) as caught:
        memory.handle(pin.allocation)
    assert caught.value.reason is Refusal.NO_MEMORY


@pytest.mark.parametrize("what", ["pipe", "file", "folder", "socket", "soft memfd", "short memfd"])
def test_what_is_no_arena_is_not_opened(memory, what, tmp_path):
    fd, other = descriptor(what, tmp_path)
    with pytest.raises(OpenFailed) as caught:
        memory.open(Announce("host", 1, 0, 4 * PAGE, "", b""), [fd])
    assert caught.value.reason is Failure.OPEN_FAILED
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for fd in other:
        os.close(fd)


def descriptor(what, tmp_path) -> tuple[int, list[int]]:
    if what == "pipe":
        reader, writer = os.pipe()
        return reader, [writer]
    if what == "file":
        (tmp_path / "file").write_bytes(bytes(4 * PAGE))
        return os.open(tmp_path / "file", os.O_RDWR), []
    if what == "folder":
        return os.open(tmp_path, os.O_RDONLY), []
    if what == "socket":
        import socket

        one, two = socket.socketpair()
        return one.detach(), [two.detach()]
    fd = os.memfd_create(what, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * PAGE if what == "soft memfd" else 4 * PAGE - 1)
    if what == "short memfd":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd, []


GOOD = Layout(0, "=<f8", 8, (10,), (8,))


@pytest.mark.parametrize(
    "layout",
    [
        replace(GOOD, dtype="=O"),
        replace(GOOD, dtype="=nonsense"),
        replace(GOOD, dtype="@no_such_dtype"),
        replace(GOOD, dtype="#[('a', 'O')]"),
        replace(GOOD, itemsize=1, strides=(1,), offset=4 * MIB - 10),
        replace(GOOD, dtype="=V1000000"),
        replace(GOOD, shape=(0,)),
        replace(GOOD, strides=()),
    ],
    ids=repr,
)
def test_a_layout_that_is_none_fails_to_open_and_touches_nothing(memory, layout):
    with pinned(memory, BASE) as [pin], opened(memory, pin) as mapping:
        before = mapped()
        with pytest.raises(OpenFailed):
            memory.load(mapping, layout, Rung.SHARE)
        gc.collect()
        assert mapped() == before


def test_a_closed_mapping_gives_no_array(memory):
    with pinned(memory, BASE) as [pin]:
        with opened(memory, pin) as mapping:
            pass
        with pytest.raises(OpenFailed):
            memory.load(mapping, pin.layout, Rung.SHARE)


# -- many ----------------------------------------------------------------------------------------


def test_thousands_of_imports_cost_no_descriptors(memory):
    arrays = [np.full(600, value, "i2") for value in range(50)]
    with pinned(memory, *arrays) as pins, opened(memory, pins[0]) as mapping:
        before, maps = len(links()), mapped()
        imports = [memory.load(mapping, pins[i % 50].layout, Rung.SHARE).array for i in range(5000)]
        assert len(links()) == before
        assert all((a == i % 50).all() for i, a in enumerate(imports))
        imports[7][:] = 99
        assert (imports[57] == 7).all()
        del imports
        assert mapped() == maps


def test_many_threads_import_at_once(memory):
    arrays = [np.full(3000, value, "i4") for value in range(16)]
    together = threading.Barrier(16)
    with pinned(memory, *arrays) as pins, opened(memory, pins[0]) as mapping:

        def imports(i):
            together.wait(20)
            for _ in range(50):
                array = memory.load(mapping, pins[i].layout, Rung.SHARE).array
                assert (array == i).all()
                array[:] = -1
            return True

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(imports, range(16)))


def test_many_threads_export_at_once(memory):
    together = threading.Barrier(16)

    def exports(i):
        together.wait(20)
        rng = np.random.default_rng(i)
        for round_ in range(25):
            array = np.full(rng.integers(1, 200_000), i * 1000 + round_, "i4")
            with pinned(memory, array, array[::2]) as pins:
                for pin in pins:
                    assert (load(memory, pin) == i * 1000 + round_).all()
            if not round_ % 8:
                memory.collect()
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(exports, range(16)))
    assert sum(arena.live for arena in arenas(memory)) == 0
    memory.collect()
    assert memfds() == 0


# -- the wrappers that make it fail --------------------------------------------------------------


def test_a_faulty_memory_is_still_a_memory():
    check_memory(make_faultless)


def make_faultless():
    return FaultyMemory(HostMemory())


def test_faults_strike_the_calls_they_are_for(memory):
    full = Fault("pin", first=2, times=2, error=partial(Refused, Refusal.NO_MEMORY))
    faulty = FaultyMemory(memory, full)
    outcomes = []
    for _ in range(5):
        try:
            faulty.pin(BASE, None).release()
            outcomes.append("good")
        except Refused:
            outcomes.append("refused")
    assert outcomes == ["good", "refused", "refused", "good", "good"]
    assert faulty.calls["pin"] == 5


@pytest.mark.parametrize("after", [False, True])
def test_a_fault_leaks_nothing(memory, after):
    stale = Fault("open", times=None, error=partial(OpenFailed, Failure.STALE), after=after)
    full = Fault("pin", first=2, error=partial(Refused, Refusal.NO_MEMORY), after=after)
    faulty = FaultyMemory(memory, stale, full)
    with pinned(faulty, BASE) as [pin]:
        before = len(links())
        with pytest.raises(OpenFailed, match="stale"):
            faulty.open(*announce(memory, pin))
        assert len(links()) == before
        with pytest.raises(Refused):
            faulty.pin(BASE[1:], None)
        assert arenas(memory)[0].live == 1


def test_a_fault_can_change_and_hold(memory):
    go = threading.Event()
    fault = Fault("handle", change=lambda handle: replace(handle, payload=b"?"), hold=go)
    faulty = FaultyMemory(memory, fault)
    with pinned(faulty, BASE) as [pin], ThreadPoolExecutor(1) as pool:
        held = pool.submit(faulty.handle, pin.allocation)
        assert not held.done()
        go.set()
        assert held.result(20).payload == b"?"
        assert faulty.handle(pin.allocation).payload == b""


# -- snapshots -----------------------------------------------------------------------------------


def test_a_snapshot_is_of_now_and_pinned_without_a_copy():
    memory = HostMemory(1 << 20)
    array = np.arange(5000)
    snapshot = memory.snapshot(array)
    array[:] = 0
    assert snapshot.array.tobytes() == np.arange(5000).tobytes()
    assert not memory.pin_copies(snapshot.array)
    pin = memory.pin(snapshot.array, None)
    assert memory.handle(pin.allocation).fds
    assert "1 slots" in repr(memory)
    snapshot.release()
    assert "1 slots" in repr(memory)
    pin.release()
    assert "0 slots" in repr(memory)
    del snapshot
    memory.close()


def test_a_snapshot_and_a_pin_of_the_same_array_are_apart():
    memory = HostMemory(1 << 20)
    array = np.arange(5000)
    pin = memory.pin(array, None)
    snapshot = memory.snapshot(array)
    assert "2 slots" in repr(memory)
    snapshot.release()
    again = memory.pin(array, None)
    again.release()
    pin.release()
    assert "0 slots" in repr(memory)
    del snapshot
    memory.close()


def test_a_memory_is_closed_while_somebody_looks_at_a_snapshot():
    memory = HostMemory(1 << 20)
    snapshot = memory.snapshot(np.arange(5000))
    memory.close()
    snapshot.release()
    assert snapshot.array[17] == 17
    del snapshot
