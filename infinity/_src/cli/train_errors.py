"""Errors of `infinity train` as one line each, with the fix if one is known."""

from __future__ import annotations

import argparse
import traceback

import torch
from rich.console import Console

from infinity._src.base import console as lines
from infinity._src.base.console import say, to_stderr
from infinity._src.base.torch_compat import is_out_of_memory
from infinity._src.cli.stop_signals import Stopped
from infinity._src.cli.torchrun import Joined
from infinity._src.cli.train_setup import slices_of
from infinity.errors import DriveLostError, InfinityError

_FORESEEN = (ValueError, InfinityError, OSError)
"""Errors that are printed in one line, like errors of exhausted memory."""


def say_error(
    console: Console,
    error: BaseException,
    options: argparse.Namespace | None = None,
    ranks: Joined | None = None,
    *,
    kept: bool = False,
) -> None:
    """Print an error in one line, with the rank if there are several. On several ranks, first print
    the traceback of an unforeseen error; on one rank the caller raises such an error. kept: steps
    have been recorded.
    """
    if isinstance(error, KeyboardInterrupt):
        assert options is not None
        left = f"what was measured so far is in {options.out}" if kept else "no step was recorded"
        what = f"{error}: stopped at once" if isinstance(error, Stopped) else "interrupted"
        say(to_stderr(console), f"{what}; {left}", markup=False)
        return
    several = ranks is not None and ranks.world > 1
    if not is_foreseen(error):
        if not several:
            # The caller raises the error, which shows its traceback.
            return
        say(to_stderr(console), "".join(traceback.format_exception(error)), markup=False)
    who = f"rank {ranks.rank}: " if several and ranks is not None else ""
    text = text_of_error(error)
    if isinstance(error, DriveLostError):
        text += (
            f". Run the same infinity train command with --resume, and without --nvme "
            f"{error.directory}"
        )
    # Errors of infinity already name a fix.
    if is_out_of_memory(error) and not isinstance(error, InfinityError):
        text = _out_of_memory(error, text, options)
    lines.say_error(console, who + text)


def text_of_error(error: BaseException) -> str:
    """Return the text of an error; the name of its type if the text is empty."""
    return str(error) or type(error).__name__


def is_foreseen(error: BaseException) -> bool:
    """Return whether an error is printed in one line: a user's mistake, a fault of a file or drive,
    or exhausted memory.
    """
    return isinstance(error, _FORESEEN) or is_out_of_memory(error)


def _out_of_memory(error: BaseException, text: str, options: argparse.Namespace | None) -> str:
    # Further lines of torch's message are a stack trace.
    text = text.partition("\n")[0].removesuffix(".")
    if isinstance(error, torch.OutOfMemoryError):
        # The vertical schedule always checkpoints, and retains the inputs of blocks for all
        # micro-batches, so --checkpointing would not help.
        sliced = options is not None and slices_of(options) > 1
        less = "--activations cpu or nvme, --schedule horizontal" if sliced else "--checkpointing"
        return (
            f"there is not enough memory on the device: {text}. Give shorter sequences (--seq) or "
            f"fewer (--batch), {less}, or tiles (--tile-linears, --tile-experts)"
        )
    ram = getattr(options, "ram", None) or "half of what the machine leaves"
    return (
        f"there is not enough memory: {text}. The budget is --ram {ram}: give a smaller one, "
        "shorter sequences (--seq) or fewer (--batch), or raise the machine's or cgroup's limit"
    )
