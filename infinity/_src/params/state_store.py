"""State store: the chunks of every flat on their tier, read and written by sections.

`ShardRecords` has the chunk records of one flat: the places of its sections in RAM and on NVMe.

Before an optimizer exists a flat has one section, the parameter (`Format.RAW`). Its place has room
for the states to come. Building an optimizer gives the flats that it holds their state sections
(`convert`): parameters stay where they are, and states that begin as zeros are not written, the
executor knows of them. The placement plan decides where each section lies
(infinity._src.memory.ram_budget); the store carries that out. Parameters that are frozen when an
optimizer takes them have no states (infinity/_src/engine/optimizer_owners.py).
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
from infinity._src.cabi.records import PIECE_NUMEL, GradSection, Master, NumelT, piece_count
from infinity._src.kernels.state_codec import clear_signs
from infinity._src.memory import constants
from infinity._src.memory.device import Device, make_slabs, split_by_size
from infinity._src.memory.flat_layout import Section, aligned_section_bytes, sections_of
from infinity._src.memory.heap import give_back
from infinity._src.memory.swap_space import ExtentRequest, SwapExtent, SwapSpace
from infinity._src.params.reserved_extents import ReservedExtents
from infinity._src.params.unit import Flat
from infinity.aio import CHUNK, JOB, Executor, Format, JobKind, Priority, Slab, Ticket
from infinity.aio._spares import MovedWrite
from infinity.errors import AioError

PLACES = (
    ("file_offset", "file", "drive"),
    ("other_offset", "other_file", "other_drive"),
    ("grad_offset", "grad_file", "drive"),
)
"""The fields of a record that say where its run lies, its second run, and its gradients."""


def sections_in_common(before: Format, now: Format) -> int:
    """The number of sections that keep their contents when a flat changes its format: the
    parameter's, or all states'.
    """
    # Section 0 is the parameter in every format; another encoding shares nothing else.
    none = GradSection.NONE
    if before.master is Master.RAW or before.with_grad(none) != now.with_grad(none):
        return 1
    return min(before.written_count, now.written_count)


def sections_carried(before: Format, now: Format) -> dict[int, int]:
    """The sections that keep their contents, each with the section of the old format that has them.

    These are the sections in common, and spilled gradients: they are no part of the states, and
    wait for a step also when the states change.
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

    `sections` and `records["section_*"]` agree; a section of a chunk is resident (an address) or in
    the chunk's run. The records of versioned chunks are as they were made: only the executor knows
    which place is the live one.
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
        """Bytes of the spilled gradients of chunks with so many elements, at the end of their
        runs."""
        return aligned_section_bytes(self.sections[-1], numel) if self.format.grad else 0 * numel

    def wants(
        self, chunks: npt.NDArray[np.intp], layers: tuple[int, int]
    ) -> dict[int, list[ExtentRequest]]:
        """The extents that each of these chunks wants of the swap space, in the order of `PLACES`;
        its first and second run in these layers.
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
        """Chunks in which this section is where section `source` of `before` is: [chunks]."""
        mine, theirs = self.records, before.records
        in_memory = mine["section_ptr"][:, section]
        same = (in_memory != 0) & (in_memory == theirs["section_ptr"][:, source])
        # No two chunks share a place, so one that both have was taken over.
        on_drive = (mine["section_at"][:, section] >= 0) & (theirs["section_at"][:, source] >= 0)
        for name in ("drive", "file", "file_offset"):
            on_drive &= mine[name] == theirs[name]
        on_drive &= mine["section_at"][:, section] == theirs["section_at"][:, source]
        found: npt.NDArray[np.bool_] = same | on_drive
        return found

    def keep_sums(
        self, before: ShardRecords, section: int, source: int, chunks: npt.NDArray[np.intp]
    ) -> None:
        """Take the checksums of a section of these chunks over, from their first place."""
        # The last chunk is shorter, and so has fewer.
        for numel in np.unique(self.records["numel"][chunks]).tolist():
            pieces, alike = piece_count(numel), chunks[self.records["numel"][chunks] == numel]
            self.sums[0, alike, section * pieces : (section + 1) * pieces] = before.sums[
                0, alike, source * pieces : (source + 1) * pieces
            ]

    def put(self, record: Any, places: Sequence[SwapExtent | None]) -> None:
        self.places.extend(place for place in places if place is not None)
        # All extents of a chunk lie on one drive: they were reserved together.
        record["drive"] = next(place.drive for place in places if place is not None)
        record["other_drive"] = record["drive"]
        for place, (offset, file, _) in zip(places, PLACES, strict=False):
            if place is not None:
                record[offset], record[file] = place.offset, place.layer
        if record["file_offset"] < 0:  # gradients alone
            record["file_offset"], record["file"] = record["grad_offset"], record["grad_file"]


class _Wanted(NamedTuple):
    """Memory for one section of a flat's chunks: their addresses, those of them that want memory,
    and the bytes of each."""

    addresses: npt.NDArray[np.uint64]
    resident: npt.NDArray[np.bool_]
    sizes: npt.NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())


def resident_bytes(section: Section, numels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that a section of each chunk takes in RAM, where the next starts at a cache line."""
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
    """Make the records of a flat's chunks, without places yet. Sections in `masks[chunk]` are to
    lie in runs.

    key: of the first chunk; others follow.
    """
    sections = sections_of(state_format, flat.layout.itemsize)
    spans = flat.layout.chunks
    records = np.zeros(len(spans), dtype=CHUNK)
    pieces = piece_count(spans.numel_max)
    sums: npt.NDArray[np.uint32] = np.zeros(
        (1 + versioned, len(spans), len(sections) * pieces), dtype=np.uint32
    )
    records["key"] = key + np.arange(len(spans), dtype=np.uint64)
    # -1: no place yet. A section that keeps it is resident.
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
        # In order and 4096-aligned, so that each section of a run can be read by itself.
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
    # Both places hold states alone: gradients have an extent of their own (`wants`).
    if versioned:
        records["other_bytes"] = records["run_bytes"] - shard.grad_bytes(numels)
    return shard


