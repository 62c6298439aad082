"""Windows of gradients on their way to updates: a ring in which none is overwritten too early."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinity._src.memory.constants import LAG_UNITS, WINDOW_UNITS
from infinity._src.memory.device import Device
from infinity._src.memory.device_capacity import OVERLAP_BYTES_MAX
from infinity._src.optim.grad_windows import GradWindows, ring_bytes


class Read:
    """A ticket of an update that reads when somebody waits for it: as late as it may."""

    def __init__(self, views: dict[Any, torch.Tensor], expected: float) -> None:
        self._views, self._expected, self.filled = views, expected, False

    def wait_filled(self, check: Any = None) -> None:
        del check
        if not self.filled:
            self.filled = True
            for view in self._views.values():
                assert (view == self._expected).all()


class Place(Device):
    """A device whose copies are made at once."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def copy(self, to: int, source: int, size_bytes: int, *, out: bool) -> Any:
        assert not out
        ctypes.memmove(to, source, size_bytes)
        return SimpleNamespace(filled=True, wait_filled=lambda check=None: None)


class OneUnit:
    """A unit with parameters of these sizes, all trained."""

    def __init__(self, numels: list[int]) -> None:
        flat = SimpleNamespace(learns=True)
        self.name = "unit"
        self.params = [SimpleNamespace(numel=numel, flat=flat) for numel in numels]


def test_a_ring_holds_four_small_units_and_no_multiple_of_a_huge_one() -> None:
    assert ring_bytes([[64 * 1000]] * 9) == WINDOW_UNITS * 64 * 1000
    assert ring_bytes([[64], [20 * OVERLAP_BYTES_MAX], [64]]) == 20 * OVERLAP_BYTES_MAX + 128


@settings(deadline=None, max_examples=60)
@given(
    units=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=3), min_size=1, max_size=6),
    order=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20),
)
# The ring is full at its wrap when a unit comes whose gradients lie in accumulators already.
@example(units=[[16]], order=[(0, True)] * 5 + [(0, False), (0, True)])
def test_no_window_is_overwritten_before_its_update_has_read_it(
    units: list[list[int]], order: list[tuple[int, bool]]
) -> None:
    sizes: Any = [OneUnit(numels) for numels in units]
    windows: Any = GradWindows(sizes, Place(), lambda _flat: torch.float32)
    pending: dict[OneUnit, tuple[dict[Any, torch.Tensor], float]] = {}
    updated: list[float] = []

    def update(unit: OneUnit) -> None:
        views, value = pending.pop(unit)
        updated.append(value)
        windows.update_submitted(unit, Read(views, value))

    for number, (index, fresh) in enumerate(order):
        # Each comes once in a backward: a new one of the same sizes each time.
        unit, value = OneUnit(units[index % len(units)]), float(number)
        grads = {each: torch.full((param.numel,), value) for each, param in enumerate(unit.params)}
        while (due := windows.in_the_way(grads, lambda _param, new=fresh: new)) is not None:
            update(due)
        found, leaving = windows.copy_out(unit, grads, lambda _param, new=fresh: new)
        assert leaving == fresh * sum(grad.nbytes for grad in grads.values())
        pending[unit] = found, value
        while (due := windows.next(LAG_UNITS)) is not None:
            update(due)
    while (due := windows.next(0)) is not None:
        update(due)
    assert updated == [float(number) for number in range(len(order))]
    for window in windows._windows:
        assert window.read is not None
        window.read.wait_filled()
    windows.close()
