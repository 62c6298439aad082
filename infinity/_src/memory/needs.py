"""What the placement planner knows of a model: one `FlatNeed` per flat, what a step does, and the bytes of its sections."""

from __future__ import annotations

import dataclasses
import functools

from infinity._src.memory.layout import FlatLayout, Section, sections_of
from infinity._src.memory.layout import run_bytes as section_run_bytes
from infinity._src.perf.roofline import move_counts
from infinity.aio import Format


@dataclasses.dataclass(frozen=True)
class FlatNeed:
    """One flat as the planner sees it: its layout, its format, the tiers of its sections, its gradients.

    grad_bytes: bytes that this rank's gradients of the flat take in RAM (both sets under update="delayed"); 0 when no optimizer
        holds it, and while update="backward" keeps none.
    held: an optimizer writes its sections every step. shadow_bytes: a second `hi` in RAM (update="delayed").
    spill_format: the format with a `grad` section, for gradients that may spill; None: they may not. Such gradients take
        `window_bytes` of RAM in a staging window while backward fills them.
    versions: how often its states rest, each time on the same tier; gradients rest once.
    """

    layout: FlatLayout
    format: Format
    params_tier: str
    optim_tier: str
    grad_bytes: int = 0
    shadow_bytes: int = 0
    spill_format: Format | None = None
    window_bytes: int = 0
    versions: int = 1

    @functools.cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each chunk."""
        return tuple(span.numel for span in self.layout.chunks)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections of its format."""
        return sections_of(self.format, self.layout.itemsize)

    @property
    def held(self) -> bool:
        """Whether an optimizer holds it."""
        return self.format != Format.RAW

    def kind(self, section: int) -> str:
        """What `Policy.resident` calls a section: "params", "optim", or "grad". States on a device have section 0 with the
        optimizer's states."""
        if section >= self.format.written_count:
            return "grad"
        return "params" if section == 0 and self.params_tier != "device" else "optim"

    def tier(self, section: int) -> str:
        """The lowest tier of a section."""
        kind = self.kind(section)
        if kind == "grad":
            return "nvme"
        if kind == "params":
            return self.params_tier
        return self.optim_tier if self.held else "cpu"

    def nvme_mask(self) -> int:
        """The sections that may rest on NVMe, as bits."""
        return sum(1 << index for index in range(len(self.sections)) if self.tier(index) == "nvme")

    def grad_mask(self) -> int:
        """The `grad` section as a bit, 0 without one."""
        return 1 << self.format.written_count if self.format.grad else 0


@dataclasses.dataclass(frozen=True)
class Load:
    """What a step does, as far as the worth of a resident byte depends on it.

    bandwidths: (read, write) bytes per second of the drives, in any unit: only their ratio counts.
    """

    update: str = "deferred"
    micro_batches: int = 1
    bandwidths: tuple[float, float] = (1.0, 1.0)


def chunk_bytes(need: FlatNeed, chunk: int, mask: int) -> int:
    """Bytes of the sections in `mask` of one chunk."""
    return _bytes_of(need.sections, need.numels[chunk], mask)


def run_bytes(need: FlatNeed, chunk: int, mask: int) -> int:
    """As `chunk_bytes`, in a run on a drive or in a slot, where every section starts at a multiple of 4096."""
    return _run_bytes_of(need.sections, need.numels[chunk], mask)


# A model has a million chunks, and only a few kinds of them.
@functools.lru_cache(maxsize=4096)
def _bytes_of(sections: tuple[Section, ...], numel: int, mask: int) -> int:
    return sum(section.size_bytes(numel) for index, section in enumerate(sections) if mask >> index & 1)


@functools.lru_cache(maxsize=4096)
def _run_bytes_of(sections: tuple[Section, ...], numel: int, mask: int) -> int:
    return sum(section_run_bytes(section, numel) for index, section in enumerate(sections) if mask >> index & 1)


def traffic(need: FlatNeed, section: int, load: Load) -> tuple[int, int]:
    """How often a step reads and writes a section that rests on NVMe."""
    count = move_counts(load.update, load.micro_batches)
    if need.kind(section) == "grad":
        return count.grads_read, count.grads_written
    if section:
        return count.optim_read, count.states_written
    return (count.params_read, count.states_written) if need.held else (count.frozen_read, 0)
