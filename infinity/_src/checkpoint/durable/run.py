"""Durable runs: every committed step has a manifest next to the swap files, from which training
resumes after a crash.

    set-up          when all trainable parameters have states: a manifest of step 0
    opt.step()      captures the step's small state: step counts, groups, buffers, handle.extra
    the next step   updates have ended -> flush the drives -> every rank writes its manifest
                    -> the states of the step before may be overwritten

Before every rank has written its manifest, no write touches a place that the last manifest names.
So there is always a whole generation: the last committed step, or the step before. With
`Policy.generations` of 3 or more, older commits stay, too (named_places.py). The run then removes
the oldest commit, manifest first, before it writes to the places of that commit.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from infinity._src.base.atomic_file import write_durably
from infinity._src.base.torch_compat import dynamo_disable
from infinity._src.cabi.records import PIECE_NUMEL
from infinity._src.checkpoint import metadata
from infinity._src.checkpoint.directory import (
    file_name,
    files_of,
    is_of,
    read_heads,
    remove,
    sync_directory,
    typed_errors,
    write_attachment,
)
from infinity._src.checkpoint.durable.copies import for_copy, save_number
from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.checkpoint.durable.named_places import OlderCommits, PinnedLayers
from infinity._src.checkpoint.formats.safe_pickle import extra_bytes
from infinity._src.checkpoint.manifest import (
    ROW,
    TABLE,
    FileEntry,
    Head,
    Marks,
    OptimizerEntry,
    marks_of,
    table_parts,
)
from infinity._src.checkpoint.reader import ALGORITHM
from infinity._src.checkpoint.save import Saver
from infinity._src.checkpoint.writer import StoredStates
from infinity._src.memory.swap_space import SwapSpace
from infinity._src.optim.base import Optimizer
from infinity._src.optim.step import StepPipeline
from infinity._src.params.state_store import ShardRecords, StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Executor
from infinity.errors import AioError, DriveLostError, PeerFailed

log = logging.getLogger("infinity")

_DRIVES_MAX = 1 << 16
BLOCK_CHUNKS = 4096


@dataclasses.dataclass(frozen=True)
class Described:
    """The chunks at one moment. files: the numbers (`layer_and_drive`) of the files with live
    places, ascending. digest: a checksum of all places. shards: the records of the chunks.
    """

    marks: Marks
    files: tuple[int, ...]
    digest: bytes
    shards: tuple[ShardRecords, ...]


def layer_and_drive(number: int) -> tuple[int, int]:
    """Return the layer and the drive of a file from the file's number in tables and rows."""
    return divmod(number, _DRIVES_MAX)


