"""States at rest, on every executor: what is stored comes back, and formats change without losing
parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity._src.memory.layout import CHUNK_NUMEL, plan_flat
from infinity._src.memory.swap_space import SwapSpace
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity.aio import Format, PoolSpec, Priority, open_executor
from infinity.aio import _memory_limits as memory_limits

LARGE_BYTES = CHUNK_NUMEL * 12
NUMELS = (CHUNK_NUMEL + 5000, 77, 12_345)


def make_flat(unit: Unit, index: int, dtype: torch.dtype) -> Flat:
    layout = plan_flat(NUMELS, dtype.itemsize)
    return Flat(unit, index, dtype, True, layout, torch.empty(0, dtype=dtype))


@contextmanager
def make_store(directory: Path, backend: str) -> Iterator[StateStore]:
    space = SwapSpace([directory])
    executor = open_executor(
        space.files,
        small=PoolSpec(4, CHUNK_NUMEL * 4),
        large=PoolSpec(2, LARGE_BYTES),
        backend=backend,
    )
    store = StateStore(executor, space, sums_on=True)
    try:
        yield store
    finally:
        executor.close()
        store.close()
        space.close()


@pytest.fixture(params=["io_uring", "threads"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    with make_store(tmp_path, request.param) as made:
        yield made


def fetched(store: StateStore, flat: Flat, section: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((flat.layout.shard_numel,), 7, dtype=dtype)
    store.fetch(flat, section, out.data_ptr(), priority=Priority.DEMAND).wait()
    return out


@pytest.mark.parametrize("mask_before", [0, 1])
@pytest.mark.parametrize("mask_after", [0, 0b1111, 0b1110, 0b0001])
def test_a_parameter_survives_every_change_of_place_and_format(
    store: StateStore, mask_before: int, mask_after: int
) -> None:
    unit = Unit(0, "u", ())
    flat = make_flat(unit, 0, torch.bfloat16)
    chunks = len(flat.layout.chunks)
    values = torch.randn(flat.layout.shard_numel).bfloat16()
    store.create([flat], [[mask_before] * chunks])
    store.store(flat, 0, values.data_ptr()).wait()
    store.convert([flat], [Format.SPLIT], [[mask_after] * chunks])
    assert torch.equal(
        fetched(store, flat, 0, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )
    for section, dtype in ((1, torch.int16), (2, torch.float32), (3, torch.float32)):
        assert not fetched(store, flat, section, dtype).any()


def test_overwriting_some_elements_leaves_the_others_and_resets_their_master(
    store: StateStore,
) -> None:
    flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
    chunks = len(flat.layout.chunks)
    values = torch.randn(flat.layout.shard_numel).bfloat16()
    store.create([flat], [[1] * chunks])
    store.store(flat, 0, values.data_ptr()).wait()
    store.convert([flat], [Format.SPLIT], [[0b1111] * chunks])
    low = torch.randint(-30000, 30000, (flat.layout.shard_numel,), dtype=torch.int16)
    store.store(flat, 1, low.data_ptr()).wait()
    start = CHUNK_NUMEL - 100
    new = torch.randn(3000).bfloat16()
    new[:7] = values[start : start + 7]  # what stays keeps its master
    changed = new != values[start : start + 3000]
    store.overwrite(flat, start, new)
    values[start : start + 3000] = new
    low[start : start + 3000][changed] = 0
    assert low[start : start + 7].any()
    assert torch.equal(
        fetched(store, flat, 0, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )
    assert torch.equal(fetched(store, flat, 1, torch.int16), low)


def held_by(store: StateStore) -> dict[str, object]:
    space = store._space
    assert space is not None
    return {
        "places": space._extents[0].used_bytes(0),
        "file": space.size_bytes,
        "counted on NVMe": store.nvme_bytes,
        "counted in RAM": store.resident_bytes,
        "slabs": len(store._slabs),
        "chunks": store._executor.stats().extra.get("chunks_live"),
    }


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_define_that_fails_leaves_nothing_reserved(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_store(tmp_path, backend) as store:
        unit = Unit(0, "u", ())
        flats = [make_flat(unit, 0, torch.bfloat16), make_flat(unit, 1, torch.float32)]
        # A chunk of each is resident, so that a slab is made as well.
        masks = [[0] + [1] * (len(flat.layout.chunks) - 1) for flat in flats]
        real, calls = store._executor.define, []

        def no_memory_for_the_second(chunks: Any) -> Any:
            calls.append(len(chunks))
            if len(calls) % 2 == 0:
                raise MemoryError("no memory for chunks")
            return real(chunks)

        monkeypatch.setattr(store._executor, "define", no_memory_for_the_second)
        before = held_by(store)
        with pytest.raises(MemoryError):
            store.create(flats, masks)
        assert len(calls) == 2
        assert held_by(store) == before
        monkeypatch.setattr(store._executor, "define", real)
        store.create(flats, masks)
        values = torch.randn(flats[0].layout.shard_numel).bfloat16()
        store.store(flats[0], 0, values.data_ptr()).wait()
        before = held_by(store)
        monkeypatch.setattr(store._executor, "define", no_memory_for_the_second)
        with pytest.raises(MemoryError):
            store.convert(
                flats, [Format.SPLIT, Format.RAW], [[0b1111] * len(masks[0]), [0] * len(masks[1])]
            )
        assert held_by(store) == before
        assert torch.equal(fetched(store, flats[0], 0, torch.bfloat16), values)


def test_a_slab_for_which_there_is_no_memory_leaves_nothing_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_store(tmp_path, "threads") as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        before = held_by(store)
        with monkeypatch.context() as patch:
            limit = memory_limits.CgroupLimit("/a/container", 1 << 30, (1 << 30) - 4096)
            patch.setattr(memory_limits, "cgroup_limits", lambda: [limit])
            with pytest.raises(MemoryError, match="/a/container"):
                store.create([flat], [[0] + [1] * (len(flat.layout.chunks) - 1)])
        assert held_by(store) == before
        store.create([flat], [[0] + [1] * (len(flat.layout.chunks) - 1)])
