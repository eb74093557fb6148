"""What is asked of any `memory.base.Memory`: one function to each clause of the contract."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dask_gpuipc.errors import OpenFailed, Refusal, Refused
from dask_gpuipc.memory.base import Memory, Preparation, Rung
from dask_gpuipc.testing.bench import Bench, flags_of, name_of
from dask_gpuipc.testing.leaks import counts
from dask_gpuipc.wire import Announce


def check_memory(make_memory: Callable[[], Memory]) -> None:
    """Hold an implementation of `memory.base.Memory` to its contract.

    One memory exports in this process, another one imports in a process that is spawned. Wants the
    array library of the memory: NumPy for ``host``, CuPy for ``cuda``.

    Parameters
    ----------
    make_memory : callable
        Takes nothing and makes a memory. At a module's top level, since the second process
        imports it.

    Raises
    ------
    AssertionError
        The contract is broken; notes on the error name the check.
    """
    bench = Bench(make_memory)
    try:
        bench.warm_up()
        mine, theirs = counts(), bench.second.call("descriptors")
        for check in _CHECKS:
            try:
                check(bench)
            except BaseException as error:
                error.add_note(f"check_memory, {check.__name__.strip('_')}: {check.__doc__}")
                raise
        bench.forget_all()
        _poll(lambda: bench.second.call("descriptors") == theirs, "importer's descriptors closed")
        _poll(lambda: counts() == mine, "exporter's descriptors closed by collect()")
    finally:
        bench.close()
    bench.memory.close()  # a second time


def _poll(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within 10 s"
        time.sleep(0.01)


def _same(name: str, expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> None:
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, not {expected.shape}"
    if expected.dtype.fields is None:
        equal = got.tobytes() == expected.tobytes()
    else:  # padding is nobody's value
        equal = np.array_equal(got, expected)
    assert equal, f"{name}: other values"


def _accepts_its_own(bench: Bench) -> None:
    """`accepts` knows arrays by their exact type; `devices` and `rung` answer."""
    array = bench.arrays.fill(1)
    assert bench.memory.accepts(array)
    for other in (None, 1, b"bytes", [array], (array,), {"x": array}, type(array)):
        assert not bench.memory.accepts(other), f"accepts {type(other).__name__}"
    if bench.memory.kind == "host":
        assert not bench.memory.accepts(np.ma.masked_array(array)), "accepts a subclass"
    assert isinstance(bench.memory.devices(), tuple)
    assert all(isinstance(rung, Rung) for rung in bench.rungs)


def _layouts_round_trip(bench: Bench) -> None:
    """Values, dtype, shape and contiguity arrive, whatever the layout."""
    for name, array in bench.arrays.layouts():
        expected = bench.arrays.values(array)
        with bench.pinned(array) as pin:
            low, high = pin.layout.extent()
            assert 0 <= low < high <= pin.allocation.nbytes, f"{name}: outside the allocation"
            assert pin.nbytes > 0, f"{name}: charged with nothing"
            for rung in bench.rungs:
                remote = bench.load(pin, rung)
                _same(f"{name} by {rung}", expected, remote.values())
                _same(f"{name} owned", expected, remote.own())
                mine = flags_of(array)
                assert remote.flags[2] == mine[2], f"{name}: writeable or not, unlike its source"
                assert remote.flags == mine or not any(mine[:2]), f"{name}: another order"
                remote.forget()


def _slices_keep_their_place(bench: Bench) -> None:
    """Of many small arrays and slices, each import has its own values."""
    whole = bench.arrays.xp.arange(64 * 1000, dtype="i4").reshape(64, 1000)
    arrays = [bench.arrays.fill(i, 700) for i in range(5)] + [whole[i, 3:-5] for i in range(64)]
    with contextlib.ExitStack() as stack:
        pins = [stack.enter_context(bench.pinned(array)) for array in arrays]
        for rung in bench.rungs:
            remotes = [bench.load(pin, rung) for pin in pins]
            for i, remote in enumerate(remotes):
                _same(f"array {i}", bench.arrays.values(arrays[i]), remote.values())
                remote.forget()


def _names_are_unique(bench: Bench) -> None:
    """Two pins of one array name the same bytes; a new allocation has a new name."""
    seen: set[str] = set()
    for i in range(10):
        array = bench.arrays.fill(i)
        with bench.pinned(array) as one, bench.pinned(array) as two:
            assert not bench.memory.pin_copies(array), "a second pin of one array copies it"
            assert (one.allocation, one.block) == (two.allocation, two.block)
            place = name_of(one.allocation)
            pooled = bool(one.allocation.device)  # and may stay in a pool that is not ours
        assert place not in seen, f"allocation {place} came back after it was told to be gone"
        del array, one, two
        gone = bench.collect()
        assert pooled or place in gone, f"collect() tells of {gone}, not of {place}"
        assert not gone & seen, "collect() tells twice"
        seen |= gone


def _released_once(bench: Bench) -> None:
    """A release ends its own pin only."""
    array = bench.arrays.fill(5)
    first = bench.pin(array)
    with bench.pinned(array) as second:
        first.release()
        del first
        assert name_of(second.allocation) not in bench.collect()
        for value in range(10):
            with bench.pinned(bench.arrays.fill(100 + value)):
                pass
        remote = bench.load(second, bench.rungs[0])
        _same("the other pin", bench.arrays.values(array), remote.values())
        remote.forget()


def _imports_are_private(bench: Bench) -> None:
    """What is written into a private import is seen nowhere else; into an alias, everywhere."""
    for rung in bench.rungs:
        array = bench.arrays.fill(1)
        with bench.pinned(array) as pin:
            one, two = bench.load(pin, rung), bench.load(pin, rung)
            one.write(2)
            three = bench.load(pin, rung)
            seen = 1 if bench.private(rung) else 2
            assert (one.values() == 2).all()
            for other in (two.values(), three.values(), bench.arrays.values(array)):
                assert (other == seen).all(), f"{rung}: another's array is {other[0]}, not {seen}"
            for remote in (one, two, three):
                remote.forget()


def _recycling_shows_nothing(bench: Bench) -> None:
    """Bytes that are put where others were released appear in imports of theirs only."""
    for rung in bench.rungs:
        kept = bench.arrays.fill(-1)
        with bench.pinned(kept) as pin:
            neighbour = bench.load(pin, rung)
            for value in range(20):
                array = bench.arrays.fill(value)
                with bench.pinned(array) as passing:
                    remote = bench.load(passing, rung)
                    assert (remote.values() == value).all(), f"{rung}: old bytes in a new import"
                    if bench.private(rung):
                        remote.write(value + 1000)
                    remote.forget()
                del array, passing
            assert (neighbour.values() == -1).all(), f"{rung}: a live import has changed"
            neighbour.forget()


def _copies_outlive_the_pin(bench: Bench) -> None:
    """A finished copy does not change when its source is released and overwritten."""
    if Rung.COPY not in bench.rungs:
        return
    array = bench.arrays.fill(7)
    with bench.pinned(array) as pin:
        remote = bench.load(pin, Rung.COPY)
    array[...] = 8
    assert (remote.values() == 7).all() or remote.rung is not Rung.COPY
    remote.forget()


def _opened_once(bench: Bench) -> None:
    """One mapping serves any number of imports, and none of them costs a descriptor."""
    array = bench.arrays.fill(3)
    with bench.pinned(array) as pin:
        bench.load(pin, bench.rungs[0]).forget()
        before = bench.second.call("descriptors")["/memfd:"]
        remotes = [bench.load(pin, bench.rungs[0]) for _ in range(200)]
        assert bench.second.call("descriptors")["/memfd:"] == before
        assert (remotes[-1].values() == 3).all()
        for remote in remotes:
            remote.forget()


def _bad_handles_are_refused(bench: Bench) -> None:
    """What is no handle gives OpenFailed; descriptors that came along are closed."""
    array = bench.arrays.fill(3)
    with bench.pinned(array) as pin, contextlib.ExitStack() as stack:
        announcement, fds = bench.announce(pin)
        before = bench.second.call("descriptors")
        for name, spoilt, wrong in _spoilt(announcement, fds, stack):
            try:
                bench.second.call("open", "spoilt", spoilt, fds=wrong)
            except OpenFailed:
                continue
            raise AssertionError(f"{name} was opened")
        assert bench.second.call("descriptors") == before, "a refused descriptor stays open"


def _spoilt(
    announcement: Announce, fds: tuple[int, ...], stack: contextlib.ExitStack
) -> Iterator[tuple[str, Announce, Sequence[int]]]:
    payload = announcement.handle
    if payload:
        for name, wrong in (
            ("a handle backwards", payload[::-1]),
            ("no handle", b""),
            ("a short handle", payload[:-1]),
            ("a long handle", payload + b"x"),
        ):
            yield name, replace(announcement, handle=wrong), fds
    if fds:
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        stack.callback(os.close, writer)
        soft = _memfd(announcement.nbytes, os.MFD_CLOEXEC, stack)
        yield "no descriptor", announcement, ()
        yield "one descriptor too many", announcement, (*fds, reader)
        yield "a pipe", announcement, (reader,)
        yield "a memfd that may shrink", announcement, (soft,)
        yield "too short a memfd", replace(announcement, nbytes=announcement.nbytes + 1), fds


def _memfd(nbytes: int, flags: int, stack: contextlib.ExitStack) -> int:
    fd = os.memfd_create("testing", flags)
    stack.callback(os.close, fd)
    os.ftruncate(fd, nbytes)
    return fd


def _refuses_what_it_cannot(bench: Bench) -> None:
    """`pin` raises Refused, and nothing else, for what cannot be shared or is not ready."""
    wrong: list[tuple[Any, Preparation | None, Refusal]] = []
    array = bench.arrays.fill(1)
    if bench.memory.prepares:
        other = bench.memory.prepare([bench.arrays.fill(2)])
        wrong += [(array, None, Refusal.NOT_READY), (array, other, Refusal.NOT_READY)]
    if bench.memory.kind == "host":
        objects = np.array([None] * 512, dtype=object)
        nested = np.zeros(512, np.dtype([("a", "i4"), ("b", object)]))
        wrong += [(x, None, Refusal.UNSUPPORTED_DTYPE) for x in (objects, nested)]
    for bad, prepared, reason in wrong:
        got: Refusal | str = "pinned"
        try:
            bench.memory.pin(bad, prepared)
        except Refused as refused:
            got = refused.reason
        assert got is reason, f"pin: {got}, where {reason} is right"


_CHECKS: Final[tuple[Callable[[Bench], None], ...]] = (
    _accepts_its_own,
    _layouts_round_trip,
    _slices_keep_their_place,
    _names_are_unique,
    _released_once,
    _imports_are_private,
    _recycling_shows_nothing,
    _copies_outlive_the_pin,
    _opened_once,
    _bad_handles_are_refused,
    _refuses_what_it_cannot,
)
