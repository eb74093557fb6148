"""What a process holds, compared before and after."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

import psutil

_COUNTED = re.compile(r"socket:|/memfd:|anon_inode:\[pidfd\]|pidfd:")


@contextlib.contextmanager
def leak_check(*, ignore: Iterable[str] = (), timeout: float = 5.0) -> Iterator[None]:
    """Fail if what runs within leaves anything behind in this process.

    Counted are descriptors of sockets, memfds and pidfds, mappings of memfds, threads and child
    processes. Garbage is collected before judgement; what ends by itself has a while for it.

    Parameters
    ----------
    ignore : iterable of str
        Regular expressions; what one of them is found in (see the message) is not counted.
    timeout : float
        Seconds until which what was left must be gone.

    Raises
    ------
    AssertionError
        It lists what is left. Not raised over an exception from within, whose traceback may hold
        anything.
    """
    before = _holdings()
    yield
    deadline = time.monotonic() + timeout
    while left := _left(before, ignore):
        if time.monotonic() > deadline:
            raise AssertionError("left behind:\n  " + "\n  ".join(left))
        gc.collect()
        time.sleep(0.01)


def _left(before: dict[Hashable, str], ignore: Iterable[str]) -> list[str]:
    new = [text for key, text in _holdings().items() if key not in before]
    if any("socket:" in text for text in new):
        new = [_with_address(text) for text in new]
    return sorted(text for text in new if not any(re.search(p, text) for p in ignore))


def _holdings() -> dict[Hashable, str]:
    """What this process holds: an identity, and a line for people."""
    held: dict[Hashable, str] = {}
    for fd, target, inode in _descriptors():
        held["fd", fd, target, inode] = f"descriptor {fd}: {target}"
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line:
                where, *_, inode_text, name = line.split(None, 5)
                held["map", where.partition("-")[0], inode_text] = (
                    f"mapping {where}: {name.strip()}"
                )
    for thread in threading.enumerate():
        held["thread", thread] = f"thread {thread.name!r}{' (daemon)' * thread.daemon}"
    multiprocessing.active_children()  # reaps those that have ended
    for child in psutil.Process().children():
        held["child", child] = f"child process {child.pid}: {_command(child)}"
    return held


def _descriptors() -> Iterator[tuple[int, str, int]]:
    """Number, target and inode of the descriptors that count."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            inode = os.stat(f"/proc/self/fd/{name}").st_ino if _COUNTED.match(target) else None
        except OSError:
            continue  # that of the listing itself, or closed by another thread meanwhile
        if inode is not None:
            yield int(name), target, inode


def _command(child: psutil.Process) -> str:
    try:
        return f"{' '.join(child.cmdline())[:160]} ({child.status()})"
    except psutil.Error:
        return "has just ended"


def _with_address(text: str) -> str:
    """Add what the kernel's table of unix sockets says: kind and path."""
    inode = re.search(r"socket:\[(\d+)\]", text)
    if inode is None:
        return text
    kinds = {"0001": "stream", "0002": "datagram", "0005": "seqpacket"}
    with open("/proc/net/unix") as table:
        for line in table:
            _, _, _, _, kind, _, number, *path = line.split()
            if number == inode[1]:
                return f"{text} unix {kinds.get(kind, kind)} {''.join(path)}".rstrip()
    return f"{text} not unix"


def counts() -> Counter[str]:
    """Descriptors by their kind, and memfds that are mapped."""
    kinds = Counter(target.partition("[")[0] for _, target, _ in _descriptors())
    with open("/proc/self/maps") as maps:
        kinds["mapped"] = sum("/memfd:" in line for line in maps)
    return kinds
