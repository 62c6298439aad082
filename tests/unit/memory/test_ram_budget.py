"""The placement planner: pure, deterministic, never over budget, never slower for more RAM."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi.records import GradSection, Master, Moments
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.memory.ram_budget import (
    WINDOW_COUNT,
    FlatNeed,
    PlacementPlan,
    StepLoad,
    chunk_bytes,
    plan_placement,
    step_bytes,
    van_der_corput_order,
)
from infinity.aio import Format
from infinity.errors import BudgetError

TIERS = st.sampled_from(["device", "cpu", "nvme"])
FORMATS = (
    Format.RAW,
    Format.SPLIT,
    Format.FP32,
    Format(Master.SPLIT, Moments.BF16, 2),
    Format(Master.SPLIT8, Moments.Q8, 2),
    Format(Master.SPLIT, Moments.FP32, 1),
    Format(Master.FP16, Moments.FP32, 2),
)
RAM = st.one_of(st.integers(0, 400_000_000), st.integers(0, 20_000_000))
LOADS = st.builds(
    StepLoad,
    update=st.sampled_from(["deferred", "backward", "delayed"]),
    micro_batches=st.integers(1, 4),
    bandwidths=st.sampled_from([(1.0, 1.0), (6.8, 5.0), (3.5, 3.0), (1.0, 3.0)]),
)


def need(
    numel: int,
    params: str,
    optim: str,
    state_format: Format = Format.SPLIT,
    *,
    spills: bool = False,
    delayed: bool = False,
) -> FlatNeed:
    layout = plan_flat((numel,), 4 if state_format is Format.FP32 else 2)
    held = state_format is not Format.RAW
    grads = layout.shard_numel * 2 if held else 0
    return FlatNeed(
        layout,
        state_format,
        params,
        optim,
        grad_bytes=grads,
        delayed_params_bytes=grads if delayed else 0,
        spill_format=state_format.with_grad(GradSection.BF16) if spills and held else None,
        window_bytes=grads if spills else 0,
    )


def needs_of(spills: bool | None = None) -> st.SearchStrategy[list[FlatNeed]]:
    """Models of up to six flats; whether gradients may spill is drawn where `spills` is None."""
    return st.builds(
        lambda numels, params, optim, formats, delayed, able: [
            need(n, params, optim, f, spills=able if spills is None else spills, delayed=delayed)
            for n, f in zip(numels, formats, strict=False)
        ],
        st.lists(st.integers(1, 5_000_000), min_size=1, max_size=6),
        TIERS,
        TIERS,
        st.lists(st.sampled_from(FORMATS), min_size=6, max_size=6),
        st.booleans(),
        st.booleans(),
    )


NEEDS = needs_of()
RESIDENT = st.dictionaries(
    st.sampled_from(["params", "optim"]),
    st.one_of(st.floats(0.0, 1.0), st.integers(0, 60_000_000)),
    max_size=2,
)


def least_of(
    needs: list[FlatNeed],
    load: StepLoad | None = None,
    resident: dict[str, float | int] | None = None,
) -> int:
    """The smallest budget that works, as the error of one that does not says."""
    try:
        plan_placement(needs, 0, load=load or StepLoad(), resident=resident)
    except BudgetError as error:
        return int(str(error).split("works is ")[1].split(" bytes")[0])
    return 0


def seconds(needs: list[FlatNeed], plan: PlacementPlan, load: StepLoad) -> float:
    read, written = step_bytes(needs, plan, load)
    return read / load.bandwidths[0] + written / load.bandwidths[1]


@given(NEEDS, RAM, RESIDENT, LOADS)
def test_a_plan_never_holds_more_than_the_budget_and_is_deterministic(
    needs: list[FlatNeed], ram_bytes: int, resident: dict[str, float | int], load: StepLoad
) -> None:
    least = least_of(needs, load, resident)
    if ram_bytes < least:
        with pytest.raises(BudgetError):
            plan_placement(needs, ram_bytes, resident=resident, load=load)
        ram_bytes += least
    plan = plan_placement(needs, ram_bytes, resident=resident, load=load)
    assert plan.ram_bytes <= ram_bytes
    assert plan == plan_placement(list(needs), ram_bytes, resident=resident, load=load)


@given(needs_of(spills=False))
def test_without_spilling_the_least_is_what_min_holds(needs: list[FlatNeed]) -> None:
    plan = plan_placement(needs, None)
    assert plan.ram_bytes == plan.min_bytes
    assert plan_placement(needs, plan.min_bytes).ram_bytes <= plan.min_bytes
    assert not any(plan.spilled)


@given(NEEDS, RAM)
def test_every_byte_rests_somewhere_and_only_once(needs: list[FlatNeed], ram_bytes: int) -> None:
    plan = plan_placement(needs, ram_bytes + least_of(needs))
    total = sum(chunk_bytes(n, c, ~0) for n in needs for c in range(len(n.layout.chunks)))
    assert plan.resident_bytes + plan.nvme_bytes == total
    grads = sum(n.grad_bytes for n in needs)
    assert (
        plan.grad_bytes
        + sum(n.grad_bytes for n, gone in zip(needs, plan.spilled, strict=True) if gone)
        == grads
    )
    assert (plan.spilled_bytes > 0) == any(plan.spilled)


@settings(max_examples=150)
@given(NEEDS, RAM, st.one_of(st.integers(0, 100_000_000), st.integers(0, 2_000_000)), LOADS)
def test_more_ram_never_predicts_slower(
    needs: list[FlatNeed], ram_bytes: int, more: int, load: StepLoad
) -> None:
    least = least_of(needs, load)
    small = plan_placement(needs, least + ram_bytes, load=load)
    large = plan_placement(needs, least + ram_bytes + more, load=load)
    assert seconds(needs, large, load) <= seconds(needs, small, load) * (1 + 1e-9)
    assert large.spilled_bytes <= small.spilled_bytes


@given(NEEDS, RAM, st.integers(0, 50_000_000))
def test_what_more_ram_holds_includes_what_less_held(
    needs: list[FlatNeed], ram_bytes: int, more: int
) -> None:
    least = plan_placement(needs, None).min_bytes
    small = plan_placement(needs, least + ram_bytes)
    large = plan_placement(needs, least + ram_bytes + more)
    for before, after in zip(small.nvme_masks, large.nvme_masks, strict=True):
        assert all(was & now == now for was, now in zip(before, after, strict=True))


@given(NEEDS, RESIDENT, st.one_of(st.none(), RAM))
def test_resident_is_honoured_to_within_a_chunk(
    needs: list[FlatNeed], resident: dict[str, float | int], more: int | None
) -> None:
    least = plan_placement(needs, None, resident=resident)
    plan = (
        least if more is None else plan_placement(needs, least.min_bytes + more, resident=resident)
    )
    for kind, wanted in resident.items():
        total = held = granule = 0
        for each, row in zip(needs, plan.nvme_masks, strict=True):
            nvme = each.nvme_mask
            bits = sum(
                1 << s for s in range(len(each.sections)) if nvme >> s & 1 and each.kind(s) == kind
            )
            for chunk, mask in enumerate(row):
                size = chunk_bytes(each, chunk, bits)
                total, granule = total + size, max(granule, size)
                held += size - chunk_bytes(each, chunk, bits & mask)
        limit = wanted * total if isinstance(wanted, float) else min(wanted, total)
        assert held <= limit + 1e-6 * total
        assert held > limit - granule or held == total or not total


def test_resident_is_added_to_the_least_and_refused_where_it_does_not_fit() -> None:
    needs = [need(3_000_000, "nvme", "nvme") for _ in range(4)]
    plain, half = plan_placement(needs, None), plan_placement(needs, None, resident={"optim": 0.5})
    assert (
        half.min_bytes - plain.min_bytes
        == half.resident_bytes
        == pytest.approx(4 * 3_000_000 * 5, rel=0.1)
    )
    with pytest.raises(BudgetError, match="resident states"):
        plan_placement(needs, plain.min_bytes, resident={"optim": 0.5})
    roomy = plan_placement(needs, 1 << 30, resident={"optim": 0.0})
    # hi is in RAM; the policy excludes the other sections
    assert roomy.resident_bytes == 4 * needs[0].layout.shard_numel * 2
    none = plan_placement(needs, 1 << 30, resident={"optim": 0.0, "params": 0.0})
    assert none.resident_bytes == 0


def test_parameters_go_first_and_the_rest_of_a_chunk_stays_one_run() -> None:
    needs = [need(4_000_000, "nvme", "nvme") for _ in range(4)]
    least = plan_placement(needs, None)
    plan = plan_placement(needs, least.min_bytes + 4 * 4_000_000 * 2 + 5_000_000 * 4)
    assert all(not mask & 1 for row in plan.nvme_masks for mask in row)  # hi of every chunk
    # of the other sections all or none
    assert {mask for row in plan.nvme_masks for mask in row} == {0b1110, 0}


@given(st.integers(1, 300))
def test_any_prefix_of_the_order_is_spread_evenly(count: int) -> None:
    order = van_der_corput_order(count)
    assert sorted(order) == list(range(count))
    for taken in (count // 4, count // 2):
        if taken:
            places = sorted(order[:taken])
            gaps = [b - a for a, b in zip(places, [*places[1:], count], strict=True)]
            assert max(gaps) <= 4 * max(count // taken, 1)


def test_time_falls_linearly_and_no_stretch_is_left_out() -> None:
    needs = [need(393_216 * 4, "nvme", "nvme") for _ in range(32)]
    least = plan_placement(needs, None).min_bytes
    params = 32 * 4 * 393_216 * 2
    times = [
        seconds(needs, plan_placement(needs, least + params * k // 8), StepLoad()) for k in range(9)
    ]
    steps = [a - b for a, b in itertools.pairwise(times)]
    assert max(steps) <= min(steps) * 1.1
    half = plan_placement(needs, least + params // 2)
    per_flat = [sum(1 for mask in row if not mask & 1) for row in half.nvme_masks]
    assert set(per_flat) == {2}


def test_a_section_that_a_step_hardly_moves_gets_no_ram_before_all_fits() -> None:
    flat = need(5_000_000, "nvme", "nvme")
    needs = [flat, dataclasses.replace(flat, idle_mask=0b1000)]
    least, moment = least_of(needs), 4 * flat.layout.shard_numel
    plans = [plan_placement(needs, least + ram) for ram in (20_000_000, 40_000_000)]
    for plan in plans:
        assert all(mask & 0b1000 for mask in plan.nvme_masks[1])
        read, _ = step_bytes(needs, plan)
        others = [dataclasses.replace(each, idle_mask=0) for each in needs]
        assert step_bytes(others, plan)[0] == read + moment
    assert not all(mask & 0b1000 for mask in plans[1].nvme_masks[0])


def test_a_budget_that_holds_everything_uses_no_nvme_and_no_pools() -> None:
    needs = [need(3_000_000, "nvme", "nvme")]
    total = 3_000_000 * 14
    # also where the pools would not have fitted besides
    for ram_bytes in (1 << 30, total + 100_000):
        plan = plan_placement(needs, ram_bytes)
        assert plan.nvme_bytes == 0
        assert plan.pool_bytes == 0


def test_the_error_states_the_smallest_budget_that_works_and_it_does() -> None:
    for spills in (False, True):
        needs = [need(3_000_000, "nvme", "nvme", spills=spills) for _ in range(8)]
        with pytest.raises(
            BudgetError, match=r"smallest budget that works is (\d+) bytes"
        ) as caught:
            plan_placement(needs, 1000)
        least = least_of(needs)
        assert plan_placement(needs, least).ram_bytes <= least
        with pytest.raises(BudgetError):
            plan_placement(needs, least - 1)
        assert ("windows of spilled gradients" if spills else "gradients") in str(caught.value)
        assert "pools" in str(caught.value)


def test_gradients_spill_only_below_the_least_and_only_where_they_may() -> None:
    needs = [need(3_000_000, "nvme", "nvme", spills=True) for _ in range(8)]
    least = plan_placement(needs, None).min_bytes
    assert not any(plan_placement(needs, least).spilled)
    # three windows cost what three flats did
    assert sum(plan_placement(needs, least - 1).spilled) >= 4
    bottom = plan_placement(needs, least_of(needs))
    assert all(bottom.spilled)
    assert bottom.grad_bytes == 0
    assert bottom.staging_bytes == WINDOW_COUNT * needs[0].grad_bytes
    kept = [dataclasses.replace(each, spill_format=None) for each in needs]
    with pytest.raises(BudgetError):
        plan_placement(kept, least - 1)


def test_a_large_embedding_stays_in_ram_rather_than_making_every_window_large() -> None:
    needs = [need(40_000_000, "nvme", "nvme", spills=True)] + [
        need(1_000_000, "nvme", "nvme", spills=True) for _ in range(20)
    ]
    plan = plan_placement(needs, least_of(needs))
    assert not plan.spilled[0]
    assert all(plan.spilled[1:])


def test_the_spilled_set_may_be_given() -> None:
    needs = [need(3_000_000, "nvme", "nvme", spills=True) for _ in range(8)]
    flags = (True, *[False] * 7)
    assert plan_placement(needs, 1 << 30, spill=flags).spilled == flags


@given(needs_of(spills=False), st.integers(1, 4))
def test_every_drive_has_slots_of_its_own_within_the_budget(
    needs: list[FlatNeed], drives: int
) -> None:
    one, several = plan_placement(needs, None), plan_placement(needs, None, drive_count=drives)
    assert several.pool_bytes == drives * one.pool_bytes
    assert several.min_bytes - one.min_bytes == several.pool_bytes - one.pool_bytes


def test_the_bytes_of_a_step_are_those_of_the_design() -> None:
    numel = 393_216 * 4
    needs = [need(numel, "nvme", "nvme")]
    plan = plan_placement(needs, None)
    assert step_bytes(needs, plan) == (14 * numel, 12 * numel)
    assert step_bytes(needs, plan, StepLoad(micro_batches=8)) == ((14 + 4 * 7) * numel, 12 * numel)
    spilling = [need(numel, "nvme", "nvme", spills=True)]
    spilled = plan_placement(spilling, None, spill=(True,))
    assert step_bytes(spilling, spilled) == (16 * numel, 14 * numel)
    assert step_bytes(spilling, spilled, StepLoad(micro_batches=3)) == (
        (16 + 2 * 6) * numel,
        (14 + 4) * numel,
    )


