"""Windows in pinned memory, through which gradients leave the device for updates during backward.

    backward of unit k ends        copy its gradients to a window (D2H)
    backward of unit k - 2 ends    submit the update of unit k, which reads them there

The units in between keep the device busy. Waiting for the last unit's copies would let it run dry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from infinity._src.config import Policy
from infinity._src.memory.constants import WINDOW_UNITS
from infinity._src.memory.device import Device, GradOffload
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.sizes import round_up
from infinity.aio import Slab, Ticket
from infinity.errors import AioError

_ALIGNMENT_BYTES = 64


def window_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a window for gradients of these sizes."""
    return sum(round_up(size_bytes, _ALIGNMENT_BYTES) for size_bytes in sizes)


def windows_bytes(policy: Policy, unit_sizes: Iterable[Iterable[int]], *, copies: bool) -> int:
    """Return the pinned memory of all windows, which the engine and `infinity plan` both count.

    unit_sizes: for each unit the bytes of its parameters' gradients. copies: the model computes on
    a device with memory of its own.
    """
    # Only updates in backward read gradients from windows; others wait in accumulators. Speculation
    # leaves them in accumulators too.
    if not (copies and policy.consumes_grads):
        return 0
    return WINDOW_UNITS * max(map(window_bytes, unit_sizes), default=0)


def grad_sizes(
    units: Sequence[Unit], dtype_of: Callable[[Flat], torch.dtype]
) -> Iterator[list[int]]:
    """Yield for each unit the bytes of its parameters' gradients, of those that learn."""
    for unit in units:
        yield [
            param.numel * dtype_of(param.flat).itemsize
            for param in unit.params
            if param.flat.learns
        ]


class GradWindows:
    """The windows, each for one unit's gradients. One thread uses it at a time. dtype_of: the dtype
    of a flat's waiting gradients.
    """

    def __init__(
        self, units: Sequence[Unit], device: Device, dtype_of: Callable[[Flat], torch.dtype]
    ) -> None:
        self._units = list(units)
        self._dtype_of = dtype_of
        self._device = device
        self._window_bytes = self.needs_bytes(units, dtype_of) // WINDOW_UNITS
        self._offload = GradOffload(device, WINDOW_UNITS * self._window_bytes)
        self._slab: Slab | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._turn = 0
        # For each window the update that reads it.
        self._reads: list[Ticket | None] = [None] * WINDOW_UNITS
        self._window_of: dict[Unit, int] = {}
        self._due: deque[Unit] = deque()
        self._tickets: dict[Unit, list[Ticket]] = {}

    @staticmethod
    def needs_bytes(units: Sequence[Unit], dtype_of: Callable[[Flat], torch.dtype]) -> int:
        """Return the bytes of all windows. They grow when parameters are unfrozen."""
        sizes = map(window_bytes, grad_sizes(units, dtype_of))
        return WINDOW_UNITS * max(sizes, default=0)

    def grow(self) -> None:
        """Make the windows fit all parameters that learn by now. Nothing may be pending."""
        window = self.needs_bytes(self._units, self._dtype_of) // WINDOW_UNITS
        if window > self._window_bytes:
            self.close()
            self._window_bytes = window
            self._offload = GradOffload(self._device, WINDOW_UNITS * window)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._tickets

    def copy_out(
        self,
        unit: Unit,
        gradients: Mapping[Param, torch.Tensor | None],
        fresh: Callable[[Param], bool],
    ) -> dict[Param, torch.Tensor | None]:
        """Start the D2H copies of the unit's fresh gradients to a window. Returns all its
        gradients, the fresh ones as views of the window.

        Blocks while an update still reads the window.
        """
        # Windows go round. An update that was submitted one round ago has had the time of several
        # units to read.
        index = self._turn = (self._turn + 1) % WINDOW_UNITS
        memory = self._window(index)
        found: dict[Param, torch.Tensor | None] = {}
        tickets, at = [], 0
        for param, gradient in gradients.items():
            # A gradient that is not fresh lies in an accumulator already, in host memory.
            found[param] = gradient
            if gradient is None or not fresh(param):
                continue
            size_bytes = gradient.numel() * gradient.element_size()
            target = memory[at : at + size_bytes].view(gradient.dtype)
            # Aligned, since kernels read whole vectors.
            at += round_up(size_bytes, _ALIGNMENT_BYTES)
            tickets.append(self._offload.copy_out(gradient, target))
            found[param] = target
        self._window_of[unit], self._tickets[unit] = index, tickets
        # Appended after all copies have started: an interrupt leaves no unit without its tickets.
        self._due.append(unit)
        return found

    def next(self, lag: int) -> Unit | None:
        """Return the next unit to update, if copies of more than `lag` units are pending. Blocks
        until its copies are done.
        """
        if len(self._due) <= lag:
            return None
        unit = self._due.popleft()
        for ticket in self._tickets.pop(unit):
            self._device.wait_filled(ticket)
        return unit

    def update_submitted(self, unit: Unit, ticket: Ticket) -> None:
        """Note that the unit's update was submitted. It reads the window until its ticket is
        filled.
        """
        self._reads[self._window_of.pop(unit)] = ticket

    def reset(self) -> None:
        """Drop all pending units, after a backward broke off. Later copies to a window come behind
        theirs on the stream.
        """
        self._due.clear()
        self._tickets.clear()
        self._window_of.clear()

    def close(self) -> None:
        """Free the windows. Nothing may be pending."""
        self.reset()
        self._offload.close()
        if self._slab is not None:
            # Unpinned before it is freed: the driver would keep a mapping of memory that is gone.
            self._device.unpin(self._slab)
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._slab.close()
            self._slab = None

    def allocate(self) -> None:
        """Make the windows, if there are none. Blocks while they are pinned."""
        if self._slab is None and self._window_bytes:
            self._slab = Slab(WINDOW_UNITS * self._window_bytes)
            self._device.pin(self._slab)
            self._memory = torch.from_numpy(self._slab.array(np.uint8))

    def _window(self, index: int) -> torch.Tensor:
        """Return the memory of a window, free for new gradients. Blocks while an update reads it.
        """
        self.allocate()
        ticket, self._reads[index] = self._reads[index], None
        while ticket is not None and not ticket.filled:
            try:
                # Of the memory that it writes, some is on the device.
                self._device.wait_filled(ticket)
            except AioError:
                # A failed update reads no more, and the pipeline raises its error.
                break
        return self._memory[index * self._window_bytes : (index + 1) * self._window_bytes]
