"""Lines and tables that the commands write for people."""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def say(console: Console, text: str, *, markup: bool = True, style: str | None = None) -> None:
    """Print a line without wrapping it. markup: False for a text that may contain brackets, such as
    a path.
    """
    console.print(text, style=style, markup=markup, highlight=False, soft_wrap=True)


def to_stderr(console: Console) -> Console:
    """Return the console for errors of a command: standard error if the command writes to standard
    output, else the same.
    """
    return Console(stderr=True) if console.file is sys.stdout else console


def say_error(console: Console, error: object) -> None:
    """Print an error in one line, to the console of `to_stderr`."""
    say(to_stderr(console), f"[red]error:[/red] {escape(str(error))}")


def make_table(title: str, *columns: str, left: Collection[str] | None = None) -> Table:
    """Make a table. left: the columns that are flush left; None: the first."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        flush_left = index == 0 if left is None else column in left
        table.add_column(column, justify="left" if flush_left else "right", overflow="fold")
    return table
