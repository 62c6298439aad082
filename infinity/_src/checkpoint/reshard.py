"""Resharding: composes chunks from a checkpoint's chunks, for any number of ranks, chunk size and
state format.

    compose       one chunk, from the saved chunks that hold its parameters; a restore uses it too
    ReshardJob    a whole checkpoint, written anew for another number of ranks

States that keep their format are copied byte for byte: in every layout parameters start, and shards
and chunks end, at the boundary of a quantization group, so a part of a parameter is whole groups.
States that get another format are converted through fp32, rounded to nearest.
"""

from __future__ import annotations

import dataclasses
import errno
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
from infinity._src.checkpoint.manifest import FlatEntry, Layout, section_bytes
from infinity._src.checkpoint.reader import (
    Checkpoint,
    ChunkReader,
    ChunkRef,
    Chunks,
    Piece,
    SavedParam,
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
from infinity._src.params.chunk_pipeline import Bytes, ChunkPipeline, slab_buffers
from infinity.aio import Format
from infinity.errors import AioError, SwapFullError

# Neighbours share saved chunks, since boundaries of old and new chunks differ.
CHUNKS_CACHED = 8
"""Saved chunks in memory: chunks read ahead, and chunks that the next composed chunk needs, too."""
LOOK_AHEAD = 4
"""Number of composed chunks whose saved chunks are read ahead."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A chunk to compose. section: gives the memory of (section, first element, elements). states:
    also compose optimizer states, as in `convert`. If False, the moments stay as they are, and
    `section` must give `format.master_sections` with their present values.
    """

    format: Format
    dtype: torch.dtype
    section: Callable[[int, int, int], Bytes]
    states: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a parameter. start: its first element in the composed chunk. saved, pieces: its
    place in the checkpoint. element: its first element in the saved parameter.
    """

    start: int
    saved: SavedParam
    pieces: tuple[Piece, ...]
    element: int

    @property
    def refs(self) -> Iterator[ChunkRef]:
        for piece in self.pieces:
            yield ChunkRef(piece.rank, self.saved.flat_index, piece.chunk)


def refs_of(chunks: Sequence[Sequence[Part]]) -> Iterator[ChunkRef]:
    """Yield the saved chunks that these chunks need."""
    return (ref for parts in chunks for part in parts for ref in part.refs)


def compose(
    reader: ChunkReader,
    part: Part,
    target: Target,
    missed: Callable[[Piece, AioError], None] | None = None,
) -> None:
    """Read a part and put it into a chunk. Blocks. Raises: as `ChunkReader.get`; the error names
    the parameter, too.

    missed: gets a piece that cannot be read, and the error, which is then not raised. The piece's
    elements in the chunk stay as they are.
    """
    source, form, section = part.saved.flat.state_format, target.format, target.section
    for piece, ref in zip(part.pieces, part.refs, strict=True):
        try:
            arrays = reader.get(ref)
        except AioError as error:
            if missed is None:
                first = part.element + piece.at
                where = f"elements {first} to {first + piece.numel} of {part.saved.entry.name}"
                error.args = (f"{where}: {error}",)
                raise
            missed(piece, error)
            continue
        given = [
            slice_of(each, array, piece.start, piece.numel)
            for each, array in zip(part.saved.flat.sections, arrays, strict=True)
        ]
        made = convert(source, given, form, target.dtype, states=target.states)
        at, numel = part.start + piece.at, piece.numel
        if not target.states and form.sign_section is not None:
            lo, moment = (section(index, at, numel) for index in form.master_sections[1:])
            every = torch.ones((), dtype=torch.bool)
            clear_signs(torch.from_numpy(lo), torch.from_numpy(moment), every)
        for index in range(len(made) if target.states else form.master_count):
            section(index, at, numel)[:] = made[index]


def convert(
    source: Format, given: Sequence[Bytes], target: Format, dtype: torch.dtype, *, states: bool
) -> list[Bytes]:
    """Convert sections of whole groups to another format. states: convert the saved states. If
    False, the master is made from the parameter, and the moments are zero.

    The given arrays are not changed. A parameter that was saved without states gets moments of
    zero.
    """
    # Gradients are no part of a checkpoint.
    target = target.with_grad(GradSection.NONE) if target.grad else target
    # The parameter alone, whatever else was saved.
    if target.master is Master.RAW:
        return [given[0]]
    # Bit for bit: nothing is decoded where the format stays.
    if states and source is target:
        return list(given)
    # RAW has no separate master: the parameter is all that was saved.
    if states and source.master is not Master.RAW:
        master, moments = decode_sections(source, [torch.from_numpy(array) for array in given])
    else:
        # A copy: the saved chunk may be needed again, and `given` is a view of it.
        master = torch.from_numpy(given[0].copy()).view(dtype).float()
        moments = [torch.zeros_like(master) for _ in range(target.count)]
    return [values.numpy().view(np.uint8) for values in encode_sections(target, master, moments)]


def rounding(source: Format, target: Format) -> str:
    """Describe the loss of converting between two state formats; "" without loss."""
    # No optimizer states on one side, so none that could be rounded.
    if Master.RAW in (source.master, target.master):
        return ""
    lost = []
    if target.master is Master.SPLIT8 and source.master is not Master.SPLIT8:
        # lo goes from 16 bits to 8.
        lost.append("masters to 24 bits (1 parameter in 512, about, becomes the next bf16)")
    if source.master is Master.SPLIT8 and target.master is Master.SPLIT:
        # 24-bit masters half-way between two bf16 have their parameters rounded away from zero.
        lost.append("parameters half-way between two bf16 to the even one (1 in 512, about)")
        if target.sign_section is None:
            lost.append("their masters by one unit in the last place")
    if target.count and target.moments is not source.moments and target.moments is not Moments.FP32:
        kind = "bf16" if target.moments is Moments.BF16 else "8 bits in groups of 64"
        lost.append(f"moments to {kind}")
    return f"rounded to nearest: {' and '.join(lost)}" if lost else ""


def slice_of(section: Section, array: Bytes, start: int, numel: int) -> Bytes:
    """Slice elements [start, start + numel) of a section's bytes; a begun group of elements counts
    whole.
    """
    return array[section.size_bytes(start) : section.size_bytes(start + numel)]


# -- a checkpoint for other ranks ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resharded:
    """The result of a ReshardJob. rounded: how another state format rounded the values, "" where
    all bits are as saved. notes: parts of the original that are left out.
    """

    generation: int
    step: int
    world: int
    size_bytes: int
    rounded: str
    notes: tuple[str, ...]


class ReshardJob:
    """A checkpoint for another number of ranks, and in another state format if that is wanted:
    chunk by chunk, without a model.

    The result is what restoring the original with so many ranks and saving it makes: rank r gets
    the extra state of rank r, or of rank 0 where there was no such rank. Files lie in the directory
    without a manifest until all are written.

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
        # Before any layout: otherwise the user would learn only at the restore that the engine
        # refuses this state.
        _check_state(checkpoint, state)
        numerics: dict[str, Any] = {
            **checkpoint.numerics,
            **({"state": state} if state is not None else {}),
        }
        self._layouts: list[FlatLayout] = []
        flats = []
        for flat in checkpoint.flats:
            # By the planner that lays out a model, so that a model on `world` ranks has this
            # layout, too.
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
        """Write the checkpoint; `progress` gets the bytes of states of each chunk. Blocks.

        Raises: ValueError for a directory that has a checkpoint or a durable run, SwapFullError,
        AioError (EWOULDBLOCK while another is written there). After an error the files written so
        far are removed.
        """
        # inf.restore would take the run there for the checkpoint.
        check_no_run(target)
        _check_empty(target)
        # Before anything is written: a missing file, or one cut short, is found at once.
        self.checkpoint.check_files()
        make_directory(target)
        lock = DirectoryLock(target)
        try:
            # Again: another save may have ended before the lock was taken.
            _check_empty(target)
            return self._write(target, progress)
        finally:
            lock.release()

    def _write(self, target: Path, progress: Callable[[int], object]) -> Resharded:
        checkpoint = self.checkpoint
        # Space for all ranks is checked first: each data file is preallocated only when its turn
        # comes.
        free = shutil.disk_usage(target).free
        if free < self.size_bytes:
            raise SwapFullError(
                f"no space for a checkpoint of {self.size_bytes} bytes, {free} are free: free "
                "space, or name another directory",
                errno=errno.ENOSPC, path=str(target), op="allocate", length=self.size_bytes,
            )  # fmt: skip
        # All ranks of a save share `save`, so manifests of two saves never make a whole generation.
        generation, save = next_generation(target), secrets.randbits(48)
        try:
            for rank in range(self._world):
                # A random key, which seeds the checksums: stale bytes of another save never match.
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
            # Only after all parts are written: a manifest of one rank would be a begun commit.
            for rank in range(self._world):
                commit_part(target, generation, rank)
        # Ctrl-C too: half a checkpoint must not stay.
        except BaseException:
            for rank in range(self._world):
                remove_part(target, generation, rank)
            raise
        # These are parts of interrupted saves: `_check_empty` made sure that no checkpoint is here.
        remove_others(target, generation)
        return Resharded(
            generation, checkpoint.step, self._world, self.size_bytes, self.rounded, self._notes()
        )

    def _notes(self) -> tuple[str, ...]:
        # With fewer ranks the state of ranks that are gone is dropped, and a note says so.
        lost = [
            manifest.rank
            for manifest in self.checkpoint.manifests[self._world :]
            if manifest.extra is not None
        ]
        if not lost:
            return ()
        ranks = ", ".join(map(str, lost))
        return (f"the extra state of ranks {ranks} is omitted: there are {self._world} now",)

    def parts(self, flat_index: int, rank: int) -> dict[int, list[Part]]:
        """Find the parts that make up the chunks of a rank's shard of a flat, by chunk."""
        found: dict[int, list[Part]] = {}
        old = self.checkpoint.flats[flat_index]
        for slot, entry in enumerate(old.params):
            saved = SavedParam(entry, flat_index, old)
            for chunk, start, element, numel in self._layouts[flat_index].spans(slot, rank):
                pieces = tuple(self.checkpoint.pieces(saved, element, numel))
                found.setdefault(chunk, []).append(Part(start, saved, pieces, element))
        return found


class _NewRow(NamedTuple):
    row: int
    parts: list[Part]


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
        self._sizes = section_bytes(rows, of.flats)
        self._at = np.cumsum(self._sizes, axis=1) - self._sizes

    def store_all(self, writer: DataWriter) -> None:
        """Compose and write all chunks. Blocks. Raises the error of a read or a write."""
        reader = ChunkReader(self._of.checkpoint, CHUNKS_CACHED)

        def finish(turn: _NewRow, _buffer: Bytes) -> None:
            # A failed write ends the job now, not after the last chunk.
            writer.check()
            self._progress(int(self._sizes[turn.row].sum()))

        try:
            with slab_buffers(int(self._sizes.sum(axis=1).max(initial=4096))) as buffers:
                pipeline = ChunkPipeline(
                    buffers,
                    ahead=LOOK_AHEAD,
                    look_ahead=lambda coming: reader.start(refs_of([t.parts for t in coming])),
                    transform=lambda turn, buffer: self._compose(reader, buffer, turn),
                    write=lambda turn, buffer: writer.store(
                        np.array([turn.row]), self._addresses(turn.row, buffer)
                    ),
                    finish=finish,
                    # `wait_filled` is enough: the executor then has a copy of the buffer.
                    # `DataWriter.finish` waits for all writes.
                    reusable=lambda ticket: ticket.wait_filled(),
                )
                pipeline.run(self._turns())
        finally:
            reader.close()

    def _addresses(self, row: int, buffer: Bytes) -> npt.NDArray[np.uint64]:
        at = np.where(self._sizes[row] > 0, buffer.ctypes.data + self._at[row], 0)
        return at[None].astype(np.uint64)

    def _turns(self) -> Iterator[_NewRow]:
        row = 0
        counts = np.bincount(self._rows["flat"], minlength=len(self._of.flats)).tolist()
        for flat in range(len(self._of.flats)):
            by_chunk = self._of.parts(flat, self._rank)
            for chunk in range(counts[flat]):
                # A chunk of only padding has no parts, but is written.
                yield _NewRow(row, by_chunk.get(chunk, []))
                row += 1

    def _compose(self, reader: ChunkReader, buffer: Bytes, turn: _NewRow) -> None:
        row = turn.row
        flat = self._of.flats[self._rows[row]["flat"]]
        # Padding between parameters, and of sections up to 4096: checksums cover it, so it is zero.
        buffer[:] = 0

        def section(index: int, start: int, numel: int) -> Bytes:
            low = int(self._at[row, index])
            size = flat.sections[index].size_bytes
            return buffer[low + size(start) : low + size(start + numel)]

        target = Target(flat.state_format, dtype_of(flat.dtype), section, states=True)
        for part in turn.parts:
            compose(reader, part, target)


def _layout_of(flat: FlatEntry, world: int, state: str) -> FlatLayout:
    """Lay the flat out over `world` ranks, as a model does. Raises: ValueError if the saved flat
    has its parameters at other offsets.
    """
    dtype = dtype_of(flat.dtype)
    # As a model's own planner: frozen parameters have no states, and chunks of the default size.
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
    # Parameters without states have nothing that another format would change.
    if state is None or held.master is Master.RAW:
        return held
    found = state_format(state, dtype_of(flat.dtype), held.count)
    # The flat has states, so its dtype has a format.
    assert found is not None, flat.dtype
    return found


def _check_empty(target: Path) -> None:
    if target.is_dir() and begun_commits(target):
        raise ValueError(
            f"{str(target)!r} has a checkpoint already: name an empty or a new directory"
        )


def _check_state(checkpoint: Checkpoint, state: str | None) -> None:
    """Raise ValueError for a state that the engine refuses with these optimizers."""
    others = [
        entry.title for entry in checkpoint.optimizers if entry.title.startswith("Elementwise")
    ]
    if state == "compact" and others:
        raise ValueError(
            "state='compact' keeps moments in 8 bits, whose map fits those of AdamW, SGD and "
            f"Lion, and {others[0]} holds these; use 'exact' or 'bf16'"
        )
