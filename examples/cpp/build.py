"""Compile the C++ modules: ``python build.py FOLDER [host] [cuda]``.

``host`` wants a C++ compiler, ``cuda`` nvcc; both want pybind11. Without build systems, so that all
that is done can be read here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {"host": "host.cpp", "cuda": "cuda.cu"}


class CannotBuild(Exception):
    """A compiler or pybind11 is missing; the text says which."""


def compiler(backend: str) -> list[str]:
    """The command that compiles for a backend."""
    if backend == "cuda":
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise CannotBuild("nvcc is not on the PATH")
        return [nvcc, "-std=c++17", "-O2", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise CannotBuild("no C++ compiler is on the PATH")
    return [found, "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]


def build(backend: str, folder: Path) -> Path:
    """Compile a module into a folder, and return its path.

    Raises
    ------
    CannotBuild
        Something that it takes is missing.
    subprocess.CalledProcessError
        It does not compile; the compiler has said why.
    """
    try:
        import pybind11
    except ImportError as error:
        raise CannotBuild("pybind11 is not installed") from error
    target = folder / f"reconstruct_{backend}{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    command = [*compiler(backend), *(f"-I{path}" for path in includes)]
    subprocess.run([*command, str(HERE / SOURCES[backend]), "-o", str(target)], check=True)
    return target


if __name__ == "__main__":
    for name in sys.argv[2:] or ["host"]:
        print(build(name, Path(sys.argv[1])))
