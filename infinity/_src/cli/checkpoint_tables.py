"""What `infinity checkpoint` shows: the generations of a directory, the files of the newest, what is damaged."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity._src.checkpoint.verify import Damage, Generation, ListedFile
from infinity._src.sizes import format_size

_LEFT = ("generation", "state", "optimizer", "whole", "file", "what", "why")


def show_directory(console: Console, directory: Path, generations: Sequence[Generation]) -> None:
    """Print a directory: a row for each generation, why one is not whole, and the files of the newest."""
    table = _table(
        str(directory), "generation", "whole", "step", "ranks", "on disk", "parameters", "state", "optimizer", "written"
    )
    for each in generations:
        table.add_row(
            str(each.number),
            "[green]yes[/green]" if each.whole else "[red]no[/red]",
            _number(each.step),
            _number(each.world),
            format_size(each.disk_bytes),
            f"{each.params:,}" if each.params else "-",
            escape(_state(each)),
            escape(", ".join(each.optimizers) or "-"),
            _time(each.written_s),
        )
    console.print(table)
    for each in generations:
        if each.why_not:
            text = f"generation {each.number} is not whole: {each.why_not}"
            console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    if generations:
        console.print(_files(generations[0]))


def show_damage(console: Console, damage: Sequence[Damage]) -> None:
    """Print every damaged place."""
    table = _table("Damage", "file", "offset", "bytes", "what", "why")
    for each in damage:
        table.add_row(escape(each.path), f"{each.offset:,}", f"{each.length:,}", escape(each.what), escape(each.reason))
    console.print(table)


def _files(generation: Generation) -> Table:
    table = _table(f"files of generation {generation.number}", "rank", "file", "bytes", "on disk")
    for file in generation.files:
        table.add_row(str(file.rank), escape(file.name), f"{file.size_bytes:,}", _taken(file))
    return table


def _taken(file: ListedFile) -> str:
    return "[red]missing[/red]" if file.disk_bytes is None else format_size(file.disk_bytes)


def _state(generation: Generation) -> str:
    """The policy's state, and how much of the model has it."""
    kinds = "; ".join(f"{name} ({numel:,})" for name, numel in generation.formats.items())
    if len(generation.formats) == 1:
        kinds = next(iter(generation.formats))
    return f"{generation.state}: {kinds}" if kinds else "-"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold")
    return table
