"""The kernel tells whether an array was written: `memory.writes`, and host memory that asks it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from dask_gpuipc.errors import MemoryUnavailable
from dask_gpuipc.memory import host
from dask_gpuipc.memory.host import HostMemory
from dask_gpuipc.memory.writes import Watch, Watcher, may_be_written_by_devices

NBYTES = 8 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    try:
        watcher = Watcher()
    except MemoryUnavailable as error:
        pytest.skip(str(error))
    if may_be_written_by_devices():
        pytest.skip("a device is open")
    with closing(watcher):
        yield watcher


def watch(watcher: Watcher, array: np.ndarray) -> Watch:
    begun = watcher.watch(array.ctypes.data, array.nbytes)
    assert begun is not None
    return begun


def pread_into(array: np.ndarray) -> None:
    """The kernel writes, not the process."""
    with open("/dev/zero", "rb") as zeros:
        assert os.preadv(zeros.fileno(), [memoryview(array)[PAGE : 3 * PAGE]], 0) == 2 * PAGE


def write_in_thread(array: np.ndarray) -> None:
    thread = threading.Thread(target=array.__setitem__, args=(len(array) // 2, 1))
    thread.start()
    thread.join()


WRITES = {
    "first whole page": lambda a: a.__setitem__(PAGE, 1),
    "last whole page": lambda a: a.__setitem__(-PAGE, 1),
    "in another thread": write_in_thread,
    "through a view": lambda a: a[100:].view("u4").__setitem__(slice(None), 7),
    "by the kernel": pread_into,
    "the same value": lambda a: np.copyto(a, a.copy()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("make", [np.zeros, np.ones])  # zeros: no page was ever touched
def test_every_write_is_seen_and_no_read(watcher, make, write) -> None:
    array = make(NBYTES, "u1")
    begun = watch(watcher, array)
    assert array.sum() in (0, NBYTES)
    assert not begun.written()
    write(array)
    assert begun.written()
    begun.renew()
    assert not begun.written()
    write(array)
    assert begun.written()


def test_its_ends_are_those_of_whole_pages(watcher) -> None:
    whole = np.ones(NBYTES, "u1")
    skip = -whole.ctypes.data % PAGE
    array = whole[skip + 100 : skip + 100 + 10 * PAGE]
    begun = watch(watcher, array)
    assert (begun.head, begun.tail) == (PAGE - 100, 100)
    array[: begun.head] = 2
    array[len(array) - begun.tail :] = 2
    assert not begun.written()
    array[begun.head] = 2
    assert begun.written()


def test_what_a_forked_child_writes_is_its_own(watcher) -> None:
    array = np.ones(NBYTES, "u1")
    begun = watch(watcher, array)
    child = os.fork()
    if not child:
        array[PAGE:] = 2
        begun.renew()
        os._exit(0 if begun.written() else 1)  # a child's watches tell nothing
    assert os.waitpid(child, 0)[1] == 0
    assert not begun.written()
    array[NBYTES // 2] = 2
    assert begun.written()


def test_a_later_watch_on_the_same_pages_ends_an_earlier_one(watcher) -> None:
    array = np.ones(NBYTES, "u1")
    first = watch(watcher, array)
    array[NBYTES // 2] = 2
    second = watch(watcher, array[PAGE:])  # protects again what was written
    assert not second.written()
    assert first.written()
    first.end()
    assert not second.written()


def test_what_was_ended_dropped_or_closed_counts_as_written(watcher) -> None:
    ended, overlapped, kept = (np.ones(NBYTES, "u1") for _ in range(3))
    block = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(bytes(NBYTES))
    dropped = watch(watcher, np.frombuffer(block, "u1"))
    watches = [watch(watcher, array) for array in (ended, overlapped, kept)]
    assert not any(one.written() for one in (*watches, dropped))
    watches[0].end()
    watch(watcher, overlapped[PAGE:]).end()
    block.madvise(mmap.MADV_DONTNEED)
    assert [one.written() for one in (*watches, dropped)] == [True, True, False, True]
    watcher.close()
    assert watches[2].written()
    assert watcher.watch(kept.ctypes.data, kept.nbytes) is None


def test_memory_that_others_may_change_is_not_watched(watcher, tmp_path) -> None:
    (tmp_path / "file").write_bytes(bytes(NBYTES))
    with (tmp_path / "file").open("r+b") as file:
        maps = [
            mmap.mmap(-1, NBYTES),
            mmap.mmap(file.fileno(), NBYTES),
            mmap.mmap(file.fileno(), NBYTES, flags=mmap.MAP_PRIVATE),
        ]
    for shared in maps:
        array = np.frombuffer(shared, "u1")
        assert watcher.watch(array.ctypes.data, array.nbytes) is None
    assert watcher.watch(np.ones(10, "u1").ctypes.data, 10) is None


DEVICES = ("/dev/fuse", "/dev/kvm", "/dev/net/tun", "/dev/kmsg", "/dev/hpet", "/dev/rtc0")


def test_with_a_device_open_nothing_is_known(watcher) -> None:
    array = np.ones(NBYTES, "u1")
    begun = watch(watcher, array)
    for device in DEVICES:
        try:
            fd = os.open(device, os.O_RDONLY)
        except OSError:
            continue
        break
    else:
        pytest.skip("no device can be opened")
    try:
        assert begun.written()
        assert watcher.watch(array.ctypes.data, array.nbytes) is None
    finally:
        os.close(fd)
    assert not begun.written()


# -- host memory ----------------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch) -> list[int]:
    """Bytes of each comparison."""
    found: list[int] = []
    compare = host._libc.memcmp

    def counted(one: int, other: int, nbytes: int) -> int:
        found.append(nbytes)
        return compare(one, other, nbytes)

    monkeypatch.setattr(host._libc, "memcmp", counted)
    return found


def values(pin: host.Pin, memory: HostMemory) -> np.ndarray:
    """What is in the slot that a pin holds."""
    fd = memory.handle(pin.allocation).fds[0]
    data = os.pread(fd, pin.nbytes, pin.layout.offset)
    return np.frombuffer(data, "u1")[:NBYTES]


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with closing(HostMemory()) as memory:
        yield memory


def test_a_copy_is_used_again_without_reading_the_array(watcher, memory, compared) -> None:
    array = np.ones(NBYTES, "u1")
    pins = [memory.pin(array, None) for _ in range(4)]
    assert len({pin.block for pin in pins}) == 1
    assert sum(compared) < 3 * 2 * PAGE
    for pin in pins:
        pin.release()


@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("where", [0, NBYTES // 2, NBYTES - 1])
def test_what_was_written_is_copied_again(memory, where, again) -> None:
    array = np.ones(NBYTES, "u1")
    first = memory.pin(array, None)
    for number in range(again):
        array[where] = 2 + number
        second = memory.pin(array, None)
        assert second.block != first.block
        assert np.array_equal(values(second, memory), array)
        second.release()
    assert np.array_equal(values(first, memory), np.ones(NBYTES, "u1"))
    first.release()


def test_what_was_written_and_is_the_same_is_compared_once(watcher, memory, compared) -> None:
    array = np.ones(NBYTES, "u1")
    first = memory.pin(array, None)
    array[:] = 1
    second = memory.pin(array, None)
    assert compared == [NBYTES]
    third = memory.pin(array, None)
    assert first.block == second.block == third.block
    assert sum(compared) < NBYTES + 2 * PAGE
    for pin in (first, second, third):
        pin.release()


def test_what_could_not_be_copied_again_is_not_sent_as_it_was(memory, monkeypatch) -> None:
    array = np.ones(NBYTES, "u1")
    first = memory.pin(array, None)
    array[NBYTES // 2] = 2
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_take", partial(fail, OSError("no room")))
        with pytest.raises(NotImplementedError):
            memory.pin(array, None)
    second = memory.pin(array, None)
    assert np.array_equal(values(second, memory), array)
    first.release()
    second.release()


def fail(error: Exception, *_: object) -> None:
    raise error


def test_several_threads_export_while_the_array_changes(memory) -> None:
    """Nobody gets bytes that are older than its own request."""
    array = np.zeros(NBYTES, "u1")
    held = memory.pin(array, None)
    wrong = []

    def export() -> None:
        pin = memory.pin(array, None)
        if values(pin, memory)[NBYTES // 2] != array[NBYTES // 2]:
            wrong.append(int(array[NBYTES // 2]))
        pin.release()

    for number in range(1, 20):
        array[NBYTES // 2] = number
        threads = [threading.Thread(target=export) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    held.release()


def test_switched_off_the_bytes_are_compared(compared) -> None:
    array = np.ones(NBYTES, "u1")
    with closing(HostMemory(watch_writes=False)) as memory:
        pins = [memory.pin(array, None) for _ in range(2)]
        assert compared == [NBYTES]
        for pin in pins:
            pin.release()
