"""The worked example of Python to C++: its modules, importable or built, and a problem."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

__all__ = ["EXAMPLE", "ROUNDS", "built", "example", "expected", "problem"]

EXAMPLE = Path(__file__).parent.parent / "examples" / "cpp"
ROUNDS = 5


@pytest.fixture(scope="module")
def example():
    """The example's modules, importable here and in processes that are started from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield importlib.import_module("reconstruct")


@contextlib.contextmanager
def built(backend: str, folder: Any) -> Iterator[str]:
    """The folder of the compiled module, importable within; skips where it cannot be built."""
    build = importlib.import_module("build")
    try:
        build.build(backend, folder)
    except build.CannotBuild as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield str(folder)


@pytest.fixture(scope="module")
def problem(example):
    _, problem = example.make_problem(240, 24)
    return problem


@pytest.fixture(scope="module")
def expected(example, problem):
    """In one process, in NumPy."""
    object_ = np.zeros(problem.shape, "f4")
    for _ in range(ROUNDS):
        object_ = example.improved(object_, [example.numpy_update(object_, problem)])
    return object_
