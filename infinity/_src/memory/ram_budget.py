"""Placement of states in RAM and on NVMe under one budget: pure arithmetic over sizes, no tensors.

    ram = pools + checksums + states of the tiers that are RAM + `resident` + gradients
          + a static set of further sections

A step scans all states once. For a cyclic scan no least-recently-used rule helps, so the set of
resident sections is fixed. A byte of RAM saves this much traffic per step of M micro-batches
(`traffic`):

    hi, param    2M reads and one write: each forward and backward gathers, and the update's read
                 serves the first forward (update="delayed" reads twice: gathers use a copy in RAM)
    grad         M reads and M writes if it spills: stored M times, fetched M - 1 times, and read
                 by the update
    lo, moments  one read and one write

So gradients stay in RAM first: only a `ram` below the minimum spills them. Then sections become
resident by value per byte. `hi` becomes resident first, which also makes the remaining requests
larger: gathers read `hi` in small requests (768 KiB of a 4.5 MiB chunk), while `lo` and moments
stay one contiguous range of 3.75 MiB. Sections of equal value become resident together, by whole
chunks. With two generations a resident section is held twice, and a byte of RAM saves half as much.

**Spilled gradients.** A flat's gradients are in RAM as a whole, or on NVMe by way of a staging
window that holds them while backward fills them. The windows' memory has capacity for the largest
flat that spills, and for further flats. So a large flat (an embedding) may be worth keeping in RAM
only to keep the windows small: the planner compares maximum sizes up to which flats may spill.

**Nested budgets.** Within a class of sections chunks become resident in the van der Corput order of
their positions. Any prefix of this order is spread evenly, so that no stretch of the forward is all
NVMe. The planner takes a prefix, up to the first chunk that does not fit. So the set of a larger
budget contains that of a smaller one: more RAM never moves more bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from infinity._src.base.sizes import format_size, round_size, round_up
from infinity._src.cabi.records import piece_count
from infinity._src.memory.device_capacity import overlap_bytes
from infinity._src.memory.flat_layout import FlatLayout, Section, aligned_section_bytes, sections_of
from infinity._src.memory.roofline import move_counts
from infinity.aio import Format
from infinity.errors import BudgetError


@dataclasses.dataclass(frozen=True)
class FlatNeed:
    """Needs of one flat: its layout, its format, the tiers of its sections, its gradients.

    grad_bytes: RAM of this rank's gradients of the flat (both sets under update="delayed"); 0
        without an optimizer, and while update="backward" stores no gradients.
    delayed_params_bytes: RAM of a second `hi` (update="delayed").
    spill_format: the format with a `grad` section if the gradients may spill, else None.
        window_bytes: RAM of their staging window while backward fills it.
    versions: number of copies of the states, all on the same tier; gradients have one copy.
    idle_mask: sections that few parameters of the flat use, so that a step moves few of their
        bytes.
    """

    layout: FlatLayout
    format: Format
    params_tier: str
    optim_tier: str
    grad_bytes: int = 0
    delayed_params_bytes: int = 0
    spill_format: Format | None = None
    window_bytes: int = 0
    versions: int = 1
    idle_mask: int = 0

    # Cached: a plan reads it once per chunk, and a large model has a million chunks.
    @functools.cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(self.layout.chunks.numels.tolist())

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        return sections_of(self.format, self.layout.itemsize)

    @property
    def held(self) -> bool:
        """Return whether an optimizer holds the flat, and so writes its sections every step."""
        # RAW, only the parameter, is the format of a flat without an optimizer.
        return self.format != Format.RAW

    def kind(self, section: int) -> str:
        """Name the kind of a section as `Policy.resident` does: "params", "optim"; or "grad"."""
        # If parameters are on a device, section 0 counts as "optim": only the update moves it.
        if section >= self.format.written_count:
            return "grad"
        return "params" if section == 0 and self.params_tier != "device" else "optim"

    def tier(self, section: int) -> str:
        """Name the lowest tier of a section."""
        kind = self.kind(section)
        # Only formats of spilling gradients have a `grad` section.
        if kind == "grad":
            return "nvme"
        if kind == "params":
            return self.params_tier
        # A parameter on the device without an optimizer rests in RAM.
        return self.optim_tier if self.held else "cpu"

    @functools.cached_property
    def nvme_mask(self) -> int:
        """Mask of the sections that may rest on NVMe."""
        return sum(1 << index for index in range(len(self.sections)) if self.tier(index) == "nvme")

    def grad_mask(self) -> int:
        """Mask of the `grad` section; 0 without one."""
        return 1 << self.format.written_count if self.format.grad else 0


def idle_mask_of(form: Format, numels: Mapping[int, int]) -> int:
    """Return the mask of the moments that fewer than half of a flat's elements have. numels:
    elements by the number of their moments."""
    total = sum(numels.values())
    return sum(
        1 << form.master_count + moment
        for moment in range(form.count)
        if 2 * sum(numel for count, numel in numels.items() if count > moment) < total
    )


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """Load of a step on the drives: determines how much a resident byte saves.

    bandwidths: (read, write) of the drives, in any unit: only their ratio counts.
    """

    update: str = "deferred"
    micro_batches: int = 1
    bandwidths: tuple[float, float] = (1.0, 1.0)


def chunk_bytes(need: FlatNeed, chunk: int, mask: int) -> int:
    """Add up the bytes of the sections in `mask` of one chunk."""
    return _bytes_of(need.sections, need.numels[chunk], mask)


Row = tuple[int, ...]
"""A mask of sections for each chunk of a flat."""


Chunks = tuple[FlatNeed, int, int, int]
"""A group of equal chunks: (need of their flat, elements, mask, number of chunks)."""


def chunks_alike(needs: Sequence[FlatNeed], rows: Sequence[Row]) -> list[Chunks]:
    """Group equal chunks of flats: a model has a million chunks of a few kinds. rows: the masks of
    each flat's chunks."""
    # By identity: equal flats share one need.
    numbers = list(map(id, needs))
    known = dict(zip(numbers, needs, strict=True))
    found = []
    for (number, row), count in collections.Counter(zip(numbers, rows, strict=True)).items():
        need = known[number]
        chunks = collections.Counter(zip(need.numels, row, strict=True))
        found += [(need, numel, mask, count * times) for (numel, mask), times in chunks.items()]
    return found


