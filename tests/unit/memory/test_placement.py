"""The placement planner: pure, deterministic, never over budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.aio.plan import Format
from infinity.errors import BudgetError
from infinity.memory.layout import plan_flat
from infinity.memory.placement import FlatNeed, chunk_bytes, plan_placement

TIERS = st.sampled_from(["device", "cpu", "nvme"])


def need(numel: int, params: str, optim: str, state_format: Format = Format.SPLIT) -> FlatNeed:
    layout = plan_flat((numel,), 4 if state_format is Format.FP32 else 2)
    held = state_format is not Format.RAW
    return FlatNeed(layout, state_format, params, optim, layout.shard_numel * 2 if held else 0)


NEEDS = st.builds(
    lambda numels, params, optim, formats: [
        need(n, params, optim, f) for n, f in zip(numels, formats, strict=False)
    ],
    st.lists(st.integers(1, 5_000_000), min_size=1, max_size=6),
    TIERS,
    TIERS,
    st.lists(st.sampled_from(list(Format)), min_size=6, max_size=6),
)


@given(NEEDS, st.integers(0, 400_000_000))
def test_a_plan_never_holds_more_than_the_budget(needs: list[FlatNeed], ram_bytes: int) -> None:
    least = plan_placement(needs, None)
    if ram_bytes < least.min_bytes:
        with pytest.raises(BudgetError):
            plan_placement(needs, ram_bytes)
        return
    plan = plan_placement(needs, ram_bytes)
    assert plan.ram_bytes <= ram_bytes
    assert plan == plan_placement(needs, ram_bytes)


@given(NEEDS)
def test_every_byte_rests_somewhere_and_only_once(needs: list[FlatNeed]) -> None:
    plan = plan_placement(needs, None)
    total = sum(chunk_bytes(n, c, ~0) for n in needs for c in range(len(n.layout.chunks)))
    assert plan.resident_bytes + plan.nvme_bytes == total
    assert plan.ram_bytes == plan.min_bytes


@given(NEEDS, st.integers(0, 400_000_000), st.integers(0, 100_000_000))
def test_more_ram_never_moves_more_bytes_to_nvme_than_one_chunk(
    needs: list[FlatNeed], ram_bytes: int, more: int
) -> None:
    least = plan_placement(needs, None).min_bytes
    small = plan_placement(needs, least + ram_bytes)
    large = plan_placement(needs, least + ram_bytes + more)
    chunk_max = max(chunk_bytes(n, c, ~0) for n in needs for c in range(len(n.layout.chunks)))
    assert large.nvme_bytes <= small.nvme_bytes + chunk_max


def test_a_budget_that_holds_everything_uses_no_nvme_and_no_pools() -> None:
    needs = [need(3_000_000, "nvme", "nvme")]
    plan = plan_placement(needs, 1 << 30)
    assert plan.nvme_bytes == 0
    assert plan.pool_bytes == 0


def test_the_error_states_the_smallest_budget_that_works_and_it_does() -> None:
    needs = [need(3_000_000, "nvme", "nvme")]
    with pytest.raises(BudgetError, match=r"smallest budget that works is (\d+) bytes") as caught:
        plan_placement(needs, 1000)
    least = int(str(caught.value).split("works is ")[1].split(" bytes")[0])
    assert plan_placement(needs, least).ram_bytes <= least
    with pytest.raises(BudgetError):
        plan_placement(needs, least - 1)
    assert "gradients" in str(caught.value)
    assert "pinned pools" in str(caught.value)


@given(NEEDS, st.integers(0, 400_000_000), st.integers(1, 4))
def test_every_drive_has_slots_of_its_own_within_the_budget(
    needs: list[FlatNeed], ram_bytes: int, drives: int
) -> None:
    one, several = plan_placement(needs, None), plan_placement(needs, None, drive_count=drives)
    assert several.pool_bytes == drives * one.pool_bytes
    assert several.min_bytes - one.min_bytes == several.pool_bytes - one.pool_bytes
    if ram_bytes >= several.min_bytes:
        assert plan_placement(needs, ram_bytes, drive_count=drives).ram_bytes <= ram_bytes
