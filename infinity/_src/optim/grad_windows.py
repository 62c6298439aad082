"""Windows in pinned memory by way of which gradients leave the device for updates that run during backward.

    backward of unit k ends     its gradients start for a window
    backward of unit k - 2 ends the update of unit k is submitted, and reads them there

The units in between keep the device busy: who waited for the last one's gradients would let it run dry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from infinity._src.memory.constants import WINDOW_UNITS
from infinity._src.memory.device import Device, GradOffload
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.sizes import round_up
from infinity.aio import Slab, Ticket
from infinity.errors import AioError

_ALIGNMENT_BYTES = 64


def window_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a window for gradients of these sizes."""
    return sum(round_up(size_bytes, _ALIGNMENT_BYTES) for size_bytes in sizes)


class GradWindows:
    """The windows, each for one unit's gradients. One thread uses it at a time. dtype_of: in which gradients of a flat wait."""

    def __init__(self, units: Sequence[Unit], device: Device, dtype_of: Callable[[Flat], torch.dtype]) -> None:
        self._units = list(units)
        self._dtype_of = dtype_of
        self._device = device
        self._window_bytes = self.needs_bytes(units, dtype_of) // WINDOW_UNITS
        self._offload = GradOffload(device, WINDOW_UNITS * self._window_bytes)
        self._slab: Slab | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._turn = 0
        self._reads: list[Ticket | None] = [None] * WINDOW_UNITS  # of each window, the update that reads it
        self._at: dict[Unit, int] = {}
        self._due: deque[Unit] = deque()
        self._tickets: dict[Unit, list[Ticket]] = {}

    @staticmethod
    def needs_bytes(units: Sequence[Unit], dtype_of: Callable[[Flat], torch.dtype]) -> int:
        """Bytes of all windows: more after parameters were thawed."""
        needs = (
            window_bytes(param.numel * dtype_of(param.flat).itemsize for param in unit.params if param.flat.learns)
            for unit in units
        )
        return WINDOW_UNITS * max(needs, default=0)

    def grow(self) -> None:
        """Make the windows fit what learns by now. Nothing may be under way."""
        window = self.needs_bytes(self._units, self._dtype_of) // WINDOW_UNITS
        if window > self._window_bytes:
            self.close()
            self._window_bytes = window
            self._offload = GradOffload(self._device, WINDOW_UNITS * window)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._tickets

    def send(
        self, unit: Unit, gradients: Mapping[Param, torch.Tensor | None], fresh: Callable[[Param], bool]
    ) -> dict[Param, torch.Tensor | None]:
        """Start the unit's fresh gradients for a window. Returns all of them, the fresh ones as they will be there.

        Blocks while an update still reads the window.
        """
        index = self._turn = (self._turn + 1) % WINDOW_UNITS
        memory = self._window(index)
        found: dict[Param, torch.Tensor | None] = {}
        tickets, at = [], 0
        for param, gradient in gradients.items():
            found[param] = gradient
            if gradient is None or not fresh(param):
                continue
            size_bytes = gradient.numel() * gradient.element_size()
            target = memory[at : at + size_bytes].view(gradient.dtype)
            at += round_up(size_bytes, _ALIGNMENT_BYTES)
            tickets.append(self._offload.copy_out(gradient, target))
            found[param] = target
        self._at[unit], self._tickets[unit] = index, tickets
        self._due.append(unit)
        return found

    def next(self, lag: int) -> Unit | None:
        """The unit whose update comes now, if more than `lag` are on their way. Blocks until its gradients are there."""
        if len(self._due) <= lag:
            return None
        unit = self._due.popleft()
        for ticket in self._tickets.pop(unit):
            ticket.wait_filled()
        return unit

    def taken(self, unit: Unit, ticket: Ticket) -> None:
        """The unit's update was submitted, and reads the window until its ticket is filled."""
        self._reads[self._at.pop(unit)] = ticket

    def reset(self) -> None:
        """A backward broke off: what is on its way nobody wants. Later gradients for a window come behind it."""
        self._due.clear()
        self._tickets.clear()
        self._at.clear()

    def close(self) -> None:
        """Free the windows. Nothing may be under way."""
        self.reset()
        self._offload.close()
        if self._slab is not None:
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
        self.allocate()
        ticket, self._reads[index] = self._reads[index], None
        while ticket is not None and not ticket.filled:
            try:
                ticket.wait_filled()
            except AioError:
                break  # it is the pipeline's to raise, and reads no more
        return self._memory[index * self._window_bytes : (index + 1) * self._window_bytes]
