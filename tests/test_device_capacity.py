"""Device memory is bounded in bytes: several small units fit at a time, or one huge unit."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.memory import device_capacity
from infinity._src.memory.device_capacity import (
    OVERLAP_BYTES_MAX,
    Passes,
    UnitBytes,
    blocks_of,
    capacity_bytes,
    fresh_capacity,
    gathered_capacity,
    regathered_bytes,
    retained_capacity,
)
from infinity._src.params.discover import check_gatherable, find_units
from infinity._src.params.unit import UNSHARDED
from infinity.aio import Seam
from tests import harness, models
from tests.device import simulated
from tests.distributed.ranks import on_ranks
from tests.harness import Training
from tests.marks import mostly_slow

CPU, MIB, GIB = torch.device("cpu"), 1 << 20, 1 << 30


# -- the bounds ------------------------------------------------------------------------------------


def test_of_small_units_there_is_room_for_two_ahead() -> None:
    units = [UnitBytes(400 * MIB, (300 * MIB, 100 * MIB))] * 32
    assert gathered_capacity(units, Passes()) == 3 * 400 * MIB
    assert fresh_capacity(units, Passes()) == 300 * MIB
    assert fresh_capacity(units, Passes(copies=True)) == (300 + 2 * 400) * MIB
    assert fresh_capacity(units, Passes(copies=True, several=True)) == 3 * 400 * MIB
    # Three units besides the one in backward would exceed 1 GiB.
    assert fresh_capacity(units, Passes(in_backward=True)) == (400 + 1024) * MIB
    assert gathered_capacity(units, Passes(whole=True)) == 32 * 400 * MIB


def test_a_huge_unit_has_its_neighbours_beside_it_and_no_multiple_of_itself() -> None:
    # As in a mixture of experts: attention, a router, all experts of a layer.
    layer = [UnitBytes(356 * MIB), UnitBytes(4 * MIB), UnitBytes(21 * GIB, (14 * GIB, 7 * GIB))]
    units = [*layer * 58, UnitBytes(2 * GIB)]
    assert gathered_capacity(units, Passes()) == 23 * GIB  # the head is a neighbour, too
    assert gathered_capacity(units[:-1], Passes()) == 22 * GIB
    # A tensor's gradient is copied while the next one is made.
    assert fresh_capacity(units, Passes(copies=True)) == 21 * GIB


def test_units_that_are_in_use_together_have_room_together() -> None:
    # A block is a unit, with three experts inside as units.
    units = [UnitBytes(100), *[UnitBytes(50, around=(0,))] * 3]
    assert gathered_capacity(units, Passes()) == 250  # everything
    assert gathered_capacity([*units, *[UnitBytes(60)] * 9], Passes()) == 100 + 50 + 2 * 100


SIZES = st.lists(st.integers(1, 3 * OVERLAP_BYTES_MAX), min_size=1, max_size=12)


@settings(max_examples=50)
@given(SIZES, st.integers(0, 4))
def test_the_room_holds_neighbours_and_is_no_more_than_it_must(
    sizes: list[int], count: int
) -> None:
    room, largest = capacity_bytes(sizes, count), max(sizes)
    assert largest <= room <= sum(sizes)
    for here, there in itertools.pairwise(sizes):
        assert here + there <= room
    assert room <= max(2 * largest, largest + min(count * largest, OVERLAP_BYTES_MAX))
    assert capacity_bytes(sizes[::-1], count) == room
    # `repeat` counts as that many units.
    assert capacity_bytes(sizes[:1], count, repeats=[5]) == capacity_bytes(sizes[:1] * 5, count)


def test_a_block_in_slices_counts_as_one_unit_where_the_device_has_room() -> None:
    # An embedding, and two blocks of four units, the first of which is around the other three.
    block = [UnitBytes(100, (60, 40)), *[UnitBytes(300, (300,), around=(1,))] * 3]
    units = [UnitBytes(50, (50,)), *block, *block]
    units[6:] = [dataclasses.replace(unit, around=(5,)) for unit in units[6:]]
    units = [dataclasses.replace(unit, block=(i + 3) // 4) for i, unit in enumerate(units)]
    assert [each.gathered for each in blocks_of(units)] == [50, 1000, 1000]
    assert [sum(each.grads) for each in blocks_of(units)] == [50, 1000, 1000]
    assert [each.around for each in blocks_of(units)] == [(), (), ()]
    assert gathered_capacity(units, Passes()) == 2050  # all: two more units fit besides one
    assert fresh_capacity(units, Passes()) == 300 + 1000
    assert regathered_bytes(units, Passes()) == 0
    # Single units: 300 besides 100, and two of 300.
    alone, fresh = 1000, fresh_capacity(units, Passes())
    none, some = (Passes(device_bytes=alone + fresh + 2 * spare) for spare in (0, 450))
    assert gathered_capacity(units, none) == alone
    assert retained_capacity(units, none) == {0: 50, 1: 1000, 2: 1000}, "one block fits"
    assert gathered_capacity(units, some) == alone + 450
    # A unit of 100 and one of 300, of a block of 2,000, stay gathered.
    large = [dataclasses.replace(unit, block=min(unit.block or 0, 1)) for unit in units]
    some = Passes(device_bytes=alone + fresh_capacity(large, Passes()) + 2 * 450)
    assert retained_capacity(large, some) == {0: 50, 1: 450}
    assert regathered_bytes(large, some) == 2000 - 400


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3 * OVERLAP_BYTES_MAX), min_size=1, max_size=12),
    per_block=st.integers(1, 5),
    device=st.one_of(st.none(), st.integers(0, 60 * OVERLAP_BYTES_MAX)),
    passes=st.builds(Passes, st.booleans(), st.booleans(), st.booleans()),
)
def test_what_stays_from_slice_to_slice_refuses_no_device_and_has_room(
    sizes: list[int], per_block: int, device: int | None, passes: Passes
) -> None:
    passes = dataclasses.replace(passes, device_bytes=device)
    units = [UnitBytes(size, (size,), block=i // per_block) for i, size in enumerate(sizes)]
    alone = gathered_capacity([dataclasses.replace(unit, block=None) for unit in units], passes)
    room, fresh = gathered_capacity(units, passes), fresh_capacity(units, passes)
    assert alone <= room <= sum(sizes)
    if device is not None and alone + fresh <= device:
        assert room + fresh <= device
    kept, again = retained_capacity(units, passes), regathered_bytes(units, passes)
    for block in blocks_of(units):
        assert block.block is not None
        inside = [unit.gathered for unit in units if unit.block == block.block]
        stay = min(kept[block.block], sum(inside))
        # The largest other unit is gathered besides the units that stay.
        assert stay + (max(inside) if stay < sum(inside) else 0) <= room
    assert (again == 0) == all(
        kept[block.block] >= block.gathered for block in blocks_of(units) if block.block is not None
    )
    if device is None:
        assert again == 0


def test_what_the_device_cannot_hold_is_refused_with_the_value_and_the_fix() -> None:
    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
    specs = find_units(model, units=["Linear"], unit_bytes_max=MIB)
    # Two units of 1 MiB gathered, and a gradient of one.
    check_gatherable(model, specs, MIB, CPU, 3 * MIB, Passes())
    with pytest.raises(
        ValueError,
        match=r"0.weight takes 1 MiB gathered whole: inf.tile_linears\(model, tiles=\d, .*"
        r"has 2.9 MiB; gathered parameters take up to 2 MiB of it, and fresh gradients 1 MiB",
    ):
        check_gatherable(model, specs, MIB, CPU, 3 * MIB - 100_000, Passes())
    # Gradients are copied to the host while the next ones are made.
    with pytest.raises(ValueError, match=r"fresh gradients 2 MiB"):
        check_gatherable(model, specs, MIB, CPU, 3 * MIB, Passes(copies=True))
    # Frozen parameters have no gradients.
    check_gatherable(
        model.requires_grad_(requires_grad=False), specs, MIB, CPU, 2 * MIB, Passes(copies=True)
    )
    with pytest.raises(ValueError, match=r"all parameters stay gathered, 2 MiB: use zero=3"):
        check_gatherable(model, specs, MIB, CPU, 2 * MIB - 1, Passes(whole=True))


def test_gradients_of_a_block_that_add_up_over_slices_are_refused_where_they_have_no_room() -> None:
    layers = (nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
    model = inf.microbatched(nn.Sequential(nn.Sequential(*layers)), 2, blocks=["0"])
    specs = find_units(model, units=["Linear"], unit_bytes_max=MIB)
    assert [spec.block for spec in specs] == [0, 0]
    # Two units of 1 MiB gathered, their gradients, and one being made.
    passes = Passes(device_bytes=5 * MIB)
    check_gatherable(model, specs, MIB, CPU, 5 * MIB, passes)
    with pytest.raises(ValueError, match=r"adds up .* block's last slice: name smaller modules"):
        check_gatherable(model, specs, MIB, CPU, 4 * MIB, passes)


# -- the engine ------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Layers of different sizes, applied in the caller's order."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8 * width) for width in widths)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x).view(-1, 8).mean(0, keepdim=True))
        return x.sum()


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@settings(max_examples=8, deadline=None)
@given(
    widths=st.lists(st.integers(1, 400), min_size=2, max_size=7),
    beside=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_what_is_gathered_never_exceeds_the_bound_and_every_unit_is_gathered(
    widths: list[int], beside: float, seed: int, drive: Path
) -> None:
    """Test any bound that holds the largest unit, and orders that deviate while reads are in
    flight."""
    torch.manual_seed(0)
    plain = Wide(widths)
    model = Wide(widths)
    model.load_state_dict(plain.state_dict())
    policy = inf.Policy(params="nvme", optim="nvme", nvme=drive, ram="min", units=["Linear"])
    offload(model, policy, _seam=Seam(delay_us_max=300, seed=seed))
    handle = inf.handle(model)
    sizes = [unit.size_bytes for unit in handle.units]
    bound = max(sizes) + int(beside * (sum(sizes) - max(sizes)))
    handle.unsharder.gathered_bytes_max = bound
    gathered = set()
    for unit in handle.units:
        unit.modules[0].register_forward_pre_hook(
            lambda *_, unit=unit: gathered.add(unit.index) if unit.state is UNSHARDED else None
        )
    rng = random.Random(seed)
    for _ in range(4):
        order = rng.sample(range(len(widths)), len(widths))
        if rng.random() < 0.5:
            order.sort()
        gathered.clear()
        x = torch.randn(1, 8, requires_grad=True)
        loss = model(x, order)
        assert gathered == set(order)
        loss.backward()
        assert torch.equal(loss, plain(x, order))
        assert handle.stats().gathered_bytes_peak <= bound
    handle.close()


# -- the same bits with any capacity ---------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every unit huge: almost nothing fits besides the unit in use."""
    monkeypatch.setattr(device_capacity, "OVERLAP_BYTES_MAX", 1000)


