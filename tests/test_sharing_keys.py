"""Sharing by key between real processes, on host memory: who may open, and who closes when."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import sharing_peers as at
from helpers import child

from dask_gpuipc import sharing
from dask_gpuipc.errors import GPUIPCError, HandleClosed, NotPermitted, StillOpen
from dask_gpuipc.sharing import node as nodes
from dask_gpuipc.sharing.desk import Reply, Visit, Want
from dask_gpuipc.sharing.keys import _ticket


@pytest.fixture(scope="module")
def processes():
    with child(daemon=False) as a, child() as b, child() as c:
        yield a, b, c


@pytest.fixture
def peers(processes):
    with at.session(*processes):
        yield processes


def export(name, pids=None):
    at.here["key of " + name] = sharing.export_key(at.here[name], pids)
    return at.here["key of " + name]


def open_(key, as_):
    try:
        at.here[as_] = sharing.open_key(key)
    except GPUIPCError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def close(key, timeout=20.0):
    try:
        sharing.close_key(key, timeout)
    except GPUIPCError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forget_keys():
    """Close what a test left open by key, so that nothing holds it."""
    from dask_gpuipc.sharing import keys

    keys._keys.opened.clear()
    for key in list(keys._keys.given):
        sharing.close_key(key)


@pytest.fixture
def abc(peers):
    yield peers
    a, *others = peers
    for c in others:
        c.call(forget_keys)
        c.call(at.clear)
    a.call(forget_keys)


def given(a, value=3, pids=None):
    a.call(at.make, "x", value)
    return a.call(export, "x", pids)


# -- open, close ---------------------------------------------------------------------------------


def test_a_key_is_short_printable_and_names_kind_and_process(abc):
    a, *_ = abc
    key = given(a)
    assert re.fullmatch(rf"gpuipc-host-{a.pid}-[a-z2-7]{{16}}", key)
    assert len(key) < 40
    assert given(a) != key


def test_any_process_opens_by_key(abc):
    a, b, c = abc
    key = given(a, 3)
    assert (b.call(open_, key, "y"), c.call(open_, key, "y")) == ("", "")
    assert b.call(at.values, "y") == c.call(at.values, "y") == [3]


PROGRAM = """
import sys, dask
from dask_gpuipc import sharing
dask.config.set({"gpuipc.socket-directory": sys.argv[1]})
print(int(sharing.open_key(sys.argv[2]).sum()))
sharing.close_key(sys.argv[2])
"""


def test_a_process_that_is_no_relative_opens_by_key(abc):
    a, *_ = abc
    key = given(a, 3)
    command = [sys.executable, "-c", PROGRAM, a.call(at.directory), key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("15000\n", "")
    a.until(at.nothing_held)


def test_each_open_wants_its_close(abc):
    a, b, _ = abc
    key = given(a)
    b.call(open_, key, "y")
    b.call(open_, key, "z")
    assert b.call(at.same_memory, "y", "z")
    b.call(at.drop, "y", "z")
    assert b.call(close, key) == ""
    assert a.call(at.held) == (1, 0)
    assert b.call(close, key) == ""
    a.until(at.nothing_held)
    assert b.call(close, key) == f"HandleClosed: '{key}' is not open here"
    assert b.call(open_, key, "y") == ""  # a key is no handle: it can be opened anew


def test_in_its_process_a_key_gives_the_original_array(abc):
    a, *_ = abc
    key = given(a)
    assert a.call(open_, key, "y") == ""
    assert a.call(at.same_memory, "x", "y")
    assert a.call(at.held) == (0, 0)


def test_the_key_keeps_the_array_alive(abc):
    a, b, _ = abc
    key = given(a, 8)
    a.call(at.drop, "x")
    assert b.call(open_, key, "y") == ""
    assert b.call(at.values, "y") == [8]


def test_the_exporters_close_waits_for_importers(abc):
    a, b, _ = abc
    key = given(a)
    b.call(open_, key, "y")
    a.start(close, key)
    b.call(at.drop, "y")
    assert b.call(close, key) == ""
    assert a.finish() == ""
    assert a.call(close, key).startswith("HandleClosed")


def test_beyond_its_limit_the_exporters_close_is_an_error_and_harms_nobody(abc):
    a, b, c = abc
    key = given(a, 5)
    b.call(open_, key, "y")
    said = a.call(close, key, 0.0)
    assert said.startswith(f"StillOpen: after 0 s {key} is open in processes [{b.pid}]")
    assert c.call(open_, key, "y").startswith("SourceGone")  # nobody new
    a.call(at.make, "other", 9, 500_000)
    assert b.call(at.values, "y") == [5]
    b.call(at.drop, "y")
    b.call(close, key)
    assert a.call(close, key) == ""


def test_an_importer_that_is_killed_holds_up_nobody(abc):
    a, b, _ = abc
    key = given(a)
    with at.helper_child(b.call(at.directory)) as c:
        c.call(open_, key, "y")
        a.start(close, key)
        c.signal(signal.SIGKILL)
        assert a.finish() == ""
        c.kill()


def test_an_exporter_that_is_killed_leaves_importers_their_memory(abc):
    _, b, c = abc
    with at.helper_child(b.call(at.directory)) as a:
        key = given(a, 6)
        b.call(open_, key, "y")
        a.kill()
    assert b.call(at.values, "y") == [6]
    assert b.call(open_, key, "z") == ""  # it has it already
    assert c.call(open_, key, "y").startswith("SourceGone")


@pytest.mark.parametrize("text", ["", "gpuipc-host-1", "gpuipc-host-1-UPPER", "gpuipc-disk-1-a"])
def test_what_is_no_key_is_a_value_error(text):
    with pytest.raises(ValueError, match="is no key"):
        sharing.open_key(text)


def test_an_unknown_key_is_gone(abc):
    a, b, _ = abc
    key = given(a)
    wrong = key[:-16] + "a" * 16
    assert b.call(open_, wrong, "y").startswith("SourceGone")
    nobody = f"gpuipc-host-{2**22 + 5}-{'a' * 16}"
    assert b.call(open_, nobody, "y").endswith(f"which exported {nobody}, has ended")


def test_an_empty_array_has_no_key():
    with pytest.raises(ValueError, match="no memory to share"):
        sharing.export_key(np.zeros(0))


# -- who may -------------------------------------------------------------------------------------


def allow(key, *pids):
    try:
        sharing.allow(key, pids)
    except (GPUIPCError, ProcessLookupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_only_those_on_the_list_open(abc):
    a, b, c = abc
    key = given(a, 3, [b.pid])
    assert b.call(open_, key, "y") == ""
    said = c.call(open_, key, "y")
    assert said == (
        f"NotPermitted: process {a.pid}: process {c.pid} is not among those that may open it"
    )
    assert a.call(at.held) == (1, 0)


def test_the_first_allow_narrows_and_the_next_widens(abc):
    a, b, c = abc
    key = given(a)
    assert a.call(allow, key, b.pid) == ""
    assert c.call(open_, key, "y").startswith("NotPermitted")
    assert a.call(allow, key, c.pid, b.pid) == ""
    assert (b.call(open_, key, "y"), c.call(open_, key, "y")) == ("", "")


def test_who_has_it_keeps_it_when_the_list_is_narrowed(abc):
    a, b, c = abc
    key = given(a, 4)
    b.call(open_, key, "y")
    a.call(allow, key, c.pid)
    assert b.call(at.values, "y") == [4]


def ask_as(key, pid, started):
    """Ask with another process's advertisement."""
    import dataclasses

    ticket = _ticket(key)
    mine = nodes.node().endpoint("host").advertisement
    with Visit(ticket.address, 20) as visit:
        visit.send(Want(ticket.key, ticket.kind))
        visit.send(dataclasses.replace(mine, pid=pid, start_time=started))
        return visit.receive(Reply)


