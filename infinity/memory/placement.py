"""What rests in RAM and what on NVMe, under one budget: pure arithmetic over sizes, no tensors.

    ram = pools + sums + gradients + what the chosen tiers keep in RAM + a static set of further chunks

The last term is what the budget leaves. A step scans all states once, and a cyclic scan defeats any recency rule, so
the set is fixed: chunks spread evenly over the model, which lets the bytes that move fall linearly with the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from infinity.aio.plan import Format, piece_count
from infinity.errors import BudgetError
from infinity.memory.layout import FlatLayout, sections_of
from infinity.sizes import format_size, round_up

# Slots for each drive: 8 chunks of states in flight, and 16 of parameters alone (see bench/README.md).
LARGE_COUNT = 8
SMALL_COUNT = 16


@dataclasses.dataclass(frozen=True)
class FlatNeed:
    """One flat as the planner sees it: its layout, its format, the tiers of its sections, its gradients.

    grad_bytes: bytes of this rank's gradients of the flat, 0 when no optimizer holds it.
    """

    layout: FlatLayout
    format: Format
    params_tier: str
    optim_tier: str
    grad_bytes: int = 0

    def tier(self, section: int) -> str:
        """The lowest tier of a section. States that rest on a device keep section 0 with the optimizer's states."""
        if section == 0 and self.params_tier != "device":
            return self.params_tier
        if self.format is Format.RAW:
            return "cpu"
        return self.optim_tier

    def nvme_mask(self) -> int:
        """The sections that may rest on NVMe, as bits."""
        count = len(sections_of(self.format, self.layout.itemsize))
        return sum(1 << index for index in range(count) if self.tier(index) == "nvme")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where everything rests. `nvme_masks[flat][chunk]` has a bit for each section on NVMe; the rest is resident."""

    nvme_masks: tuple[tuple[int, ...], ...]
    small_count: int
    small_bytes: int
    large_count: int
    large_bytes: int
    sums_bytes: int
    grad_bytes: int
    resident_bytes: int
    nvme_bytes: int
    scratch_bytes: int
    min_bytes: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pinned slots."""
        return self.small_count * self.small_bytes + self.large_count * self.large_bytes

    @property
    def ram_bytes(self) -> int:
        """Everything that this plan holds in RAM."""
        return self.pool_bytes + self.sums_bytes + self.grad_bytes + self.resident_bytes + self.scratch_bytes


def chunk_bytes(need: FlatNeed, chunk: int, mask: int) -> int:
    """Bytes of the sections in `mask` of one chunk."""
    numel = need.layout.chunks[chunk].numel
    sections = sections_of(need.format, need.layout.itemsize)
    return sum(numel * section.itemsize for index, section in enumerate(sections) if mask >> index & 1)


def plan_placement(
    needs: Sequence[FlatNeed],
    ram_bytes: int | None,
    *,
    drive_count: int = 1,
    scratch_bytes: int = 0,
    pools: tuple[int, int] | None = None,
    advice: str = "",
) -> Plan:
    """Place every chunk of `needs` under `ram_bytes` (None: the least that works); `scratch_bytes` is held besides.

    drive_count: NVMe drives; each wants slots of its own, or they would wait for each other.

    pools: the slot sizes (small, large) of pools that exist already; the plan counts them, and says if it wants larger.

    Raises: BudgetError stating the smallest budget that works and what takes it.
    """
    masks = [[need.nvme_mask()] * len(need.layout.chunks) for need in needs]
    slots = _slot_bytes(needs, masks)
    if pools is not None:
        slots = (max(slots[0], pools[0]), max(slots[1], pools[1]))
    counts = (SMALL_COUNT * max(drive_count, 1), LARGE_COUNT * max(drive_count, 1))
    fixed = _fixed_bytes(needs, masks, slots, counts) | {"scratch for norms": scratch_bytes}
    least = sum(fixed.values())
    if ram_bytes is not None and ram_bytes < least:
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in fixed.items() if size)
        raise BudgetError(
            f"ram={format_size(ram_bytes)} is too small: the smallest budget that works is {least} bytes "
            f"({format_size(least)}): {parts}. {advice}".rstrip()
        )
    if ram_bytes is not None:
        _keep_in_ram(needs, masks, ram_bytes - least)
    # Slots of the size that the tiers may need, whatever happens to be resident: another plan under the same budget
    # (an optimizer that holds fewer parameters) then finds room in the pools of this one.
    if not any(mask for row in masks for mask in row):
        slots = pools or (0, 0)
    return _finish(needs, masks, slots, counts, least, scratch_bytes)


