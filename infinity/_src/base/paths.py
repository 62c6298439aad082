"""Paths that a caller gives: absolute from the moment that they come in.

Files that are written or read later lie where the caller meant, even if the current directory is
another by then. Symbolic links stay in the path: one that is changed later leads elsewhere, as it
does in any program.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def absolute(path: str | os.PathLike[str], what: str) -> Path:
    """Make a path absolute, `~` and `~user` expanded as a shell does. what: the argument's name.

    Raises: ValueError for what is no path, for an empty one, and for a relative one while the
    current directory is removed, or cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ValueError(f"{what}={path!r} is no path: give a str or a pathlib.Path")
    if not os.fspath(path):
        raise ValueError(f"{what} is an empty path: for the current directory give '.'")
    # Not Path.expanduser, which raises where there is no such user; a shell leaves the text.
    given = Path(os.path.expanduser(path))  # noqa: PTH111
    try:
        return given.absolute()
    except OSError as error:
        raise ValueError(
            f"{what}={os.fspath(path)!r} is relative, and the current directory is gone or cannot "
            f"be read ({error.strerror}): give an absolute path, or call os.chdir first"
        ) from error


def check_link(path: Path) -> None:
    """Raise ValueError for a symbolic link to something that is not there."""
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a symbolic link to {str(path.readlink())!r}, and there is nothing: bring "
            "that back, or replace the link"
        )


def argument(text: str) -> Path:
    """Make a path of the command line absolute; "-" stays, which is standard output where an option
    takes it. Raises: argparse.ArgumentTypeError.
    """
    try:
        return Path(text) if text == "-" else absolute(text, "path")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
