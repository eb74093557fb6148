"""A dtype as text, and back.

``dtype.str`` loses the fields of structured dtypes and turns bfloat16 into raw bytes, so a dtype
travels in one of three forms: ``=<f8`` (what ``dtype.str`` says), ``#[...]`` (the ``.npy`` format's
description, a Python literal) and ``@bfloat16`` (a name that ml_dtypes registers). What does not
come back equal is refused at export, so the importer only meets what its own side can read.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

import numpy as np

from dask_gpuipc.errors import Refusal, Refused, WireError
from dask_gpuipc.wire import MAX_TEXT


@functools.lru_cache(maxsize=256)
def encode_dtype(dtype: np.dtype[Any]) -> str:
    """Text for a dtype.

    Raises
    ------
    Refused
        It holds Python objects, or does not survive the round trip.
    """
    if dtype.hasobject:
        raise Refused(Refusal.UNSUPPORTED_DTYPE, f"{dtype} holds Python objects")
    text = _describe(dtype)
    if len(text) > MAX_TEXT:
        raise Refused(Refusal.UNSUPPORTED_DTYPE, f"its description has {len(text)} characters")
    try:
        same = decode_dtype(text) == dtype
    except WireError:
        same = False
    if not same:
        raise Refused(Refusal.UNSUPPORTED_DTYPE, f"{dtype!r} does not survive its description")
    return text


def _describe(dtype: np.dtype[Any]) -> str:
    if dtype.fields is not None or dtype.subdtype is not None:
        return "#" + repr(np.lib.format.dtype_to_descr(dtype))
    if dtype.isbuiltin == 2:  # another library's; their kind and str are of all sorts
        return "@" + dtype.name
    return "=" + dtype.str


@functools.lru_cache(maxsize=256)
def decode_dtype(text: str) -> np.dtype[Any]:
    """The dtype of a text; `WireError` if it is none."""
    form, rest = text[:1], text[1:]
    try:
        if form == "=":
            dtype = np.dtype(rest)
        elif form == "#":
            dtype = np.lib.format.descr_to_dtype(ast.literal_eval(rest))
        elif form == "@":
            dtype = _registered(rest)
        else:
            raise WireError(f"dtype {text!r} has none of the forms =, #, @")
    except WireError:
        raise
    except Exception as error:
        # numpy and the literal parser raise almost anything on nonsense
        raise WireError(f"dtype {text!r} is not one: {error!r}") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise WireError(f"dtype {text!r} holds Python objects or no bytes")
    return dtype


def _registered(name: str) -> np.dtype[Any]:
    import ml_dtypes

    scalar = getattr(ml_dtypes, name, None)
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
        raise WireError(f"ml_dtypes has no dtype {name!r}")
    return np.dtype(scalar)
