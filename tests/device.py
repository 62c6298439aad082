"""Trainings whose model computes on a simulated device: its memory is ordinary, but the engine
takes it for a GPU's.

What computes is announced to the simulation as kernels: the reads of a gathered unit when it is
demanded and when its use ends, a fresh gradient when it is accumulated, and memory that the
allocator gets back when something writes there again. Gradients may also come late for real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from infinity._src.engine import build
from infinity._src.memory import device as module
from infinity._src.memory.device import Device, GradOffload
from infinity._src.params.unit import Unit
from infinity._src.params.unshard import Unsharder
from tests.simulated import Simulated


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def simulated(
    monkeypatch: pytest.MonkeyPatch, *, seed: int = 0, delay_us: int = 2000, late_us: int = 0
) -> Iterator[Simulated]:
    """Models offloaded inside compute on a simulated device. Fails at the end if there was a race.

    late_us: delay of each gradient after backward has returned it, as by a GPU's kernel; a copy
    that does not wait for this kernel copies other bytes.
    """
    device = Simulated(seed=seed, delay_us=delay_us)
    demand, idle, copy, free = Unsharder.unshard, Unsharder.release, Device.copy, GradOffload._free
    copy_out = GradOffload.copy_out
    if late_us:
        device.late(late_us)

    def reads(unit: Unit, what: str) -> None:
        for flat in unit.flats:
            device.kernel(*_bytes_of(flat.tensor), writes=False, what=what)

    def demanded(self: Unsharder, unit: Unit) -> None:
        demand(self, unit)
        reads(unit, "the first kernel of a use")

    def idled(self: Unsharder, unit: Unit) -> None:
        reads(unit, "the last kernel of a use")
        idle(self, unit)

    def copied(self: Device, to: int, source: int, size_bytes: int, *, out: bool) -> Any:
        if not out:
            device.kernel(
                source, size_bytes, writes=True, what="the kernel that makes what is copied out"
            )
        return copy(self, to, source, size_bytes, out=out)

    def made_late(self: GradOffload, source: torch.Tensor, target: torch.Tensor) -> Any:
        # As `copy_out` flattens it, so that this memory is what it copies.
        source = source.detach().reshape(-1).contiguous()
        device.late_write(*_bytes_of(source), what="a late kernel that makes a gradient")
        return copy_out(self, source, target)

    def gone(self: GradOffload, source: torch.Tensor) -> None:
        free(self, source)
        device.kernel(
            *_bytes_of(source), writes=True, what="a kernel that reuses the memory of a gradient"
        )

    def opened(torch_device: torch.device, *, check: Callable[[], None]) -> Device:
        return Device(torch_device, device.driver(), check=check)

    monkeypatch.setattr(Unsharder, "unshard", demanded)
    monkeypatch.setattr(Unsharder, "release", idled)
    monkeypatch.setattr(module.Device, "copy", copied)
    monkeypatch.setattr(GradOffload, "_free", gone)
    if late_us:
        monkeypatch.setattr(GradOffload, "copy_out", made_late)
    monkeypatch.setattr(build, "open_device", opened)
    try:
        yield device
        assert device.races() == []
    finally:
        # A failed test may still hold them.
        device.hold_kernels(False)
        device.synchronise()
        monkeypatch.undo()