def start_time():
    from dask_gpuipc import process

    return process.start_time(os.getpid())


def test_the_kernels_word_counts_and_not_the_askers(abc):
    a, b, c = abc
    key = given(a, 3, [b.pid, c.pid])
    reply = c.call(ask_as, key, b.pid, b.call(start_time))
    assert (reply.verdict, reply.detail) == (
        "not_permitted",
        f"process {c.pid} asks as {b.pid}",
    )


def test_a_pid_stands_for_the_process_that_has_it_now(abc):
    a, b, _ = abc
    key = given(a)
    a.call(allow, key, b.pid)
    assert a.call(allowed, key) == {(b.pid, b.call(start_time))}


def allowed(key):
    from dask_gpuipc.sharing import keys

    return keys._keys.given[key]._entry.allowed


def test_a_forked_child_of_one_that_may_is_another_process(abc):
    a, b, _ = abc
    with at.helper_child(b.call(at.directory), daemon=False) as c:
        key = given(a, 3, [c.pid])
        assert c.call(at.in_a_fork, open_, key, "y").startswith("NotPermitted")
        assert c.call(open_, key, "y") == ""


def test_other_hosts_are_refused_with_a_reason(abc):
    a, b, _ = abc
    key = given(a)
    said = a.call(allow, key, f"elsewhere.example:{b.pid}")
    assert said.startswith(f"NotPermitted: elsewhere.example:{b.pid}: descriptors and CUDA IPC")
    assert "fabric handles" in said
    assert b.call(open_, key, "y") == ""  # the list is as it was
    assert a.call(allow, key, f"{socket.gethostname()}:{b.pid}", f"localhost:{a.pid}") == ""


