"""Resharding: composes chunks from a checkpoint's chunks, for any number of ranks, chunk size and
state format.

    Composer      chunks of a rank's shards, in groups, from the saved chunks that hold their
                  parameters; restores use the Composer, too
    ReshardJob    a whole checkpoint, rewritten for another number of ranks

Places are computed as arrays for thousands of chunks at once. One submission reads a group and
another one stores it.

States that keep their format are copied byte for byte: in every layout parameters start, and shards
and chunks end, at the boundary of a quantization group, so a part of a parameter is whole groups.
States that get another format are converted through fp32, rounded to nearest.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.dtypes import dtype_of
from infinity._src.cabi.records import CHUNK_NUMEL, GradSection, Master, Moments, Section
from infinity._src.checkpoint.directory import (
    DirectoryLock,
    begun_commits,
    make_directory,
    next_generation,
)
from infinity._src.checkpoint.durable.files import check_no_run
from infinity._src.checkpoint.manifest import (
    FlatEntry,
    Layout,
    extent_bytes,
    section_bytes,
    section_widths,
)
from infinity._src.checkpoint.reader import (
    BLOCK_ROWS,
    Checkpoint,
    ChunkReader,
    Chunks,
    Cuts,
    SavedParam,
    cut_at_chunks,
)
from infinity._src.checkpoint.writer import (
    DataWriter,
    commit_part,
    new_part,
    new_rows,
    remove_others,
    remove_part,
    write_part,
)
from infinity._src.kernels.state_codec import clear_signs, decode_sections, encode_sections
from infinity._src.memory.flat_layout import FlatLayout, chunk_numel_of, plan_flat, state_format
from infinity._src.params.chunk_pipeline import (
    GROUP_BYTES,
    Bytes,
    ChunkPipeline,
    slab_buffers,
)
from infinity.aio import Format
from infinity.errors import AioError, SwapFullError

LOOK_AHEAD = 4
"""Number of groups whose saved chunks are read ahead."""
_ROWS_AT_ONCE = 2 * BLOCK_ROWS
"""Rows whose places are computed at once."""


class Range(NamedTuple):
    """Elements [element, element + numel) of a saved parameter, which become elements of a flat
    from index `low` on. flat: index of the flat.
    """

    flat: int
    low: int
    saved: SavedParam
    element: int
    numel: int


class Fill(NamedTuple):
    """A part of a saved chunk that becomes elements [start, start + numel) of a row. row: index of
    the row in its group. saved, element: the saved parameter, and the index of the part's first
    element in it. chunk, source: the saved chunk, and the index of the part's first element in it.
    copied: number of sections that are copied byte for byte; 0 for a conversion. spans: begin and
    end of each section in the saved chunk, then begin and end in the buffer.
    """

    row: int
    start: int
    saved: SavedParam
    element: int
    chunk: int
    source: int
    numel: int
    copied: int
    spans: tuple[list[int], list[int], list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are composed together. at: offsets of the rows' sections in a buffer, -1 for
    sections that a format lacks: [rows, SECTION_MAX]. chunks: the saved chunks of `fills`.
    """

    rows: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]
    size_bytes: int
    fills: list[Fill]
    chunks: list[int]


