"""Paths from callers, made absolute on entry.

A later change of the current directory then does not redirect a path. Symbolic links are not
resolved: if a link is changed later, the path leads to the link's new target, as in any program.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def absolute(path: str | os.PathLike[str], what: str) -> Path:
    """Return an absolute path, with `~` and `~user` expanded as in a shell. what: the argument's
    name.

    Raises: ValueError for a value that is not a path, an empty path, and a relative one if the
    current directory is removed or unreadable.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ValueError(f"{what}={path!r} is not a path: give a str or a pathlib.Path")
    if not os.fspath(path):
        raise ValueError(f"{what} is an empty path: for the current directory give '.'")
    # Not Path.expanduser, which raises for an unknown user; a shell leaves the text unchanged.
    given = Path(os.path.expanduser(path))  # noqa: PTH111
    try:
        return given.absolute()
    except OSError as error:
        raise ValueError(
            f"{what}={os.fspath(path)!r} is relative, and the current directory is gone or cannot "
            f"be read ({error.strerror}): give an absolute path, or call os.chdir first"
        ) from error


def check_link(path: Path) -> None:
    """Raise ValueError for a dangling symbolic link."""
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a symbolic link to {str(path.readlink())!r}, which does not exist: "
            "restore it, or replace the link"
        )


def argument(text: str) -> Path:
    """Make a command line's path absolute, except "-" (standard output). Raises:
    argparse.ArgumentTypeError.
    """
    try:
        return Path(text) if text == "-" else absolute(text, "path")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