def _fixed_bytes(
    needs: Sequence[FlatNeed], masks: list[list[int]], slots: tuple[int, int], counts: tuple[int, int]
) -> dict[str, int]:
    """What no budget can leave out, by name."""
    resident = sum(
        chunk_bytes(need, chunk, ~mask)
        for need, row in zip(needs, masks, strict=True)
        for chunk, mask in enumerate(row)
    )
    return {
        "pinned pools": sum(count * size for count, size in zip(counts, slots, strict=True)),
        "gradients": sum(need.grad_bytes for need in needs),
        "states that the chosen tiers keep in RAM": resident,
        "checksums": sum(_sums_bytes(need) for need in needs),
    }


def _slot_bytes(needs: Sequence[FlatNeed], masks: list[list[int]]) -> tuple[int, int]:
    """The slot sizes of the two pools: one parameter section of a chunk; all sections of a chunk. 0: not needed."""
    small = large = 0
    for need, row in zip(needs, masks, strict=True):
        for chunk, mask in enumerate(row):
            if mask & 1:
                small = max(small, chunk_bytes(need, chunk, 1))
            large = max(large, chunk_bytes(need, chunk, mask))
    if small == large:
        large = 0
    return round_up(small, 4096), round_up(large, 4096)


def _sums_bytes(need: FlatNeed) -> int:
    count = len(sections_of(need.format, need.layout.itemsize))
    return sum(4 * count * piece_count(span.numel) for span in need.layout.chunks)


def _keep_in_ram(needs: Sequence[FlatNeed], masks: list[list[int]], spare_bytes: int) -> None:
    """Make chunks resident, spread evenly, until `spare_bytes` is used. Changes `masks`."""
    candidates = [
        (flat, chunk, chunk_bytes(need, chunk, mask))
        for flat, (need, row) in enumerate(zip(needs, masks, strict=True))
        for chunk, mask in enumerate(row)
        if mask
    ]
    total = sum(size for _, _, size in candidates)
    share = min(spare_bytes / total, 1.0) if total else 0.0
    used = seen = 0
    for flat, chunk, size in candidates:
        seen += size
        # The running target is exact for the whole: with share 1 every chunk is taken.
        if used + size <= min(share * seen + size * 0.5, spare_bytes) or share == 1.0:
            masks[flat][chunk] = 0
            used += size


def _finish(
    needs: Sequence[FlatNeed],
    masks: list[list[int]],
    slots: tuple[int, int],
    counts: tuple[int, int],
    least: int,
    scratch_bytes: int,
) -> Plan:
    small, large = slots
    pairs = [
        (need, chunk, mask) for need, row in zip(needs, masks, strict=True) for chunk, mask in enumerate(row)
    ]
    return Plan(
        nvme_masks=tuple(tuple(row) for row in masks),
        small_count=counts[0] if small else 0,
        small_bytes=small,
        large_count=counts[1] if large else 0,
        large_bytes=large,
        sums_bytes=sum(_sums_bytes(need) for need in needs),
        grad_bytes=sum(need.grad_bytes for need in needs),
        resident_bytes=sum(chunk_bytes(need, chunk, ~mask) for need, chunk, mask in pairs),
        nvme_bytes=sum(chunk_bytes(need, chunk, mask) for need, chunk, mask in pairs),
        scratch_bytes=scratch_bytes,
        min_bytes=least,
    )