class Composer:
    """Composes chunks of a rank's shards from saved chunks, in groups of about GROUP_BYTES.

    flats, rows: these shards, and their chunks in order. ranges: the sources of the flats'
    elements. states: whether optimizer states of each flat are also composed, [flats]. If not, the
    moments in a buffer stay unchanged, and the buffer must have the present values of
    `Format.master_sections`. whole: also compose rows without parameters, and group only rows of
    one block (`RowChunks`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        flats: Sequence[FlatEntry],
        rows: npt.NDArray[np.void],
        ranges: Sequence[Range],
        rank: int,
        *,
        states: npt.NDArray[np.bool_],
        sections: Sequence[int] | None = None,
        whole: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self.reader = ChunkReader(checkpoint, sections)
        self._flats = flats
        self._rows = rows
        self._rank = rank
        self._states = states
        self._whole = whole
        self._saved = [each.saved for each in ranges]
        self.rounded: dict[str, None] = {}
        """Kinds of rounding in conversions so far: an ordered set."""
        shards = np.array([flat.shard_numel for flat in flats], dtype=np.int64)
        # Positions: elements of the rank's shards, counted one shard after the other.
        self._shards, self._flat_at = shards, np.cumsum(shards) - shards
        self._at = self._flat_at[rows["flat"]] + rows["start"]
        columns = [
            (flat, low, numel, saved.flat_index, saved.entry.offset, element)
            for flat, low, saved, element, numel in ranges
        ]
        table = np.array(columns, dtype=np.int64).reshape(-1, 6).T
        flat, low, numel, self._saved_flat, offset, element = table
        # Positions of the saved parameters, and shifts from the ranges' positions to saved ones.
        self._saved_at = checkpoint.chunks.flat_at[self._saved_flat] + offset
        self._parts = self.cut(flat, low, numel)
        self._shift = self._saved_at + element - self._position(flat, low)
        self._copied = self._sections_copied(flat)
        self._widths, self._saved_widths = section_widths(flats), section_widths(checkpoint.flats)
        every = np.arange(len(rows))
        self.used: npt.NDArray[np.int64] = every if whole else np.unique(self._parts.chunk)
        """Rows that are composed."""
        self.size_bytes, self.buffer_bytes = 0, 4096
        """Bytes of these rows, and of a buffer for the largest group."""
        for part in self._batches():
            sizes, firsts = self._cut_groups(part)
            self.size_bytes += int(sizes.sum())
            groups = np.add.reduceat(sizes.sum(axis=1), firsts)
            self.buffer_bytes = max(self.buffer_bytes, int(groups.max()))

    def _position(
        self, flat: npt.NDArray[np.int64], low: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        begin = self._flat_at[flat] - self._rank * self._shards[flat]
        position: npt.NDArray[np.int64] = begin + low
        return position

    def cut(
        self,
        flat: npt.NDArray[np.int64],
        low: npt.NDArray[np.int64],
        numel: npt.NDArray[np.int64],
    ) -> Cuts:
        """Find the parts of ranges of flats in the rows (`chunk`), in the order of the rows."""
        begin = self._position(flat, low)
        first = np.maximum(begin, self._flat_at[flat])
        end = np.minimum(begin + numel, self._flat_at[flat] + self._shards[flat])
        found = cut_at_chunks(first, np.maximum(end - first, 0), self._at, self._rows["numel"])
        order = np.argsort(found.chunk, kind="stable")
        return Cuts(*(column[order] for column in found))

    def _sections_copied(self, flat: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Count the sections of each range that are copied byte for byte."""
        mine, theirs = (
            np.array([each.format for each in flats], dtype=np.int64)
            for flats in (self._flats, self._checkpoint.flats)
        )
        counts = np.array([len(each.sections) for each in self._flats], dtype=np.int64)
        raw = np.array([each.state_format is Format.RAW for each in self._flats], dtype=np.bool_)
        same = self._states[flat] & (theirs[self._saved_flat] == mine[flat])
        # A target without states gets the parameter alone, from any saved format.
        found: npt.NDArray[np.int64] = np.where(raw[flat] | same, counts[flat], 0)
        return found

    def groups(self) -> Iterator[Group]:
        for part in self._batches():
            yield from self._groups_of(part)

    def _batches(self) -> Iterator[npt.NDArray[np.int64]]:
        for begin in range(0, len(self.used), _ROWS_AT_ONCE):
            yield self.used[begin : begin + _ROWS_AT_ONCE]

    def _cut_groups(
        self, used: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """Return the bytes of the sections of these rows, and the rows with which groups begin."""
        sizes = section_bytes(self._rows[used], self._flats)
        total = sizes.sum(axis=1)
        new = np.diff((np.cumsum(total) - total) // GROUP_BYTES, prepend=-1) != 0
        if self._whole:
            new |= used % BLOCK_ROWS == 0
        return sizes, np.flatnonzero(new)

    def _groups_of(self, used: npt.NDArray[np.int64]) -> Iterator[Group]:
        rows = self._rows[used]
        sizes, firsts = self._cut_groups(used)
        before = np.cumsum(sizes).reshape(sizes.shape) - sizes
        counts = np.diff(firsts, append=len(used))
        at = before - np.repeat(before[firsts, 0], counts)[:, None]
        fills, of_row = self._fills(used, rows, at, np.repeat(firsts, counts))
        bounds = [*firsts.tolist(), len(used)]
        parts = np.searchsorted(of_row, bounds).tolist()
        pairs = zip(itertools.pairwise(bounds), itertools.pairwise(parts), strict=True)
        for (begin, end), (low, high) in pairs:
            part, mine = slice(begin, end), fills[low:high]
            yield Group(
                used[part],
                np.where(sizes[part] > 0, at[part], -1),
                int(sizes[part].sum()),
                mine,
                list(dict.fromkeys([fill.chunk for fill in mine])),
            )

    def _fills(
        self,
        used: npt.NDArray[np.int64],
        rows: npt.NDArray[np.void],
        at: npt.NDArray[np.int64],
        firsts: npt.NDArray[np.intp],
    ) -> tuple[list[Fill], npt.NDArray[np.int64]]:
        """Return the parts of saved chunks in these rows, and the index of each part's row. firsts:
        index of the first row of each row's group.
        """
        part = slice(*np.searchsorted(self._parts.chunk, (used[0], used[-1] + 1)))
        owner, row, first, numel = (column[part] for column in self._parts)
        source = first + self._shift[owner]
        found = self._checkpoint.chunks.cut(source, numel)
        owner, row = owner[found.owner], np.searchsorted(used, row)[found.owner]
        start = found.first + (first - source)[found.owner] - self._at[used[row]]
        begin = found.first - self._checkpoint.chunks.positions[found.chunk]
        mine, theirs = self._widths[rows["flat"][row]], self._saved_widths[self._saved_flat[owner]]
        spans = (
            extent_bytes(begin, theirs),
            extent_bytes(begin + found.numel, theirs),
            at[row] + extent_bytes(start, mine),
            at[row] + extent_bytes(start + found.numel, mine),
        )
        columns = (
            (row - firsts[row]).tolist(),
            start.tolist(),
            [self._saved[index] for index in owner.tolist()],
            (found.first - self._saved_at[owner]).tolist(),
            found.chunk.tolist(),
            begin.tolist(),
            found.numel.tolist(),
            self._copied[owner].tolist(),
            zip(*(span.tolist() for span in spans), strict=True),
        )
        return list(map(Fill, *columns)), row

    def compose(
        self,
        group: Group,
        buffer: Bytes,
        missed: Callable[[Fill, AioError], None] | None = None,
    ) -> None:
        """Read the parts of a group, and put them into a buffer. Blocks. Raises: as
        `ChunkReader.get`; the error also names the parameter.

        missed: called with a part that cannot be read, and with the error, which is then not
        raised. The part's elements in the buffer stay unchanged.
        """
        for fill in group.fills:
            try:
                arrays = self.reader.get(fill.chunk)
            except AioError as error:
                if missed is None:
                    where = f"elements {fill.element} to {fill.element + fill.numel}"
                    error.args = (f"{where} of {fill.saved.entry.name}: {error}",)
                    raise
                missed(fill, error)
                continue
            if not fill.copied:
                self.put(group, fill, buffer, arrays)
                continue
            lows, ends, begins, stops = fill.spans
            for s in range(fill.copied):
                buffer[begins[s] : stops[s]] = arrays[s][lows[s] : ends[s]]

    def put(self, group: Group, fill: Fill, buffer: Bytes, arrays: Sequence[Bytes]) -> None:
        """Convert a part, and put it into a buffer. arrays: sections of the part's saved chunk."""
        index = int(self._rows["flat"][group.rows[fill.row]])
        flat, states = self._flats[index], bool(self._states[index])
        form, source = flat.state_format, fill.saved.flat
        if states and (text := rounding(source.state_format, form)):
            self.rounded[text] = None
        given = [
            slice_of(each, array, fill.source, fill.numel)
            for each, array in zip(source.sections, arrays, strict=True)
        ]
        made = convert(source.state_format, given, form, dtype_of(flat.dtype), states=states)
        at = group.at[fill.row].tolist()
        targets = [
            slice_of(section, buffer[base:], fill.start, fill.numel)
            for section, base in zip(flat.sections, at, strict=False)
        ]
        if not states and form.sign_section is not None:
            lo, moment = (targets[s] for s in form.master_sections[1:])
            every = torch.ones((), dtype=torch.bool)
            clear_signs(torch.from_numpy(lo), torch.from_numpy(moment), every)
        for s in range(len(made) if states else form.master_count):
            targets[s][:] = made[s]


def convert(
    source: Format, given: Sequence[Bytes], target: Format, dtype: torch.dtype, *, states: bool
) -> list[Bytes]:
    """Convert sections of whole groups to another format. states: convert the saved states. If
    False, the master is made from the parameter, and the moments are zero.

    The given arrays are not changed. A parameter that was saved without states gets moments of
    zero.
    """
    # A checkpoint does not contain gradients.
    target = target.with_grad(GradSection.NONE) if target.grad else target
    # The target has the parameter alone.
    if target.master is Master.RAW:
        return [given[0]]
    # Equal formats are copied, so all bits stay.
    if states and source is target:
        return list(given)
    # Codes and scales are copied, too: encoding the decoded values again rounds them.
    if states and (source.master, source.moments) == (target.master, Moments.Q8):
        return _with_count(source, given, target.count)
    # RAW has no separate master: only the parameter was saved.
    if states and source.master is not Master.RAW:
        master, moments = decode_sections(source, [torch.from_numpy(array) for array in given])
    else:
        # A copy: the saved chunk may be needed again, and `given` is a view of it.
        master, moments = torch.from_numpy(given[0].copy()).view(dtype).float(), []
    # Muon's matrices have further moments, of zero, only beside vectors.
    fresh = [torch.zeros_like(master) for _ in range(target.count)]
    moments = [*moments, *fresh[len(moments) :]][: target.count]
    return [values.numpy().view(np.uint8) for values in encode_sections(target, master, moments)]


def _with_count(source: Format, given: Sequence[Bytes], count: int) -> list[Bytes]:
    """Return sections of a format with quantized moments, with `count` moments: further ones are
    zero."""
    *codes, scales = given[source.master_count :]
    codes = [*codes, *[np.zeros_like(codes[0])] * count][:count]
    columns = np.zeros((len(scales) // (2 * source.count), max(count, source.count)), np.int16)
    columns[:, : source.count] = scales.view(np.int16).reshape(-1, source.count)
    made = np.ascontiguousarray(columns[:, :count]).view(np.uint8).reshape(-1)
    return [*given[: source.master_count], *codes, made]


def rounding(source: Format, target: Format) -> str:
    """Describe the loss of converting between two state formats; "" without loss."""
    # One format has no optimizer states, so none can be rounded.
    if Master.RAW in (source.master, target.master):
        return ""
    lost = []
    if target.master is Master.SPLIT8 and source.master is not Master.SPLIT8:
        # Section lo shrinks from 16 bits to 8.
        lost.append("masters to 24 bits (about 1 parameter in 512 becomes the next bf16)")
    if source.master is Master.SPLIT8 and target.master is Master.SPLIT:
        # The parameters of 24-bit masters half-way between two bf16 were rounded away from zero.
        lost.append("parameters half-way between two bf16 to the even one (about 1 in 512)")
        if target.sign_section is None:
            lost.append("their masters by one unit in the last place")
    if target.count and target.moments is not source.moments and target.moments is not Moments.FP32:
        kind = "bf16" if target.moments is Moments.BF16 else "8 bits in groups of 64"
        lost.append(f"moments to {kind}")
    return f"rounded to nearest: {' and '.join(lost)}" if lost else ""


def slice_of(section: Section, array: Bytes, start: int, numel: int) -> Bytes:
    """Slice elements [start, start + numel) of a section's bytes, rounded up to whole groups."""
    return array[section.size_bytes(start) : section.size_bytes(start + numel)]


# -- a checkpoint for other ranks ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resharded:
    """The result of a ReshardJob. rounded: how another state format rounded the values; "" if all
    bits are as saved. notes: parts of the original that were left out.
    """

    generation: int
    step: int
    world: int
    size_bytes: int
    rounded: str
    notes: tuple[str, ...]


class ReshardJob:
    """Rewrites a checkpoint for another number of ranks, or in another state format, chunk by chunk
    and without a model.

    The result equals a save after a restore of the original with this number of ranks: rank r gets
    the extra state of rank r, or of rank 0 if the original had no such rank. Manifests are written
    after all other files.

    state: another `Policy.state`; None keeps the formats.

    Raises: ValueError for a number of ranks below 1, or a state that the engine refuses.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        world: int,
        state: str | None = None,
        backend: str = "auto",
    ) -> None:
        if world < 1:
            raise ValueError(f"{world} ranks: give at least 1")
        self.checkpoint = checkpoint
        self._world = world
        self._backend = backend
        # Checked here, since otherwise only a restore would show that the engine refuses the state.
        _check_state(checkpoint, state)
        numerics: dict[str, Any] = {
            **checkpoint.numerics,
            **({"state": state} if state is not None else {}),
        }
        self._layouts: list[FlatLayout] = []
        flats = []
        for flat in checkpoint.flats:
            # `_layout_of` uses the planner of models, so a model on `world` ranks has this layout,
            # too.
            layout = _layout_of(flat, world, numerics.get("state", "exact"))
            target = _format_of(flat, state)
            flats.append(
                dataclasses.replace(flat, format=target.code, shard_numel=layout.shard_numel)
            )
            self._layouts.append(layout)
        self.flats = tuple(flats)
        self._layout = Layout(self.flats, numerics, checkpoint.left_out)
        pairs = zip(checkpoint.flats, flats, strict=True)
        self.rounded = "; ".join(
            dict.fromkeys(
                text for old, new in pairs if (text := rounding(old.state_format, new.state_format))
            )
        )
        self._shards: list[Chunks] = [_chunks_of(layout) for layout in self._layouts]
        self.size_bytes = world * int(section_bytes(new_rows(self._shards, 0), flats).sum())
        """Bytes of states that are written."""

    def write(
        self, target: Path, progress: Callable[[int], object] = lambda _size: None
    ) -> Resharded:
        """Write the checkpoint. Calls `progress` with the bytes of states of each chunk. Blocks.

        Raises: ValueError for a directory that has a checkpoint or a durable run, SwapFullError,
        AioError (EWOULDBLOCK while another save into the directory is running). After an error the
        files written so far are removed.
        """
        # inf.restore would read a durable run in the directory instead of the checkpoint.
        check_no_run(target)
        _check_empty(target)
        # Before anything is written, so that missing and short files are found first.
        self.checkpoint.check_files()
        make_directory(target)
        lock = DirectoryLock(target)
        try:
            # Checked again: another save may have ended before this process had the lock.
            _check_empty(target)
            return self._write(target, progress)
        finally:
            lock.release()

    def _write(self, target: Path, progress: Callable[[int], object]) -> Resharded:
        checkpoint = self.checkpoint
        # Space for all ranks is checked first, since data files are preallocated one by one.
        free = shutil.disk_usage(target).free
        if free < self.size_bytes:
            raise SwapFullError(
                f"no space for a checkpoint of {self.size_bytes} bytes, {free} are free: free "
                "space, or name another directory",
                errno=errno.ENOSPC, path=str(target), op="allocate", length=self.size_bytes,
            )  # fmt: skip
        # All ranks of a save share the number `save`, so manifests of different saves never form a
        # whole generation.
        generation, save = next_generation(target), secrets.randbits(48)
        try:
            for rank in range(self._world):
                # A random key seeds the checksums, so that stale bytes of another save never match.
                rows = new_rows(self._shards, secrets.randbits(62))
                part = new_part(
                    self._layout,
                    checkpoint.optimizers,
                    rows,
                    generation=generation,
                    save=save,
                    rank=rank,
                    world=self._world,
                    step=checkpoint.step,
                )
                write_part(
                    target,
                    part,
                    _RankShards(self, rank, rows, progress).store_all,
                    buffers=checkpoint.attachment("buffers", rank),
                    extra=checkpoint.attachment("extra", rank),
                    backend=self._backend,
                )
            # Only after all parts are written: a manifest of one rank would begin a commit.
            for rank in range(self._world):
                commit_part(target, generation, rank)
        # Also after Ctrl-C: half a checkpoint must not stay.
        except BaseException:
            for rank in range(self._world):
                remove_part(target, generation, rank)
            raise
        # Only parts of interrupted saves are removed: `_check_empty` has excluded checkpoints.
        remove_others(target, generation)
        return Resharded(
            generation, checkpoint.step, self._world, self.size_bytes, self.rounded, self._notes()
        )

    def _notes(self) -> tuple[str, ...]:
        # With fewer ranks, the extra state of the last ranks is dropped, and a note reports it.
        lost = [
            manifest.rank
            for manifest in self.checkpoint.manifests[self._world :]
            if manifest.extra is not None
        ]
        if not lost:
            return ()
        ranks = ", ".join(map(str, lost))
        return (f"the extra state of ranks {ranks} is omitted: there are {self._world} ranks now",)

    @functools.cached_property
    def ranges(self) -> list[Range]:
        """Places of the new flats' elements in the checkpoint."""
        return [
            Range(index, entry.offset, SavedParam(entry, index, flat), 0, entry.numel)
            for index, flat in enumerate(self.checkpoint.flats)
            for entry in flat.params
        ]


class _RankShards:
    def __init__(
        self,
        of: ReshardJob,
        rank: int,
        rows: npt.NDArray[np.void],
        progress: Callable[[int], object],
    ) -> None:
        self._of = of
        self._progress = progress
        self._rank = rank
        self._rows = rows

    def store_all(self, writer: DataWriter) -> None:
        """Compose and write all chunks. Blocks. Raises the error of a read or a write."""
        flats = self._of.flats
        composer = Composer(
            self._of.checkpoint, flats, self._rows, self._of.ranges, self._rank,
            states=np.ones(len(flats), dtype=np.bool_), whole=True,
        )  # fmt: skip

        def compose(group: Group, buffer: Bytes) -> None:
            # Padding between parameters and after sections must be zero, since checksums cover it.
            buffer[: group.size_bytes] = 0
            composer.compose(group, buffer)

        def finish(group: Group, _buffer: Bytes) -> None:
            # Raise the error of a failed write now, not after the last chunk.
            writer.check()
            self._progress(group.size_bytes)

        try:
            with slab_buffers(composer.buffer_bytes) as buffers:
                pipeline = ChunkPipeline(
                    buffers,
                    ahead=LOOK_AHEAD,
                    look_ahead=lambda coming: composer.reader.start(g.chunks for g in coming),
                    transform=compose,
                    write=lambda group, buffer: writer.store(
                        group.rows,
                        np.where(group.at >= 0, group.at + buffer.ctypes.data, 0).astype(np.uint64),
                    ),
                    finish=finish,
                    # After `wait_filled` the executor has a copy of the buffer. `DataWriter.finish`
                    # waits for all writes.
                    reusable=lambda ticket: ticket.wait_filled(),
                )
                pipeline.run(composer.groups())
        finally:
            composer.reader.close()


def _layout_of(flat: FlatEntry, world: int, state: str) -> FlatLayout:
    """Lay the flat out over `world` ranks, as a model does. Raises: ValueError if the saved flat
    has its parameters at other offsets.
    """
    dtype = dtype_of(flat.dtype)
    # As in a model: frozen parameters have no states, and chunks of the default size.
    chunk = chunk_numel_of(state, dtype) if flat.trainable else CHUNK_NUMEL
    layout = plan_flat(tuple(entry.numel for entry in flat.params), dtype.itemsize, world, chunk)
    # Bytes are copied by offset, so both layouts must agree.
    if layout.offsets != tuple(entry.offset for entry in flat.params):
        raise ValueError(
            f"unit {flat.unit}: its parameters have another layout than in this release; restore "
            "and save it instead"
        )
    return layout


def _chunks_of(layout: FlatLayout) -> Chunks:
    return layout.chunks.starts, layout.chunks.numels


def _format_of(flat: FlatEntry, state: str | None) -> Format:
    held = flat.state_format
    # Another format does not change parameters without states.
    if state is None or held.master is Master.RAW:
        return held
    found = state_format(state, dtype_of(flat.dtype), held.count)
    # The flat has states, so its dtype has a format.
    assert found is not None, flat.dtype
    return found


def _check_empty(target: Path) -> None:
    if target.is_dir() and begun_commits(target):
        raise ValueError(
            f"{str(target)!r} already has a checkpoint: name an empty or a new directory"
        )


def _check_state(checkpoint: Checkpoint, state: str | None) -> None:
    """Raise ValueError for a state that the engine refuses with these optimizers."""
    others = [
        entry.title for entry in checkpoint.optimizers if entry.title.startswith("Elementwise")
    ]
    if state == "compact" and others:
        raise ValueError(
            "state='compact' encodes moments in 8 bits, which suits the moments of AdamW, SGD and "
            f"Lion only, and {others[0]} has others; use 'exact' or 'bf16'"
        )
