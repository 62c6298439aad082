"""Gradients on their way from a device: what they hold up, and when their memory is free again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity._src.memory.device import Device, GradOffload, compute_device
from infinity.aio import Slab
from infinity.errors import DeviceCopyError
from tests.device import simulated
from tests.simulated import Simulated
from tests.unit.aio.rig import BACKENDS, Rig


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, Simulated]]:
    """A device that is attached to an executor."""
    rig = Rig(tmp_path, BACKENDS[0])
    with simulated(monkeypatch, delay_us=3000) as simulation:
        device = Device(torch.device("cpu"), simulation.driver())
        device.attach(rig.executor)
        yield device, simulation
        rig.close()
        device.close()
        assert simulation.live() == (0, 0, 0)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(numels=st.lists(st.integers(1, 5000), min_size=1, max_size=12), room=st.integers(0, 20_000))
def test_no_more_is_on_its_way_than_there_is_room_for(
    there: tuple[Device, Simulated], numels: list[int], room: int
) -> None:
    device, simulation = there
    slab = Slab(4 * sum(numels))
    device.pin(slab)
    memory: Any = torch.from_numpy(slab.array("float32"))
    leaving = GradOffload(device, room)
    at, sent = 0, []
    for numel in numels:
        source = torch.randn(numel)
        sent.append((leaving.copy_out(source, memory[at : at + numel]), source.clone(), at))
        del source  # from here on its memory is the allocator's as soon as `leaving` lets go
        at += numel
    assert leaving.bytes_peak <= max(room, 4 * max(numels))
    for ticket, value, start in sent:
        ticket.wait_filled(20)
        assert torch.equal(memory[start : start + value.numel()], value)
    leaving.free_done()
    assert leaving.leaving_bytes == 0
    leaving.close()
    assert simulation.races() == []
    del memory
    device.unpin(slab)
    slab.close()


def test_memory_that_cannot_be_pinned_is_a_typed_error(there: tuple[Device, Simulated]) -> None:
    device, _ = there
    slab = Slab(1 << 20)
    device.pin(slab)
    with pytest.raises(DeviceCopyError, match="712"):
        device.pin(slab)
    device.unpin(slab)
    device.unpin(slab)  # nothing to do
    slab.close()


def test_where_a_model_computes() -> None:
    model = torch.nn.Linear(2, 2)
    assert compute_device(model, None) == torch.device("cpu")
    assert compute_device(model.to("meta"), None) == torch.device("cpu")
    assert compute_device(model, "cpu") == torch.device("cpu")
    two = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert compute_device(two, None) == torch.device("cpu")
