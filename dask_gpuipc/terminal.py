"""Text for people: tables and progress, in colour on a terminal, plain where they are piped.

Rich draws them where it is installed and the stream is a terminal; without it, and in files and
pipes, the same words come as aligned columns. What is shown says nothing by colour alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, TextIO

WIDTH: Final = 100
"""Columns of plain text, where the terminal does not say."""


class Mood(StrEnum):
    """How a cell or line is meant; its colour, where there are colours."""

    PLAIN = ""
    GOOD = "green"
    WARN = "yellow"
    BAD = "bold red"
    DIM = "dim"
    STRONG = "bold"


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and how it is meant."""

    text: str
    mood: Mood = Mood.PLAIN


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column heads. A head that begins with ``>`` aligns its column to the right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""


class Screen(Protocol):
    """Where text for people goes."""

    def line(self, text: str = "", mood: Mood = Mood.PLAIN) -> None:
        """One line, or a paragraph that may be wrapped."""

    def table(self, table: Table) -> None:
        """A table, with an empty line before it."""


def screen(stream: TextIO | None = None) -> Screen:
    """In colour if the stream (stdout by default) is a terminal and rich is installed."""
    stream = stream or sys.stdout
    if stream.isatty() and importlib.util.find_spec("rich"):
        return RichScreen(stream)
    return PlainScreen(stream)


# -- plain ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainScreen:
    """Aligned columns, no colour, no box."""

    stream: TextIO
    width: int = field(default_factory=lambda: shutil.get_terminal_size((WIDTH, 24)).columns)

    def line(self, text: str = "", mood: Mood = Mood.PLAIN) -> None:
        """One line; a long one is wrapped at the width, and goes on indented."""
        wrapped = textwrap.wrap(text, max(40, self.width), subsequent_indent="  ")
        print("\n".join(wrapped or [""]), file=self.stream)

    def table(self, table: Table) -> None:
        """Columns two blanks apart; the last one is wrapped."""
        self.line()
        self.line(table.title)
        heads = [head.removeprefix(">") for head in table.heads]
        rows = [heads, *[[_text(cell) for cell in row] for row in table.rows]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        rights = [head.startswith(">") for head in table.heads]
        for row in rows:
            for text in _aligned(row, widths, rights, self.width):
                print(text, file=self.stream)
        if table.note:
            self.line(table.note)


def _aligned(row: list[str], widths: list[int], rights: list[bool], width: int) -> list[str]:
    *first, last = (
        text.rjust(w) if right else text.ljust(w)
        for text, w, right in zip(row, widths, rights, strict=True)
    )
    begin = "  " + "".join(f"{text}  " for text in first)
    room = max(24, width - len(begin))
    lines = (
        textwrap.wrap(last.rstrip(), room, break_long_words=False)
        if len(last.rstrip()) > room
        else [last.rstrip()]
    )
    blank = " " * len(begin)
    return [((blank if i else begin) + line).rstrip() for i, line in enumerate(lines)]


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


# -- rich -----------------------------------------------------------------------------------------


class RichScreen:
    """The same by rich.

    Parameters
    ----------
    stream : file, optional
    console : rich.console.Console, optional
        Instead of one on the stream; a recording one makes pictures of it.
    """

    def __init__(self, stream: TextIO | None = None, console: Any = None) -> None:
        from rich.console import Console

        self.console = console or Console(file=stream, highlight=False)

    def line(self, text: str = "", mood: Mood = Mood.PLAIN) -> None:
        """One line; wrapped by rich."""
        self.console.print(_rich(Cell(text, mood)))

    def table(self, table: Table) -> None:
        """With a thin rule below its heads."""
        from rich import box
        from rich.table import Table as RichTable

        drawn = RichTable(
            title=_rich(Cell(table.title, Mood.STRONG)),
            title_justify="left",
            title_style="",
            box=box.SIMPLE_HEAD,
            caption=_rich(Cell(table.note, Mood.DIM)) if table.note else None,
            caption_justify="left",
            pad_edge=False,
        )
        last = len(table.heads) - 1
        for i, head in enumerate(table.heads):
            right = head.startswith(">")
            drawn.add_column(
                head.removeprefix(">"),
                justify="right" if right else "left",
                no_wrap=i != last,
                overflow="fold",
            )
        for row in table.rows:
            drawn.add_row(*[_rich(cell) for cell in row])
        self.console.print()
        self.console.print(drawn)


def _rich(cell: str | Cell) -> Any:
    from rich.text import Text

    # never a plain str, in which rich would look for markup
    return Text(cell) if isinstance(cell, str) else Text(cell.text, style=cell.mood.value)


# -- progress -------------------------------------------------------------------------------------


class Progress(Protocol):
    """How far something is that takes more than a second."""

    def step(self, what: str) -> None:
        """The next thing begins."""


@contextlib.contextmanager
def progress(total: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """So many steps, on stderr by default: a bar on a terminal, else nothing at all."""
    stream = stream or sys.stderr
    if stream.isatty() and importlib.util.find_spec("rich"):
        with _rich_progress(total, stream) as shown:
            yield shown
    elif stream.isatty():
        yield _Lines(total, stream)
    else:
        yield _Silent()


class _Silent:
    def step(self, what: str) -> None:
        pass


class _Lines:
    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._done = 0

    def step(self, what: str) -> None:
        self._done += 1
        print(f"[{self._done}/{self._total}] {what}", file=self._stream)


class _Bar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._first = True

    def step(self, what: str) -> None:
        self._bar.update(self._task, description=what, advance=0 if self._first else 1)
        self._first = False


@contextlib.contextmanager
def _rich_progress(total: int, stream: TextIO) -> Iterator[Progress]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    console = Console(file=stream)
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar, bar.add_task("", total=total))
