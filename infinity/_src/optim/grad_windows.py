"""Windows in pinned memory, through which gradients leave the device for updates during backward.

    backward of unit k ends        copy its gradients to a window (D2H)
    backward of unit k - 2 ends    submit the update of unit k, which reads them there

The lag of two units keeps the device busy: a wait for the last unit's copies would leave the device
idle.

Windows lie one after another in a ring buffer, each as large as its unit's gradients. If the ring
has no free range for a unit's gradients, pending updates are submitted earlier. So a unit as large
as the ring gets the whole ring.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from infinity._src.base.sizes import round_up
from infinity._src.config.policy import Policy
from infinity._src.memory.constants import OFFLOAD_UNITS, WINDOW_UNITS
from infinity._src.memory.device import Device, GradOffload
from infinity._src.memory.device_capacity import capacity_bytes, overlap_bytes
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Slab, Ticket
from infinity.errors import AioError

_ALIGNMENT_BYTES = 64


def window_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a window for gradients of these sizes (in bytes)."""
    return sum(round_up(size_bytes, _ALIGNMENT_BYTES) for size_bytes in sizes)


def _place_bytes(sizes: Iterable[int]) -> int:
    # At least one aligned block: in a full ring, a window of 0 bytes at the wrap would look as if
    # the ring had not wrapped, and `_gap` would return a range that other windows use.
    return max(window_bytes(sizes), _ALIGNMENT_BYTES)


def windows_bytes(policy: Policy, unit_sizes: Iterable[Iterable[int]], *, copies: bool) -> int:
    """Return the bytes of pinned memory of all windows. The engine and `infinity plan` call it.

    unit_sizes: for each unit the bytes of its parameters' gradients. copies: the model computes on
    a device with separate memory.
    """
    # Only updates in backward read gradients from windows. In all other modes, speculative updates
    # included, gradients wait in accumulators.
    if not (copies and policy.consumes_grads):
        return 0
    return ring_bytes(unit_sizes)


def ring_bytes(unit_sizes: Iterable[Iterable[int]]) -> int:
    """Return the bytes of a ring of windows for units with gradients of these sizes."""
    return capacity_bytes([window_bytes(sizes) for sizes in unit_sizes], WINDOW_UNITS - 1)


def grad_sizes(
    units: Sequence[Unit], dtype_of: Callable[[Flat], torch.dtype]
) -> Iterator[list[int]]:
    """Yield for each unit the bytes of each gradient, of the trainable parameters."""
    for unit in units:
        yield [
            param.numel * dtype_of(param.flat).itemsize
            for param in unit.params
            if param.flat.learns
        ]


@dataclasses.dataclass(eq=False)
class _Window:
    """Part [start, end) of the ring, in bytes, with the gradients of a unit. read: ticket of the
    update that reads the gradients; None until the update is submitted."""

    unit: Unit
    start: int
    end: int
    read: Ticket | None = None

    def read_by(self, ticket: Ticket) -> None:
        self.read = ticket


