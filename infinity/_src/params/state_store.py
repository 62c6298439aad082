"""State store: the chunks of every flat on their tier, read and written by sections.

`ShardRecords` has the chunk records of one flat: the places of its sections in RAM and on NVMe.

Before an optimizer exists a flat has one section, the parameter (`Format.RAW`). Its place has space
for future states. Building an optimizer adds state sections to its flats (`convert`): parameters
keep their places, and states that begin as zeros are not written: the executor marks them. The
placement plan decides where each section lies (infinity._src.memory.ram_budget); the store
implements the plan. Parameters that are frozen when an optimizer takes them have no states
(infinity/_src/engine/optimizer_owners.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.dtypes import as_integers
from infinity._src.cabi.records import (
    PIECE_NUMEL,
    QUANT_GROUP,
    SECTION_MAX,
    Master,
    Moments,
    NumelT,
    piece_count,
)
from infinity._src.kernels.state_codec import clear_signs
from infinity._src.memory import constants
from infinity._src.memory.device import Device, make_slabs, split_by_size
from infinity._src.memory.flat_layout import Section, aligned_section_bytes, sections_of
from infinity._src.memory.heap import give_back
from infinity._src.memory.swap_space import ExtentRequest, SwapExtent, SwapSpace
from infinity._src.params.reserved_extents import ReservedExtents
from infinity._src.params.unit import Flat
from infinity.aio import CHUNK, JOB, Executor, Format, JobKind, Priority, Slab, Ticket
from infinity.errors import AioError

PLACES = (
    ("file_offset", "file", "drive"),
    ("other_offset", "other_file", "other_drive"),
    ("grad_offset", "grad_file", "drive"),
)
"""A record's fields for the places of its run, its second run, and its gradients."""

DEFINED_TOGETHER = 64
"""Number of flats whose chunks one call of the executor defines. Each call checks its arrays, which
takes nearly as long for one flat as for several.
"""


def sections_in_common(before: Format, now: Format) -> int:
    """Return the number of sections that keep contents and number when a flat's format changes:
    only the parameter's, all states', or all but the scales of a format that gets more moments.
    """
    # Section 0 is the parameter in every format; another encoding shares nothing else. Nor do fewer
    # moments: signs of the second one belong to the masters.
    alike = (before.master, before.moments) == (now.master, now.moments)
    if before.master is Master.RAW or not alike or now.count < before.count:
        return 1
    return now.written_count if now.count == before.count else before.master_count + before.count


def sections_carried(before: Format, now: Format) -> dict[int, int]:
    """Map each section that keeps its contents to its section in the old format.

    These are the common sections, and spilled gradients, which are not states and still wait for
    their step.
    """
    carried = {section: section for section in range(sections_in_common(before, now))}
    # Gradients lie behind the states, so their section has another number in another format.
    if now.grad and now.grad is before.grad:
        carried[now.written_count] = before.written_count
    return carried


@dataclasses.dataclass(eq=False)
class ShardRecords:
    """One rank's shard of a flat at rest: chunk records, their ids in the executor, their places on
    NVMe.

    `sections` and `records["section_*"]` agree. A section of a chunk is resident (an address in
    RAM) or in the chunk's run (contiguous bytes on NVMe). Records of versioned chunks, which have
    two places, are not updated: only the executor knows which place is live.
    """

    flat: Flat
    format: Format
    sections: tuple[Section, ...]
    records: npt.NDArray[Any]  # CHUNK [chunks]
    ids: npt.NDArray[np.int32]  # [chunks]
    places: list[SwapExtent]  # of its runs, first and second ones, and of spilled gradients
    sums: npt.NDArray[np.uint32]  # [places, chunks, sections * pieces]
    versioned: bool  # each chunk has a second place

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Element of the shard at which each chunk starts."""
        return self.flat.layout.chunks.starts

    @property
    def first_sums(self) -> npt.NDArray[np.uint64]:
        """Addresses of the checksums of each chunk's first place."""
        row_bytes = self.sums.strides[1]
        addresses: npt.NDArray[np.uint64] = self.sums.ctypes.data + row_bytes * np.arange(
            len(self.records), dtype=np.uint64
        )
        return addresses

    def grad_bytes(self, numel: NumelT) -> NumelT:
        """Return the bytes of spilled gradients, at the end of the run of a chunk of `numel`
        elements."""
        return aligned_section_bytes(self.sections[-1], numel) if self.format.grad else 0 * numel

    def wants(
        self, chunks: npt.NDArray[np.intp], layers: tuple[int, int]
    ) -> dict[int, list[ExtentRequest]]:
        """Return the extents that each of these chunks needs, in the order of `PLACES`. layers: of
        the swap space, for first and second runs.
        """
        records = self.records[chunks]
        if not self.versioned:
            sizes = zip(chunks.tolist(), records["run_bytes"].tolist(), strict=True)
            return {index: [ExtentRequest(size, layers[0])] for index, size in sizes}
        numels: npt.NDArray[np.int64] = records["numel"]
        states, grads = records["other_bytes"].tolist(), self.grad_bytes(numels).tolist()
        return {
            index: [
                ExtentRequest(size, layers[0]),
                ExtentRequest(size, layers[1]),
                ExtentRequest(grad),
            ]
            for index, size, grad in zip(chunks.tolist(), states, grads, strict=True)
        }

    def stays(self, before: ShardRecords, section: int, source: int) -> npt.NDArray[np.bool_]:
        """Return which chunks have this section at the place of section `source` of `before`:
        [chunks]."""
        mine, theirs = self.records, before.records
        in_memory = mine["section_ptr"][:, section]
        same = (in_memory != 0) & (in_memory == theirs["section_ptr"][:, source])
        # Chunks never share places, so an equal place was taken over.
        on_drive = (mine["section_at"][:, section] >= 0) & (theirs["section_at"][:, source] >= 0)
        for name in ("drive", "file", "file_offset"):
            on_drive &= mine[name] == theirs[name]
        on_drive &= mine["section_at"][:, section] == theirs["section_at"][:, source]
        found: npt.NDArray[np.bool_] = same | on_drive
        return found

    def keep_sums(
        self, before: ShardRecords, section: int, source: int, chunks: npt.NDArray[np.intp]
    ) -> None:
        """Copy the checksums of a section of these chunks from their first place in `before`."""
        # The last chunk is shorter, and so has fewer checksums.
        for numel in np.unique(self.records["numel"][chunks]).tolist():
            pieces, alike = piece_count(numel), chunks[self.records["numel"][chunks] == numel]
            self.sums[0, alike, section * pieces : (section + 1) * pieces] = before.sums[
                0, alike, source * pieces : (source + 1) * pieces
            ]

    def put(self, record: Any, places: Sequence[SwapExtent | None]) -> None:
        self.places.extend(place for place in places if place is not None)
        # All extents of a chunk are on one drive: they were reserved together.
        record["drive"] = next(place.drive for place in places if place is not None)
        record["other_drive"] = record["drive"]
        for place, (offset, file, _) in zip(places, PLACES, strict=False):
            if place is not None:
                record[offset], record[file] = place.offset, place.layer
        if record["file_offset"] < 0:  # gradients alone
            record["file_offset"], record["file"] = record["grad_offset"], record["grad_file"]