_SECOND_DTYPES = {Master.SPLIT: torch.int16, Master.SPLIT8: torch.int8, Master.FP16: torch.float32}
"""Dtypes of the second section of a master: 0 in `lo`, the same value in fp32."""


def _makes_master(before: ShardRecords, now: ShardRecords) -> bool:
    """Return whether an fp32 master is new, which begins as the parameter's value."""
    return now.format.master is Master.FP16 and 1 not in sections_carried(before.format, now.format)


def _mark_zeros(before: ShardRecords, now: ShardRecords) -> None:
    """Mark sections on NVMe that begin as zeros, so that zeros are not written."""
    carried = {*sections_carried(before.format, now.format)}
    if _makes_master(before, now):
        carried.add(1)
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
    """A save under way, which copies states while training continues."""

    def before_write(self, flats: Sequence[Flat]) -> None:
        """Return when states of these flats may be written. Blocks until they were read."""


class StateStore:
    """All flats of a model at rest. Not safe from several threads at once.

    sums_on: keep checksums, which the executor then verifies. generations: of what optimizers hold,
    1 or 2; layers: those of the swap space where first and second places lie. In layers of their
    own everything has two. shown: whether long waits show progress. before_write: called before
    states are written. remember_bad: notes a range that refused a write; None: nothing outlives the
    process.
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
        self._slabs: dict[Slab, int] = {}  # and how many of its bytes are in use
        self._flats: dict[Flat, ShardRecords] = {}
        self._key = 0
        self.nvme_bytes = 0
        self.resident_bytes = 0
        self._reader: StateReader | None = None
        self.writes = 0  # how often something was about to be written
        # Places that no chunk has any more, and that a durable run's last commit names.
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
        """Give each flat its parameter section. `masks[flat][chunk] & 1` puts it on NVMe; else it
        is resident.

        formats: of the flats once they have all of `masks`. Space for these is reserved on drives
        now, so that `convert` need not move the parameters.
        Contents are undefined until written. Raises: SwapFullError; then nothing was created.
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
        """Change formats and places. Parameters and spilled gradients keep their values, and all
        sections do where the format stays; those of a new format start as zeros. Blocks.

        Raises: SwapFullError before anything changed; AioError when moving fails: each flat is then
        as it was, or done. Memory that no flat has any more goes back to the system at once, flat
        by flat, also then.
        """
        changed = [
            index
            for index, flat in enumerate(flats)
            if self._flats[flat].format is not formats[index]
            or self._masks_of(flat) != list(masks[index])
        ]
        self.will_write([flats[index] for index in changed])
        self.settle_moves()
        # Slots of writes that failed hold the only copy, and go with the old chunks: written now,
        # or the drive's error is raised while nothing has changed.
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
            # The keys of before: what stays where it is has checksums that are seeded with them.
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
                # Moves that are under way still write to the memory of `made`, which is freed next.
                self._executor.wait_all()
                self.settle_moves()
                for shard in made:
                    self._drop(shard, stays=old[shard.flat])
                raise
            # Removed when it is moved, and not before: the handler above frees what is in `made`.
            now = made.pop(0)
            self._flats[now.flat] = now
            self.settle_moves()
            self._drop(old[now.flat], stays=now)

    def will_write(self, flats: Sequence[Flat]) -> None:
        """Announce that states of these flats will be written. Blocks while a reader has yet to
        read them.
        """
        self._before_write()
        # A durable run compares it to learn whether there is anything to commit.
        self.writes += 1
        self.wait_for_reader(flats)

    def wait_for_reader(self, flats: Sequence[Flat]) -> None:
        """Return when a save under way has read the states of these flats, whose live places are
        about to change. Blocks.
        """
        # Read once: another thread may call `guard` meanwhile.
        reader = self._reader
        if reader is not None:
            reader.before_write(flats)

    def guard(self, reader: StateReader | None) -> None:
        """Ask `reader` before states are written, from now on; None ends that. Any thread may
        call it.
        """
        self._reader = reader

    def pin(self) -> None:
        """Pin resident slabs, for copies to the device. Slabs that have given parts back to the
        system stay unpinned. Blocks, once.
        """
        while self._unpinned:
            slab = self._unpinned[-1]
            if self._slabs.get(slab) == slab.size_bytes:
                self._device.pin_all([slab], shown=self._shown)
            # Removed one by one: if another one fails, the next call must not pin this one again.
            self._unpinned.pop()

    def fetch(
        self, flat: Flat, section: int, address: int, *, priority: Priority, on_device: bool = False
    ) -> Ticket:
        """Start copying one section of the shard to `address`, which holds shard_numel elements;
        on_device: the address is there. Does not block.
        """
        shard = self._flats[flat]
        if section == 0:
            on_nvme = shard.records["section_at"][:, 0] >= 0
            self.params_read_bytes += (
                int(shard.records["numel"][on_nvme].sum()) * shard.sections[0].itemsize
            )
        # Kernels that still read the target come first.
        if on_device:
            self._device.behind()
        return self._move(
            shard, JobKind.FETCH, section, address, priority, self._device.mask if on_device else 0
        )

    def store(self, flat: Flat, section: int, address: int) -> Ticket:
        """Start writing one section of the shard from `address` (0: zeros). Does not block."""
        # Gradients lie behind the states, and no save reads them.
        if section < self._flats[flat].format.written_count:
            self.will_write((flat,))
        return self._move(self._flats[flat], JobKind.STORE, section, address, Priority.DEMAND)

    def overwrite(self, flat: Flat, start: int, values: torch.Tensor) -> None:
        """Replace elements [start, start + len) of the shard's parameter, and its master with the
        same values. Blocks.

        values: 1-D CPU tensor of the parameter's dtype. An element whose bits stay keeps its
        master, which may be finer. Other elements of the chunks it touches stay as they are; in an
        optimizer's chunk the moments do, too.
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
        # Read before written: the elements beside the range are in the same chunks.
        self._move_buffers(shard, touched, JobKind.FETCH, buffers)
        old, *others = [buffer[start - first : end - first] for buffer in buffers.values()]
        if others:
            replaced = as_integers(old) != as_integers(values)
            # Before `lo` changes: it says which signs belong to the masters that go.
            if form.sign_section is not None and not clear_signs(others[0], others[1], replaced):
                del buffers[form.sign_section]
            for buffer in others[: form.master_count - 1]:
                # `lo` is 0 where the master is exactly `hi`; an fp32 master is the value itself.
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
        """Fetch or store sections of neighbouring chunks; each buffer begins with the first chunk.
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
        # Neither the parameter, which comes first, nor spilled gradients, which come last.
        left = shard.sections[1 : shard.format.written_count]
        for index in flat.layout.chunks.touched(start, numel) if left else ():
            span = flat.layout.chunks[index]
            low, high = max(start, span.start), min(start + numel, span.start + span.numel)
            buffers = [np.zeros(kind.size_bytes(span.numel), dtype=np.uint8) for kind in left]
            addresses = {section: each.ctypes.data for section, each in enumerate(buffers, 1)}
            self.move_chunk(flat, index, JobKind.FETCH, addresses).wait()
            for buffer, kind in zip(buffers, left, strict=True):
                # A parameter starts where a group does, so its last group is its own, too.
                first = (low - span.start) // kind.group_numel * kind.itemsize
                buffer[first : kind.size_bytes(high - span.start)] = 0
            # Without an update an fp32 master is the parameter's value.
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
        """Start a FETCH or STORE of some sections of one chunk; `addresses` says where each lies in
        memory. Does not block.
        """
        if kind is JobKind.STORE:
            self.will_write((flat,))
        job = np.zeros(1, dtype=JOB)
        job["chunk"], job["kind"], job["base"] = self._flats[flat].ids[chunk], kind, -1
        for section, address in addresses.items():
            job["mask"] |= np.uint32(1 << section)
            job["ptr"][0, section] = address
        return self._executor.submit(job, priority=priority)

    # -- chunks that cannot be read ----------------------------------------------------------------

    def chunk_at(self, chunk: int) -> ChunkAt | None:
        """Return the chunk with this id of the executor; None: it is none of this store's. Any
        thread may ask.
        """
        # A copy: the thread that trains may change formats meanwhile.
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
        """Return whether the second place of a chunk may have states of an earlier step. Only
        `exchange` and a read tell.
        """
        now = self._executor.look(self._flats[at.flat].ids[at.index : at.index + 1])[0]
        # A newer generation is one of a step that was undone.
        return self._sums_on and bool(now["other_generation"] < now["generation"])

    def exchange(self, at: ChunkAt) -> None:
        """Exchange the committed states of a chunk for those before its last update, in its second
        place; or back. Blocks while a save has yet to read them. Raises: ValueError where the
        second place has none.
        """
        self.will_write((at.flat,))
        # What was read last may not be out of its queue yet.
        self._executor.wait_all()
        self._executor.exchange(self._flats[at.flat].ids[at.index : at.index + 1])

    def renew_second_place(self, at: ChunkAt) -> SwapExtent:
        """Give a chunk, which is committed, another second place on the same drive. Returns the old
        one, which is not given out again. Blocks. Raises: SwapFullError; ValueError for one whose
        spilled gradients lie on another drive than that.
        """
        assert self._space is not None
        assert self._spares is not None
        # The second place may be one that a write moved to and no extent says yet.
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
            # Its owner gives the extent back by the place that it knows.
            self._space.exchange(bad, fresh)
        self._spares.retire(bad)
        return bad

    def recover(self) -> None:
        """Let drives that refuse writes, after one that failed, try again. Blocks.

        A drive that still fails refuses writes as before, and the next writer gets the error.
        """
        with contextlib.suppress(AioError):
            self._executor.recover().wait()

    def units_of_chunks(self) -> npt.NDArray[np.int32]:
        """Return the index of each chunk's unit, by the executor's id of the chunk; -1: none of
        this store's.
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
        """Bring the records of versioned chunks up to date: which place is live now. Nothing may
        be pending.
        """
        if shard.versioned or self.moved_writes:
            shard.records[:] = self._executor.look(shard.ids)

    def in_its_places(self, flat: Flat) -> bool:
        """Return whether all chunks of a flat lie where their records say: no step has exchanged
        their places, and no write that failed has moved one.
        """
        shard = self._flats[flat]
        now = self._executor.look(shard.ids)
        return all(
            np.array_equal(now[name], shard.records[name])
            for name in ("drive", "file", "file_offset")
        )

    @property
    def moved_writes(self) -> int:
        """Writes that failed and went to another place, as far as `settle_moves` has seen them."""
        return self._spares.moved_writes if self._spares is not None else 0

    @property
    def spare_bytes(self) -> int:
        """Bytes on the drives that are kept free for writes that fail."""
        return self._spares.held_bytes if self._spares is not None else 0

    @property
    def spare_bytes_wanted(self) -> int:
        """Bytes on each drive that are to be kept free for writes that fail."""
        return self._spares.wanted_bytes if self._spares is not None else 0

    def settle_moves(self) -> None:
        """Note writes that went to other places than their own, as far as they have by now."""
        if self._spares is not None:
            self._spares.settle(self._adopt)

    def place_in(self, layers: tuple[int, int]) -> None:
        self.layers = layers
        if self._spares is not None:
            self._spares.rehome(layers[-1])

    def _adopt(self, move: MovedWrite, bad: SwapExtent, spare: SwapExtent) -> bool:
        """Put `spare` in the place of `bad` among the extents of the flat that has it."""
        return self._put_place(move.key, bad, spare)

    def _put_place(self, key: int, before: SwapExtent, now: SwapExtent) -> bool:
        """Put `now` in the place of `before` among the extents of the flat that has the chunk with
        this key. Returns whether it has `before`.
        """
        there = (before.layer, before.drive, before.offset)
        for shard in self._flats.values():
            # Keys of a flat's chunks follow one another.
            if not 0 <= key - int(shard.records["key"][0]) < len(shard.records):
                continue
            for at, place in enumerate(shard.places):
                if (place.layer, place.drive, place.offset) == there:
                    shard.places[at] = now
                    self.nvme_bytes += now.size_bytes - place.size_bytes
                    return True
        return False

    def commit_named_places(self) -> None:
        """Note that a commit which outlives the process has named all places in use.

        Places that are released from now on stay as they are until the next commit. Places that
        were released before are free.
        """
        # From here on `_drop` frees nothing that this commit names.
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
        # Address 0 stays 0 for every chunk: STORE then writes zeros.
        if address:
            kind_of = shard.sections[section]
            # An item of a quantized section stands for a group of elements.
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
        """Give the chunks of `made` their places, and define them in the executor. planned: the
        chunks for which these places must be large enough. before: the flats' chunks until now,
        with which memory and places are shared.

        Raises: SwapFullError; then nothing has changed.
        """
        fresh: list[SwapExtent] = []
        # Undone in reverse: the executor drops the chunks before their memory and places go.
        with contextlib.ExitStack() as undo:
            with (
                self._space.grow_together() if self._space is not None else contextlib.nullcontext()
            ):
                for shard, plan in zip(made, planned, strict=True):
                    fresh += self._reserve(shard, plan, before.get(shard.flat), undo)
            slabs = self._place_resident(made, before)
            for slab in slabs:
                undo.callback(slab.close)
            for shard in made:
                shard.ids = self._executor.define(shard.records)
                undo.callback(self._executor.drop, shard.ids)
            # Nothing may raise below: the chunks are the store's from here on.
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
        """Put the places of a flat's chunks into the records: those of `before` where they fit, new
        ones elsewhere. Returns the new ones.
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
        """Find the places of `before` into which the chunks of `shard` fit, and in which nothing of
        `before` changes.
        """
        # Formats with more than a parameter have sections there that new ones would overwrite. And
        # places that the last commit of a durable run names stay as they are.
        if before.format is not Format.RAW or self._places_named:
            return {}
        there = {(place.layer, place.drive, place.offset): place for place in before.places}
        old = before.records
        # The parameter is first in its run: it stays where it is, or is elsewhere in both.
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
            # A write that failed may have moved one of them to another drive.
            together = len({place.drive for place in group if place is not None}) == 1
            if alike[index] and together and len(group) == len(requests):
                found[index] = group
        taken = np.array(list(found), dtype=np.intp)
        shard.records["generation"][taken] = old["generation"][taken]
        return found

    def _shorten(self, shard: ShardRecords) -> None:
        """Free the extents for states behind parameters that a commit names: the states will lie
        elsewhere.
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
        """Return the first of so many keys, which no chunk has had."""
        # No two flats share a key: it seeds checksums, so that chunks have different ones.
        key, self._key = self._key + 1, self._key + count
        return key

    def _unplaced(
        self, flat: Flat, state_format: Format, masks: Sequence[int], key: int
    ) -> ShardRecords:
        # A durable run never overwrites what a commit names, frozen parameters included.
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
        memory twice, or one in new slabs for all of `made`. Returns these slabs.
        """
        # A section of neighbours lies together, so that a copy to a device takes it as one.
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
            # A lost section does not stay: reading it raises the fault, before anything changes.
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

    def _drop(self, shard: ShardRecords, *, stays: ShardRecords) -> None:
        # First: the executor must not use the places once another chunk has them.
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
            # This place refused a write of the chunks that stay, so it is not used again.
            if self._spares is not None and self._spares.refused(place):
                continue
            self.nvme_bytes -= place.size_bytes
            # The last commit of a durable run names the place: it stays readable until the next
            # one.
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
        """Free resident memory: its pages, and the whole slab with the last of its bytes."""
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
