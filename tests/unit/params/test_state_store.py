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
def make_rest(directory: Path, backend: str) -> Iterator[StateStore]:
    space = SwapSpace([directory])
    executor = open_executor(
        space.files,
        small=PoolSpec(4, CHUNK_NUMEL * 4),
        large=PoolSpec(2, LARGE_BYTES),
        backend=backend,
    )
    rest = StateStore(executor, space, sums_on=True)
    try:
        yield rest
    finally:
        executor.close()
        rest.close()
        space.close()


@pytest.fixture(params=["io_uring", "threads"])
def rest(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    with make_rest(tmp_path, request.param) as made:
        yield made


def fetched(rest: StateStore, flat: Flat, section: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((flat.layout.shard_numel,), 7, dtype=dtype)
    rest.fetch(flat, section, out.data_ptr(), priority=Priority.DEMAND).wait()
    return out


@pytest.mark.parametrize("mask_before", [0, 1])
@pytest.mark.parametrize("mask_after", [0, 0b1111, 0b1110, 0b0001])
def test_a_parameter_survives_every_change_of_place_and_format(
    rest: StateStore, mask_before: int, mask_after: int
) -> None:
    unit = Unit(0, "u", ())
    flat = make_flat(unit, 0, torch.bfloat16)
    chunks = len(flat.layout.chunks)
    values = torch.randn(flat.layout.shard_numel).bfloat16()
    rest.create([flat], [[mask_before] * chunks])
    rest.store(flat, 0, values.data_ptr()).wait()
    rest.convert([flat], [Format.SPLIT], [[mask_after] * chunks])
    assert torch.equal(
        fetched(rest, flat, 0, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )
    for section, dtype in ((1, torch.int16), (2, torch.float32), (3, torch.float32)):
        assert not fetched(rest, flat, section, dtype).any()


def test_overwriting_some_elements_leaves_the_others_and_resets_their_master(
    rest: StateStore,
) -> None:
    flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
    chunks = len(flat.layout.chunks)
    values = torch.randn(flat.layout.shard_numel).bfloat16()
    rest.create([flat], [[1] * chunks])
    rest.store(flat, 0, values.data_ptr()).wait()
    rest.convert([flat], [Format.SPLIT], [[0b1111] * chunks])
    low = torch.randint(-30000, 30000, (flat.layout.shard_numel,), dtype=torch.int16)
    rest.store(flat, 1, low.data_ptr()).wait()
    start = CHUNK_NUMEL - 100
    new = torch.randn(3000).bfloat16()
    new[:7] = values[start : start + 7]  # what stays keeps its master
    changed = new != values[start : start + 3000]
    rest.overwrite(flat, start, new)
    values[start : start + 3000] = new
    low[start : start + 3000][changed] = 0
    assert low[start : start + 7].any()
    assert torch.equal(
        fetched(rest, flat, 0, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )
    assert torch.equal(fetched(rest, flat, 1, torch.int16), low)


def held_by(rest: StateStore) -> dict[str, object]:
    space = rest._space
    assert space is not None
    return {
        "places": space._extents[0].used_bytes(0),
        "file": space.size_bytes,
        "counted on NVMe": rest.nvme_bytes,
        "counted in RAM": rest.resident_bytes,
        "slabs": len(rest._slabs),
        "chunks": rest._executor.stats().extra.get("chunks_live"),
    }


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_define_that_fails_leaves_nothing_reserved(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_rest(tmp_path, backend) as rest:
        unit = Unit(0, "u", ())
        flats = [make_flat(unit, 0, torch.bfloat16), make_flat(unit, 1, torch.float32)]
        # A chunk of each is resident, so that a slab is made as well.
        masks = [[0] + [1] * (len(flat.layout.chunks) - 1) for flat in flats]
        real, calls = rest._executor.define, []

        def no_memory_for_the_second(chunks: Any) -> Any:
            calls.append(len(chunks))
            if len(calls) % 2 == 0:
                raise MemoryError("no memory for chunks")
            return real(chunks)

        monkeypatch.setattr(rest._executor, "define", no_memory_for_the_second)
        before = held_by(rest)
        with pytest.raises(MemoryError):
            rest.create(flats, masks)
        assert len(calls) == 2
        assert held_by(rest) == before
        monkeypatch.setattr(rest._executor, "define", real)
        rest.create(flats, masks)
        values = torch.randn(flats[0].layout.shard_numel).bfloat16()
        rest.store(flats[0], 0, values.data_ptr()).wait()
        before = held_by(rest)
        monkeypatch.setattr(rest._executor, "define", no_memory_for_the_second)
        with pytest.raises(MemoryError):
            rest.convert(
                flats, [Format.SPLIT, Format.RAW], [[0b1111] * len(masks[0]), [0] * len(masks[1])]
            )
        assert held_by(rest) == before
        assert torch.equal(fetched(rest, flats[0], 0, torch.bfloat16), values)


def test_a_slab_for_which_there_is_no_memory_leaves_nothing_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_rest(tmp_path, "threads") as rest:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        before = held_by(rest)
        with monkeypatch.context() as patch:
            limit = memory_limits.CgroupLimit("/a/container", 1 << 30, (1 << 30) - 4096)
            patch.setattr(memory_limits, "cgroup_limits", lambda: [limit])
            with pytest.raises(MemoryError, match="/a/container"):
                rest.create([flat], [[0] + [1] * (len(flat.layout.chunks) - 1)])
        assert held_by(rest) == before
        rest.create([flat], [[0] + [1] * (len(flat.layout.chunks) - 1)])
