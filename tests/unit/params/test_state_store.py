"""States at rest, on every executor: stored values can be read back, and format changes keep
parameters."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi.records import GradSection, Master, Moments
from infinity._src.memory.flat_layout import CHUNK_NUMEL, plan_flat
from infinity._src.memory.swap_space import SwapSpace
from infinity._src.params import state_store
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity.aio import Fault, Format, PoolSpec, Priority, Seam, open_executor
from infinity.aio import _memory_limits as memory_limits
from infinity.errors import AioError

LARGE_BYTES = CHUNK_NUMEL * 14
NUMELS = (CHUNK_NUMEL + 5000, 77, 12_345)


def make_flat(unit: Unit, index: int, dtype: torch.dtype) -> Flat:
    layout = plan_flat(NUMELS, dtype.itemsize)
    return Flat(unit, index, dtype, True, layout, torch.empty(0, dtype=dtype))


@contextmanager
def make_store(
    directory: Path, backend: str, *, generations: int = 1, seam: Seam | None = None
) -> Iterator[StateStore]:
    space = SwapSpace([directory])
    executor = open_executor(
        space.files,
        small=PoolSpec(4, CHUNK_NUMEL * 4),
        large=PoolSpec(2, LARGE_BYTES),
        backend=backend,
        seam=seam,
    )
    store = StateStore(executor, space, sums_on=True, generations=generations)
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
        "places": space._extents[0].used_bytes(0) - store.spare_bytes,
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
    monkeypatch.setattr(state_store, "DEFINED_TOGETHER", 1)
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


def test_the_executor_gets_the_chunks_of_many_flats_in_one_call(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "DEFINED_TOGETHER", 3)
    real, calls = store._executor.define, []

    def counted(chunks: Any) -> Any:
        calls.append(len(chunks))
        return real(chunks)

    monkeypatch.setattr(store._executor, "define", counted)
    flats = [make_flat(Unit(0, "u", ()), index, torch.bfloat16) for index in range(4)]
    count = len(flats[0].layout.chunks)
    values = [torch.randn(flat.layout.shard_numel).bfloat16() for flat in flats]
    store.create(flats, [[1] * count for _ in flats])
    assert calls == [3 * count, count]
    for flat, value in zip(flats, values, strict=True):
        store.store(flat, 0, value.data_ptr()).wait()
    for flat, value in zip(flats, values, strict=True):
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), value)


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


# -- space for later states ------------------------------------------------------------------------


def moved(store: StateStore) -> int:
    return sum(drive.bytes_read + drive.bytes_written for drive in store._executor.stats().drives)


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize("grad", [GradSection.NONE, GradSection.BF16])
def test_states_that_were_planned_for_move_nothing_when_they_come(
    tmp_path: Path, generations: int, grad: GradSection
) -> None:
    state_format = Format.SPLIT.with_grad(grad)
    with make_store(tmp_path, "threads", generations=generations) as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        masks = [[(1 << len(state_format.sections)) - 1] * len(flat.layout.chunks)]
        values = torch.randn(flat.layout.shard_numel).bfloat16()
        store.create([flat], masks, [state_format])
        store.store(flat, 0, values.data_ptr()).wait()
        before, bytes_before = held_by(store), moved(store)
        store.convert([flat], [state_format], masks)
        assert (held_by(store), moved(store)) == (before, bytes_before)
        assert store.nvme_bytes == before["places"]
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)
        for section, dtype in ((1, torch.int16), (2, torch.float32), (3, torch.float32)):
            assert not fetched(store, flat, section, dtype).any()


def test_fewer_states_than_planned_give_the_room_of_the_others_back(tmp_path: Path) -> None:
    fewer = Format(Master.SPLIT, Moments.FP32, 0)
    with make_store(tmp_path, "threads") as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        count = len(flat.layout.chunks)
        values = torch.randn(flat.layout.shard_numel).bfloat16()
        store.create([flat], [[0b1111] * count], [Format.SPLIT])
        store.store(flat, 0, values.data_ptr()).wait()
        space = store._space
        assert space is not None
        spares = store.spare_bytes // 512
        blocks = os.fstat(space.files[0].fd).st_blocks - spares
        store.convert([flat], [fewer], [[0b11] * count])
        assert store.nvme_bytes == 4 * sum(numel for numel in padded(flat))
        # 8 of 12 bytes per element are free again, also for other flats.
        assert os.fstat(space.files[0].fd).st_blocks - spares <= blocks // 2
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)
        # They are reused, together with the space behind them.
        store.convert([flat], [Format.SPLIT], [[0b1111] * count])
        assert store.nvme_bytes == 12 * sum(numel for numel in padded(flat))
        assert os.fstat(space.files[0].fd).st_blocks * 512 >= store.nvme_bytes
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)


def padded(flat: Flat) -> list[int]:
    """Elements of the chunks, whose sections of 2 and 4 bytes are whole blocks."""
    numels = [int(numel) for numel in flat.layout.chunks.numels]
    assert all(2 * numel % 4096 == 0 for numel in numels)
    return numels


MASKS = st.integers(0, 0b1111)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    planned=st.sampled_from([None, Format.SPLIT, Format(Master.SPLIT, Moments.FP32, 1)]),
    moments=st.integers(0, 2),
    masks=st.lists(MASKS, min_size=4, max_size=4),
    generations=st.integers(1, 2),
    late=st.booleans(),
)
def test_whatever_was_planned_the_parameter_stays_and_the_rest_begins_as_zeros(
    tmp_path_factory: pytest.TempPathFactory,
    planned: Format | None,
    moments: int,
    masks: list[int],
    generations: int,
    late: bool,
) -> None:
    now = Format(Master.SPLIT, Moments.FP32, moments)
    everything = (1 << len(now.sections)) - 1
    with make_store(tmp_path_factory.mktemp("s"), "threads", generations=generations) as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        count = len(flat.layout.chunks)
        values = torch.randn(flat.layout.shard_numel).bfloat16()
        store.create([flat], [masks[:count]], None if planned is None else [planned])
        store.store(flat, 0, values.data_ptr()).wait()
        if late:  # as a commit of a durable run does
            store.commit_named_places()
        store.convert([flat], [now], [[mask & everything for mask in masks[2 : 2 + count]]])
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)
        for section, kind in list(enumerate(now.sections))[1:]:
            dtype = {2: torch.int16, 4: torch.float32}[kind.itemsize]
            assert not fetched(store, flat, section, dtype).any()
        space = store._space
        assert space is not None
        held = space._extents[0].used_bytes(0) - store.spare_bytes
        assert store.nvme_bytes == held - sum(place.size_bytes for place in store._dropped)
        # Each place belongs to one chunk.
        places = sorted((place.offset, place.size_bytes) for place in store[flat].places)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))


def test_a_conversion_that_fails_leaves_a_parameter_that_shares_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_store(tmp_path, "threads") as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        count = len(flat.layout.chunks)
        values = torch.randn(flat.layout.shard_numel).bfloat16()
        store.create([flat], [[0b1111] * count], [Format.SPLIT])
        store.store(flat, 0, values.data_ptr()).wait()
        before = held_by(store)

        def fails(*_args: object) -> None:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(store, "_carry_over", fails)
            store.convert([flat], [Format.SPLIT], [[0b1111] * count])
        assert held_by(store) == before
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)
        store.convert([flat], [Format.SPLIT], [[0b1111] * count])
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_parameter_whose_write_failed_is_not_lost_to_a_conversion(
    tmp_path: Path, persistent: bool
) -> None:
    """The only copy is in a slot of the chunk that the conversion replaces; another refused write
    has left its chunk without a value."""
    seam = Seam(fault=Fault("write", 0, errno=5, persistent=persistent, lasting=True))
    with make_store(tmp_path, "threads", seam=seam) as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        count = len(flat.layout.chunks)
        values = torch.randn(flat.layout.shard_numel).bfloat16()
        store.create([flat], [[0b1111] * count], [Format.SPLIT])
        with pytest.raises(AioError):
            store.store(flat, 0, values.data_ptr()).wait()
        masks = [[0b1111] * count]
        if persistent:  # repair is impossible, and nothing has changed
            with pytest.raises(AioError):
                store.convert([flat], [Format.SPLIT], masks)
            assert store[flat].format is Format.RAW
            return
        refused = (store._executor.invalid(store[flat].ids) & 1).astype(bool)
        if refused.any():
            with pytest.raises(AioError):
                store.convert([flat], [Format.SPLIT], masks)
            store.store(flat, 0, values.data_ptr()).wait()
        store.convert([flat], [Format.SPLIT], masks)
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)


def test_room_for_states_that_a_commit_makes_useless_is_given_back_first(tmp_path: Path) -> None:
    with make_store(tmp_path, "threads", generations=2) as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        count = len(flat.layout.chunks)
        values = torch.randn(flat.layout.shard_numel).bfloat16()
        store.create([flat], [[0b1111] * count], [Format.SPLIT])
        store.store(flat, 0, values.data_ptr()).wait()
        store.commit_named_places()
        store.convert([flat], [Format.SPLIT], [[0b1111] * count])
        space = store._space
        assert space is not None
        # 2 bytes that the commit names, and what it does not need, beside 24 of both generations.
        numel = sum(padded(flat))
        assert space._extents[0].used_bytes(0) - store.spare_bytes <= (24 + 2 + 12) * numel
        assert torch.equal(fetched(store, flat, 0, torch.bfloat16), values)
        store.commit_named_places()
        held = space._extents[0].used_bytes(0) - store.spare_bytes
        assert store.nvme_bytes == held == 24 * numel
