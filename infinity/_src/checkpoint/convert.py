"""A checkpoint for another number of ranks, and in another state format if that is wanted: chunk by chunk, without a model.

What comes of it is what restoring the original with so many ranks makes, as an ordinary checkpoint: rank r gets the extra state
of rank r, or of rank 0 where there was no such rank. Its files lie in the directory without a manifest until all are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.data_file import DataWriter, new_rows
from infinity._src.checkpoint.directory import DirectoryLock, begun_commits, make_directory, next_generation
from infinity._src.checkpoint.json_values import dtype_of
from infinity._src.checkpoint.manifest import FlatEntry, Layout, section_bytes
from infinity._src.checkpoint.pieces import Chunks
from infinity._src.checkpoint.reader import Bytes, Checkpoint, SavedParam, StateReader
from infinity._src.checkpoint.reshard import CHUNKS_KEPT, STAGES, Part, compose, rounding
from infinity._src.checkpoint.run_files import check_no_run
from infinity._src.checkpoint.writer import NewPart, commit_part, remove_others, remove_part, write_part
from infinity._src.memory.layout import FlatLayout, plan_flat
from infinity._src.memory.planner import chunk_numel_of, state_format
from infinity.aio import Format, Slab, Ticket
from infinity.aio._records import CHUNK_NUMEL, Master
from infinity.errors import AioError, SwapFullError


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What was written. rounded: what another state format made of the values, "" where all bits are as saved.
    notes: what is not in it."""

    generation: int
    step: int
    world: int
    size_bytes: int
    rounded: str
    notes: tuple[str, ...]


class Rewriting:
    """One rewriting of a checkpoint. state: another `Policy.state`; None keeps the formats.

    Raises: ValueError for a number of ranks or a state that cannot be.
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
            raise ValueError(f"{world} ranks: a checkpoint is of at least 1")
        self._checkpoint = checkpoint
        self._world = world
        self._progress: Callable[[int], object] = lambda _size: None
        self._backend = backend
        _check_state(checkpoint, state)
        numerics: dict[str, Any] = {**checkpoint.numerics, **({"state": state} if state is not None else {})}
        self._layouts: list[FlatLayout] = []
        flats = []
        for flat in checkpoint.flats:
            layout = _layout_of(flat, world, numerics.get("state", "exact"))
            target = _format_of(flat, state)
            flats.append(dataclasses.replace(flat, format=target.code, shard_numel=layout.shard_numel))
            self._layouts.append(layout)
        self._layout = Layout(tuple(flats), numerics)
        pairs = zip(checkpoint.flats, flats, strict=True)
        self.rounded = "; ".join(
            dict.fromkeys(text for old, new in pairs if (text := rounding(old.state_format, new.state_format)))
        )
        self._shards: list[Chunks] = [_chunks_of(layout) for layout in self._layouts]
        self.size_bytes = world * int(section_bytes(new_rows(self._shards, 0), flats).sum())
        """Bytes of states that are written."""

    def run(self, target: Path, progress: Callable[[int], object] = lambda _size: None) -> Rewritten:
        """Write the checkpoint; `progress` is told bytes of states. Blocks.

        Raises: ValueError for a directory that has a checkpoint or a durable run, SwapFullError, AioError (EWOULDBLOCK while
        another is written there); then nothing of it stays.
        """
        self._progress = progress
        check_no_run(target)
        _check_empty(target)
        self._checkpoint.check_files()
        make_directory(target)
        lock = DirectoryLock(target)
        try:
            _check_empty(target)  # another may have ended just now
            return self._write(target)
        finally:
            lock.release()

    def _write(self, target: Path) -> Rewritten:
        checkpoint = self._checkpoint
        free = shutil.disk_usage(target).free
        if free < self.size_bytes:
            raise SwapFullError(
                f"no room for a checkpoint of {self.size_bytes} bytes, {free} are free: free space, or name another directory",
                errno=errno.ENOSPC, path=str(target), op="allocate", length=self.size_bytes,
            )  # fmt: skip
        generation, save = next_generation(target), secrets.randbits(48)
        try:
            for rank in range(self._world):
                rows = new_rows(self._shards, secrets.randbits(62))
                part = NewPart(
                    layout=self._layout,
                    generation=generation,
                    save=save,
                    rank=rank,
                    world=self._world,
                    step=checkpoint.step,
                    optimizers=checkpoint.optimizers,
                    rows=rows,
                    buffers=checkpoint.attachment("buffers", rank),
                    extra=checkpoint.attachment("extra", rank),
                )
                write_part(target, part, _Filling(self, rank, rows).run, backend=self._backend)
            for rank in range(self._world):
                commit_part(target, generation, rank)
        except BaseException:
            for rank in range(self._world):
                remove_part(target, generation, rank)
            raise
        remove_others(target, generation)
        return Rewritten(generation, checkpoint.step, self._world, self.size_bytes, self.rounded, self._notes())

    def _notes(self) -> tuple[str, ...]:
        lost = [manifest.rank for manifest in self._checkpoint.manifests[self._world :] if manifest.extra is not None]
        if not lost:
            return ()
        return (f"the extra state of ranks {', '.join(map(str, lost))} is left out: there are {self._world} now",)

    def parts(self, flat_index: int, rank: int) -> dict[int, list[Part]]:
        """What the chunks of a rank's shard of a flat are made of, by chunk."""
        found: dict[int, list[Part]] = {}
        old = self._checkpoint.flats[flat_index]
        for slot, entry in enumerate(old.params):
            saved = SavedParam(entry, flat_index, old)
            for chunk, start, element, numel in self._layouts[flat_index].spans(slot, rank):
                pieces = tuple(self._checkpoint.pieces(saved, element, numel))
                found.setdefault(chunk, []).append(Part(start, saved, pieces))
        return found

    @property
    def flats(self) -> tuple[FlatEntry, ...]:
        """The flats as they are written."""
        return self._layout.flats

    @property
    def checkpoint(self) -> Checkpoint:
        """Where they are read."""
        return self._checkpoint

    def advance(self, size_bytes: int) -> None:
        """So many bytes of states are composed."""
        self._progress(size_bytes)


