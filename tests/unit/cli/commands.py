"""Commands of `infinity` in this process: `run(run_plan, "plan", *arguments)`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from infinity._src.cli.main import build_parser


def run(
    command: Callable[..., int], *arguments: object, width: int = 200, **options: Any
) -> tuple[int, str]:
    """The status of a command, and what it shows on a console so wide."""
    console = Console(file=io.StringIO(), width=width, **options)
    status = command(build_parser().parse_args(list(map(str, arguments))), console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()
