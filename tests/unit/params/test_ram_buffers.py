"""Buffers with one tensor for each flat."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from infinity._src.memory import constants
from infinity._src.memory import device as memory_device
from infinity._src.params.ram_buffers import ALIGN_BYTES, FlatBuffers, flat_bytes
from infinity.aio import Slab


@dataclasses.dataclass(eq=False)
class FakeFlat:
    numel: int
    dtype: torch.dtype


class FakeDevice:
    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.refuses = False

    def pin(self, slab: Slab) -> None:
        if self.refuses:
            raise RuntimeError("cannot pin")
        self.pinned.append(slab.address)

    def pin_all(self, slabs: list[Slab], *, shown: bool) -> None:
        for slab in slabs:
            self.pin(slab)

    def unpin(self, slab: Slab) -> None:
        if slab.address in self.pinned:
            self.pinned.remove(slab.address)


def buffers(device: Any = None) -> FlatBuffers:
    return FlatBuffers(lambda flat: flat.numel, lambda flat: flat.dtype, device)  # type: ignore[attr-defined]


def test_tensors_have_their_size_dtype_and_alignment_and_do_not_overlap() -> None:
    flats: list[Any] = [
        FakeFlat(3, torch.bfloat16),
        FakeFlat(100, torch.float32),
        FakeFlat(1, torch.float64),
    ]
    pool = buffers()
    assert pool.allocate(flats) == flats
    for value, flat in enumerate(flats):
        assert pool[flat].shape == (flat.numel,)
        assert pool[flat].dtype is flat.dtype
        assert pool[flat].data_ptr() % ALIGN_BYTES == 0
        pool[flat].fill_(value)
    for value, flat in enumerate(flats):
        assert bool((pool[flat] == value).all())
    assert (
        pool.size_bytes
        == sum(flat_bytes(flat.numel, flat.dtype) for flat in flats)
        == 64 + 448 + 64
    )
    pool.close()
    assert pool.size_bytes == 0
    assert not any(flat in pool for flat in flats)


def test_what_has_memory_keeps_it_and_its_contents() -> None:
    first: Any = FakeFlat(8, torch.float32)
    second: Any = FakeFlat(8, torch.float32)
    pool = buffers()
    pool.allocate([first])
    pool[first].fill_(7)
    address = pool[first].data_ptr()
    assert pool.allocate([first, second]) == [second]
    assert pool[first].data_ptr() == address
    assert pool[first].tolist() == [7.0] * 8
    assert pool.allocate([first, second]) == []
    assert pool.get(second) is not None
    assert pool.get(second) is pool[second]
    pool.close()
    assert pool.get(first) is None


def test_nothing_is_allocated_for_no_bytes() -> None:
    empty: Any = FakeFlat(0, torch.float32)
    pool = buffers()
    assert pool.allocate([empty]) == []
    assert pool.size_bytes == 0
    assert empty not in pool


def test_a_view_keeps_the_memory_mapped_after_close() -> None:
    flat: Any = FakeFlat(1000, torch.float32)
    pool = buffers()
    pool.allocate([flat])
    view = pool[flat]
    view.fill_(3)
    pool.close()
    assert view.sum().item() == 3000.0


def test_slabs_are_pinned_while_they_live() -> None:
    device = FakeDevice()
    pool = buffers(device)
    pool.allocate([FakeFlat(8, torch.float32)])  # type: ignore[list-item]
    pool.allocate([FakeFlat(8, torch.float32)])  # type: ignore[list-item]
    assert len(device.pinned) == 2
    pool.close()
    assert not device.pinned


def test_what_is_more_than_a_slab_takes_lies_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "SLAB_BYTES_MAX", 256)
    device = FakeDevice()
    pool = buffers(device)
    flats: list[Any] = [FakeFlat(numel, torch.float32) for numel in (32, 32, 100, 8, 64)]
    pool.allocate(flats)
    # 128 + 128, then 400 alone, then 64, and 256 that no longer fit beside it.
    assert len(device.pinned) == 4
    assert pool.size_bytes == sum(pool.bytes_of(flat) for flat in flats)
    for value, flat in enumerate(flats):
        pool[flat].fill_(value)
    assert all(bool((pool[flat] == value).all()) for value, flat in enumerate(flats))
    pool.close()
    assert not device.pinned


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_that_there_is_not_for_all_slabs_is_taken_for_none(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "SLAB_BYTES_MAX", 64)
    made: list[Any] = []

    def slab(size_bytes: int, *, progress: Any) -> Slab:
        if len(made) == failing:
            raise MemoryError("no memory")
        made.append(Slab(size_bytes, progress=progress))
        return made[-1]

    monkeypatch.setattr(memory_device, "Slab", slab)
    pool = buffers()
    flats: list[Any] = [FakeFlat(16, torch.float32) for _ in range(2)]
    with pytest.raises(MemoryError):
        pool.allocate(flats)
    assert not any(flat in pool for flat in flats)
    assert pool.size_bytes == 0
    assert all(each._closed for each in made)


def test_memory_that_cannot_be_pinned_is_freed_by_close() -> None:
    device = FakeDevice()
    device.refuses = True
    pool = buffers(device)
    flat: Any = FakeFlat(8, torch.float32)
    with pytest.raises(RuntimeError, match="cannot pin"):
        pool.allocate([flat])
    assert flat not in pool
    assert pool.size_bytes > 0
    pool.close()
    assert pool.size_bytes == 0