@functools.lru_cache(maxsize=4096)
def _bytes_of(sections: tuple[Section, ...], numel: int, mask: int) -> int:
    return sum(
        section.size_bytes(numel) for index, section in enumerate(sections) if mask >> index & 1
    )


@functools.lru_cache(maxsize=4096)
def run_bytes_of(sections: tuple[Section, ...], numel: int, mask: int) -> int:
    """Add up the bytes of these sections on a drive or in a slot, where each starts 4096-aligned.
    """
    return sum(
        aligned_section_bytes(section, numel)
        for index, section in enumerate(sections)
        if mask >> index & 1
    )


def traffic(need: FlatNeed, section: int, load: StepLoad) -> tuple[int, int]:
    """Count how often a step reads and writes a section that rests on NVMe."""
    count = move_counts(load.update, load.micro_batches)
    if need.kind(section) == "grad":
        return count.grads_read, count.grads_written
    if need.idle_mask >> section & 1:
        return 0, 0
    # Section 0 is the parameter.
    if section:
        return count.optim_read, count.states_written
    # Frozen parameters are read by gathers, and never written.
    return (count.params_read, count.states_written) if need.held else (count.frozen_read, 0)


WINDOW_COUNT = 3
"""Number of staging windows: backward fills one, one is being written, and one is being prefetched
or waits for its write."""


def staging_bytes(largest: int, count: int) -> int:
    """Return the bytes of all windows for `count` flats that spill. largest: bytes of the largest
    flat's window."""
    return min(largest + overlap_bytes([largest], WINDOW_COUNT - 1), largest * count)


