"""Boundary activations in pinned memory: slabs that are used again, whatever the batch's length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity._src.hooks.activation_store import HostActivationStore, slab_bytes
from infinity._src.memory.device import Device
from infinity.aio import Priority, Slab
from tests.device import simulated
from tests.unit.aio.rig import BACKENDS, Rig

CALLS = 3
LONGEST = 9 << 20


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    rig = Rig(tmp_path_factory.mktemp("rig"), BACKENDS[0])
    with pytest.MonkeyPatch.context() as patch, simulated(patch, delay_us=0) as simulation:
        device = Device(torch.device("cpu"), simulation.driver())
        device.attach(rig.executor)
        yield device
        rig.close()
        device.close()


def step(store: HostActivationStore, source: torch.Tensor, size_bytes: int) -> None:
    """A forward that stores, and a backward that fetches and frees."""
    stored = [store.store(source[call].data_ptr(), size_bytes) for call in range(CALLS)]
    for call, one in reversed(list(enumerate(stored))):
        there = torch.zeros(size_bytes, dtype=torch.uint8)
        store.fetch(one, there.data_ptr(), Priority.DEMAND).wait()
        assert torch.equal(there, source[call, :size_bytes])
        store.free(one)
    store.wait_all()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.integers(1, LONGEST), min_size=1, max_size=8))
def test_nothing_is_pinned_once_the_longest_batch_was_seen(
    device: Device, sizes: list[int]
) -> None:
    pinned: list[int] = []
    pin = Device.pin

    def counting(self: Device, slab: Slab) -> None:
        pinned.append(slab.size_bytes)
        pin(self, slab)

    store = HostActivationStore(device)
    source = torch.randint(256, (CALLS, LONGEST), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "pin", counting)
        for size in sizes:
            step(store, source, size)
        assert store.rest_bytes_peak <= CALLS * slab_bytes(max(sizes))
        step(store, source, max(sizes))
        before = len(pinned)
        for size in sizes:
            step(store, source, size)
        assert len(pinned) == before, "a length that was seen before pins memory again"
    store.close()
    assert store._rest_bytes == 0


@given(size=st.integers(1, 1 << 40))
def test_slabs_are_an_eighth_larger_at_most_or_2_mib(size: int) -> None:
    assert size <= slab_bytes(size) <= size + max(size // 8, 2 << 20)
    assert slab_bytes(slab_bytes(size)) == slab_bytes(size)