class RunTable:
    """The table of one rank's chunks. Threads may not share it."""

    def __init__(self, executor: Executor, store: StateStore, flats: Sequence[Flat]) -> None:
        self._executor = executor
        self._store = store
        self._flats = list(flats)
        # The table's file, the digest of the places in the table, and the records of its chunks.
        self._committed: tuple[FileEntry, bytes, tuple[ShardRecords, ...]] | None = None

    @property
    def file(self) -> FileEntry | None:
        return self._committed[0] if self._committed is not None else None

    def describe(self) -> Described:
        digest = xxhash.xxh3_128()
        parts, used = [], set()
        shards = tuple(self._store[flat] for flat in self._flats)
        for shard in shards:
            first = shard.first_sums
            for begin in range(0, len(shard.ids), BLOCK_CHUNKS):
                part = slice(begin, begin + BLOCK_CHUNKS)
                now = self._executor.look(shard.ids[part])
                assert not now["older"].any(), "a commit between the two updates of a chunk"
                second = now["sums_ptr"] != first[part]
                for array in _places(now, second):
                    digest.update(array.data)
                used.update(np.unique(_numbers(now, "file")).tolist())
                pieces = -(-now["numel"] // PIECE_NUMEL)
                parts.append(marks_of(now, second, pieces, shard.format.written_count))
        return Described(Marks.join(parts), tuple(sorted(used)), digest.digest(), shards)

    def known(self, found: Described) -> FileEntry | None:
        if self._committed is None:
            return None
        file, digest, shards = self._committed
        alike = digest == found.digest and all(
            mine is other for mine, other in zip(shards, found.shards, strict=True)
        )
        return file if alike else None

    def rows(self) -> npt.NDArray[np.void]:
        parts = []
        for index, flat in enumerate(self._flats):
            shard = self._store[flat]
            now = self._executor.look(shard.ids)
            table = _of_chunks(TABLE, index, shard, now)
            table["file"], table["file_offset"] = _places(now, now["sums_ptr"] != shard.first_sums)
            parts.append(table)
        return np.concatenate(parts)

    def live_rows(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
        """Return (a row for the live place of each chunk, ROW [chunks]; the checksums of all
        pieces). rows["file"] are numbers (`layer_and_drive`).
        """
        parts, sums, count = [], [], 0
        for index, flat in enumerate(self._flats):
            shard = self._store[flat]
            now = self._executor.look(shard.ids)
            rows = _of_chunks(ROW, index, shard, now)
            rows["generation"], rows["file_offset"] = now["generation"], now["file_offset"]
            rows["zeros"] = now["zeros"] & ((1 << shard.format.written_count) - 1)
            rows["file"] = _numbers(now, "file")
            pieces = shard.format.written_count * -(-now["numel"] // PIECE_NUMEL)
            rows["sums_at"] = count + np.cumsum(pieces) - pieces
            # Each place has a table of checksums; select the live place's.
            second = (now["sums_ptr"] != shard.first_sums).astype(np.int64)
            taken = shard.sums[second, np.arange(len(now))]
            # A row of `taken` has capacity for the longest chunk with gradients; its first `pieces`
            # checksums belong to this chunk's states.
            sums.append(taken[np.arange(taken.shape[1]) < pieces[:, None]])
            count += len(sums[-1])
            parts.append(rows)
        return np.concatenate(parts), np.concatenate(sums)

    def committed(self, file: FileEntry, found: Described) -> None:
        # Keep `found` without its marks, which take most of the memory.
        self._committed = file, found.digest, found.shards


def _of_chunks(
    dtype: np.dtype[np.void], index: int, shard: ShardRecords, now: npt.NDArray[np.void]
) -> npt.NDArray[np.void]:
    rows = np.zeros(len(now), dtype=dtype)
    rows["flat"], rows["start"] = index, shard.starts
    # `other_bytes` counts states only; `run_bytes` may include gradients.
    rows["run_bytes"] = now["other_bytes"]
    for name in ("numel", "key", "section_at"):
        rows[name] = now[name]
    # Commits do not contain gradients.
    rows["section_at"][:, shard.format.written_count :] = -1
    return rows


def _numbers(now: npt.NDArray[np.void], field: str) -> npt.NDArray[np.int32]:
    drive = {"file": "drive", "other_file": "other_drive"}[field]
    numbers: npt.NDArray[np.int32] = now[field] * np.int32(_DRIVES_MAX) + now[drive]
    return numbers


def _places(
    now: npt.NDArray[np.void], second: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return (file numbers, offsets) of the first and the second place of each chunk: [chunks, 2]
    each.
    """
    files = np.stack([_numbers(now, "file"), _numbers(now, "other_file")], axis=1)
    offsets = np.stack([now["file_offset"], now["other_offset"]], axis=1)
    files[second], offsets[second] = files[second, ::-1], offsets[second, ::-1]
    return files, offsets


@dataclasses.dataclass(frozen=True)
class _Small:
    """Small state of a step: everything except the chunks.

    whole: True if `extra` is the user's encoded state, or None without a state. False if the commit
    must still read and encode the user's state.
    """

    step: int
    optimizers: tuple[OptimizerEntry, ...]
    buffers: bytes | None
    extra: bytes | None
    whole: bool = True


class DurableRun:
    """One model's durable run. Threads may not share it. extra: a function that returns the user's
    small state.
    """

    def __init__(
        self,
        files: RunFiles,
        space: SwapSpace,
        model: torch.nn.Module,
        saver: Saver,
        pipeline: StepPipeline,
        *,
        extra: Callable[[], Any],
    ) -> None:
        assert pipeline.transaction is not None, "Policy ensures two generations"
        self.files = files
        self._policy = policy = saver.policy
        self._model = model
        self._units = list(saver.units)
        self._store = saver.states.store
        self._executor = saver.executor
        self._comm = saver.comm
        self._drives = saver.drives
        self._optimizer_of = saver.optimizer_of
        self._pipeline = pipeline
        self._extra = extra
        before = files.before
        # The ranks agree on both numbers when the first commit begins.
        self._generation = self._save = 0
        # Step of the run in the directories, until the user restores or releases that run.
        self._waits_for = before[0].step if before is not None and policy.durable != "new" else None
        self._captured: _Small | None = None
        self._committed: _Small | None = None
        self._written = -1  # `StateStore.writes` at the last commit
        self._pinned = PinnedLayers(files, space, self._store, self._executor)
        self._older = OlderCommits(
            policy.older_commits,
            self.flats,
            store=self._store,
            executor=self._executor,
            space=space,
            pinned=self._pinned,
        )
        # True on all ranks once one rank has linked.
        self._linked = False
        self._stepped = False
        self._cleaned = False
        self._table = RunTable(self._executor, self._store, self.flats)
        # The first step's forward may change buffers, so this hook captures them before.
        self._first_forward = model.register_forward_pre_hook(
            dynamo_disable(self._before_forward), prepend=True
        )

    def close(self) -> None:
        self._first_forward.remove()

    def _before_forward(self, *_: object) -> None:
        # Forward may change buffers (running means): commit their values before forward.
        if not self._stepped and not self.waits:
            self.capture()
            if self._captured == self._committed:
                # Unchanged since set-up: `commit` compares identities, and finds nothing new.
                self._captured = self._committed
        # A forward for evaluation leaves the hook in place for the first forward that trains.
        if self._model.training and torch.is_grad_enabled():
            self._first_forward.remove()
            # If some trainable parameters have no optimizer, set-up could not know when all states
            # existed, and committed nothing.
            if not self.begun and self._captured is not None and self._captured.optimizers:
                self._pipeline.commit()

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self._units for flat in unit.flats]

    def check(self) -> None:
        """Raise ValueError while the directories hold a run that was not restored or released."""
        if self._waits_for is not None:
            place, files = str(self.files.home.parent), self.files
            # If this run resumes from a copy of another run, that run's first drive is lost with
            # its states.
            reports = "" if files.source in (files.home, *files.copies) else ", damaged='report'"
            raise ValueError(
                f"{files.source.parent} holds a durable run, committed up to step "
                f"{self._waits_for}: call inf.restore(model, opt, {place!r}{reports}) "
                "first, or discard it with Policy(durable='new')"
            )

    def must_restore(self, directories: Sequence[str | os.PathLike[str]]) -> bool:
        """Return whether the run must be restored first, and has all of these directories."""
        mine = {os.path.realpath(run.parent) for run in self.files.directories}
        named = {os.path.realpath(each) for each in directories}
        return self._waits_for is not None and bool(named) and named <= mine

    @property
    def before(self) -> int | None:
        """The generation in the directories when this process began; None if they held no run, or
        if this process has committed.
        """
        return (
            self.files.before[0].generation
            if self.files.before is not None and self._written < 0
            else None
        )

    @property
    def has_states(self) -> bool:
        return self.files.before is not None and bool(self.files.before[0].optimizers)

    @property
    def waits(self) -> bool:
        """Return whether the directories hold a run that was neither restored nor released, which
        a step does.
        """
        released = self._stepped or self.begun or self.files.before is None
        return self._waits_for is not None or not released

    @property
    def begun(self) -> bool:
        return self._written >= 0

    def restored(self, extra: object) -> None:
        """Note that a checkpoint with this `extra` was restored: the next commit may replace the
        run that the directories held.
        """
        # Like after a step: `extra` belongs to the restored step.
        self._waits_for, self._stepped = None, True
        self._first_forward.remove()
        self._capture(lambda: extra)

    # -- a step ------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """Note that a step was taken, and capture the small state to commit with it.

        Raises: ValueError for a `handle.extra` that cannot be encoded; then every commit fails
        until the user mends it.
        """
        self._stepped = True
        self.capture()

    def capture(self) -> None:
        # `handle.extra` before the first step belongs to that step: a run without steps has none.
        self._capture(self._extra if self._stepped else lambda: None)

    def _capture(self, extra: Callable[[], object]) -> None:
        # First without `extra`, so that the step's state is captured if encoding `extra` fails.
        self._captured = self._described()
        self._captured = dataclasses.replace(self._captured, extra=extra_bytes(extra()), whole=True)

    def _described(self) -> _Small:
        # One optimizer holds many parameters, and is described once.
        holders = {
            id(holder): holder
            for unit in self._units
            for param in unit.params
            if (holder := self._optimizer_of(param))
        }
        entries: list[OptimizerEntry] = []
        for holder in holders.values():
            assert isinstance(holder, Optimizer)
            entries.append(metadata.describe_optimizer(holder, self._optimizer_of))
        buffers = metadata.buffer_bytes(self._model)
        return _Small(self._pipeline.steps, tuple(entries), buffers, None, whole=False)

    def undone(self) -> None:
        """Forget the small state captured since the last commit, since a fault undid its step."""
        self._captured = self._committed

    def states_moved(self, *, complete: bool) -> None:
        """Commit the last step again, since flats have moved, and other flats will use their old
        places. complete: all trainable parameters have states, so a run without a commit makes its
        first.
        """
        # Set to None first: if `_described` fails, the next commit captures again.
        before, self._captured = self._captured, None
        if self._written >= 0:
            # `extra` belongs to the last step, or to the restored run.
            if before is not None and before.whole:
                self._captured = dataclasses.replace(
                    self._described(), extra=before.extra, whole=True
                )
            self.commit()
        elif complete and not self.waits:
            # Only when all states exist, since a commit reserves its places, and a second
            # optimizer's states might not fit.
            try:
                self.commit()
            except BaseException:
                # The optimizer is then not registered, so no commit may describe its groups.
                self._captured = None
                raise

    def prepare_next(self) -> None:
        """Move chunks away from places that the next step must not write: places that a linked
        checkpoint names, and places that a retained older commit names. Called after a commit.

        Collective if older commits are retained, or if a checkpoint was linked. Raises:
        SwapFullError, AioError, and PeerFailed if another rank failed.
        """
        # Equal on all ranks (if one rank linked, all have `_linked`), so that no rank waits alone
        # in the collective below.
        if not (self._linked or self._policy.older_commits):
            return
        problem: Exception | None = None
        try:
            # If there is no space for a further place, `make_way` drops older commits that name
            # places to be written: remove their manifests first.
            if self._older.make_way():
                self._remove_older()
            if self._linked:
                self._pinned.make_way(self.flats, self._older.layers)
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks stop too
            problem = error
        failed = self._comm.all_reduce_any([problem is not None])[0]
        if problem is not None:
            raise problem
        if failed:
            raise PeerFailed(
                "another rank lacks space for the next step in addition to a checkpoint or an "
                "older commit; its error gives the cause"
            )

    def link(self, directory: Path, generation: int) -> StoredStates | None:
        """Make hard links to the files of the newest generation, just committed, in a checkpoint's
        directory.

        Returns None if links cannot be made, or while a run waits for its restore. Raises:
        SwapFullError, AioError.
        """
        if self.waits:
            return None
        # Set before the attempt, which may fail on this rank only: `prepare_next` is collective.
        self._linked = True
        rows, sums = self._table.live_rows()
        numbers, rows["file"] = np.unique(rows["file"], return_inverse=True)
        used = [layer_and_drive(each) for each in numbers.tolist()]
        names = [
            file_name(f"data{index}", generation, self.files.rank) for index in range(len(used))
        ]
        targets = {each: directory / name for each, name in zip(used, names, strict=True)}
        now = np.concatenate([self._executor.look(self._store[flat].ids) for flat in self.flats])
        # The save copies if the target is on another file system, or if there are too many layers.
        if not self._pinned.link(now, targets, spare=self._older.capacity > 0):
            return None
        entries = (
            FileEntry(name, self.files.layers[layer][drive].size_bytes)
            for name, (layer, drive) in zip(names, used, strict=True)
        )
        return StoredStates(tuple(entries), rows, sums)

    def is_due(self) -> bool:
        small = self._captured
        # If nothing is captured, `commit` captures, and checks for changes.
        return small is None or small.step % self._policy.durable_every == 0

    def commit(self) -> None:
        """Commit the present states as the newest generation, on all ranks. No update may be
        pending. Blocks; collective.

        Raises: SwapFullError, DeviceFailedError, AioError, and PeerFailed if another rank failed.
        After an error a run still resumes from the previous generation, whose places were not
        overwritten.
        """
        # A single rank may have written between steps, so the ranks decide together.
        if not self._comm.all_reduce_any(
            [self._store.writes != self._written or self._captured is not self._committed]
        )[0]:
            return
        problem: Exception | None = None
        written = None
        generation = self._next_generation()
        try:
            if self._captured is None:
                self.capture()
            elif not self._captured.whole:
                # `extra` could not be encoded when the step ended; the user may have changed it.
                kept = extra_bytes(self._extra())
                self._captured = dataclasses.replace(self._captured, extra=kept, whole=True)
            written = self._write(generation)
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            problem = error
        if isinstance(problem, AioError):
            problem = self._drives.examine(problem)
        if isinstance(problem, DriveLostError):
            # Report the lost drive to all ranks, which else wait in the collective below.
            self._comm.report_failure(problem)
            self._drives.check()
        # All ranks retain as many older commits as the rank with the least capacity, since a
        # further commit would lack that rank's part.
        lacks = [self._older.capacity <= count for count in range(self._policy.older_commits)]
        failed, *lacks = self._comm.all_reduce_any([problem is not None, *lacks])
        if failed:
            # Some rank has no manifest, so the generation is not whole: remove this rank's part.
            self._remove(lambda path, number: number == generation and is_of(path, self.files.rank))
        if problem is not None:
            raise problem
        if failed:
            raise PeerFailed(
                "another rank could not commit the step, and its error gives the cause; the commit "
                "before stays"
            )
        assert written is not None
        manifest, found = written
        assert manifest.table is not None
        # From now on a run resumes from this step after a crash, so the places of the commit before
        # may be overwritten.
        self._written, self._committed = self._store.writes, self._captured
        self._table.committed(manifest.table, found)
        self._drives.committed(manifest.step)
        self._older.committed(generation, manifest.table.name, lacks.count(False))
        # Every rank has its manifest now; before, only the older generation was whole.
        self._remove_older()
        # A manifest names these places now: the next step writes each chunk to its other place.
        self._store.commit_named_places()
        try:
            self.files.committed()
        except AioError as error:
            # The states are committed, and the next commit tries again.
            log.warning(
                "%s: the journal of the initialization could not be removed: %s",
                self.files.home,
                error,
            )

    def _next_generation(self) -> int:
        """Return a generation number that no file has, also no part of an interrupted commit.
        Collective.
        """
        # The ranks agree once; afterwards each rank counts, and all counts are equal.
        if not self._generation:
            mine = [0.0, 0.0]
            if self.files.rank == 0:
                before = self.files.before if self._policy.durable != "new" else None
                save = save_number(before[0] if before is not None else None)
                mine = [float(self.files.next_generation() - 1), float(save)]
            self._generation, self._save = map(int, self._comm.all_reduce_sum(mine))
        self._generation += 1
        return self._generation

    def _write(self, generation: int) -> tuple[Head, Described]:
        # Checked first, since the files below are written by their paths.
        self.files.check_place()
        # After a failed write, chunks may be in memory only. Write them to the drives now; the
        # commit fails if that fails.
        if self._executor.stats().kept_chunks:
            self._executor.recover().wait()
            self._store.settle_moves()
        # The states first, then the manifest that names them.
        for files in self.files.layers.values():
            for file in files:
                # A manifest on the drive must never name bytes that are only in a cache.
                file.fsync()
        small, rank = self._captured, self.files.rank
        assert small is not None
        attached = [
            self._attach(file_name(kind, generation, rank), data) if data is not None else None
            for kind, data in (("buffers", small.buffers), ("extra", small.extra))
        ]
        found = self._table.describe()
        table = self._table.known(found)
        if table is None:
            layout = metadata.layout_of(self.flats, self._store, self._policy)
            parts = table_parts(layout, self._table.rows())
            table = self._attach(file_name("table", generation, rank), *parts)
        used = [layer_and_drive(each) for each in found.files]
        manifest = Head(
            generation=generation,
            save=self._save,
            rank=rank,
            world=self._comm.world,
            step=small.step,
            algorithm=ALGORITHM,
            files=tuple(
                FileEntry(self.files.name(*each), self.files.layers[each[0]][each[1]].size_bytes)
                for each in used
            ),
            buffers=attached[0],
            extra=attached[1],
            optimizers=small.optimizers,
            table=table,
            numbers=found.files,
        )
        # Before the first rename: a manifest then names these files, and the end of the process
        # must not remove them, even if the commit is interrupted.
        self.files.keep()
        # The home last, since the home's manifest commits the generation.
        for place in self.files.places:
            head = manifest if place == self.files.home else for_copy(manifest)
            _put_manifest(place, head, found.marks)
        return manifest, found

    def _attach(self, name: str, *parts: bytes | memoryview) -> FileEntry:
        """Write a small file to the home and to every copy. Returns the entry for the manifest."""
        # All entries are equal; the last one is the home's.
        return [write_attachment(place, name, *parts) for place in self.files.places][-1]

    def _remove_older(self) -> None:
        """Remove this rank's part of generations that are not retained. The first time, rank 0 also
        removes states files that no manifest names, such as the earlier run's.
        """
        # Each rank removes only files of this rank, so that it removes no file that another rank
        # still writes.
        rank, first = self.files.rank, not self._cleaned
        # Rank 0 also removes the files of ranks that only an earlier, larger run had. It keeps the
        # files of present ranks, whose manifests may still name them, for example the table of an
        # earlier commit.
        everything = rank == 0 and first
        world, kept = self._comm.world, self._older.generations
        newest = max(kept)
        # A manifest may name the table of an earlier commit: a commit writes a table only if a
        # place changed.
        tables = self._older.tables
        self._remove(
            lambda path, number: (
                number < newest
                and number not in kept
                and path.name not in tables
                and (
                    is_of(path, rank)
                    or (everything and not any(is_of(path, each) for each in range(world)))
                )
            )
        )
        if self._policy.older_commits:
            for place in self.files.places:
                try:
                    # Make the removal durable: if a crash brought a manifest back, it would name
                    # places that were overwritten since.
                    sync_directory(place)
                except AioError as error:
                    log.warning("%s: %s", place, error)
        if everything:
            try:
                # Read all ranks' manifests, since a file that any manifest names stays.
                heads = read_heads(self.files.home, newest)
                self.files.remove_strangers(entry.name for head in heads for entry in head.files)
            except (OSError, AioError) as error:
                log.warning(
                    "%s: states that no manifest names could not be removed: %s",
                    self.files.home,
                    error,
                )
                # The next commit tries again.
                return
        self._cleaned = True

    def _remove(self, goes: Callable[[Path, int], bool]) -> None:
        """Remove files of generations. A file that cannot be removed does not fail the commit: a
        later commit removes it.
        """
        # At every place, even if one drive is gone: no restore may find parts of a failed commit.
        for place in self.files.places:
            try:
                found = [path for path, number in files_of(place) if goes(path, number)]
                # Manifests first: the other files are only used through a manifest.
                remove(sorted(found, key=lambda path: not path.name.startswith("manifest-")))
            except OSError as error:
                log.warning("%s: an older generation could not be removed: %s", place, error)


def _put_manifest(place: Path, head: Head, marks: Marks) -> None:
    """Put a manifest into a directory, whole and on the drive. Blocks. Raises: AioError."""
    path, parts = place / head.name, head.parts_with(marks)
    # Written atomically: a reader accepts any manifest as a commit.
    with typed_errors(path, "write", sum(len(part) for part in parts)):
        write_durably(path, *parts)
