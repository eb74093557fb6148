"""Dtypes as text: what survives, what is refused, what is no dtype."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dask_gpuipc.dtypes import decode_dtype, encode_dtype
from dask_gpuipc.errors import Refusal, Refused, WireError
from dask_gpuipc.wire import MAX_TEXT

PLAIN = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 >i2 >u4 >i8 >f2 >f8 >c16 U7 >U3 S5 V16".split()  # noqa: SIM905 -- a table reads better in one line
TIMES = ["M8[ns]", "M8[25s]", "M8[D]", "M8", ">M8[us]", "m8[ms]", "m8[7D]", "m8", ">m8[h]"]
STRUCTURED = {
    "two fields": [("a", "i4"), ("b", "f8")],
    "one field": [("only", "f8")],
    "big-endian fields": [("a", ">i4"), ("b", "<M8[s]")],
    "text fields": [("name", "U10"), ("tag", "S3"), ("raw", "V4")],
    "a nested field": [("point", [("x", "f4"), ("y", "f4")]), ("n", "u1")],
    "nested three deep": [("a", [("b", [("c", "i1"), ("d", ">c8")])])],
    "a subarray": [("matrix", "f8", (3, 3)), ("n", "i4")],
    "a subarray of records": [("points", [("x", "f4"), ("y", "f4")], (2, 5))],
    "an odd name": [('it\'s a "name"\\\n', "i4"), ("größe", "f4")],
    "a title": [(("title", "a"), "i4")],
    "offsets": {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [4, 12], "itemsize": 20},
}


def check(dtype: np.dtype) -> str:
    text = encode_dtype(dtype)
    assert isinstance(text, str)
    assert len(text) <= MAX_TEXT
    back = decode_dtype(text)
    assert back == dtype
    assert back.itemsize == dtype.itemsize
    assert back.descr == dtype.descr if dtype.fields is not None else back.str == dtype.str
    return text


@pytest.mark.parametrize("name", [*PLAIN, *TIMES])
def test_plain_dtypes_survive(name):
    assert check(np.dtype(name)) == "=" + np.dtype(name).str


@pytest.mark.parametrize("fields", STRUCTURED.values(), ids=STRUCTURED.keys())
def test_structured_dtypes_survive(fields):
    check(np.dtype(fields))


@pytest.mark.parametrize("fields", [[("a", "i1"), ("b", "f8")], [("a", "f8"), ("b", "i1", 3)]])
def test_padding_survives(fields):
    padded = np.dtype(fields, align=True)
    assert padded.itemsize == 16
    assert decode_dtype(check(padded)).fields["b"][1] == padded.fields["b"][1]


def test_bytes_of_a_padded_record_mean_the_same():
    dtype = np.dtype([("a", "i1"), ("b", ">f8"), ("c", "U3", 2)], align=True)
    records = np.zeros(3, dtype)
    records["a"], records["b"], records["c"] = [1, 2, 3], [0.5, 1.5, 2.5], [["x", "yz"]] * 3
    again = np.frombuffer(records.tobytes(), decode_dtype(encode_dtype(dtype)))
    np.testing.assert_array_equal(again, records)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_dtypes_of_ml_dtypes_survive(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert check(dtype) == "@" + name
    assert decode_dtype("@" + name).type is dtype.type


def test_a_foreign_dtype_in_a_record_is_refused_not_spoilt():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(Refused) as caught:
        encode_dtype(np.dtype([("a", ml_dtypes.bfloat16), ("b", "i2")]))
    assert caught.value.reason is Refusal.UNSUPPORTED_DTYPE


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(object),
        np.dtype([("a", "i4"), ("b", object)]),
        np.dtype([("a", [("b", object, 3)])]),
        pytest.param(
            getattr(getattr(np, "dtypes", None), "StringDType", lambda: np.dtype(object))(),
            id="StringDType",
        ),
    ],
)
def test_what_holds_python_objects_is_refused(dtype):
    with pytest.raises(Refused) as caught:
        encode_dtype(dtype)
    assert caught.value.reason is Refusal.UNSUPPORTED_DTYPE


def test_a_description_too_long_is_refused():
    fields = [(f"field number {i}", "f8") for i in range(MAX_TEXT // 20)]
    with pytest.raises(Refused, match="characters"):
        encode_dtype(np.dtype(fields))


@pytest.mark.parametrize(
    "text",
    [
        "", "<f8", "=", "=O", "=nonsense", "=S0", "=U99999999999", "=M8[parsec]", "=V-1",
        "#", "#(", "#[('a', 'O')]", "#[]", "#'O'", "#5", "#None", "#{'a': 1}", "#[('a',)]",
        "#__import__('os').getcwd()", "#open('/etc/passwd')", "#" + "[" * 4000, "#" + "9" * 4000,
        "#" + "-" * 4000 + "1",
        "@", "@nothing", "@finfo", "@__name__", "@__class__", "@f8", "@object_", "?<f8",
    ],
)  # fmt: skip
def test_what_is_no_dtype_is_a_wire_error(text):
    with pytest.raises(WireError):
        decode_dtype(text)


@given(npst.array_dtypes() | npst.nested_dtypes())
def test_every_dtype_of_numpy_survives_or_is_refused(dtype):
    with contextlib.suppress(Refused):
        check(dtype)


@given(st.text(max_size=60), st.sampled_from(["", "=", "#", "@"]))
def test_any_text_gives_a_dtype_with_bytes_or_a_wire_error(text, form):
    try:
        dtype = decode_dtype(form + text)
    except WireError:
        return
    assert not dtype.hasobject
    assert dtype.itemsize > 0