class _Wanted(NamedTuple):
    """Memory to allocate for one section of a flat's chunks: the address field of all chunks, which
    chunks lack memory, and the bytes of each of these."""

    addresses: npt.NDArray[np.uint64]
    resident: npt.NDArray[np.bool_]
    sizes: npt.NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())


def resident_bytes(section: Section, numels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes of a section of each chunk in RAM, rounded up to a cache line."""
    return -(-section.size_bytes(numels) // 64) * 64


def unplaced(
    flat: Flat,
    state_format: Format,
    masks: Sequence[int],
    *,
    key: int,
    versioned: bool,
    sums_on: bool,
) -> ShardRecords:
    """Make the records of a flat's chunks, without places. The sections in `masks[chunk]` will lie
    in the chunk's run, other sections in RAM.

    key: of the first chunk; the other chunks have the next keys.
    """
    sections = sections_of(state_format, flat.layout.itemsize)
    spans = flat.layout.chunks
    records = np.zeros(len(spans), dtype=CHUNK)
    pieces = piece_count(spans.numel_max)
    sums: npt.NDArray[np.uint32] = np.zeros(
        (1 + versioned, len(spans), len(sections) * pieces), dtype=np.uint32
    )
    records["key"] = key + np.arange(len(spans), dtype=np.uint64)
    # -1: no place. If it stays, the section is resident.
    records["drive"] = records["other_drive"] = records["section_at"] = -1
    for offset, _, _ in PLACES:
        records[offset] = -1
    records["format"], records["section_count"], records["piece_numel"] = (
        state_format,
        len(sections),
        PIECE_NUMEL,
    )
    records["numel"] = numels = spans.numels
    rows: npt.NDArray[np.int64] = np.array(masks, dtype=np.int64)
    assert rows.shape == numels.shape, (rows.shape, numels.shape)
    # For all chunks at once: a large model has a million.
    for s, section in enumerate(sections):
        records["itemsize"][:, s], records["group_numel"][:, s] = (
            section.itemsize,
            section.group_numel,
        )
        # In order and 4096-aligned, so that each section can be read alone.
        here = rows >> s & 1 != 0
        records["section_at"][here, s] = records["run_bytes"][here]
        records["run_bytes"][here] += aligned_section_bytes(section, numels[here])
    if sums_on:
        row_bytes = np.arange(len(spans), dtype=np.uint64) * np.uint64(sums.strides[1])
        for place, field in enumerate(("sums_ptr", "other_sums_ptr")[: 1 + versioned]):
            records[field] = np.uint64(sums[place].ctypes.data) + row_bytes
    shard = ShardRecords(
        flat, state_format, sections, records, np.zeros(0, np.int32), [], sums, versioned
    )
    # Both places hold only states: gradients have a separate extent (`wants`).
    if versioned:
        records["other_bytes"] = records["run_bytes"] - shard.grad_bytes(numels)
    return shard


_SECOND_DTYPES = {Master.SPLIT: torch.int16, Master.SPLIT8: torch.int8, Master.FP16: torch.float32}
"""Dtypes of a master's second section: `lo`, where 0 means an exact master, or an fp32 value."""


def _makes_master(before: ShardRecords, now: ShardRecords) -> bool:
    """Return whether `now` adds an fp32 master, which starts as the parameter's value."""
    return now.format.master is Master.FP16 and 1 not in sections_carried(before.format, now.format)


def _widens_scales(before: ShardRecords, now: ShardRecords) -> bool:
    """Return whether the moments of `before` keep their scales, beside those of more moments."""
    common = sections_in_common(before.format, now.format)
    return now.format.moments is Moments.Q8 and 1 < common < now.format.written_count


def _mark_zeros(before: ShardRecords, now: ShardRecords) -> None:
    """Mark sections on NVMe that begin as zeros, so that zeros are not written."""
    carried = {*sections_carried(before.format, now.format)}
    if _makes_master(before, now):
        carried.add(1)
    if _widens_scales(before, now):
        carried.add(now.format.written_count - 1)
    for section in set(range(len(now.sections))) - carried:
        on_drive = now.records["section_at"][:, section] >= 0
        now.records["zeros"][on_drive] |= np.uint16(1 << section)


@dataclasses.dataclass(frozen=True)
class ChunkAt:
    """A chunk: the executor's id, its flat, and its index there."""

    id: int
    flat: Flat
    index: int


class StateReader(Protocol):
    """A running save, which copies states while training continues."""

    def before_write(self, flats: Sequence[Flat]) -> None:
        """Prepare for jobs that write states of these flats: they must run after this save's reads.
        """

    def wait_read(self, flats: Sequence[Flat]) -> None:
        """Block until states of these flats have been read."""


class StateStore:
    """All flats of a model at rest. Not safe from several threads at once.

    sums_on: keep checksums, which the executor verifies. generations: places of each chunk with an
    optimizer, 1 or 2. layers: of the swap space, for first and second places; with others than
    (0, 0) chunks without an optimizer have two places, too. shown: whether long waits show
    progress. before_write: called before states are written. remember_bad: records a range with a
    failed write for later processes; None: nothing outlives the process.
    """

    def __init__(
        self,
        executor: Executor,
        space: SwapSpace | None,
        *,
        sums_on: bool,
        generations: int = 1,
        layers: tuple[int, int] = (0, 0),
        device: Device | None = None,
        shown: bool = False,
        before_write: Callable[[], None] = lambda: None,
        remember_bad: Callable[[SwapExtent], None] | None = None,
    ) -> None:
        self._executor = executor
        self._shown = shown
        self._before_write = before_write
        self._device = device or Device(torch.device("cpu"))
        self._unpinned: list[Slab] = []
        self._space = space
        self._sums_on = sums_on
        self._generations = generations
        self.layers = layers
        self._spares = (
            ReservedExtents(executor, space, layer=layers[-1], remember=remember_bad)
            if space is not None and space.files
            else None
        )
        self._slabs: dict[Slab, int] = {}  # with the number of bytes in use
        self._flats: dict[Flat, ShardRecords] = {}
        self._key = 0
        self.nvme_bytes = 0
        self.resident_bytes = 0
        self._reader: StateReader | None = None
        self.writes = 0  # number of announced writes
        # Places without a chunk that a durable run's last commit still names.
        self._dropped: list[SwapExtent] = []
        self._places_named = False
        # Parameters on NVMe that gathers have read, counted when a read is submitted.
        self.params_read_bytes = 0
        # Spilled gradients; `SpilledGradients` counts them.
        self.grads_read_bytes = self.grads_written_bytes = 0

    def __getitem__(self, flat: Flat) -> ShardRecords:
        return self._flats[flat]

    def create(
        self,
        flats: Sequence[Flat],
        masks: Sequence[Sequence[int]],
        formats: Sequence[Format] | None = None,
    ) -> None:
        """Create each flat's parameter section: on NVMe if `masks[flat][chunk] & 1`, else resident.

        formats: the flats' formats with all sections of `masks`. Their space on drives is reserved
        now, so that `convert` need not move the parameters. Contents are undefined until written.
        Raises: SwapFullError; then nothing was created.
        """
        made, planned = [], []
        for index, (flat, row) in enumerate(zip(flats, masks, strict=True)):
            key = self._new_keys(len(row))
            made.append(self._unplaced(flat, Format.RAW, [mask & 1 for mask in row], key))
            if formats is None or formats[index] is Format.RAW:
                planned.append(made[-1])
            else:
                planned.append(self._unplaced(flat, formats[index], row, key))
        self._define(made, planned, {})
        for shard in made:
            self._flats[shard.flat] = shard

    def convert(
        self, flats: Sequence[Flat], formats: Sequence[Format], masks: Sequence[Sequence[int]]
    ) -> None:
        """Change formats and places. Parameters and spilled gradients keep their values. So do all
        states if the format stays or gets more moments; other sections start as zeros. Blocks.

        Raises: SwapFullError before any change; AioError if a move fails: then each flat is either
        unchanged or converted. In any case unused memory is returned to the system flat by flat.
        """
        changed = [
            index
            for index, flat in enumerate(flats)
            if self._flats[flat].format is not formats[index]
            or self._masks_of(flat) != list(masks[index])
        ]
        self.will_write([flats[index] for index in changed])
        self.wait_for_reader([flats[index] for index in changed])
        self.settle_moves()
        # Slots of failed writes hold the only copy of their bytes, and are freed with the old
        # chunks: write them now, or raise the drive's error before any change.
        if changed and self._executor.stats().kept_chunks:
            self._executor.recover().wait()
            self.settle_moves()
        # Steps may have exchanged the places since the records were made.
        for index in changed:
            self._look(self._flats[flats[index]])
        old = {flats[index]: self._flats[flats[index]] for index in changed}
        made = []
        for index in changed:
            before = old[flats[index]]
            # Keep the keys: they seed the checksums of sections that keep their places.
            key = int(before.records["key"][0])
            made.append(self._unplaced(flats[index], formats[index], masks[index], key))
            _mark_zeros(before, made[-1])
            if self._places_named and before.format is Format.RAW:
                self._shorten(before)
        self._define(made, made, old)
        while made:
            try:
                self._carry_over(old[made[0].flat], made[0])
            except BaseException:
                # Moves in flight still write to the memory of `made`, which is freed next.
                self._executor.wait_all()
                self.settle_moves()
                for shard in made:
                    self._drop(shard, stays=old[shard.flat])
                raise
            # Removed only after its move: the handler above frees the flats in `made`.
            now = made.pop(0)
            self._flats[now.flat] = now
            self.settle_moves()
            self._drop(old[now.flat], stays=now)

    def will_write(self, flats: Sequence[Flat]) -> None:
        """Announce jobs that write states of these flats. They run after a save has read them."""
        self._before_write()
        # A durable run compares this count to detect changes to commit.
        self.writes += 1
        # Read once: another thread may call `guard` meanwhile.
        reader = self._reader
        if reader is not None:
            reader.before_write(flats)

    def wait_for_reader(self, flats: Sequence[Flat]) -> None:
        """Block until a running save has read the states of these flats, whose live places will
        change.
        """
        # Read once: as in `will_write`.
        reader = self._reader
        if reader is not None:
            reader.wait_read(flats)

    def guard(self, reader: StateReader | None) -> None:
        """Call `reader` before each later write of states; None: no reader. Any thread may call it.
        """
        self._reader = reader

    def pin(self) -> None:
        """Pin resident slabs, for copies to the device. Slabs with freed parts stay unpinned.
        Blocks, once.
        """
        while self._unpinned:
            slab = self._unpinned[-1]
            if self._slabs.get(slab) == slab.size_bytes:
                self._device.pin_all([slab], shown=self._shown)
            # Removed one by one: after a failure the next call must not pin this one again.
            self._unpinned.pop()

    def fetch(
        self, flat: Flat, section: int, address: int, *, priority: Priority, on_device: bool = False
    ) -> Ticket:
        """Start copying one section of the shard to `address`, where shard_numel elements fit;
        on_device: the address is in device memory. Does not block.
        """
        shard = self._flats[flat]
        if section == 0:
            on_nvme = shard.records["section_at"][:, 0] >= 0
            self.params_read_bytes += (
                int(shard.records["numel"][on_nvme].sum()) * shard.sections[0].itemsize
            )
        # The copy must run after kernels that still read the target.
        if on_device:
            self._device.behind()
        return self._move(
            shard, JobKind.FETCH, section, address, priority, self._device.mask if on_device else 0
        )

    def store(
        self, flat: Flat, section: int, address: int, *, chunks: slice = slice(None)
    ) -> Ticket:
        """Start writing one section of the shard, or of these chunks, from `address` (0: zeros),
        which holds their elements. Does not block.
        """
        # Gradients lie behind the states, and no save reads them.
        if section < self._flats[flat].format.written_count:
            self.will_write((flat,))
        shard = self._flats[flat]
        if address and chunks.start:
            address -= shard.sections[section].size_bytes(chunks.start * flat.layout.chunk_numel)
        return self._move(shard, JobKind.STORE, section, address, Priority.DEMAND, chunks=chunks)

    def overwrite(self, flat: Flat, start: int, values: torch.Tensor) -> None:
        """Replace elements [start, start + len) of the shard's parameter, and of its master.
        Blocks.

        values: 1-D CPU tensor of the parameter's dtype. An element whose bits do not change keeps
        its master, which may be more precise. Other elements of the chunks, and moments, do not
        change.
        """
        self.will_write((flat,))
        shard = self._flats[flat]
        end = start + values.numel()
        touched = flat.layout.chunks.touched(start, len(values))
        form = shard.format
        first = flat.layout.chunks[touched[0]].start
        last = flat.layout.chunks[touched[-1]]
        numel = last.start + last.numel - first
        dtypes = (flat.dtype, _SECOND_DTYPES.get(form.master, flat.dtype), torch.float32)
        buffers = {
            section: torch.empty(numel, dtype=dtype)
            for section, dtype in zip(form.master_sections, dtypes, strict=False)
        }
        # Read first: the chunks also hold elements outside the range.
        self._move_buffers(shard, touched, JobKind.FETCH, buffers)
        old, *others = [buffer[start - first : end - first] for buffer in buffers.values()]
        if others:
            replaced = as_integers(old) != as_integers(values)
            # Before `lo` changes: it has the signs of the replaced masters.
            if form.sign_section is not None and not clear_signs(others[0], others[1], replaced):
                del buffers[form.sign_section]
            for buffer in others[: form.master_count - 1]:
                # `lo` is 0 if the master is exactly `hi`; an fp32 master is the value.
                fresh = values.to(buffer.dtype) if buffer.is_floating_point() else 0
                buffer.copy_(torch.where(replaced, fresh, buffer))
        old.copy_(values)
        self._move_buffers(shard, touched, JobKind.STORE, buffers)

    def _move_buffers(
        self,
        shard: ShardRecords,
        chunks: range,
        kind: JobKind,
        buffers: Mapping[int, torch.Tensor],
    ) -> None:
        """Fetch or store sections of consecutive chunks; each buffer begins with the first chunk.
        Blocks."""
        starts = np.array(chunks, dtype=np.int64) * shard.flat.layout.chunk_numel
        jobs = np.zeros(len(chunks), dtype=JOB)
        jobs["chunk"], jobs["kind"], jobs["base"] = shard.ids[chunks], kind, -1
        jobs["mask"] = sum(1 << section for section in buffers)
        for section, buffer in buffers.items():
            at = (starts - starts[0]) * shard.sections[section].itemsize
            jobs["ptr"][:, section] = (at + buffer.data_ptr()).astype(np.uint64)
        self._executor.submit(jobs, priority=Priority.DEMAND).wait()

    def forget(self, flat: Flat, start: int, numel: int) -> None:
        """Zero the optimizer's states of elements [start, start + numel). The parameter and spilled
        gradients stay. Blocks.
        """
        self.will_write((flat,))
        shard = self._flats[flat]
        # Not the parameter, which is first, and not spilled gradients, which are last.
        left = shard.sections[1 : shard.format.written_count]
        for index in flat.layout.chunks.touched(start, numel) if left else ():
            span = flat.layout.chunks[index]
            low, high = max(start, span.start), min(start + numel, span.start + span.numel)
            buffers = [np.zeros(kind.size_bytes(span.numel), dtype=np.uint8) for kind in left]
            addresses = {section: each.ctypes.data for section, each in enumerate(buffers, 1)}
            self.move_chunk(flat, index, JobKind.FETCH, addresses).wait()
            for buffer, kind in zip(buffers, left, strict=True):
                # Each parameter starts a new group, so its last group is not shared.
                first = (low - span.start) // kind.group_numel * kind.itemsize
                buffer[first : kind.size_bytes(high - span.start)] = 0
            # A new fp32 master starts as the parameter's value.
            if shard.format.master is Master.FP16:
                param = torch.empty(span.numel, dtype=flat.dtype)
                self.move_chunk(flat, index, JobKind.FETCH, {0: param.data_ptr()}).wait()
                master = torch.from_numpy(buffers[0].view(np.float32))
                master[low - span.start : high - span.start] = param[
                    low - span.start : high - span.start
                ].float()
            self.move_chunk(flat, index, JobKind.STORE, addresses).wait()

    def move_chunk(
        self,
        flat: Flat,
        chunk: int,
        kind: JobKind,
        addresses: Mapping[int, int],
        *,
        priority: Priority = Priority.DEMAND,
    ) -> Ticket:
        """Start a FETCH or STORE of some sections of one chunk; `addresses` has the memory of each.
        Does not block.
        """
        at = np.zeros((1, SECTION_MAX), dtype=np.uint64)
        at[0, list(addresses)] = list(addresses.values())
        mask = sum(1 << section for section in addresses)
        ids = self._flats[flat].ids[chunk : chunk + 1]
        return self.move_chunks((flat,), ids, kind, mask, at, priority=priority)

    def move_chunks(
        self,
        flats: Sequence[Flat],
        ids: npt.NDArray[np.int32],
        kind: JobKind,
        mask: int | npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
        *,
        priority: Priority = Priority.DEMAND,
    ) -> Ticket:
        """Start a FETCH or STORE of some sections of chunks of these flats, by one submission.
        mask: bits of the sections; addresses: their memory, [chunks, SECTION_MAX]. Does not block.
        """
        if kind is JobKind.STORE:
            self.will_write(flats)
        jobs = np.zeros(len(ids), dtype=JOB)
        jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = ids, kind, mask, -1
        jobs["ptr"] = addresses
        return self._executor.submit(jobs, priority=priority)

    # -- chunks that cannot be read ----------------------------------------------------------------

    def chunk_at(self, chunk: int) -> ChunkAt | None:
        """Return the chunk with this id of the executor; None: it belongs to another store. Any
        thread may call this method.
        """
        # A copy: the training thread may change formats meanwhile.
        for flat, shard in list(self._flats.items()):
            found = np.flatnonzero(shard.ids == chunk)
            if found.size:
                return ChunkAt(chunk, flat, int(found[0]))
        return None

    def chunks_of(self, flat: Flat) -> list[ChunkAt]:
        ids = self._flats[flat].ids
        return [ChunkAt(int(chunk), flat, index) for index, chunk in enumerate(ids)]

    def verify(
        self, chunks: Sequence[ChunkAt], *, reads: int = 1
    ) -> list[tuple[ChunkAt, AioError]]:
        """Read all states of these chunks `reads` times, and compare them with their checksums.
        Returns the chunks that cannot be read, each with its first error. Blocks.
        """
        found: dict[int, tuple[ChunkAt, AioError]] = {}
        for _ in range(reads):
            tickets = []
            for at in chunks:
                if at.id in found:
                    continue
                states = range(self._flats[at.flat].format.written_count)
                job = self.move_chunk(at.flat, at.index, JobKind.FETCH, dict.fromkeys(states, 0))
                tickets.append((at, job))
            for at, ticket in tickets:
                try:
                    ticket.wait()
                except AioError as error:
                    found.setdefault(at.id, (at, error))
        return list(found.values())

    def has_older(self, at: ChunkAt) -> bool:
        """Return whether a chunk's second place may have states of an earlier step; only a read
        after `exchange` shows whether they are sound.
        """
        now = self._executor.look(self._flats[at.flat].ids[at.index : at.index + 1])[0]
        # A newer generation belongs to an undone step.
        return self._sums_on and bool(now["other_generation"] < now["generation"])

    def exchange(self, at: ChunkAt) -> None:
        """Exchange a chunk's first and second place: the second has the states from before the last
        update. A second call exchanges them back. Blocks until no job is pending. Raises:
        ValueError if the second place has no states.
        """
        self.will_write((at.flat,))
        # The executor may not have removed the last read from its queue yet.
        self._executor.wait_all()
        self._executor.exchange(self._flats[at.flat].ids[at.index : at.index + 1])

    def renew_second_place(self, at: ChunkAt) -> SwapExtent:
        """Give a committed chunk another second place on the same drive. Returns the old place,
        which is never used again. Blocks. Raises: SwapFullError; ValueError if the chunk's spilled
        gradients are on another drive.
        """
        assert self._space is not None
        assert self._spares is not None
        # First settle failed writes, which may have moved the second place to a reserved extent.
        self.settle_moves()
        ids = self._flats[at.flat].ids[at.index : at.index + 1]
        now = self._executor.look(ids)[0]
        bad = SwapExtent(
            int(now["other_drive"]),
            int(now["other_offset"]),
            int(now["other_bytes"]),
            int(now["other_file"]),
        )
        want = ExtentRequest(bad.size_bytes, self.layers[-1])
        (fresh,) = self._space.reserve_on([bad.drive], [want])
        try:
            self._executor.relocate(
                ids,
                np.array([fresh.drive], np.int32),
                np.array([fresh.layer], np.int32),
                np.array([fresh.offset], np.int64),
            )
        except ValueError:
            self._space.free(fresh)
            raise
        if not self._put_place(int(now["key"]), bad, fresh):
            # The extent has another owner, who will free it by its old place.
            self._space.exchange(bad, fresh)
        self._spares.retire(bad)
        return bad

    def recover(self) -> None:
        """Let drives that refuse writes since a failure try again. Blocks.

        A drive that still fails continues to refuse writes, and the next writer gets the error.
        """
        with contextlib.suppress(AioError):
            self._executor.recover().wait()

    def units_of_chunks(self) -> npt.NDArray[np.int32]:
        """Return the index of each chunk's unit, by the executor's id of the chunk; -1: the chunk
        belongs to another store.
        """
        top = max((int(shard.ids.max(initial=-1)) for shard in self._flats.values()), default=-1)
        owners: npt.NDArray[np.int32] = np.full(top + 1, -1, dtype=np.int32)
        for flat, shard in self._flats.items():
            owners[shard.ids] = flat.unit.index
        return owners

    def versioned_ids(self, flats: Iterable[Flat]) -> npt.NDArray[np.int32]:
        ids = [shard.ids for shard in map(self._flats.__getitem__, flats) if shard.versioned]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def _look(self, shard: ShardRecords) -> None:
        """Update the records of versioned chunks with their live places. No job may be pending."""
        if shard.versioned or self.moved_writes:
            shard.records[:] = self._executor.look(shard.ids)

    def in_its_places(self, flat: Flat) -> bool:
        """Return whether all records of a flat are current: no step has exchanged places, and no
        failed write has moved a chunk.
        """
        shard = self._flats[flat]
        now = self._executor.look(shard.ids)
        return all(
            np.array_equal(now[name], shard.records[name])
            for name in ("drive", "file", "file_offset")
        )

    @property
    def moved_writes(self) -> int:
        """Failed writes that were redirected, up to the last `settle_moves`."""
        return self._spares.moved_writes if self._spares is not None else 0

    @property
    def spare_bytes(self) -> int:
        """Bytes on all drives reserved for failed writes."""
        return self._spares.held_bytes if self._spares is not None else 0

    @property
    def spare_bytes_wanted(self) -> int:
        """Bytes to reserve on each drive for failed writes."""
        return self._spares.wanted_bytes if self._spares is not None else 0

    def settle_moves(self) -> None:
        """Settle writes that were redirected so far."""
        if self._spares is not None:
            self._spares.settle(lambda move, bad, spare: self._put_place(move.key, bad, spare))

    def place_in(self, layers: tuple[int, int]) -> None:
        self.layers = layers
        if self._spares is not None:
            self._spares.rehome(layers[-1])

    def _put_place(self, key: int, before: SwapExtent, now: SwapExtent) -> bool:
        """Replace the extent `before` by `now` in the flat of the chunk with this key. Returns
        whether the flat has `before`.
        """
        there = (before.layer, before.drive, before.offset)
        for shard in self._flats.values():
            # Keys of a flat's chunks are consecutive.
            if not 0 <= key - int(shard.records["key"][0]) < len(shard.records):
                continue
            for at, place in enumerate(shard.places):
                if (place.layer, place.drive, place.offset) == there:
                    shard.places[at] = now
                    self.nvme_bytes += now.size_bytes - place.size_bytes
                    return True
        return False

    def commit_named_places(self) -> None:
        """Record that a durable commit has named all places in use.

        Places released from now on stay unchanged until the next commit; places released before are
        free.
        """
        # From here on `_drop` frees no place that this commit names.
        self._places_named = True
        for place in self._dropped:
            assert self._space is not None
            self._space.free(place)
        self._dropped.clear()

    def close(self) -> None:
        """Forget the chunks and free the resident memory. The executor must be idle or closed."""
        self._flats.clear()
        for slab in self._slabs:
            self._device.unpin(slab)
            slab.close()
        self._slabs.clear()

    def _move(
        self,
        shard: ShardRecords,
        kind: JobKind,
        section: int,
        address: int,
        priority: Priority,
        flags: int = 0,
        *,
        chunks: npt.NDArray[np.intp] | slice = slice(None),
    ) -> Ticket:
        ids = shard.ids[chunks]
        jobs = np.zeros(len(ids), dtype=JOB)
        jobs["chunk"] = ids
        jobs["kind"] = kind
        jobs["mask"] = 1 << section | flags
        jobs["base"] = -1
        # Address 0 stays 0: STORE then writes zeros.
        if address:
            kind_of = shard.sections[section]
            # An item of a quantized section encodes a group of elements.
            items = shard.starts[chunks].astype(np.uint64) // np.uint64(kind_of.group_numel)
            jobs["ptr"][:, section] = address + items * np.uint64(kind_of.itemsize)
        return self._executor.submit(jobs, priority=priority)

    def _masks_of(self, flat: Flat) -> list[int]:
        shard = self._flats[flat]
        count = len(shard.sections)
        here = shard.records["section_at"][:, :count] >= 0
        masks: list[int] = (here << np.arange(count)).sum(axis=1).tolist()
        return masks

    def _define(
        self,
        made: list[ShardRecords],
        planned: Sequence[ShardRecords],
        before: Mapping[Flat, ShardRecords],
    ) -> None:
        """Assign the chunks of `made` their places, and define them in the executor. planned:
        chunks that must also fit the places. before: the flats' current chunks, whose memory and
        places are reused.

        Raises: SwapFullError; then nothing has changed.
        """
        fresh: list[SwapExtent] = []
        # Undone in reverse: the executor drops the chunks before their memory and places are freed.
        with contextlib.ExitStack() as undo:
            with (
                self._space.grow_together() if self._space is not None else contextlib.nullcontext()
            ):
                for shard, plan in zip(made, planned, strict=True):
                    fresh += self._reserve(shard, plan, before.get(shard.flat), undo)
            slabs = self._place_resident(made, before)
            for slab in slabs:
                undo.callback(slab.close)
            for start in range(0, len(made), DEFINED_TOGETHER):
                several = made[start : start + DEFINED_TOGETHER]
                chunks = np.concatenate([shard.records for shard in several], dtype=CHUNK)
                ids = self._executor.define(chunks)
                undo.callback(self._executor.drop, ids)
                for shard in several:
                    shard.ids, ids = np.split(ids, [len(shard.records)])
            # No statement below may raise: the store owns the chunks now.
            undo.pop_all()
        if self._spares is not None:
            runs = (shard.records["run_bytes"].max(initial=0) for shard in planned)
            self._spares.fill(max(map(int, runs), default=0))
        self.nvme_bytes += sum(place.size_bytes for place in fresh)
        self._unpinned += slabs
        for slab in slabs:
            self._slabs[slab] = slab.size_bytes
            self.resident_bytes += slab.size_bytes

    def _reserve(
        self,
        shard: ShardRecords,
        planned: ShardRecords,
        before: ShardRecords | None,
        undo: contextlib.ExitStack,
    ) -> list[SwapExtent]:
        """Write the places of a flat's chunks into the records: those of `before` if they fit, else
        new ones. Returns the new places.
        """
        runs = np.flatnonzero(planned.records["run_bytes"])
        if self._space is None or not runs.size:
            return []
        wants = planned.wants(runs, self.layers)
        kept = self._taken_over(shard, before, wants) if before is not None else {}
        missing = [index for index in wants if index not in kept]
        groups = self._space.reserve_together([wants[index] for index in missing])
        fresh = [place for group in groups for place in group if place is not None]
        undo.callback(self._space.release, fresh)
        for index, group in [*kept.items(), *zip(missing, groups, strict=True)]:
            shard.put(shard.records[index], group)
        return fresh

    def _taken_over(
        self,
        shard: ShardRecords,
        before: ShardRecords,
        wants: Mapping[int, Sequence[ExtentRequest]],
    ) -> dict[int, list[SwapExtent | None]]:
        """Find the places of `before` that fit the chunks of `shard` without changing contents of
        `before`.
        """
        # In a format with states, new sections would overwrite old ones at these places; and places
        # that a durable run's last commit names must not change.
        if before.format is not Format.RAW or self._places_named:
            return {}
        there = {(place.layer, place.drive, place.offset): place for place in before.places}
        old = before.records
        # The parameter is first in its run. It must be in the run before and after, or in neither.
        alike = (old["section_at"][:, 0] < 0) == (shard.records["section_at"][:, 0] < 0)
        columns = [
            (old[file].tolist(), old[drive].tolist(), old[offset].tolist())
            for offset, file, drive in PLACES
        ]
        found: dict[int, list[SwapExtent | None]] = {}
        for index, requests in wants.items():
            group: list[SwapExtent | None] = []
            for request, (files, drives, offsets) in zip(requests, columns, strict=False):
                # A step may have exchanged the places: then the place is in another layer.
                key = (files[index], drives[index], offsets[index])
                place = there.get(key) if files[index] == request.layer else None
                if not request.size_bytes:
                    group.append(None)
                elif place is not None and place.size_bytes >= request.size_bytes:
                    group.append(dataclasses.replace(place, size_bytes=request.size_bytes))
            # A failed write may have moved one of them to another drive.
            together = len({place.drive for place in group if place is not None}) == 1
            if alike[index] and together and len(group) == len(requests):
                found[index] = group
        taken = np.array(list(found), dtype=np.intp)
        shard.records["generation"][taken] = old["generation"][taken]
        return found

    def _shorten(self, shard: ShardRecords) -> None:
        """Trim extents to the parameters in them, which a commit names. The states, for which the
        rest was reserved, get other places.
        """
        held: dict[tuple[int, int, int], int] = {}
        for offset, file, drive in PLACES[:2]:
            columns = [shard.records[name].tolist() for name in (file, drive, offset)]
            places = zip(*columns, strict=True)
            held.update(zip(places, shard.records["run_bytes"].tolist(), strict=True))
        for at, place in enumerate(shard.places):
            size_bytes = held.get((place.layer, place.drive, place.offset), 0)
            if 0 < size_bytes < place.size_bytes:
                assert self._space is not None
                shard.places[at] = dataclasses.replace(place, size_bytes=size_bytes)
                self._space.trim(shard.places[at])
                self.nvme_bytes -= place.size_bytes - size_bytes

    def _new_keys(self, count: int) -> int:
        """Return the first of `count` unused keys."""
        # Keys are unique: they seed checksums, so that equal bytes of two chunks have different
        # sums.
        key, self._key = self._key + 1, self._key + count
        return key

    def _unplaced(
        self, flat: Flat, state_format: Format, masks: Sequence[int], key: int
    ) -> ShardRecords:
        # A durable run never overwrites places that a commit names, frozen parameters included.
        versioned = self._generations > 1 and (
            state_format is not Format.RAW or self.layers != (0, 0)
        )
        return unplaced(
            flat, state_format, masks, key=key, versioned=versioned, sums_on=self._sums_on
        )

    def _place_resident(
        self, made: list[ShardRecords], before: Mapping[Flat, ShardRecords]
    ) -> list[Slab]:
        """Give every resident section an address: its address in `before`, so that no section is in
        memory twice, or one in new slabs. Returns these slabs.
        """
        # Equal sections of consecutive chunks are adjacent, so that one device copy moves them all.
        wanted: list[_Wanted] = []
        for shard in made:
            old = before.get(shard.flat)
            common = sections_in_common(old.format, shard.format) if old is not None else 0
            for field in ("section_ptr", "other_ptr")[: 1 + shard.versioned]:
                for s, section in enumerate(shard.sections):
                    resident = shard.records["section_at"][:, s] < 0
                    addresses = shard.records[field][:, s]  # a view of the records
                    if old is not None and s < common:
                        addresses[resident] = old.records[field][resident, s]
                        resident &= addresses == 0
                    sizes = resident_bytes(section, shard.records["numel"][resident])
                    if sizes.size:
                        wanted.append(_Wanted(addresses, resident, sizes))
        parts = split_by_size(wanted, lambda each: each.size_bytes, constants.SLAB_BYTES_MAX)
        slabs = make_slabs(
            [sum(each.size_bytes for each in part) for part in parts], shown=self._shown
        )
        for part, slab in zip(parts, slabs, strict=True):
            start = slab.address
            for each in part:
                each.addresses[each.resident] = start + np.cumsum(each.sizes) - each.sizes
                start += each.size_bytes
        return slabs

    def _carry_over(self, before: ShardRecords, now: ShardRecords) -> None:
        """Move the sections that keep their values from the old chunks of a flat to the new ones.
        Other sections begin as zeros: `_mark_zeros` marks those on NVMe, and new memory is zeros.
        """
        flat = now.flat
        carried = sections_carried(before.format, now.format)
        for section, source in carried.items():
            stays = now.stays(before, section, source)
            # A lost section cannot stay: reading it raises the fault before any change.
            stays &= self._executor.invalid(before.ids) >> np.uint32(source) & 1 == 0
            on_drive = now.records["section_at"][:, section] >= 0
            now.keep_sums(before, section, source, np.flatnonzero(stays & on_drive))
            moved = np.flatnonzero(~stays)
            if not moved.size:
                continue
            buffer = np.empty(
                now.sections[section].size_bytes(flat.layout.shard_numel), dtype=np.uint8
            )
            for shard, kind, of in ((before, JobKind.FETCH, source), (now, JobKind.STORE, section)):
                self._move(
                    shard, kind, of, buffer.ctypes.data, Priority.DEMAND, chunks=moved
                ).wait()
        # A new fp32 master begins as the parameter's value, not as zeros.
        if _makes_master(before, now):
            param = torch.empty(flat.layout.shard_numel, dtype=flat.dtype)
            self._move(now, JobKind.FETCH, 0, param.data_ptr(), Priority.DEMAND).wait()
            master = param.float()
            self._move(now, JobKind.STORE, 1, master.data_ptr(), Priority.DEMAND).wait()
        if _widens_scales(before, now):
            groups = -(-flat.layout.shard_numel // QUANT_GROUP)
            old, new = (np.zeros((groups, of.format.count), np.int16) for of in (before, now))
            last = before.format.written_count - 1
            self._move(before, JobKind.FETCH, last, old.ctypes.data, Priority.DEMAND).wait()
            new[:, : before.format.count] = old
            last = now.format.written_count - 1
            self._move(now, JobKind.STORE, last, new.ctypes.data, Priority.DEMAND).wait()

    def _drop(self, shard: ShardRecords, *, stays: ShardRecords) -> None:
        # Drop the chunks first: then the executor does not use places that another chunk gets.
        self._executor.drop(shard.ids)
        shared = {(place.layer, place.drive, place.offset): place for place in stays.places}
        for place in shard.places:
            assert self._space is not None
            other = shared.get((place.layer, place.drive, place.offset))
            if other is not None:
                # Two extents share this place: trim the larger one to the size of the smaller.
                self.nvme_bytes -= max(place.size_bytes - other.size_bytes, 0)
                self._space.trim(other)
                continue
            # A write to this place failed, so it is never used again.
            if self._spares is not None and self._spares.refused(place):
                continue
            self.nvme_bytes -= place.size_bytes
            # A durable run's last commit names the place: keep it readable until the next commit.
            if self._places_named:
                self._dropped.append(place)
            else:
                self._space.free(place)
        for field in ("section_ptr", "other_ptr"):
            for s, section in enumerate(shard.sections):
                addresses = shard.records[field][:, s]
                # A section with an unchanged address stays in its memory.
                gone = (addresses != 0) & (addresses != stays.records[field][:, s])
                sizes = resident_bytes(section, shard.records["numel"][gone])
                for address, size in zip(addresses[gone].tolist(), sizes.tolist(), strict=True):
                    self._free(address, size)

    def _free(self, address: int, size_bytes: int) -> None:
        """Free resident memory: its pages, and the slab when all its bytes are free."""
        slab = next(
            slab for slab in self._slabs if slab.address <= address < slab.address + slab.size_bytes
        )
        self.resident_bytes -= size_bytes
        self._slabs[slab] -= size_bytes
        self._device.unpin(slab)
        if self._slabs[slab]:
            give_back(address, size_bytes)
        else:
            del self._slabs[slab]
            slab.close()
