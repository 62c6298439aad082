"""Options of the commands as tables, with one row per option; argparse's options are made from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One option of a command.

    name: without dashes; a leading blank marks a positional argument. kind: False for a switch; a
    tuple of choices; a function that parses the value (default: None); a list of one such function
    for an option that may be repeated; any other value is the default, and its type is the
    parser. text: sentence for the help. metavar: the value's name in the help. more: arguments of
    `add_argument`, which override the arguments from `kind`.
    """

    name: str
    kind: Any
    text: str
    metavar: str | None = None
    more: dict[str, Any] = {}


def add_options(parser: argparse._ActionsContainer, rows: Iterable[Row]) -> None:
    """Add an option for each row to a parser, or to a group of one."""
    for row in rows:
        how: dict[str, Any]
        if row.kind is False:
            how = {"action": "store_true"}
        elif isinstance(row.kind, tuple):
            how = {"type": type(row.kind[0]), "choices": row.kind}
        elif isinstance(row.kind, list):
            how = {"action": "append", "type": row.kind[0]}
        elif callable(row.kind):
            how = {"type": row.kind}
        else:
            how = {"type": type(row.kind), "default": row.kind}
        if row.metavar is not None:
            how["metavar"] = row.metavar
        name = row.name[1:] if row.name.startswith(" ") else f"--{row.name}"
        parser.add_argument(name, help=row.text or None, **{**how, **row.more})
