"""The channel over real sockets: who is let in, what arrives, what ends it, whose death counts."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from helpers import child, descriptors_used_up, run, until, wait_until

from dask_gpuipc import channel as channel_module
from dask_gpuipc import process
from dask_gpuipc.channel import (
    MAX_FDS,
    MAX_PATH,
    MAX_STRANGERS,
    PREFIX,
    Channel,
    Listener,
    Watch,
    check_credentials,
    dial,
    sweep,
)
from dask_gpuipc.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ConfigError,
    WireError,
)
from dask_gpuipc.wire import (
    MAX_MESSAGE,
    WIRE_VERSION,
    Advertisement,
    Ask,
    Hello,
    Release,
    Welcome,
    encode_message,
)


@pytest.fixture(autouse=True)
def strangers_have_time(monkeypatch):
    """So that no test passes because a stranger was too slow."""
    monkeypatch.setattr(channel_module, "HELLO_TIMEOUT", 600.0)


class Side:
    """One end: a channel, and what it told."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[object] = []
        self.fds: list[int] = []
        self.errors: list[Exception] = []
        self.channel = Channel(sock, asyncio.get_running_loop(), self._message, self._broken)

    def _message(self, channel, message, fds):
        assert channel is self.channel
        self.messages.append(message)
        self.fds.extend(fds)

    def _broken(self, channel, error):
        assert channel is self.channel
        self.errors.append(error)

    def close(self) -> None:
        self.channel.close()
        for fd in self.fds:
            os.close(fd)


@contextmanager
def channel_and_socket():
    """A channel, and the bare socket at its other end, which sends whatever a test likes."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    side = Side(mine)
    with theirs:
        try:
            yield side, theirs
        finally:
            side.close()


@contextmanager
def two_channels():
    with_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, two = (Side(sock) for sock in with_socket)
    try:
        yield one, two
    finally:
        one.close()
        two.close()


class Consumer:
    """A listener that accepts like an endpoint does."""

    def __init__(self, directory, peer="consumer") -> None:
        self.peer = peer
        self.hellos: list[Hello] = []
        self.sides: list[Side] = []
        loop = asyncio.get_running_loop()
        self.listener = Listener(str(directory), loop, self._accept)
        self.advertisement = Advertisement(
            version=WIRE_VERSION,
            peer=peer,
            scheduler="scheduler",
            pid=os.getpid(),
            start_time=process.start_time(os.getpid()),
            boot_id=process.boot_id(),
            namespaces=process.namespaces(),
            socket_path=self.listener.path,
            token=self.listener.token,
            memories=("host",),
            devices=(),
        )
        self.hello = Hello(self.listener.token, "producer", peer, os.getpid(), 1)

    def _accept(self, sock, hello):
        if hello.consumer != self.peer:
            raise ChannelBroken("not for me")
        self.hellos.append(hello)
        self.sides.append(Side(sock))
        self.sides[-1].channel.post(Welcome(self.peer))

    async def dial(self, timeout=5.0, hello=None, **changes) -> socket.socket:
        them = replace(self.advertisement, **changes)
        loop = asyncio.get_running_loop()
        return await dial(them, hello or self.hello, loop, timeout)

    async def connect(self) -> Side:
        return Side(await self.dial())

    def stranger(self, *packets: bytes) -> socket.socket:
        """A bare connection on which these packets were sent."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(self.listener.path)
        for packet in packets:
            sock.send(packet)
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        self.listener.close()
        for side in self.sides:
            side.close()


@contextmanager
def listening(directory):
    consumer = Consumer(directory)
    try:
        yield consumer
    finally:
        consumer.close()


async def ended(sock: socket.socket) -> bool:
    """Wait for the other side to close a bare socket."""

    def closed() -> bool:
        try:
            return sock.recv(MAX_MESSAGE) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    return await until(closed, "the other side to close")


async def works(one: Side, two: Side) -> None:
    """Both ways, one message."""
    number = len(one.messages) + len(two.messages) + 1
    one.channel.send(Ask(number))
    two.channel.send(Ask(-number))
    await until(lambda: two.messages[-1:] == [Ask(number)], "the message there")
    await until(lambda: one.messages[-1:] == [Ask(-number)], "the message back")


