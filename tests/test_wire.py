"""The wire format: its golden bytes, and what becomes of bytes that are not of it."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpuipc.errors import Failure, WireError
from dask_gpuipc.wire import (
    MAX_INT,
    MAX_LEASES,
    MAX_MESSAGE,
    MAX_NDIM,
    MAX_TEXT,
    MESSAGES,
    WIRE_VERSION,
    Advertisement,
    Announce,
    Answer,
    Ask,
    Closed,
    Descriptor,
    Evicted,
    Held,
    Hello,
    Layout,
    Leave,
    Nack,
    Probe,
    Proof,
    Release,
    Welcome,
    Withdraw,
    decode,
    decode_message,
    encode,
    encode_message,
)

byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # NumPy 2, NumPy 1

TOKEN = b"0123456789abcdef"
NAMESPACES = ("ipc:[1]", "mnt:[2]")
LAYOUT = Layout(4096, "=<f8", 8, (3, 1000), (8000, -8), False)

# A change of these bytes is a new wire version: raise WIRE_VERSION, say so in CHANGELOG.md, and
# only then commit new ones.
GOLDEN_RECORDS = [
    (
        Advertisement(
            1, "peer", "Scheduler-1", 4711, 123456, "boot", NAMESPACES, "/run/x/s", TOKEN,
            ("host", "cuda"), ("GPU-1",),
        ),
        "9c0101a470656572ab5363686564756c65722d31cd1267ce0001e240a4626f6f7492a76970633a5b315da76d6e74"
        "3a5b325da82f72756e2f782f73c4103031323334353637383961626364656692a4686f7374a46375646191a54750"
        "552d31",
    ),
    (
        Descriptor("peer", "other", 7, 8, "share", "host", 1, 0, LAYOUT),
        "9a01a470656572a56f746865720708a57368617265a4686f7374010096cd1000a43d3c6638089203cd03e892cd1f"
        "40f8c2",
    ),
]  # fmt: skip
GOLDEN_MESSAGES = [
    (
        Hello(TOKEN, "peer", "other", 4711, 123456),
        "970100c41030313233343536373839616263646566a470656572a56f74686572cd1267ce0001e240",
    ),
    (Welcome("peer"), "930101a470656572"),
    (
        Announce("cuda", 3, 99, 1 << 40, "GPU-1", b"handle"),
        "980102a4637564610363cf0000010000000000a54750552d31c40668616e646c65",
    ),
    (Withdraw("host", 3, 0), "950103a4686f73740300"),
    (Evicted("host", 3, 0), "950104a4686f73740300"),
    (Ask(7), "93010507"),
    (Answer(7, (8, 300, 70000)), "940106079308cd012cce00011170"),
    (Release((1, 200, 1 << 33)), "9301079301ccc8cf0000000200000000"),
    (Nack(8, Failure.STALE, "cuda", 3, 99), "97010808a57374616c65a4637564610363"),
    (Leave("peer"), "930109a470656572"),
    (Closed("peer"), "93010aa470656572"),
    (Held((1, 300), True), "94010b9201cd012cc3"),
    (
        Probe("cuda", "GPU-1", 65536, b"handle"),
        "96010ca463756461a54750552d31ce00010000c40668616e646c65",
    ),
    (Proof("cuda", "GPU-1", b"digest"), "95010da463756461a54750552d31c406646967657374"),
]


def named(pairs: list[tuple[Any, str]]) -> list[Any]:
    return [pytest.param(record, text, id=type(record).__name__) for record, text in pairs]


@pytest.mark.parametrize(("record", "text"), named(GOLDEN_RECORDS))
def test_golden_bytes_of_records(record, text):
    assert encode(record).hex() == text
    assert decode(type(record), bytes.fromhex(text)) == record


@pytest.mark.parametrize(("message", "text"), named(GOLDEN_MESSAGES))
def test_golden_bytes_of_messages(message, text):
    assert encode_message(message).hex() == text
    assert decode_message(bytes.fromhex(text)) == message


def test_codes_and_version_are_those_of_the_golden_bytes():
    assert WIRE_VERSION == 1
    assert tuple(type(message) for message, _ in GOLDEN_MESSAGES) == MESSAGES


def test_records_are_frozen():
    with pytest.raises(FrozenInstanceError):
        LAYOUT.offset = 0


# -- round trips ---------------------------------------------------------------------------------


def values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=5).map(tuple)
    if is_dataclass(hint):
        return records(hint)
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if hint is int:
        return st.integers(-MAX_INT, MAX_INT)
    return {
        bool: st.booleans(),
        str: st.text(max_size=MAX_TEXT // 4),
        bytes: st.binary(max_size=MAX_TEXT),
    }[hint]


def records(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, *(values(hints[f.name]) for f in fields(cls)))


@given(st.one_of(records(Advertisement), records(Descriptor)))
def test_every_record_survives(record):
    assert decode(type(record), encode(record)) == record


@given(st.one_of(*(records(cls) for cls in MESSAGES)))
def test_every_message_survives(message):
    got = decode_message(encode_message(message))
    assert got == message
    assert type(got) is type(message)


# -- what is no record ---------------------------------------------------------------------------


def packed(*items: Any) -> bytes:
    return msgpack.packb([WIRE_VERSION, *items])


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x00"


NONSENSE = {
    "nothing": b"",
    "zeros": bytes(64),
    "no list": msgpack.packb("text"),
    "a map": msgpack.packb({1: 2}),
    "an empty list": msgpack.packb([]),
    "version only": packed(),
    "another version": msgpack.packb([WIRE_VERSION + 1, 5, 7]),
    "no version": msgpack.packb(["one", 5, 7]),
    "code too high": packed(len(MESSAGES), 1),
    "code negative": packed(-1, "peer"),
    "code no integer": packed(True, "peer"),
    "field missing": packed(6, 7),
    "field too many": packed(5, 7, 8),
    "text for a number": packed(5, "7"),
    "truth for a number": packed(5, True),
    "float for a number": packed(5, 7.0),
    "number of 64 bits and one": packed(5, 2**64 - 1),
    "nothing for a number": packed(5, None),
    "bytes for text": packed(1, b"peer"),
    "text for bytes": packed(0, "token", "peer", "other", 1, 1),
    "number for a list": packed(7, 1),
    "text among numbers": packed(7, [1, "2"]),
    "list among numbers": packed(7, [[1]]),
    "unknown failure": packed(8, 1, "bad luck", "host", 1, 0),
    "failure no text": packed(8, 1, 5, "host", 1, 0),
    "failure a list": packed(8, 1, [], "host", 1, 0),
    "text too long": packed(1, "x" * (MAX_TEXT + 1)),
    "bytes too long": packed(2, "cuda", 1, 1, 1, "", bytes(MAX_TEXT + 1)),
    "too many leases": packed(7, list(range(MAX_LEASES + 1))),
    "no utf-8": packed(1, "peer").replace(b"peer", b"\xff\xfe\xfd\xfc"),
    "trailing bytes": packed(5, 7) + b"\x00",
    "cut short": packed(1, "peer")[:-1],
    "announced size a lie": b"\xdd\xff\xff\xff\xff\x01",
    "extension type": packed(msgpack.ExtType(1, b"x"), 1),
    "timestamp": packed(5, msgpack.Timestamp(1)),
    "nested 1000 deep": nested(1000),
    "nested 100,000 deep": nested(100_000),
    "code nested 1000 deep": b"\x92\x01" + nested(1000),
    "failure nested 1000 deep": b"\x97\x01\x08\x01" + nested(1000) + packed("host", 1, 0)[2:],
    "too large": packed(1, "x" * MAX_MESSAGE),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_a_wire_error(data):
    with pytest.raises(WireError) as caught:
        decode_message(data)
    assert len(str(caught.value)) < 2 * MAX_TEXT, "the error carries the nonsense along"
    for cls in (Advertisement, Descriptor):
        with pytest.raises(WireError):
            decode(cls, data)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lease": "8"}, "Descriptor.lease"),
        ({"rung": b"share"}, "Descriptor.rung"),
        ({"layout": 5}, "Descriptor.layout"),
        ({"layout": replace(LAYOUT, shape=(1.5,))}, "Layout.shape"),
        ({"layout": replace(LAYOUT, writeable=1)}, "Layout.writeable"),
    ],
)
def test_the_error_names_the_field(change, named):
    record, _ = GOLDEN_RECORDS[1]
    with pytest.raises(WireError, match=named):
        decode(Descriptor, encode(replace(record, **change)))


def test_another_version_is_told():
    data = msgpack.packb([WIRE_VERSION + 1, "whatever", "a later version", "has here"])
    with pytest.raises(WireError, match=f"version {WIRE_VERSION + 1}.*speaks {WIRE_VERSION}"):
        decode(Advertisement, data)


def test_what_is_too_large_is_not_sent():
    leases = tuple(2**62 + i for i in range(MAX_LEASES))
    assert decode_message(encode_message(Release(leases))) == Release(leases)
    with pytest.raises(WireError, match="Release of"):
        encode_message(Release(leases * 4))
    with pytest.raises(WireError, match="Descriptor of"):
        encode(Descriptor("x" * MAX_MESSAGE, "", 1, 1, "", "", 1, 1, LAYOUT))


def mutations(seed: int, count: int) -> Any:
    """Valid bytes with a few bytes flipped, cut out, repeated or put in from another record."""
    rng = random.Random(seed)
    known: list[tuple[Callable[[bytes], Any], bytes]] = [
        *((decode_message, bytes.fromhex(text)) for _, text in GOLDEN_MESSAGES),
        *(
            (functools.partial(decode, type(record)), bytes.fromhex(text))
            for record, text in GOLDEN_RECORDS
        ),
    ]
    for _ in range(count):
        reader, data = rng.choice(known)
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            i, j = sorted(rng.choices(range(len(changed) + 1), k=2))
            kind = rng.random()
            if kind < 0.5 and changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            elif kind < 0.65:
                del changed[i:j]
            elif kind < 0.8:
                changed[i:i] = changed[i:j] * rng.randint(1, 50)
            else:
                other = rng.choice(known)[1]
                changed[i:i] = other[rng.randrange(len(other)) :]
        yield reader, bytes(changed)


def check_mutations(seed: int, count: int) -> None:
    good = 0
    for reader, data in mutations(seed, count):
        try:
            record = reader(data)
        except WireError:
            continue
        good += 1
        again = encode(record) if isinstance(record, Advertisement | Descriptor) else None
        assert reader(again or encode_message(record)) == record, data.hex()
    assert 0 < good < count  # neither all refused nor all harmless: something was tried


def test_mutated_bytes_give_a_record_or_a_wire_error():
    check_mutations(1, 5_000)


@pytest.mark.stress
def test_many_mutated_bytes_give_a_record_or_a_wire_error():
    check_mutations(2, 100_000)


@given(st.binary(max_size=200))
def test_random_bytes_give_a_record_or_a_wire_error(data):
    for reader in (decode_message, functools.partial(decode, Descriptor)):
        with contextlib.suppress(WireError):
            reader(data)


# -- layouts -------------------------------------------------------------------------------------


@st.composite
def views(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """An array of bytes and a view of it, cut, reversed, transposed and broadcast."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    base = np.zeros(shape, draw(st.sampled_from(["u1", "i4", "f8", "c16"])))
    cuts = [
        slice(None, None, draw(st.sampled_from([1, 2, 3, -1, -2])))
        if draw(st.booleans())
        else slice(draw(st.integers(0, n - 1)), None)
        for n in shape
    ]
    view = base[tuple(cuts)].transpose(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        view = np.broadcast_to(view, (draw(st.integers(1, 4)), *view.shape))
    return base, view


@given(views())
def test_the_extent_is_what_the_elements_touch(pair):
    base, view = pair
    start = base.ctypes.data
    layout = Layout(
        view.ctypes.data - start, "=" + view.dtype.str, view.itemsize, view.shape, view.strides
    )
    low, high = byte_bounds(view)
    assert layout.extent() == (low - start, high - start)
    assert layout.nbytes == view.nbytes


@pytest.mark.parametrize(
    ("shape", "strides", "extent"),
    [
        ((), (), (4096, 4104)),
        ((10,), (8,), (4096, 4176)),
        ((10,), (-8,), (4024, 4104)),
        ((10, 10), (-8, 80), (4024, 4824)),
        ((10,), (0,), (4096, 4104)),
        ((1,), (MAX_INT,), (4096, 4104)),
        ((2**40,), (2**40,), (4096, 4104 + (2**40 - 1) * 2**40)),
        ((MAX_INT, MAX_INT), (MAX_INT, MAX_INT), (4096, 4104 + 2 * (MAX_INT - 1) * MAX_INT)),
        ((2**32, 2**32), (2**32, -(2**32)), (4096 - (2**32 - 1) * 2**32, 4104 + 2**64 - 2**32)),
    ],
)
def test_the_extent_does_not_wrap(shape, strides, extent):
    assert Layout(4096, "=<f8", 8, shape, strides).extent() == extent


@pytest.mark.parametrize(
    ("itemsize", "shape", "strides"),
    [
        (8, (10,), ()),
        (8, (), (8,)),
        (8, (1,) * (MAX_NDIM + 1), (8,) * (MAX_NDIM + 1)),
        (0, (10,), (8,)),
        (-8, (10,), (8,)),
        (8, (0,), (8,)),
        (8, (10, -1), (8, 8)),
    ],
)
def test_what_is_no_layout_is_a_wire_error(itemsize, shape, strides):
    with pytest.raises(WireError):
        Layout(0, "=<f8", itemsize, shape, strides).extent()