@functools.lru_cache(maxsize=16)  # the choices of one plan have the same counts
def van_der_corput_order(count: int) -> tuple[int, ...]:
    """Order 0 .. count - 1 so that every prefix is spread evenly over the range."""
    # Bits of the index, reversed.
    order = [0]
    while len(order) < count:
        order = [2 * index + bit for bit in (0, 1) for index in order]
    return tuple(index for index in order if index < count)


def choose_spill(
    sizes: Sequence[tuple[int, int]], able: Sequence[bool], ram_bytes: int | None
) -> Iterator[tuple[bool, ...]]:
    """Enumerate choices of spilled flats, as a flag for each flat: one choice for each maximum size
    of spilled flats.

    Each choice keeps as many gradients in RAM as fit `ram_bytes`; with None, as many as make its
    RAM smallest. Choices that do not fit are left out.
    sizes: for each flat, bytes of its gradients in RAM and of its window. able: flats that may
    spill; only their gradients are counted.
    """
    grads, windows = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    members = np.flatnonzero(able)
    # Each maximum is the size of some flat's window.
    for window in sorted(set(windows[members].tolist())):
        small = members[windows[members] <= window]
        # A prefix of this order stays in RAM, so that a larger budget keeps a superset.
        order = small[list(van_der_corput_order(len(small)))]
        # For each length of the prefix but the full one, with which nothing would spill.
        kept_bytes = grads[order].cumsum() - grads[order]
        large = grads[members].sum() - grads[small].sum()
        left = window * np.arange(len(order), 0, -1)
        totals = large + kept_bytes + np.minimum(staging_bytes(window, WINDOW_COUNT), left)
        # `totals` need not rise: the gradients of a small flat may take less RAM than its window.
        ways = [totals.argmin()] if ram_bytes is None else np.flatnonzero(totals <= ram_bytes)[-1:]
        for kept in ways:  # one, or none if no prefix fits
            gone = np.zeros(len(sizes), dtype=bool)
            gone[order[kept:]] = True
            yield tuple(gone.tolist())


# Slots for each drive: 8 for chunks of states (36 MiB in flight: 5 ms at 7 GB/s, many times a
# drive's latency), and 16 for parameters alone. More slots gained nothing (bench/README.md): the
# bytes save more as resident sections.
LARGE_COUNT = 8
SMALL_COUNT = 16

# Parts of the RAM under a plan: fields of `PlacementPlan` that add up to `ram_bytes`, and their
# names in messages. `Stats` has the same fields, some under other names (see `name_parts`).
RAM_PARTS = {
    "pool_bytes": "pools",
    "grad_bytes": "gradients",
    "staging_bytes": "windows of spilled gradients",
    "delayed_params_bytes": "parameters of the step before",
    "resident_bytes": "resident states",
    "sums_bytes": "checksums",
    "scratch_bytes": "scratch",
}


@dataclasses.dataclass(frozen=True)
class PlacementPlan:
    """Placement of all states: `nvme_masks[flat][chunk]` has a bit for each section on NVMe.

    All other sections are resident.
    formats: of each flat, with a `grad` section where its gradients spill.
    grad_bytes: gradients in RAM.
    spilled_bytes: gradients on NVMe. staging_bytes: RAM of the windows through which they spill.
    min_bytes: the smallest `ram` that works without spilling.
    """

    nvme_masks: tuple[Row, ...]
    formats: tuple[Format, ...]
    small_count: int
    small_bytes: int
    large_count: int
    large_bytes: int
    sums_bytes: int
    grad_bytes: int
    spilled_bytes: int
    staging_bytes: int
    delayed_params_bytes: int
    resident_bytes: int
    nvme_bytes: int
    scratch_bytes: int
    min_bytes: int

    @property
    def pools(self) -> tuple[int, int]:
        return self.small_bytes, self.large_bytes

    @property
    def pool_bytes(self) -> int:
        return self.small_count * self.small_bytes + self.large_count * self.large_bytes

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram_parts.values())

    @property
    def ram_parts(self) -> dict[str, int]:
        """Parts of `ram_bytes` that are not zero, by name."""
        return name_parts(self)

    @property
    def spilled(self) -> tuple[bool, ...]:
        return tuple(bool(each.grad) for each in self.formats)

    def in_formats(self, needs: Sequence[FlatNeed]) -> list[FlatNeed]:
        """Return the needs in the plan's formats, with a `grad` section where gradients spill.
        Equal flats share one need.
        """
        placed = _once(lambda need, state_format: dataclasses.replace(need, format=state_format))
        pairs = zip(needs, self.formats, strict=True)
        return [
            need if need.format is found else placed(need, found) for need, found in pairs
        ]


