"""The records that travel, and their encoding.

Two roads carry them. `Advertisement` and `Descriptor` go through Dask's own messages; the rest are
the channel's messages, one record to a packet. A descriptor names an allocation that was announced
over the channel; it holds nothing that would let a stranger open memory.

Everything that is decoded here comes from outside: `decode` checks size, version, code, number and
type of fields, and raises `WireError` for the first that is not as it must be. What a field *means*
(does the offset lie inside the allocation?) is checked where it is used, by `Layout.extent`.

Wire version 1.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar, cast, get_args, get_origin, get_type_hints

import msgpack

from dask_gpuipc.errors import Failure, WireError

WIRE_VERSION: Final = 1
MAX_MESSAGE: Final = 128 * 1024
"""Bytes of one encoded record; a SEQPACKET socket takes about 200 kB by default."""
MAX_LEASES: Final = 4096
"""Leases in one record, and so in one transfer (9 bytes each at most)."""
MAX_TEXT: Final = 4096
MAX_NDIM: Final = 64
MAX_INT: Final = 2**63 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Advertisement:
    """What a consumer says of itself in Dask's connection handshake."""

    version: int
    peer: str
    """Random, new at each set-up of the plugin."""
    scheduler: str
    pid: int
    start_time: int
    """Clock ticks after boot at which the process began: with `pid`, its identity."""
    boot_id: str
    namespaces: tuple[str, ...]
    socket_path: str
    token: bytes
    memories: tuple[str, ...]
    devices: tuple[str, ...]
    """UUIDs of the GPUs whose handles this process opens; of others it must be proven first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one array lies inside its allocation.

    ``offset`` is that of the element with index zero in every axis, in bytes; strides are in bytes
    and may be negative or zero.
    """

    offset: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writeable: bool = True

    @property
    def nbytes(self) -> int:
        """Nominal size: elements times item size."""
        total = self.itemsize
        for n in self.shape:
            total *= n
        return total

    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte that any element touches.

        Raises
        ------
        WireError
            Shape, strides and item size do not describe an array.
        """
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_NDIM:
            raise WireError(
                f"{len(self.shape)} axes with {len(self.strides)} strides; "
                f"they must be as many, and at most {MAX_NDIM}"
            )
        if self.itemsize <= 0 or any(n <= 0 for n in self.shape):
            raise WireError(f"shape {self.shape} of {self.itemsize} byte items holds no bytes")
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.offset + sum(r for r in reach if r < 0)
        high = self.offset + sum(r for r in reach if r > 0) + self.itemsize
        return low, high


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One array on the wire: an announced allocation and a place in it."""

    producer: str
    consumer: str
    transfer: int
    lease: int
    rung: str
    memory: str
    allocation: int
    generation: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Hello:
    """Producer to consumer, first on a new channel: the token from its advertisement."""

    token: bytes
    peer: str
    consumer: str
    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Consumer to producer: the channel is up."""

    peer: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Producer to consumer: the handle of an allocation (file descriptors ride along)."""

    memory: str
    allocation: int
    generation: int
    nbytes: int
    device: str
    handle: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Producer to consumer: this allocation is gone, forget its announcement."""

    memory: str
    allocation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Consumer to producer: the announcement was dropped; announce again before use."""

    memory: str
    allocation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Producer to consumer: what became of this transfer? Bars what was not opened."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Consumer to producer: the leases of the transfer that are held; no others will be."""

    transfer: int
    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Consumer to producer: these will not be read again."""

    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """Consumer to producer: this lease could not be opened, and is released by this."""

    lease: int
    reason: Failure
    memory: str
    allocation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Either way: no new offers. From a producer also: copy what you still hold of mine."""

    peer: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Consumer to producer, last: I hold nothing of yours, and will load nothing any more."""

    peer: str


@dataclass(frozen=True, slots=True)
class Held:
    """Consumer to producer, first on a new channel: the leases that are held here.

    ``last`` ends the list; what was granted before the channel was dialled, and is in no part of
    it, was released over a channel that broke.
    """

    leases: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Producer to consumer: the handle of a sample on this GPU, to be read."""

    memory: str
    device: str
    nbytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """Consumer to producer: the digest of what was read; empty, it could not be."""

    memory: str
    device: str
    digest: bytes


Message = (
    Hello
    | Welcome
    | Announce
    | Withdraw
    | Evicted
    | Ask
    | Answer
    | Release
    | Nack
    | Leave
    | Closed
    | Held
    | Probe
    | Proof
)
MESSAGES: Final[tuple[type[Message], ...]] = (
    Hello, Welcome, Announce, Withdraw, Evicted, Ask, Answer, Release, Nack, Leave,
    Closed, Held, Probe, Proof,
)  # fmt: skip
"""The position is the code on the wire: append only, or raise `WIRE_VERSION`."""