def test_a_process_that_is_not_there_is_not_allowed(abc):
    a, *_ = abc
    key = given(a)
    assert a.call(allow, key, 2**22 + 5).startswith("ProcessLookupError")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to start a process of another user")
def test_a_process_of_another_user_is_not_allowed(abc):
    a, *_ = abc
    key = given(a)
    with subprocess.Popen(["sleep", "60"], user=65534) as other:
        try:
            assert a.call(allow, key, other.pid) == (
                f"NotPermitted: process {other.pid} is of user 65534; only those of user 0 may"
            )
        finally:
            other.kill()


def as_another_user(key, ticket):
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    said = open_(key, "y")
    with pytest.raises(NotPermitted, match="Permission denied"):
        Visit(ticket.address, 20)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_user_opens_nothing(abc):
    a, b, _ = abc
    key = given(a)
    os.chmod(a.call(at.directory), 0o777)  # the private folders in it are not
    with at.helper_child(b.call(at.directory)) as c:
        said = c.call(as_another_user, key, a.call(_ticket, key))
    assert said.startswith(
        f"SourceGone: process {a.pid} shares nothing, or where this one does not"
    )
    assert a.call(at.held) == (0, 0)


def not_mine(key):
    with pytest.raises(HandleClosed, match="did not export"):
        sharing.allow(key, [os.getpid()])
    with pytest.raises(HandleClosed, match="did not export"):
        sharing.set_attributes(key, readonly=True)


def test_only_the_exporter_says_who_may(abc):
    a, b, _ = abc
    key = given(a)
    b.call(open_, key, "y")
    b.call(not_mine, key)


# -- attributes ----------------------------------------------------------------------------------


def set_readonly(key, value=True):
    sharing.set_attributes(key, readonly=value)


def cannot_be_written(name):
    array = at.here[name]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            if low <= address < high:
                return line.split()[1]
    return "not mapped"


def test_read_only_host_memory_cannot_be_written(abc):
    a, b, c = abc
    key = given(a, 3)
    b.call(open_, key, "y")
    a.call(set_readonly, key)
    c.call(open_, key, "y")
    assert c.call(cannot_be_written, "y") == "r--p"
    assert c.call(at.values, "y") == [3]
    b.call(at.fill, "y", 4)  # it was opened before
    a.call(at.fill, "x", 5)  # its owner's it stays


def test_the_attribute_can_be_taken_back(abc):
    a, b, _ = abc
    key = given(a)
    a.call(set_readonly, key)
    a.call(set_readonly, key, False)
    b.call(open_, key, "y")
    b.call(at.fill, "y", 4)


def test_memory_that_cannot_be_protected_is_an_error(monkeypatch):
    from dask_gpuipc.memory.host import HostMemory

    key = sharing.export_key(np.ones(1000))
    monkeypatch.setattr(HostMemory, "protects", lambda self, array: False)  # as cudaMalloc's is
    with pytest.raises(ValueError, match=r"allocate it with\s+dask_gpuipc.sharing.Pool"):
        sharing.set_attributes(key, readonly=True)
    sharing.close_key(key)
    sharing.stop()


def test_errors_are_of_the_kinds_that_people_catch():
    assert issubclass(NotPermitted, PermissionError)
    assert issubclass(StillOpen, TimeoutError)
    assert issubclass(HandleClosed, ValueError)
