"""The notebooks run from top to bottom, and what is committed of their output is whole."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed")

MISSING = [n for n in ("ipykernel", "matplotlib", "nbclient") if not importlib.util.find_spec(n)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LIMIT = 300
"""Seconds; a quiet machine with two cores takes about 20 for the quickstart."""
EXECUTE = "from nbclient.cli import main; main()"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(notebook: Any) -> list[Any]:
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def pictures(notebook: Any) -> int:
    return sum("image/png" in out.get("data", ()) for out in outputs(notebook))


def check(notebook: Any) -> None:
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not [out for out in outputs(notebook) if out.output_type == "error"]
    assert not [out.text for out in outputs(notebook) if out.get("name") == "stderr"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_committed_outputs_are_whole(path):
    notebook = nbformat.read(path, as_version=4)
    check(notebook)
    assert pictures(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert str(path.parent.parent) not in path.read_text()


@each_notebook
@pytest.mark.timeout(LIMIT + 30)
def test_runs_from_top_to_bottom(path, tmp_path):
    copy = Path(shutil.copy(path, tmp_path))
    # In a process of its own: the kernel's threads and sockets are not this one's to answer for.
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, "--inplace", f"--timeout={LIMIT}", str(copy)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ran = nbformat.read(copy, as_version=4)
    check(ran)
    assert pictures(ran) == pictures(nbformat.read(path, as_version=4))
