"""Importing the package needs no GPU library, and is quick."""

from __future__ import annotations

import ast
import math
import os
import pathlib
import subprocess
import sys

import pytest

import dask_gpuipc

PUBLIC = f"from dask_gpuipc import {', '.join(dask_gpuipc.__all__)}; GPUIPCPlugin()"


def run(code: str) -> str:
    """What a new interpreter prints."""
    # With compiled modules, as distributed has them: an installer made these.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_alone_imports_nothing_heavy() -> None:
    code = """
import sys
before = set(sys.modules)
import dask_gpuipc
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"cupy", "cuda", "numpy", "distributed", "dask"}))
"""
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "block",
    ["", "sys.modules.update(cupy=None, cuda=None)"],
    ids=["where they may be there", "where they cannot be imported"],
)
def test_public_names_import_neither_cupy_nor_cuda(block: str) -> None:
    code = f"""
import sys
{block}
import dask_gpuipc
{PUBLIC}
roots = (name.partition(".")[0] for name, module in sys.modules.items() if module is not None)
print(sorted({{"cupy", "cuda"}} & set(roots)))
"""
    assert run(code) == "[]"


def cpu_seconds(statement: str) -> float:
    """Of the process's own time, which other processes do not lengthen."""
    code = f"import time; before = time.process_time(); {statement}"
    return float(run(f"{code}; print(time.process_time() - before)"))


def test_importing_takes_at_most_a_quarter_more_than_importing_distributed() -> None:
    """By the best of interleaved runs: more of them where the machine makes times uneven."""
    theirs, *ours = statements = [
        "import distributed",
        "import dask_gpuipc",
        "from dask_gpuipc import GPUIPCPlugin",
    ]
    best = dict.fromkeys(statements, math.inf)
    for count in range(10):
        for statement in statements:
            best[statement] = min(best[statement], cpu_seconds(statement))
        if count >= 2 and all(best[statement] <= 1.25 * best[theirs] for statement in ours):
            return
    pytest.fail(f"seconds: {best}")


def test_allocators_are_the_applications_to_choose() -> None:
    """This package sets no allocator of CuPy's and no memory resource of RMM's."""
    setters = {"set_allocator", "set_current_device_resource", "set_per_device_resource"}
    for file in pathlib.Path(dask_gpuipc.__file__).parent.rglob("*.py"):
        calls = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call))
        assert not setters & {ast.unparse(call.func).rpartition(".")[2] for call in calls}, file