class GradWindows:
    """Ring of windows, each for one unit's gradients. One thread uses it at a time. dtype_of:
    returns the dtype in which a flat's gradients wait for their update.
    """

    def __init__(
        self, units: Sequence[Unit], device: Device, dtype_of: Callable[[Flat], torch.dtype]
    ) -> None:
        self._units = list(units)
        self._dtype_of = dtype_of
        self._device = device
        self._size_bytes = ring_bytes(grad_sizes(self._units, dtype_of))
        self._offload = self._make_offload()
        self._slab: Slab | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        # In the order in which backward filled the windows, which is the order of the updates.
        self._windows: deque[_Window] = deque()
        self._due: deque[Unit] = deque()
        self._tickets: dict[Unit, list[Ticket]] = {}

    def _make_offload(self) -> GradOffload:
        sizes = [window_bytes(sizes) for sizes in grad_sizes(self._units, self._dtype_of)]
        return GradOffload(self._device, overlap_bytes(sizes, OFFLOAD_UNITS))

    def grow(self) -> None:
        """Enlarge the ring for all trainable parameters, if it is too small. No copy or update may
        be pending.
        """
        size_bytes = ring_bytes(grad_sizes(self._units, self._dtype_of))
        if size_bytes > self._size_bytes:
            self.close()
            self._size_bytes = size_bytes
            self._offload = self._make_offload()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._tickets

    def in_the_way(
        self,
        gradients: Mapping[Param, torch.Tensor | None],
        fresh: Callable[[Param], bool],
    ) -> Unit | None:
        """Return the unit that must be updated before the ring has a free range for the fresh
        gradients among `gradients`; None if the ring has such a range. Blocks while updates read
        windows in that range, and until the copies of the returned unit's gradients are done.
        """
        leaving = (
            gradient.nbytes
            for param, gradient in gradients.items()
            if gradient is not None and fresh(param)
        )
        size_bytes = _place_bytes(leaving)
        return None if self._free_start(size_bytes) is not None else self.next(0)

    def copy_out(
        self,
        unit: Unit,
        gradients: Mapping[Param, torch.Tensor | None],
        fresh: Callable[[Param], bool],
    ) -> tuple[dict[Param, torch.Tensor | None], int]:
        """Start the D2H copies of the unit's fresh gradients to a new window, for which
        `in_the_way` has returned None. Returns all gradients of the unit, fresh gradients as views
        of the window, and the bytes of the fresh gradients.
        """
        leaving = {
            param: gradient
            for param, gradient in gradients.items()
            # A gradient that is not fresh is in an accumulator, in host memory, already.
            if gradient is not None and fresh(param)
        }
        size_bytes = _place_bytes(gradient.nbytes for gradient in leaving.values())
        start = self._free_start(size_bytes)
        assert start is not None, f"no window for {unit.name}"
        self.allocate()
        found, tickets, at = dict(gradients), list[Ticket](), start
        for param, gradient in leaving.items():
            target = self._memory[at : at + gradient.nbytes].view(gradient.dtype)
            # Align each gradient, since kernels read whole vectors.
            at += round_up(gradient.nbytes, _ALIGNMENT_BYTES)
            tickets.append(self._offload.copy_out(gradient, target))
            found[param] = target
        self._windows.append(_Window(unit, start, start + size_bytes))
        self._tickets[unit] = tickets
        # Append after all copies have started: an interrupt leaves no unit without its tickets.
        self._due.append(unit)
        return found, sum(gradient.nbytes for gradient in leaving.values())

    @property
    def leaving_bytes(self) -> int:
        return self._offload.leaving_bytes

    def next(self, lag: int) -> Unit | None:
        """Return the next unit to update, if more than `lag` units wait for their update; otherwise
        None. Blocks until the copies of the unit's gradients are done.
        """
        if len(self._due) <= lag:
            return None
        unit = self._due.popleft()
        for ticket in self._tickets.pop(unit):
            self._device.wait_filled(ticket)
        return unit

    def update_submitted(self, unit: Unit, ticket: Ticket) -> None:
        """Record the ticket of the unit's update, which reads the window until the ticket is
        filled.
        """
        # The unit may have a second window, which the update of an earlier backward still reads.
        waiting = (each for each in self._windows if each.unit is unit and each.read is None)
        next(waiting).read_by(ticket)

    def reset(self) -> None:
        """Drop all pending units, after an aborted backward. The stream runs later copies to the
        ring after the copies of dropped units, so these overwrite nothing.
        """
        self._due.clear()
        self._tickets.clear()
        # Submitted updates still read their windows.
        self._windows = deque(window for window in self._windows if window.read is not None)

    def close(self) -> None:
        """Free the windows. No copy or update may be pending."""
        self.reset()
        self._windows.clear()
        self._offload.close()
        if self._slab is not None:
            # Unpin before the slab is freed: otherwise the driver keeps a mapping of freed memory.
            self._device.unpin(self._slab)
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._slab.close()
            self._slab = None

    def allocate(self) -> None:
        """Allocate and pin the ring, unless it is allocated. Blocks."""
        if self._slab is None and self._size_bytes:
            self._slab = Slab(self._size_bytes)
            self._device.pin(self._slab)
            self._memory = torch.from_numpy(self._slab.array(np.uint8))

    def _free_start(self, size_bytes: int) -> int | None:
        """Return the start of a free range of `size_bytes` in the ring; None if the ring has none
        and the update of its oldest window is not submitted yet. Blocks while submitted updates
        read windows that must be freed first.
        """
        while (start := self._gap(size_bytes)) is None:
            oldest = self._windows[0]
            if oldest.read is None:
                return None
            self._wait_read(oldest.read)
            self._windows.popleft()
        return start

    def _gap(self, size_bytes: int) -> int | None:
        """Return the start of the next range of `size_bytes` that no window uses; None without
        such a range.
        """
        if not self._windows:
            return 0
        first, last = self._windows[0].start, self._windows[-1].end
        if self._windows[-1].start < first:  # wrapped around
            return last if last + size_bytes <= first else None
        if last + size_bytes <= self._size_bytes:
            return last
        return 0 if size_bytes <= first else None

    def _wait_read(self, ticket: Ticket) -> None:
        while not ticket.filled:
            try:
                # Wait as for a copy of the device: the update also writes to device memory.
                self._device.wait_filled(ticket)
            except AioError:
                # A failed update reads nothing any more, and the pipeline raises its error.
                return