# -- who is let in -------------------------------------------------------------------------------


def test_a_producer_dials_and_both_sides_talk(short_path):
    async def main():
        with listening(short_path) as consumer:
            mine = await consumer.connect()
            assert consumer.hellos == [consumer.hello]
            await works(mine, consumer.sides[0])
            mine.close()
            assert consumer.listener.refused == 0

    run(main())


def test_the_socket_is_private_and_goes_with_the_listener(short_path):
    async def main():
        with listening(short_path) as consumer:
            [folder] = short_path.iterdir()
            assert os.path.dirname(consumer.listener.path) == str(folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            mine = await consumer.connect()
            consumer.listener.close()
            consumer.listener.close()
            assert not list(short_path.iterdir())
            await works(mine, consumer.sides[0])  # channels live on
            mine.close()

    run(main())


@pytest.mark.parametrize(
    "change",
    [
        {"token": b"another token 16"},
        {"token": b""},
        {"pid": os.getppid()},
        {"pid": 0},
        {"consumer": "somebody else"},
    ],
    ids=["wrong token", "no token", "wrong pid", "no pid", "for somebody else"],
)
def test_a_hello_that_is_not_right_is_refused(short_path, change):
    async def main():
        with listening(short_path) as consumer:
            mine = await consumer.connect()
            with pytest.raises(ChannelError):
                await consumer.dial(hello=replace(consumer.hello, **change))
            assert consumer.listener.refused == 1
            assert len(consumer.hellos) == 1
            await works(mine, consumer.sides[0])
            mine.close()

    run(main())


@pytest.mark.parametrize(
    "packet",
    [
        encode_message(Welcome("consumer")),
        encode_message(Release((1,))),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        bytes(MAX_MESSAGE + 4096),
    ],
    ids=["Welcome", "Release", "no message", "empty", "oversized"],
)
def test_a_first_packet_that_is_no_hello_is_refused(short_path, packet):
    async def main():
        with listening(short_path) as consumer, consumer.stranger(packet) as stranger:
            assert await ended(stranger)
            assert consumer.listener.refused == 1
            assert not consumer.hellos

    run(main())


def test_descriptors_of_a_stranger_do_not_stay(short_path):
    async def main():
        with listening(short_path) as consumer, consumer.stranger() as stranger:
            with socket.socket(socket.AF_UNIX) as gift:  # the leak check counts sockets
                socket.send_fds(stranger, [b"nonsense"], [gift.fileno()] * 4)
            assert await ended(stranger)

    run(main())


def test_strangers_that_say_nothing_disturb_nobody(short_path):
    async def main():
        with listening(short_path) as consumer:
            mine = await consumer.connect()
            strangers = []
            for _ in range(4 * MAX_STRANGERS):
                strangers.append(consumer.stranger())
                await asyncio.sleep(0)
            await until(lambda: consumer.listener.refused >= 3 * MAX_STRANGERS, "the oldest closed")
            await works(mine, consumer.sides[0])
            another = await consumer.connect()
            await works(another, consumer.sides[1])
            assert await ended(strangers[0])
            with pytest.raises(BlockingIOError):
                strangers[-1].recv(1)  # still free to say Hello
            consumer.listener.close()
            assert await ended(strangers[-1])
            await works(mine, consumer.sides[0])
            for sock in strangers:
                sock.close()
            mine.close()
            another.close()

    run(main())


def test_strangers_that_talk_nonsense_disturb_nobody(short_path):
    async def main():
        with listening(short_path) as consumer:
            mine = await consumer.connect()
            for i in range(300):
                with consumer.stranger(os.urandom(1 + i)):
                    await asyncio.sleep(0)
            await until(lambda: consumer.listener.refused == 300, "all of them refused")
            await works(mine, consumer.sides[0])
            mine.close()

    run(main())


def test_a_silent_stranger_is_closed_after_a_while(short_path, monkeypatch):
    monkeypatch.setattr(channel_module, "HELLO_TIMEOUT", 0.05)

    async def main():
        with listening(short_path) as consumer:
            mine = await consumer.connect()
            with consumer.stranger() as stranger:
                assert await ended(stranger)
            assert consumer.listener.refused == 1
            await works(mine, consumer.sides[0])  # who said Hello may stay silent
            mine.close()

    run(main())


def knock_as(uid, path):
    """In another process: connect as another user; what was answered."""
    os.setuid(uid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(path)
        with suppress(ConnectionError):
            return sock.recv(MAX_MESSAGE)
    return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_before_it_says_a_word(short_path):
    async def main():
        with listening(short_path) as consumer, child() as other:
            folder = os.path.dirname(consumer.listener.path)
            for path in (short_path, folder, consumer.listener.path):
                os.chmod(path, 0o777)  # or it would not even get that far
            answer = await asyncio.to_thread(other.call, knock_as, 12345, consumer.listener.path)
            assert answer == b""
            assert consumer.listener.refused == 1

    run(main())


class Credentials:
    """What SO_PEERCRED says, without the other user or namespace that it takes."""

    def __init__(self, pid: int, uid: int) -> None:
        self.packed = struct.pack("iII", pid, uid, 0)

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        assert (level, name, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, len(self.packed))
        return self.packed


@pytest.mark.parametrize(
    ("pid", "uid", "claimed", "refused"),
    [
        (7, 1000, 7, None),
        (7, 1000, None, None),
        (7, 1001, 7, "uid 1001"),
        (8, 1000, 7, "claims to be 7"),
        (0, 1000, 0, "foreign pid namespace"),
        (7, 65534, 7, "uid 65534"),
        (7, 3_000_000_000, 7, "uid 3000000000"),
    ],
)
def test_the_kernels_word_decides(monkeypatch, pid, uid, claimed, refused):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check(Credentials(pid, uid), claimed, refused)


def test_the_kernels_word_on_users_at_the_ends_of_their_range(monkeypatch):
    for uid, refused in ((4_000_000_000, None), (0, None), (process.overflow_uid(), "uid")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        check(Credentials(7, uid), 7, refused)


def check(credentials, claimed, refused):
    if refused is None:
        check_credentials(credentials, claimed)
    else:
        with pytest.raises(ChannelBroken, match=refused):
            check_credentials(credentials, claimed)


# -- dialling ------------------------------------------------------------------------------------


def test_dialling_what_is_not_there_fails(short_path):
    async def main():
        with listening(short_path) as consumer:
            with pytest.raises(ChannelBroken, match="nowhere"):
                await consumer.dial(socket_path=str(short_path / "nowhere"))
            consumer.listener.close()
            with pytest.raises(ChannelBroken):
                await consumer.dial()

    run(main())


@pytest.mark.parametrize("path", ["\0abstract", "relative/s", "", "/with\0zero"])
def test_only_an_absolute_path_is_dialled(short_path, path):
    """An abstract socket is in no directory of ours: any user can make one."""

    async def main():
        with (
            listening(short_path) as consumer,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as abstract,
        ):
            abstract.bind("\0abstract")
            abstract.listen()
            abstract.setblocking(False)
            with pytest.raises(ChannelBroken, match="absolute path"):
                await consumer.dial(socket_path=path)
            with pytest.raises(BlockingIOError):
                abstract.accept()

    run(main())


def test_dialling_who_does_not_answer_ends_in_time(short_path):
    async def main():
        with (
            listening(short_path) as consumer,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf,
        ):
            path = str(short_path / "deaf")
            deaf.bind(path)
            deaf.listen()
            with pytest.raises(ChannelBroken, match="TimeoutError"):
                await consumer.dial(timeout=0.05, socket_path=path)

    run(main())


def test_dialling_another_process_than_advertised_says_nothing_to_it(short_path):
    async def main():
        with listening(short_path) as consumer:
            with pytest.raises(ChannelBroken, match="claims to be"):
                await consumer.dial(pid=os.getppid())
            await until(lambda: consumer.listener.refused == 1, "end of file there")
            assert not consumer.hellos

    run(main())


def test_dialling_another_peer_of_the_process_fails(short_path):
    async def main():
        with (
            listening(short_path) as consumer,
            pytest.raises(ChannelBroken, match="Welcome of another"),
        ):
            await consumer.dial(peer="another")

    run(main())


@pytest.mark.parametrize("reply", [b"nonsense", b"", encode_message(Ask(1))])
def test_dialling_who_answers_nonsense_fails(short_path, reply):
    async def main():
        with (
            listening(short_path) as consumer,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as odd,
        ):
            path = str(short_path / "odd")
            odd.bind(path)
            odd.listen()
            dialling = asyncio.create_task(consumer.dial(socket_path=path))
            accepted, _ = await asyncio.to_thread(odd.accept)
            with accepted:
                accepted.send(reply)
                with pytest.raises(ChannelBroken):
                    await dialling

    run(main())


def test_dialling_without_a_free_descriptor_fails_as_dialling_does(short_path):
    async def main():
        with (
            listening(short_path) as consumer,
            descriptors_used_up(),
            pytest.raises(ChannelError),
        ):
            await consumer.dial()

    run(main())


def test_a_cancelled_dial_leaves_no_socket(short_path):
    async def main():
        with (
            listening(short_path) as consumer,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf,
        ):
            path = str(short_path / "deaf")
            deaf.bind(path)
            deaf.listen()
            dialling = asyncio.create_task(consumer.dial(socket_path=path))
            accepted, _ = await asyncio.to_thread(deaf.accept)
            dialling.cancel()
            with suppress(asyncio.CancelledError):
                await dialling
            with accepted:
                accepted.setblocking(False)
                await ended(accepted)

    run(main())


# -- where the socket lives ----------------------------------------------------------------------


def test_too_long_a_path_is_a_config_error_and_leaves_nothing(short_path):
    async def main():
        loop = asyncio.get_running_loop()
        base = short_path / ("x" * MAX_PATH)
        base.mkdir()
        with pytest.raises(ConfigError, match=r"gpuipc\.socket-directory"):
            Listener(str(base), loop, lambda *_: None)
        assert not list(base.iterdir())

    run(main())


def test_the_longest_path_works(short_path):
    async def main():
        with listening(short_path) as consumer:
            room = MAX_PATH - len(os.fsencode(consumer.listener.path)) - 1
        base = short_path / ("x" * room)
        base.mkdir()
        with listening(base) as consumer:
            assert len(os.fsencode(consumer.listener.path)) == MAX_PATH
            side = await consumer.connect()
            side.close()
        (short_path / ("x" * (room + 1))).mkdir()
        with pytest.raises(ConfigError, match=f"{MAX_PATH + 1} bytes"):
            Consumer(short_path / ("x" * (room + 1)))

    run(main())


def test_a_directory_that_is_none_is_a_config_error(short_path):
    async def main():
        with pytest.raises(ConfigError, match="not a directory"):
            Listener(str(short_path / "missing"), asyncio.get_running_loop(), lambda *_: None)

    run(main())


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    return gone.pid


def test_sweeping_removes_folders_of_the_dead_only(short_path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    mine, begun = os.getpid(), process.start_time(os.getpid())
    stale = {
        f"{PREFIX}-{namespace}-{dead_pid()}-5-abc_1": "its process is gone",
        f"{PREFIX}-{namespace}-{mine}-{begun + 1}-abc_2": "its pid is another process's now",
    }
    kept = {
        f"{PREFIX}-{namespace}-{mine}-{begun}-abc_3": "its process lives",
        f"{PREFIX}-{namespace + 1}-{dead_pid()}-5-abc_4": "its pid means another elsewhere",
        f"other-{namespace}-{dead_pid()}-5-abc_5": "not ours",
        f"{PREFIX}-{namespace}-{dead_pid()}-5": "not quite a name of ours",
        f"{PREFIX}-notes": "not a name of ours",
    }
    for name in (*stale, *kept):
        (short_path / name).mkdir()
        (short_path / name / "s").touch()
    (short_path / f"{PREFIX}-{namespace}-{dead_pid()}-5-file").touch()
    link = short_path / f"{PREFIX}-{namespace}-{dead_pid()}-5-link"
    link.symlink_to(short_path / f"{PREFIX}-notes")
    if os.geteuid() == 0:
        foreign = short_path / f"{PREFIX}-{namespace}-{dead_pid()}-5-theirs"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
    before = {entry.name for entry in short_path.iterdir()}
    removed = sweep(str(short_path))
    assert {os.path.basename(path) for path in removed} == set(stale)
    assert {entry.name for entry in short_path.iterdir()} == before - set(stale)
    assert (short_path / f"{PREFIX}-notes" / "s").exists()


def test_a_new_listener_sweeps(short_path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    (short_path / f"{PREFIX}-{namespace}-{dead_pid()}-5-abc").mkdir()

    async def main():
        with listening(short_path) as consumer:
            assert [str(entry) for entry in short_path.iterdir()] == [
                os.path.dirname(consumer.listener.path)
            ]

    run(main())


# -- what arrives --------------------------------------------------------------------------------


def test_messages_arrive_once_and_in_order_whoever_reads():
    async def main():
        with two_channels() as (one, two):
            busy = threading.Lock()
            arrive = two._message

            def on_message(*args):
                assert busy.acquire(blocking=False), "two messages at a time"
                arrive(*args)
                busy.release()

            two.channel._on_message = on_message
            done = threading.Event()

            def drain():
                while not done.is_set():
                    two.channel.drain()

            threads = [threading.Thread(target=drain) for _ in range(3)]
            for thread in threads:
                thread.start()
            for i in range(3000):
                one.channel.post(Ask(i))
                if not i % 100:
                    await asyncio.sleep(0)
            await until(lambda: len(two.messages) >= 3000, "all messages")
            done.set()
            for thread in threads:
                thread.join()
            assert two.messages == [Ask(i) for i in range(3000)]

    run(main())


def fill(side: Side) -> int:
    """Send until it would block; the number of messages that were sent."""
    sent = 0
    with suppress(ChannelFull):
        while True:
            side.channel.send(Ask(sent))
            sent += 1
    return sent


def read(sock: socket.socket) -> list[bytes]:
    packets = []
    with suppress(BlockingIOError):
        while True:
            packets.append(sock.recv(MAX_MESSAGE))
    return packets


def test_a_full_channel_refuses_to_send_and_queues_what_is_posted():
    async def main():
        with channel_and_socket() as (side, reader):
            full = fill(side)
            assert 10 < full < 100_000
            for i in range(full, full + 500):
                side.channel.post(Ask(i))
            assert repr(side.channel) == "<Channel open: 500 queued>"
            with pytest.raises(ChannelFull, match="500 messages wait"):
                side.channel.send(Ask(0))  # not past those that wait
            got: list[bytes] = []

            def arrived():
                got.extend(read(reader))
                return len(got) >= full + 500

            await until(arrived, "the queue to be sent as the reader resumes")
            assert got == [encode_message(Ask(i)) for i in range(full + 500)]
            side.channel.send(Ask(-1))
            assert read(reader) == [encode_message(Ask(-1))]

    run(main())


def test_what_another_thread_posts_to_a_full_channel_arrives():
    async def main():
        with channel_and_socket() as (side, reader):
            full = fill(side)
            await asyncio.to_thread(lambda: [side.channel.post(Ask(full + i)) for i in range(10)])
            got: list[bytes] = []
            await until(lambda: got.extend(read(reader)) or len(got) == full + 10, "all of it")
            assert got == [encode_message(Ask(i)) for i in range(full + 10)]

    run(main())


def test_a_descriptor_arrives_close_on_exec_and_is_the_same_file():
    async def main():
        with two_channels() as (one, two), socket.socket(socket.AF_UNIX) as sent:
            one.channel.send(Ask(1), [sent.fileno(), sent.fileno()])
            await until(lambda: two.messages, "the message")
            assert len(two.fds) == 2
            for fd in two.fds:
                assert os.fstat(fd).st_ino == os.fstat(sent.fileno()).st_ino
                assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC

    run(main())


def test_more_descriptors_than_any_message_has_are_all_closed():
    async def main():
        with channel_and_socket() as (side, other), socket.socket(socket.AF_UNIX) as sent:
            socket.send_fds(other, [encode_message(Ask(1))], [sent.fileno()] * (MAX_FDS + 3))
            await until(lambda: side.messages, "the message")
            assert side.fds == []
            assert side.channel.usable

    run(main())


@pytest.mark.parametrize("free", [0, 1])
def test_without_free_descriptors_the_message_arrives_alone(free):
    async def main():
        with two_channels() as (one, two), socket.socket(socket.AF_UNIX) as sent:
            with descriptors_used_up(free):
                one.channel.send(Ask(1), [sent.fileno()] * 2)
                await until(lambda: two.messages, "the message")
            assert (two.messages, two.fds, two.errors) == ([Ask(1)], [], [])
            one.channel.send(Ask(2), [sent.fileno()])
            await until(lambda: len(two.messages) == 2, "the next one")
            assert len(two.fds) == 1

    run(main())


def test_a_listener_without_free_descriptors_recovers(short_path):
    async def main():
        with listening(short_path) as consumer:
            with descriptors_used_up(1):
                stranger = consumer.stranger()
                for _ in range(20):
                    await asyncio.sleep(0)
            mine = await consumer.connect()
            await works(mine, consumer.sides[0])
            mine.close()
            stranger.close()

    run(main())


def test_a_listener_without_free_descriptors_does_not_spin(short_path):
    async def main():
        with listening(short_path) as consumer:
            accept, calls = consumer.listener._on_connection, []
            consumer.listener._loop.add_reader(
                consumer.listener._sock.fileno(), lambda: (calls.append(1), accept())
            )
            with descriptors_used_up(1), consumer.stranger():
                for _ in range(1000):
                    await asyncio.sleep(0)
            assert 1 <= len(calls) < 10

    run(main())


# -- what ends it --------------------------------------------------------------------------------

ENDINGS = {
    "end of file": (lambda sock: sock.close(), ChannelBroken),
    "empty packet": (lambda sock: sock.send(b""), ChannelBroken),
    "nonsense": (lambda sock: sock.send(b"nonsense"), WireError),
    "cut short": (lambda sock: sock.send(encode_message(Welcome("peer"))[:-1]), WireError),
    "oversized": (lambda sock: sock.send(bytes(MAX_MESSAGE + 1)), WireError),
    "far oversized": (lambda sock: sock.send(bytes(190_000)), WireError),
    "nested deep": (lambda sock: sock.send(b"\x92\x01" + b"\x91" * 1000 + b"\x00"), WireError),
}


@pytest.mark.parametrize(("end", "kind"), ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize("reader", ["loop", "thread"])
def test_the_other_side_ends_it_once_and_for_all(end, kind, reader):
    async def main():
        with channel_and_socket() as (side, other):
            other.send(encode_message(Ask(1)))
            end(other)
            if other.fileno() >= 0:
                other.send(encode_message(Ask(2)))
            if reader == "thread":
                await asyncio.to_thread(side.channel.drain)
            await until(lambda: side.errors, "to be told")
            assert [type(error) for error in side.errors] == [kind]
            assert side.messages == [Ask(1)], "what came before counts, what came after does not"
            assert not side.channel.usable
            assert repr(side.channel) == "<Channel broken: 0 queued>"
            with pytest.raises(ChannelBroken):
                side.channel.send(Ask(3))
            side.channel.post(Ask(3))
            side.channel.drain()
            if other.fileno() >= 0:
                assert await ended(other)
            side.channel.close()
            assert len(side.errors) == 1

    run(main())


@pytest.mark.parametrize("packet", [b"", b"nonsense", bytes(MAX_MESSAGE + 1)])
def test_descriptors_of_a_packet_that_ends_it_are_closed(packet):
    async def main():
        with channel_and_socket() as (side, other), socket.socket(socket.AF_UNIX) as sent:
            socket.send_fds(other, [packet], [sent.fileno()] * 2)
            await until(lambda: side.errors, "to be told")
            assert side.fds == []

    run(main())


def test_after_closing_nothing_is_sent_and_nothing_told():
    async def main():
        with two_channels() as (one, two):
            one.channel.send(Ask(1))
            two.channel.close()
            two.channel.close()
            assert (two.messages, two.errors) == ([], [])
            with pytest.raises(ChannelClosed):
                two.channel.send(Ask(2))
            two.channel.post(Ask(2))
            two.channel.drain()
            await until(lambda: one.errors, "the other side to be told")
            assert two.errors == []

    run(main())


def test_a_peer_that_goes_while_messages_wait():
    async def main():
        with channel_and_socket() as (side, other):
            full = fill(side)
            side.channel.post(Ask(full))
            other.close()
            await until(lambda: side.errors, "to be told")
            side.channel.post(Ask(full + 1))
            assert not side.channel.usable

    run(main())


# -- whose death counts --------------------------------------------------------------------------


def connect_and_fork(path):
    """In another process: connect, and have a forked child that keeps the socket open."""
    global kept
    kept = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept.connect(path)
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


def test_death_is_seen_though_a_forked_child_keeps_the_socket(short_path):
    async def main():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, child() as other:
            listening.bind(str(short_path / "s"))
            listening.listen()
            deaths: list[bool] = []
            begun = process.start_time(other.pid)
            watch = Watch(other.pid, begun, asyncio.get_running_loop(), lambda: deaths.append(True))
            grandchild = other.call(connect_and_fork, str(short_path / "s"))
            try:
                sock, _ = listening.accept()
                side = Side(sock)
                other.signal(signal.SIGKILL)
                await until(lambda: deaths, "the death to be seen")
                assert side.channel.usable, "there is no end of file: the child has the socket"
                assert side.errors == []
            finally:
                os.kill(grandchild, signal.SIGKILL)
            await until(lambda: side.errors, "end of file, now")
            watch.close()
            side.close()
            assert deaths == [True]

    run(main())


def test_a_stopped_process_is_not_dead():
    async def main():
        with child() as other:
            deaths: list[bool] = []
            begun = process.start_time(other.pid)
            watch = Watch(other.pid, begun, asyncio.get_running_loop(), lambda: deaths.append(True))
            other.signal(signal.SIGSTOP)
            await until(lambda: state_of(other.pid) == "T", "it to stop")
            await asyncio.sleep(0)
            assert deaths == []
            other.signal(signal.SIGCONT)
            assert other.call(os.getpid) == other.pid
            watch.close()
            other.kill()
            for _ in range(5):
                await asyncio.sleep(0)
            assert deaths == [], "it was not watched any more"

    run(main())


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]


@pytest.mark.parametrize("who", ["gone", "reused"])
def test_a_pid_that_is_nobodys_or_anothers_is_not_watched(who):
    pid = dead_pid() if who == "gone" else os.getpid()
    started = 1 if who == "gone" else process.start_time(pid) + 1

    async def main():
        with pytest.raises(ProcessLookupError):
            Watch(pid, started, asyncio.get_running_loop(), lambda: None)

    run(main())


def test_the_start_time_of_a_process_with_an_odd_name(short_path):
    odd = short_path / "a) R 1 (b"
    shutil.copy("/bin/sleep", odd)
    with subprocess.Popen([odd, "60"]) as sleeper:
        wait_until(lambda: os.readlink(f"/proc/{sleeper.pid}/exe") == str(odd), "exec")
        now = process.start_time(os.getpid())
        assert now <= process.start_time(sleeper.pid) < now + 60 * 60 * 24 * 100
        fd = process.open_pidfd(sleeper.pid, process.start_time(sleeper.pid))
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(fd)
        sleeper.kill()
