"""The code in the pages: where it is, what it needs, and whether its commands could be typed.

A block that cannot run everywhere says so in the line above it: ``<!-- needs: gpu -->``. `NEEDS`
lists what a block may need; all others run in the tests.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

import dask_gpuipc

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(dask_gpuipc.__file__).parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "cpp" / "README.md",
        *(p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0] != "checkout"),
    ]
)

NEEDS = {
    "certificates": "a TLS cluster; tests/test_negotiation.py runs one",
    "compiler": "a C++ compiler; tests/test_cpp_example.py runs it",
    "docker": "a container runtime",
    "gpu": "an NVIDIA GPU and cupy",
    "kubernetes": "a Kubernetes cluster with Dask's operator",
    "minutes": "runs for long; CI runs it by itself",
    "network": "installs from an index",
    "slurm": "a SLURM cluster",
}
LANGUAGES = {"bash", "python", "text", "yaml"}
DIRECTIVES = {"{eval-rst}", "{toctree}"}
"""Of the site, which is built by ``make docs``."""

SCHEDULER = "tcp://10.0.0.1:8786"
"""Stands for the address of a scheduler in every page."""

_FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>.*?) -->\n)?```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMANDS = ("dask ", "make ", "python ", "pip ", "bash ", ".venv/bin/")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    needs: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether nothing is missing to run it here."""
        return self.needs is None

    @property
    def is_script(self) -> bool:
        """Whether it is a program of its own; else it is a part of its page, with a client."""
        return "__main__" in self.text


def blocks(page: Path) -> list[Block]:
    """All of a page, directives of the site too."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m["language"], m["needs"], m["text"])
        for m in _FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def outside(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """What stands as code within the lines of a page."""
    return _SPAN.findall(outside(page))


# -- commands --------------------------------------------------------------------------------------


def commands(script: str) -> Iterator[list[str]]:
    """The words of each command of a script, the variables before it among them."""
    joined = re.sub(r"\\\n|[12]?>>? *\S+", " ", script)  # continued lines; where output goes
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("&|;"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


def typed(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every command of a page, in blocks and within lines, and where it is."""
    for block in blocks(page):
        if block.language == "bash":
            for words in commands(block.text):
                yield str(block), words
    for span in spans(page):
        if span.startswith(_COMMANDS) and "..." not in span:
            for words in commands(span):
                yield f"{page.relative_to(ROOT)}: {span}", words


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command, as far as can be told without running it."""
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words = words[1:]
    if not words:
        return None
    program, arguments = Path(words[0]).name, words[1:]
    check = _CHECKS.get(program)
    return f"nobody knows how to check {program!r}" if check is None else check(arguments)


def unknown_settings(text: str) -> list[str]:
    """Variables in a text that stand for settings of this package and do not exist."""
    defaults = yaml.safe_load((PACKAGE / "gpuipc.yaml").read_text())
    unknown = []
    for name in re.findall(r"DASK_(GPUIPC__\w+)", text):
        tree: Any = defaults
        for key in name.lower().replace("_", "-").split("--"):
            if not isinstance(tree, dict) or key not in tree:
                unknown.append(name)
                break
            tree = tree[key]
    return unknown


def _dask(arguments: list[str]) -> str | None:
    from distributed.cli import dask_scheduler, dask_worker

    from dask_gpuipc.cli import gpuipc

    known = {"gpuipc": gpuipc, "scheduler": dask_scheduler.main, "worker": dask_worker.main}
    if arguments[:2] == ["cuda", "worker"]:
        if importlib.util.find_spec("dask_cuda") is None:
            # It takes what dask worker takes, as far as the pages go.
            return _parse(dask_worker.main, arguments[2:])
        from dask_cuda.cli import worker

        return _parse(worker, arguments[2:])
    return _parse(click.Group("dask", known), arguments)


def _parse(command: click.Command | None, arguments: list[str]) -> str | None:
    while isinstance(command, click.Group) and arguments:
        name, *arguments = arguments
        command = command.commands.get(name)
    if command is None:
        return f"no such command: {name}"
    try:
        if not isinstance(command, click.Group):  # a group's own name, in a sentence
            command.make_context(command.name, list(arguments)).close()
    except click.exceptions.Exit:  # --help
        return None
    except click.UsageError as error:
        return error.format_message()
    return None


def _make(arguments: list[str]) -> str | None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [word for word in arguments if "=" not in word]
    return None if wanted and set(wanted) <= targets else f"no such target: {wanted}"


def _pip(arguments: list[str]) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        extras = re.fullmatch(r"\.\[(.*)\]", word)
        missing = (
            set(extras[1].split(",")) - set(project["optional-dependencies"]) if extras else ()
        )
        if missing:
            return f"no such extra: {sorted(missing)}"
    return None if arguments[:1] == ["install"] else f"pip {arguments}"


def _python(arguments: list[str]) -> str | None:
    if not arguments:
        return "no program"
    if arguments[0] == "-m":
        found = importlib.util.find_spec(arguments[1])
        return None if found else f"no such module: {arguments[1]}"
    places = [ROOT / arguments[0], ROOT / "examples" / "cpp" / arguments[0]]
    path = next((p for p in places if p.exists()), None)
    if path is None:
        # A program of the reader's own.
        return None if arguments[0] == "workflow.py" else f"no such program: {arguments[0]}"
    strings = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    unknown = [w for w in arguments[1:] if w.startswith("--") and w not in strings | {"--help"}]
    return f"{path.name} has no {unknown}" if unknown else None


def _bash(arguments: list[str]) -> str | None:
    return None if arguments and (ROOT / arguments[0]).exists() else f"no such script: {arguments}"


def _srun(arguments: list[str]) -> str | None:
    while arguments and arguments[0].startswith("-"):
        arguments = arguments[1:]
    return complaint(arguments)


def _docker(arguments: list[str]) -> str | None:
    inside = arguments.index("dask") if "dask" in arguments else None
    return None if inside is None else complaint(arguments[inside:])


def _pre_commit(arguments: list[str]) -> str | None:
    return None if arguments == ["install"] else f"pre-commit {arguments}"


def _known(_arguments: list[str]) -> None:
    """Everybody has it."""


_CHECKS = {
    "bash": _bash,
    "cd": _known,
    "dask": _dask,
    "docker": _docker,
    "make": _make,
    "mkdir": _known,
    "pip": _pip,
    "pre-commit": _pre_commit,
    "python": _python,
    "python3": _python,
    "srun": _srun,
}


def environment() -> dict[str, str]:
    """For programs of a page: this very package, and the commands beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