ONE = Training(models.llama, accumulation=1, max_norm=None, steps=3)
WAYS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "backward": {"update": "backward"},
    "speculating": {"update": "backward", "generations": 2},
}


@pytest.mark.parametrize("way", mostly_slow(list(WAYS), "deferred", "backward"))
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.usefixtures("little_room")
def test_units_that_go_one_by_one_keep_the_bits(
    way: str, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=tmp_path, ram="min", unit_bytes_max=8192, **WAYS[way]
    )
    if not copies:
        found = harness.offloaded(ONE, policy)
    else:
        with simulated(monkeypatch):
            found = harness.offloaded(ONE, policy)
    harness.assert_same(found, harness.reference(ONE))


@dataclasses.dataclass(frozen=True)
class Rooms:
    """Train on a rank with capacity for almost nothing besides a unit, then for all."""

    policy: dict[str, Any]

    def __call__(self, rank: int, directory: Path) -> list[harness.Run]:
        found, much = [], device_capacity.OVERLAP_BYTES_MAX
        try:
            for device_capacity.OVERLAP_BYTES_MAX in (1000, much):
                drive = directory / f"{rank}-{device_capacity.OVERLAP_BYTES_MAX}"
                drive.mkdir()
                policy = inf.Policy(
                    params="nvme",
                    optim="nvme",
                    nvme=drive,
                    ram="min",
                    unit_bytes_max=8192,
                    **self.policy,
                )
                found.append(harness.offloaded(ONE, policy))
        finally:
            device_capacity.OVERLAP_BYTES_MAX = much
        return found


@pytest.mark.ranks
@pytest.mark.parametrize("way", mostly_slow(["deferred", "backward"], "deferred"))
def test_units_that_go_one_by_one_between_ranks_keep_the_bits(way: str, tmp_path: Path) -> None:
    for little, much in on_ranks(Rooms(WAYS[way]), tmp_path / "run", 2):
        assert little.stats.gathered_bytes_peak < much.stats.gathered_bytes_peak
        harness.assert_same(little, much)