def encode(record: object) -> bytes:
    """Bytes of a record.

    Raises
    ------
    WireError
        It is larger than `MAX_MESSAGE`.
    """
    data: bytes = msgpack.packb([WIRE_VERSION, *_plain(record)], use_bin_type=True)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"{type(record).__name__} of {len(data)} bytes; at most {MAX_MESSAGE}")
    return data


def decode(cls: type[T], data: bytes) -> T:
    """The record of a known class from its bytes; `WireError` if it is none."""
    version, *values = _unpack(data)
    if version != WIRE_VERSION:
        raise WireError(f"wire version {reprlib.repr(version)}; this package speaks {WIRE_VERSION}")
    record: T = _build(cls, values)
    return record


def encode_message(message: Message) -> bytes:
    """Bytes of a channel message, its code included."""
    code = MESSAGES.index(type(message))
    data: bytes = msgpack.packb([WIRE_VERSION, code, *_plain(message)], use_bin_type=True)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"{type(message).__name__} of {len(data)} bytes; at most {MAX_MESSAGE}")
    return data


def decode_message(data: bytes) -> Message:
    """The channel message from its bytes; `WireError` if it is none."""
    version, *rest = _unpack(data)
    if version != WIRE_VERSION:
        raise WireError(f"wire version {reprlib.repr(version)}; this package speaks {WIRE_VERSION}")
    if not rest or type(rest[0]) is not int or not 0 <= rest[0] < len(MESSAGES):
        raise WireError(
            f"message code {reprlib.repr(rest[:1])}; known are 0 to {len(MESSAGES) - 1}"
        )
    return _build(MESSAGES[rest[0]], rest[1:])


def _plain(record: object) -> list[Any]:
    values = [getattr(record, name) for name in _names(type(record))]  # type: ignore[arg-type]
    return [_plain(v) if type(v) is Layout else v for v in values]


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def _unpack(data: bytes) -> list[Any]:
    if len(data) > MAX_MESSAGE:
        raise WireError(f"record of {len(data)} bytes; at most {MAX_MESSAGE}")
    try:
        values = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=MAX_LEASES,
            max_map_len=0,
            max_ext_len=0,
        )
    except Exception as error:
        # msgpack raises ValueError, its own classes, UnicodeDecodeError and RecursionError
        raise WireError(f"{len(data)} bytes that are no record: {error!r}") from error
    if not isinstance(values, list) or not values:
        raise WireError(f"a record is a list; got {type(values).__name__}")
    return values


# A record is read and written several times in each transfer, mostly with cold caches: what is
# known of a class is worked out once, into functions that take (where, value).

Read = Callable[[str, Any], Any]


@functools.cache
def _readers(cls: type) -> tuple[tuple[str, Read], ...]:
    hints = get_type_hints(cls)
    return tuple((f"{cls.__name__}.{f.name}", _reader(hints[f.name])) for f in fields(cls))


def _build(cls: type[T], values: list[Any]) -> T:
    readers = _readers(cls)  # type: ignore[arg-type]
    if len(values) != len(readers):
        raise WireError(f"{cls.__name__} has {len(readers)} fields; got {len(values)}")
    return cls(*[read(where, v) for (where, read), v in zip(readers, values, strict=True)])


def _reader(hint: Any) -> Read:
    if get_origin(hint) is tuple:
        return functools.partial(_read_tuple, _reader(get_args(hint)[0]))
    if is_dataclass(hint):
        return functools.partial(_read_record, cast(type, hint))
    if issubclass(hint, StrEnum):
        return functools.partial(_read_enum, hint)
    if hint is int:
        return _read_int
    return functools.partial(_read_plain, hint)


def _read_tuple(read: Read, where: str, value: Any) -> Any:
    _check_type(where, list, value)
    return tuple([read(where, v) for v in value])


def _read_record(cls: type[Any], where: str, value: Any) -> Any:
    _check_type(where, list, value)
    return _build(cls, value)


def _read_enum(enum: type[StrEnum], where: str, value: Any) -> Any:
    _check_type(where, str, value)
    try:
        return enum(value)
    except ValueError as error:
        raise WireError(f"{where}: {error}") from error


def _read_int(where: str, value: Any) -> Any:
    if type(value) is not int:
        _check_type(where, int, value)
    if not -MAX_INT <= value <= MAX_INT:
        raise WireError(f"{where} is {value}; integers have 64 bits")
    return value


def _read_plain(kind: type, where: str, value: Any) -> Any:
    if type(value) is not kind:
        _check_type(where, kind, value)
    if kind is not bool and len(value) > MAX_TEXT:
        raise WireError(f"{where} has length {len(value)}; at most {MAX_TEXT}")
    return value


def _check_type(where: str, kind: type, value: Any) -> None:
    if type(value) is not kind:
        raise WireError(f"{where} must be {kind.__name__}; got {type(value).__name__}")