def name_parts(holder: object, public_names: Mapping[str, str] | None = None) -> dict[str, int]:
    """Read the fields of `RAM_PARTS` of `holder` (a PlacementPlan, or Stats) that are not zero, by
    name. public_names: fields that `holder` has under another name.
    """
    names = public_names or {}
    sizes = {name: getattr(holder, names.get(field, field)) for field, name in RAM_PARTS.items()}
    return {name: size for name, size in sizes.items() if size}


def _once(make: Callable[..., FlatNeed]) -> Callable[..., FlatNeed]:
    """Cache `make` by the identity of the need and the other arguments. Repeated layers share one
    need, and so the values that it caches.
    """
    known: dict[tuple[object, ...], FlatNeed] = {}

    def found(need: FlatNeed, *more: object) -> FlatNeed:
        key = id(need), *more
        if key not in known:
            known[key] = make(need, *more)
        return known[key]

    return found


def step_bytes(
    needs: Sequence[FlatNeed], plan: PlacementPlan, load: StepLoad = StepLoad()
) -> tuple[int, int]:
    """Predict the bytes that a step reads from NVMe and writes to NVMe under a plan.

    A step reads a little less: the last unit of forward stays gathered for backward, and is
    counted twice here.
    """
    read = written = 0
    for need, numel, mask, count in chunks_alike(plan.in_formats(needs), plan.nvme_masks):
        for section, spec in enumerate(need.sections):
            if mask >> section & 1:
                reads, writes = traffic(need, section, load)
                size = count * spec.size_bytes(numel)
                read, written = read + reads * size, written + writes * size
    return read, written


def plan_placement(
    needs: Sequence[FlatNeed],
    ram_bytes: int | None,
    *,
    drive_count: int = 1,
    scratch_bytes: int = 0,
    pools: tuple[int, int] | None = None,
    resident: Mapping[str, float | int] | None = None,
    load: StepLoad = StepLoad(),
    spill: Sequence[bool] | None = None,
    small_bytes: int = 0,
    held_bytes: int = 0,
    advice: str = "",
) -> PlacementPlan:
    """Place every chunk of `needs` under `ram_bytes` (None: the minimum).

    drive_count: NVMe drives. Each gets separate slots: with shared slots drives would wait for each
        other.
    scratch_bytes: additional RAM. pools: slot sizes (small, large) of existing pools; the plan's
        slots are at least as large.
    resident: for "params" and "optim" the share (float) or the bytes (int) that rest in RAM
        although their tier is NVMe, to within a chunk. No further sections of that kind become
        resident, even if the budget allows it. With `ram_bytes` None they add to the minimum.
    spill: flags of the flats whose gradients spill; None: the planner chooses as few as `ram_bytes`
        allows.
    small_bytes: minimum size of the small slots, for activations on NVMe.
    held_bytes: bytes of the same budget that other models hold, for messages.

    Raises: BudgetError with the smallest budget that works, and its parts.
    """
    # O_DIRECT needs a multiple of 4096.
    smallest = round_up(small_bytes, 4096)
    given = _Inputs(
        tuple(needs),
        drive_count,
        scratch_bytes,
        pools,
        dict(resident or {}),
        load,
        smallest,
        held_bytes,
    )
    unspilled = _SpillChoice(given, (False,) * len(needs))
    if spill is not None:
        # An earlier plan has chosen, whatever the budget is now.
        chosen = _SpillChoice(given, tuple(spill))
        return chosen.finish(ram_bytes, unspilled.least, advice)
    if (
        ram_bytes is None
        or ram_bytes >= unspilled.least
        or not any(need.spill_format for need in needs)
    ):
        return unspilled.finish(ram_bytes, unspilled.least, advice)
    # With all states in RAM no pools are needed, which may take less than the minimum with pools.
    if (whole := unspilled.everything()) is not None and whole.ram_bytes <= ram_bytes:
        return whole
    return _spilled(given, ram_bytes, unspilled, advice)


