"""Waits for a device whose copies never end: each ends once a rank is known to have failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity._src.hooks.activation_store import HostActivationStore, StoredInHostMemory
from infinity._src.memory.device import Device, GradOffload, open_device
from infinity._src.optim.device_update import DeviceUpdate, JointTicket, _DeviceBuffer
from infinity._src.optim.grad_windows import GradWindows, _Window
from infinity._src.params.accumulator import GradRegistry
from infinity.errors import RankFailed

CPU = torch.device("cpu")
SLICES = 3  # of a wait, after which a rank is known to have failed
WAITS_MAX = 100


class Hanging:
    """A ticket that is never filled. It calls `check` as a real one does in each slice of its wait;
    a wait without `check`, or one that continues after `check` raised, fails the test."""

    done = filled = failed = False

    def wait(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        assert check is not None, "a wait without a limit"
        for _ in range(WAITS_MAX):
            check()
        raise AssertionError("the wait went on although a rank has failed")

    wait_filled = wait

    def cancel(self) -> None:
        """Do nothing: it cannot be given up."""


class Landed(Hanging):
    """A ticket that is filled."""

    done = filled = True

    def wait(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Return at once."""

    wait_filled = wait


class Stuck(Device):
    """A device whose copies never end, of those that `hangs` names; a rank fails after a while."""

    def __init__(self, hangs: Callable[[bool], bool] = lambda _out: True) -> None:
        super().__init__(CPU, check=self._fails)
        self.hangs = hangs
        self.asked = 0

    def _fails(self) -> None:
        self.asked += 1
        if self.asked >= SLICES:
            raise RankFailed("rank 1 has ended", rank=1)

    def copy(self, to: int, source: int, size_bytes: int, *, out: bool) -> Any:
        return Hanging() if self.hangs(out) else Landed()


def room_for_a_gradient(device: Stuck) -> None:
    offload = GradOffload(device, 16)
    target = torch.empty(4)
    offload.copy_out(torch.ones(4), target)
    offload.copy_out(torch.ones(4), target)


def gradient_that_lands(device: Stuck) -> None:
    registry = GradRegistry(None, grad_offload=GradOffload(device, 1 << 20))
    accumulator = registry.add("w", torch.Size([4]), torch.empty(4), CPU)
    accumulator.accumulate(torch.ones(4))
    accumulator.wait_d2h()


def sum_that_comes_back(device: Stuck) -> None:
    device.hangs = lambda out: out
    offload = GradOffload(device, 1 << 20)
    registry = GradRegistry(None, grad_offload=offload)
    accumulator = registry.add("w", torch.Size([4]), torch.empty(4), CPU)
    accumulator.accumulate(torch.ones(4))
    offload.backward_count += 1
    accumulator.prefetch_to_device(offload)
    accumulator.accumulate(torch.ones(4))


def window_of_a_unit(device: Stuck) -> None:
    windows = GradWindows([], device, lambda flat: flat.dtype)
    unit: Any = "unit"
    windows._due, windows._tickets = deque([unit]), {unit: [Hanging()]}
    windows.next(0)


def window_that_an_update_reads(device: Stuck) -> None:
    nothing: Any = None
    windows = GradWindows([], device, lambda flat: flat.dtype)
    windows._windows.append(_Window(nothing, 0, 4, Hanging()))
    windows._free_start(4)


def buffer_that_is_written_back(device: Stuck) -> None:
    buffer = _DeviceBuffer(torch.empty(1), device)
    buffer.stored = Hanging()
    buffer.wait()


def chunk_that_is_fetched(device: Stuck) -> None:
    nothing: Any = None
    update = DeviceUpdate(store=nothing, executor=nothing, device=device)
    update._update_chunk(nothing, nothing, JointTicket([Hanging()]), in_place=False)


def activation_on_its_way_out(device: Stuck) -> None:
    slab: Any = None
    stored = StoredInHostMemory(4, Hanging(), slab=slab)
    nothing: Any = None
    HostActivationStore(device).fetch(stored, 0, nothing)


@pytest.mark.parametrize(
    "waits",
    [
        room_for_a_gradient,
        gradient_that_lands,
        sum_that_comes_back,
        window_of_a_unit,
        window_that_an_update_reads,
        buffer_that_is_written_back,
        chunk_that_is_fetched,
        activation_on_its_way_out,
    ],
    ids=lambda function: function.__name__,
)
def test_a_copy_that_never_ends_is_given_up_when_a_rank_has_failed(
    waits: Callable[[Stuck], None],
) -> None:
    device = Stuck()
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        waits(device)
    assert device.asked == SLICES


def test_the_check_is_given_where_the_device_is_opened() -> None:
    def fails() -> None:
        raise RankFailed("rank 1 has ended", rank=1)

    with pytest.raises(RankFailed):
        open_device(CPU, check=fails).wait_filled(Hanging())