class _Filling:
    """Storing all rows of one rank: some chunks are read ahead, some are written, one is put together."""

    def __init__(self, of: Rewriting, rank: int, rows: npt.NDArray[np.void]) -> None:
        self._of = of
        self._rank = rank
        self._rows = rows
        self._sizes = section_bytes(rows, of.flats)
        self._at = np.cumsum(self._sizes, axis=1) - self._sizes

    def run(self, writer: DataWriter) -> None:
        """Blocks. Raises what a read or a write met."""
        size = int(self._sizes.sum(axis=1).max(initial=4096))
        slab = Slab(STAGES * size)
        reader = StateReader(self._of.checkpoint, CHUNKS_KEPT)
        stages = [slab.array(np.uint8, offset=k * size, count=size) for k in range(STAGES)]
        writing: deque[Ticket] = deque()
        upcoming: deque[tuple[int, list[Part]]] = deque()
        turns = self._turns()
        try:
            while True:
                while len(upcoming) < STAGES and (turn := next(turns, None)) is not None:
                    upcoming.append(turn)
                if not upcoming:
                    break
                reader.start(ref for _, parts in upcoming for part in parts for ref in part.refs)
                row, parts = upcoming.popleft()
                if len(writing) == STAGES:
                    writing.popleft().wait_filled()
                stage = stages[row % STAGES]
                self._compose(reader, stage, row, parts)
                count = len(self._of.flats[self._rows[row]["flat"]].sections)
                addresses = {s: stage.ctypes.data + int(self._at[row, s]) for s in range(count)}
                writing.append(writer.store(row, addresses))
                writer.check()
                self._of.advance(int(self._sizes[row].sum()))
            while writing:
                writing.popleft().wait_filled()
        finally:
            # Also after a fault: nothing may be on its way from or into memory that is freed.
            for ticket in writing:
                with contextlib.suppress(AioError):  # the first of them is on its way to the caller
                    ticket.wait()
            reader.settle()
            del stages
            slab.close()

    def _turns(self) -> Iterator[tuple[int, list[Part]]]:
        """Every row, in order, and what it is made of."""
        row = 0
        for flat in range(len(self._of.flats)):
            by_chunk = self._of.parts(flat, self._rank)
            for chunk in range(int((self._rows["flat"] == flat).sum())):
                yield row, by_chunk.get(chunk, [])
                row += 1

    def _compose(self, reader: StateReader, stage: Bytes, row: int, parts: list[Part]) -> None:
        flat = self._of.flats[self._rows[row]["flat"]]
        stage[:] = 0  # what no parameter covers, and what pads sections to 4096

        def section(index: int, start: int, numel: int) -> Bytes:
            low = int(self._at[row, index])
            size = flat.sections[index].size_bytes
            return stage[low + size(start) : low + size(start + numel)]

        for part in parts:
            compose(reader, part, flat.state_format, dtype_of(flat.dtype), range(len(flat.sections)), section, states=True)


def _layout_of(flat: FlatEntry, world: int, state: str) -> FlatLayout:
    """The flat over so many ranks, as a model of so many lays it out. Raises: ValueError for one of another arithmetic."""
    dtype = dtype_of(flat.dtype)
    chunk = chunk_numel_of(state, dtype) if flat.trainable else CHUNK_NUMEL
    layout = plan_flat(tuple(entry.numel for entry in flat.params), dtype.itemsize, world, chunk)
    if layout.offsets != tuple(entry.offset for entry in flat.params):
        raise ValueError(f"unit {flat.unit}: its parameters do not lie where this release lays them; restore and save it instead")
    return layout


def _chunks_of(layout: FlatLayout) -> Chunks:
    spans = layout.chunks
    return np.array([span.start for span in spans], np.int64), np.array([span.numel for span in spans], np.int64)


def _format_of(flat: FlatEntry, state: str | None) -> Format:
    held = flat.state_format
    if state is None or held.master is Master.RAW:
        return held
    found = state_format(state, dtype_of(flat.dtype), held.count)
    assert found is not None, flat.dtype  # it has states
    return found


def _check_empty(target: Path) -> None:
    if target.is_dir() and begun_commits(target):
        raise ValueError(f"{str(target)!r} has a checkpoint already: name an empty or a new directory")


def _check_state(checkpoint: Checkpoint, state: str | None) -> None:
    """Raise ValueError for a state that the engine refuses with these optimizers."""
    others = [entry.title for entry in checkpoint.optimizers if entry.title.startswith("Elementwise")]
    if state == "compact" and others:
        raise ValueError(
            f"state='compact' keeps moments in 8 bits, whose map fits those of AdamW, SGD and Lion, and {others[0]} holds these; "
            "use 'exact' or 'bf16'"
        )
