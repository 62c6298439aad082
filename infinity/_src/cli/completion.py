"""`infinity --print-completion SHELL`: prints a script with which a shell completes commands,
options, choices and paths. shtab generates it from the parsers; the shell then starts no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from infinity._src.base.paths import argument

SHELLS: Final = ("bash", "zsh", "fish")


class PrintCompletion(argparse.Action):
    """Action of the option: prints the script and exits. describe: a function that adds options
    which only completion needs; called before printing.
    """

    def __init__(self, *args: Any, describe: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._describe = describe

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse gives it
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Print the completion script for the shell `values`."""
        import shtab

        self._describe()
        for action in _actions(parser):
            if action.type is argument:
                paths = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
                # An attribute for shtab, unknown to argparse.
                vars(action)["complete"] = paths
        sys.stdout.write(shtab.complete(parser, shell=values) + "\n")
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of all its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for name in action.choices:
                yield from _actions(action.choices[name])
