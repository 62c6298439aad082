"""Frames: the hooked modules whose forward runs, innermost last."""

from __future__ import annotations

import dataclasses
import sys
import threading
from types import FrameType

import torch

from infinity._src._torch_compat import is_running
from infinity._src.hooks.backward import BackwardUse
from infinity._src.hooks.unit_refs import UnitRefs


@dataclasses.dataclass(eq=False, slots=True)
class Frame:
    """A hooked module whose forward is running."""

    module: torch.nn.Module
    caller: FrameType | None  # the Python frame of its __call__; tells whether it still runs
    thread: int
    first_node: int  # sequence number of the first autograd node that it can make
    outermost: bool
    held: list[UnitRefs] = dataclasses.field(default_factory=list)
    use: BackwardUse | None = None
    # Handled when it began: an exception that leaves the frame is another one.
    handled: BaseException | None = dataclasses.field(default_factory=lambda: sys.exc_info()[1])

    @property
    def alive(self) -> bool:
        """Whether it still runs, in whatever thread. KeyboardInterrupt leaves frames behind."""
        return self.caller is None or is_running(self.caller, self.thread)

    @property
    def raised(self) -> BaseException | None:
        """The exception that leaves it now, in its post hook."""
        error = sys.exc_info()[1]
        return None if error is self.handled else error

    @property
    def running_here(self) -> bool:
        """Whether it still runs, in this thread."""
        return self.thread == threading.get_ident() and self.alive


class FrameStack(list[Frame]):
    """The frames of one model. The life cycle pushes and pops them; activations ask whether one
    runs."""

    @property
    def running_here(self) -> bool:
        """Whether a forward of the model runs in this thread."""
        return bool(self) and self[-1].running_here