def _spilled(given: _Inputs, ram_bytes: int, unspilled: _SpillChoice, advice: str) -> PlacementPlan:
    """Choose the best plan under a budget that does not hold all gradients. Raises: BudgetError.

    The RAM that a choice leaves goes only to sections worth no more per byte than gradients. So a
    larger budget, which holds one more flat's gradients, is never worse.
    """
    able = [need.spill_format is not None and need.grad_bytes > 0 for need in given.needs]
    sizes = [(need.grad_bytes, need.window_bytes) for need in given.needs]
    # Every choice needs this minimum, apart from windows. The rest of the budget is for gradients
    # in RAM and for windows, which `choose_spill` counts.
    full = _SpillChoice(given, tuple(able))
    ways = [
        _SpillChoice(given, way)
        for way in choose_spill(sizes, able, ram_bytes - full.least + full.staging_bytes)
    ]
    fitting = [way for way in ways if way.least <= ram_bytes]
    if fitting:
        plans = [way.finish(ram_bytes, unspilled.least, advice) for way in fitting]
        # Least traffic, then most gradients in RAM. `saved` is the same for each choice.
        return max(plans, key=lambda plan: (fitting[0].saved(plan), plan.grad_bytes))
    # Nothing fits: the choice with the smallest budget raises the error that states it.
    ways = [unspilled, *(_SpillChoice(given, way) for way in choose_spill(sizes, able, None))]
    return min(ways, key=lambda way: way.smallest).finish(ram_bytes, unspilled.least, advice)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Arguments of `plan_placement` that are the same for every choice of spilled flats."""

    needs: tuple[FlatNeed, ...]
    drive_count: int
    scratch_bytes: int
    pools: tuple[int, int] | None
    resident: dict[str, float | int]
    load: StepLoad
    small_bytes: int
    held_bytes: int


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Sections that may become resident, in model order. Each entry: its flat and chunk, a mask of
    sections (`bits`), and their bytes (`sizes`)."""

    flats: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    def take(self, masks: list[Row], limit: int) -> tuple[int, bool]:
        """Make candidates resident in `masks`, up to `limit` bytes. Returns the bytes, and whether
        all candidates are resident now."""
        # Stop at the first candidate that does not fit: if a smaller one took its place, a larger
        # budget would choose other chunks, and budgets would not be nested.
        order = np.array(van_der_corput_order(len(self.sizes)), dtype=np.int64)
        sums = self.sizes[order].cumsum()
        count = int(np.searchsorted(sums, limit, side="right"))
        chosen = order[:count]
        rows: dict[int, list[int]] = {}
        for flat, chunk, bits in zip(
            self.flats[chosen].tolist(), self.chunks[chosen].tolist(), self.bits[chosen].tolist(),
            strict=True,
        ):  # fmt: skip
            if flat not in rows:
                rows[flat] = list(masks[flat])
            rows[flat][chunk] &= ~bits
        for flat, row in rows.items():
            masks[flat] = tuple(row)
        return int(sums[count - 1]) if count else 0, count == len(order)


