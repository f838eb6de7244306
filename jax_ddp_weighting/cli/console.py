"""What commands print: tables for people, one JSON document for programs."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from math import isfinite
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# Where answers go: a stream of their own, where users' threads may print at any time; else, and
# for None, `sys.stdout` as it is then.
_answers: ContextVar[TextIO | None] = ContextVar("answers", default=None)


@contextmanager
def answers_on(stream: TextIO) -> Iterator[None]:
    """A block whose answers go to a stream, and not to standard output."""
    token = _answers.set(stream)
    try:
        yield
    finally:
        _answers.reset(token)


def print_json(document: Any) -> None:
    """One JSON document as the answer; numbers that JSON lacks, such as NaN, as text."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False), file=_answers.get())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def print_line(text: str = "") -> None:
    """A line, not folded: it may be searched or cut by other programs."""
    console = Console(file=_answers.get(), highlight=False, markup=False, soft_wrap=True)
    console.print(_printable(text))


def _printable(text: str) -> str:
    """Text in which names of files may stand, which need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table whose numbers stand right and whose words stand left."""
    table = Table(box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        words = any(isinstance(row[place], str) for row in rows)
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(format_value, row))
    console = Console(file=_answers.get(), highlight=False, markup=False)
    console.print(title, style="bold", soft_wrap=True)
    # as wide as its numbers, which must not be cut where nothing says how wide the screen is
    wanted = console.measure(table, options=console.options.update_width(1000)).maximum
    console.width = max(console.width, wanted)
    console.print(table)


def format_value(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):  # before int, which a bool is too
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else _printable(str(value))


def count_of(number: int, thing: str, things: str = "") -> str:
    """So many things: ``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


@contextmanager
def progress_bar(task: str, total: int) -> Iterator[Any]:
    """A bar on standard error while something long runs; nothing where that is no terminal.

    Args:
        task: what is being done.
        total: how many parts it has.

    Returns:
        A function that is told how many parts more are done.
    """
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    quiet = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet
    ) as progress:
        bar = progress.add_task(task, total=total)
        yield lambda parts: progress.advance(bar, parts)


def waiting(task: str) -> AbstractContextManager[Any]:
    """A sign on standard error that something of unknown length is going on."""
    return Console(file=sys.stderr).status(f"{task} ...")