class _SpillChoice:
    """Placement for one choice of spilled flats: the minimum, and the sections that a larger budget
    makes resident."""

    def __init__(self, given: _Inputs, spilled: tuple[bool, ...]) -> None:
        self._given = given
        # A flat that spills has a `grad` section, and its only gradients in RAM are in a window.
        spills = _once(
            lambda need: dataclasses.replace(
                need, format=need.spill_format or need.format, grad_bytes=0
            )
        )
        self._needs = [
            spills(need) if gone else need for need, gone in zip(given.needs, spilled, strict=True)
        ]
        # Equal flats share one need.
        numbers = list(map(id, self._needs))
        known = dict(zip(numbers, self._needs, strict=True))
        counts = collections.Counter(numbers).items()
        self._kinds = [(known[number], count) for number, count in counts]
        rows = {id(need): (need.nvme_mask,) * len(need.numels) for need, _ in self._kinds}
        self._masks: list[Row] = [rows[number] for number in numbers]
        self._slots = self._slot_bytes()
        # Existing pools never shrink.
        if given.pools is not None:
            self._slots = (max(self._slots[0], given.pools[0]), max(self._slots[1], given.pools[1]))
        # Per drive: drives that shared slots would wait for each other.
        drives = max(given.drive_count, 1)
        self._counts = (SMALL_COUNT * drives, LARGE_COUNT * drives)
        windows = [
            need.window_bytes for need, gone in zip(given.needs, spilled, strict=True) if gone
        ]
        self.staging_bytes = staging_bytes(max(windows, default=0), len(windows))
        self._spilled_bytes = sum(
            count * chunk_bytes(need, chunk, need.grad_mask())
            for need, count in self._kinds
            if need.grad_mask()
            for chunk in range(len(need.numels))
        )
        # First, since the sections that `Policy.resident` names are part of the minimum.
        self._keep_given()
        self._chunks = chunks_alike(self._needs, self._masks)
        self._fixed = self._fixed_bytes()
        self.least = sum(self._fixed.values())  # the minimum with pools

    def _slot_bytes(self) -> tuple[int, int]:
        """Size the slots of the two pools, for a chunk's parameter section, and for all its
        sections; 0: no pool.

        The sizes depend on the tiers, not on resident sections, so that later plans (for an
        optimizer with fewer parameters) can use the same pools.
        """
        small, large = self._given.small_bytes, 0
        for need, _ in self._kinds:
            mask = need.nvme_mask
            numel = need.layout.chunks.numel_max
            small = max(small, run_bytes_of(need.sections, numel, mask & 1))
            large = max(large, run_bytes_of(need.sections, numel, mask))
        # If chunks have only their parameter section on NVMe, one pool is enough.
        return (small, large if large > small else 0)

    def _keep_given(self) -> None:
        """Make the sections resident that the argument `resident` names."""
        for kind, wanted in self._given.resident.items():
            candidates = self._candidates(self._masks, _of_kind(kind))
            # As in `Policy.resident`: a share of the sections whose tier is NVMe, or bytes.
            limit = int(wanted * candidates.total) if isinstance(wanted, float) else wanted
            candidates.take(self._masks, limit)

    def _candidates(
        self, masks: list[Row], wanted: Callable[[FlatNeed, int], bool]
    ) -> _Candidates:
        """List the `wanted` sections that are still on NVMe."""
        # The mask of wanted sections, once for each need.
        kinds = {
            id(need): sum(1 << index for index in range(len(need.sections)) if wanted(need, index))
            for need, _ in self._kinds
        }
        # Rows (chunk, bits, bytes), once for all flats with the same need and masks; `ends` has the
        # end of each such group's rows.
        keys = list(zip(map(id, self._needs), masks, strict=True))
        alike = dict(zip(keys, self._needs, strict=True))
        table, ends, place = list[tuple[int, int, int]](), [0], {}
        for key, need in alike.items():
            for chunk, mask in enumerate(key[1]):
                if bits := mask & kinds[key[0]]:
                    # A resident section is held once per version.
                    table.append((chunk, bits, need.versions * chunk_bytes(need, chunk, bits)))
            place[key] = len(ends) - 1
            ends.append(len(table))
        kind = np.array([place[key] for key in keys], dtype=np.int64)
        counts = np.diff(ends)[kind]
        flats = np.repeat(np.arange(len(keys)), counts)
        # Each candidate's index within its flat.
        before = np.arange(len(flats)) - np.repeat(counts.cumsum() - counts, counts)
        rows = np.array(table, dtype=np.int64).reshape(-1, 3)
        return _Candidates(flats, *rows[np.array(ends)[kind][flats] + before].T)

    def _fixed_bytes(self) -> dict[str, int]:
        """Return the bytes that every budget must hold, keyed by the fields of `RAM_PARTS`."""
        return {
            "pool_bytes": sum(
                count * size for count, size in zip(self._counts, self._slots, strict=True)
            ),
            "grad_bytes": sum(count * need.grad_bytes for need, count in self._kinds),
            "staging_bytes": self.staging_bytes,
            "delayed_params_bytes": sum(
                count * need.delayed_params_bytes for need, count in self._kinds
            ),
            "resident_bytes": _resident_bytes(self._chunks),
            "sums_bytes": sum(count * _sums_bytes(need) for need, count in self._kinds),
            "scratch_bytes": self._given.scratch_bytes,
        }

    def _worth(self, need: FlatNeed, section: int) -> float:
        """Return the time per step that a byte of RAM saves if it holds a part of this section."""
        reads, writes = traffic(need, section, self._given.load)
        read, write = self._given.load.bandwidths
        # A byte of RAM holds one version only.
        return (reads / read + writes / write) / need.versions

    def _grad_worth(self) -> float:
        count = move_counts(self._given.load.update, self._given.load.micro_batches)
        read, write = self._given.load.bandwidths
        # Gradients have one version.
        return count.grads_read / read + count.grads_written / write

    def everything(self) -> PlacementPlan | None:
        """Plan with all states in RAM, without pools.

        None where sections must stay on NVMe: spilled gradients, and sections beyond `resident`.
        """
        # The share in `resident` is also an upper bound.
        given = {*self._given.resident, "grad"}
        for need, _, mask, _ in self._chunks:
            if any(
                mask >> section & 1 and need.kind(section) in given
                for section in range(len(need.sections))
            ):
                return None
        rows = {row: (0,) * len(row) for row in set(self._masks)}
        masks = [rows[row] for row in self._masks]
        chunks = [(need, numel, 0, count) for need, numel, _, count in self._chunks]
        slots = self._given.pools or (self._given.small_bytes, 0)
        return self._plan(masks, chunks, slots, self.least)

    @property
    def smallest(self) -> int:
        """Smallest budget that works: the minimum with pools, or all states of a small model in RAM
        without pools."""
        whole = self.everything()
        return self.least if whole is None else min(self.least, whole.ram_bytes)

    def finish(self, ram_bytes: int | None, unspilled_least: int, advice: str) -> PlacementPlan:
        """Make the plan under a budget. Raises: BudgetError."""
        if ram_bytes is None:
            return self._plan(self._masks, self._chunks, self._slots, unspilled_least)
        whole = self.everything()
        if whole is not None and whole.ram_bytes <= ram_bytes:
            # Everything fits, which is better than any plan with pools.
            return dataclasses.replace(whole, min_bytes=unspilled_least)
        if ram_bytes < self.least:
            parts = ", ".join(
                f"{RAM_PARTS[field]} {format_size(size)}"
                for field, size in self._fixed.items()
                if size
            )
            if self.smallest < self.least:
                # `parts` describes the plan with pools, which is not the smallest one here.
                parts = "gradients and all states in RAM, without pools"
            # `ram` is for the whole process, so the message must include other models.
            held = self._given.held_bytes
            least = self.smallest + held
            raise BudgetError(
                f"{'what other models leave of ram' if held else 'ram'}={format_size(ram_bytes)} "
                f"is too small: the smallest budget that works is {least} bytes "
                f"({round_size(least)}): "
                f"{f'{format_size(held)} that other models hold, ' if held else ''}{parts}. "
                f"{advice}".rstrip(),
                smallest_bytes=least,
            )
        # A copy: other budgets start from `_masks`, too.
        masks = list(self._masks)
        self._fill(masks, ram_bytes - self.least)
        chunks = chunks_alike(self._needs, masks)
        return self._plan(masks, chunks, self._slots, unspilled_least)

    def saved(self, plan: PlacementPlan) -> float:
        """Return the time of a plan's traffic, negated, to compare choices of spilled flats."""
        # The original needs: `step_bytes` takes the formats from the plan.
        read, write = step_bytes(self._given.needs, plan, self._given.load)
        speeds = self._given.load.bandwidths
        return -(read / speeds[0] + write / speeds[1])

    def _fill(self, masks: list[Row], spare_bytes: int) -> None:
        """Make sections resident in `masks`, up to `spare_bytes`, the most valuable class first."""
        # If gradients spill, only sections worth no more than gradients: see `_spilled`.
        limit = self._grad_worth() if self.staging_bytes else float("inf")
        fixed = {*self._given.resident, "grad"}

        def worth(need: FlatNeed, section: int) -> float:
            # 0 leaves a section out: `resident` has placed it, or it spills.
            return 0.0 if need.kind(section) in fixed else self._worth(need, section)

        values = {
            worth(need, section) for need, _ in self._kinds for section in range(len(need.sections))
        }
        for value in sorted(values - {0.0}, reverse=True):
            if value > limit:
                continue  # to classes within the limit
            # The lambda is called before `value` changes.
            candidates = self._candidates(
                masks,
                lambda need, section: worth(need, section) == value,  # noqa: B023
            )
            used, all_taken = candidates.take(masks, spare_bytes)
            spare_bytes -= used
            if not all_taken:
                # A later class must not use the remaining bytes: budgets would not be nested.
                return

    def _plan(
        self, masks: list[Row], chunks: list[Chunks], slots: tuple[int, int], min_bytes: int
    ) -> PlacementPlan:
        small, large = slots
        nvme = sum(
            # Spilled gradients are counted in `spilled_bytes`, and have one version.
            count * need.versions * _bytes_of(need.sections, numel, mask & ~need.grad_mask())
            for need, numel, mask, count in chunks
        )
        return PlacementPlan(
            nvme_masks=tuple(masks),
            formats=tuple([need.format for need in self._needs]),
            small_count=self._counts[0] if small else 0,
            small_bytes=small,
            large_count=self._counts[1] if large else 0,
            large_bytes=large,
            sums_bytes=self._fixed["sums_bytes"],
            grad_bytes=self._fixed["grad_bytes"],
            spilled_bytes=self._spilled_bytes,
            staging_bytes=self.staging_bytes,
            delayed_params_bytes=self._fixed["delayed_params_bytes"],
            resident_bytes=_resident_bytes(chunks),
            nvme_bytes=nvme,
            scratch_bytes=self._given.scratch_bytes,
            min_bytes=min_bytes,
        )


def _resident_bytes(chunks: list[Chunks]) -> int:
    return sum(
        # The inverse mask: sections that are not on NVMe are resident.
        count * need.versions * _bytes_of(need.sections, numel, ~mask)
        for need, numel, mask, count in chunks
    )


def _of_kind(kind: str) -> Callable[[FlatNeed, int], bool]:
    return lambda need, section: need.kind(section) == kind


def _sums_bytes(need: FlatNeed) -> int:
    return need.versions * sum(4 * len(need.sections) * piece_count(numel) for numel in need.numels)
