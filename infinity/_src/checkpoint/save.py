"""Saving a model's states while training continues: `inf.save` captures small state immediately,
and a thread copies chunks.

    inf.save    captures scalars, groups, buffers, extra; starts a thread
    training    continues; a job that writes states runs after the save's read of these states
    thread      data file, small files  ->  all ranks done: manifests  ->  all done: remove older

The ranks agree in a separate process group, so that collectives of a save and of training do not
mix. The thread copies a few groups of chunks at a time:

    executor of the run                        this thread          executor of the data file
    FETCH all sections of chunks  -> buffer -> opens the gate   ->  STORE, checksum, write

Manifests commit the save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.progress import ProgressLine
from infinity._src.cabi.records import SECTION_MAX
from infinity._src.checkpoint import metadata, reader
from infinity._src.checkpoint.directory import DirectoryLock, make_directory, next_generation
from infinity._src.checkpoint.durable.files import check_no_run
from infinity._src.checkpoint.formats.safe_pickle import extra_bytes
from infinity._src.checkpoint.manifest import (
    FlatEntry,
    Layout,
    Manifest,
    OptimizerEntry,
    content_bytes,
    section_bytes,
)
from infinity._src.checkpoint.writer import (
    DataWriter,
    StoredStates,
    commit_part,
    new_part,
    new_rows,
    remove_others,
    remove_part,
    write_part,
)
from infinity._src.config.policy import Policy
from infinity._src.distributed.communicator import Comm, digest_of_text
from infinity._src.memory.drive_health import Drives
from infinity._src.optim.state_access import States
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.chunk_pipeline import (
    BUFFERS,
    GROUP_BYTES,
    READ_AHEAD,
    Bytes,
    ChunkPipeline,
    slab_buffers,
)
from infinity._src.params.state_store import ShardRecords
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import JOB, Executor, Gate, JobKind, Priority, Ticket
from infinity.aio._handles import JobTicket
from infinity.errors import AioClosedError, AioError, SwapFullError

log = logging.getLogger("infinity")

GROUPS_AHEAD = 4
"""Number of groups per drive that are read at once."""
PATIENCE_S = 1.0
"""Time that `Save.wait` waits for a forward, to which pending updates pass their parameters."""


def rows_of(shards: Sequence[ShardRecords], key: int) -> npt.NDArray[np.void]:
    """Return the chunks of these shards as rows, with no file or offset yet. key: see `new_rows`.
    """
    return new_rows([(np.asarray(shard.starts), shard.records["numel"]) for shard in shards], key)


@dataclasses.dataclass(eq=False)
class _Group:
    """Rows that are copied together. flats: the rows' flats. at: offsets of the rows' sections in a
    buffer, -1 for sections that a format lacks: [rows, SECTION_MAX]. pads: ranges of the buffer
    that are padding.
    """

    rows: npt.NDArray[np.int64]
    flats: list[Flat]
    at: npt.NDArray[np.int64]
    pads: list[list[int]]
    size_bytes: int
    gate: Gate
    ticket: JobTicket


class Snapshot:
    """Copies all flats of a rank, with the values after the updates that are pending at
    construction.

    The constructor submits all reads, so that no later job that writes a chunk's states overtakes
    the chunk's read. A group of rows is read when `copy_to` opens the group's gate with a buffer;
    other reads of its chunks pass the gate. If an update has just ended in a staging buffer, the
    executor copies the states from that buffer.

    shards, flats: the flats as records, and as entries of the manifest. order: order of reading,
    except that flats for which a writer waits are read first. drives: number of drives that are
    read. progress: called with the bytes of each group after its read. `copy_to` runs in one
    thread, `before_write` and `wait_read` in other threads.
    """

    def __init__(
        self,
        executor: Executor,
        shards: Sequence[ShardRecords],
        flats: Sequence[FlatEntry],
        rows: npt.NDArray[np.void],
        *,
        order: Sequence[Flat],
        drives: int,
        progress: Callable[[int], object],
    ) -> None:
        self._executor = executor
        self._ahead = GROUPS_AHEAD * max(drives, 1)
        self._progress = progress
        # Guards the groups: other threads call `before_write` while the save's thread copies.
        self._changed = threading.Condition()
        # Groups to be read, in order. Writers wait for the urgent ones, which are read first.
        self._urgent: dict[_Group, None] = {}
        self._queue: dict[_Group, None] = {}
        self._gates: list[Gate] = []  # the gates of all groups
        self._flats = [shard.flat for shard in shards]
        assert set(self._flats) == set(order), "every flat is copied"
        # Groups of each flat whose read has not ended.
        self._unread: dict[Flat, dict[_Group, None]] = {flat: {} for flat in self._flats}
        ids = np.concatenate([shard.ids for shard in shards]) if shards else np.zeros(0, np.int32)
        place = {flat: index for index, flat in enumerate(order)}
        places = np.array([place[flat] for flat in self._flats], dtype=np.int64)
        try:
            self._submit(rows, ids, flats, np.argsort(places[rows["flat"]], kind="stable"))
        except BaseException:
            self.end()
            raise

    def _submit(
        self,
        rows: npt.NDArray[np.void],
        ids: npt.NDArray[np.int32],
        flats: Sequence[FlatEntry],
        order: npt.NDArray[np.int64],
    ) -> None:
        """Submit the reads of all rows in this order, in groups of about GROUP_BYTES."""
        # `sizes` are padded to 4096, as in the data file; the run's executor reads only contents.
        exact, sizes = content_bytes(rows[order], flats), section_bytes(rows[order], flats)
        total = sizes.sum(axis=1)
        before = np.cumsum(total) - total
        at = before[:, None] + np.cumsum(sizes, axis=1) - sizes
        # A group has rows of one block only, since one call of `DataWriter.store` writes a group.
        new = (np.diff(before // GROUP_BYTES) != 0) | (np.diff(order // reader.BLOCK_ROWS) != 0)
        jobs = np.zeros(len(order), dtype=JOB)
        jobs["chunk"], jobs["kind"] = ids[order], JobKind.FETCH
        jobs["mask"] = (sizes > 0) @ (1 << np.arange(SECTION_MAX))
        cuts = [0, *(np.flatnonzero(new) + 1).tolist(), len(order)] if len(order) else []
        for part in itertools.starmap(slice, itertools.pairwise(cuts)):
            start = at[part] - before[part][0]
            jobs["ptr"][part] = start
            ends = np.stack([start + exact[part], start + sizes[part]], axis=-1)
            gate = self._executor.gate(escapes=False)
            # Appended before the submission, so that an interrupt does not lose the gate.
            self._gates.append(gate)
            # The lowest priority, so that transfers of training go first.
            ticket = self._executor.submit(jobs[part], priority=Priority.WRITEBACK, gate=gate)
            group = _Group(
                order[part],
                [self._flats[index] for index in np.unique(rows["flat"][order[part]]).tolist()],
                np.where(sizes[part] > 0, start, -1),
                ends[exact[part] < sizes[part]].tolist(),
                int(total[part].sum()),
                gate,
                ticket,
            )
            self._queue[group] = None
            for flat in group.flats:
                self._unread[flat][group] = None
        # An iterator that is consumed once: pending updates end in this order.
        self._coming = iter(tuple(self._queue))
        self._size = max((group.size_bytes for group in self._queue), default=4096)

    def before_write(self, flats: Sequence[Flat]) -> None:
        """Read these flats next, since a job that writes their states waits for the read."""
        with self._changed:
            for flat in flats:
                for group in self._unread.get(flat, ()):
                    if group in self._queue:
                        del self._queue[group]
                        self._urgent[group] = None

    def wait_read(self, flats: Sequence[Flat]) -> None:
        """Block until these flats have been read, or the copying has ended or failed."""
        # A read waits for the pending update of its chunk, which may wait for a gather.
        self._executor.release_gates()
        self.before_write(flats)
        with self._changed:
            while any(self._unread.get(flat) for flat in flats):
                self._changed.wait(0.5)

    def end(self) -> None:
        """End the copying, and let waiting jobs continue. No group may be read afterwards."""
        with self._changed:
            # Also after a fault, since training must not wait for reads that never run. A read
            # whose gate is released ends without a copy. All gates are released, also of groups
            # that were taken from the queue but got no buffer.
            for gate in self._gates:
                gate.release()
            self._gates.clear()
            for groups in (self._urgent, self._queue, self._unread):
                groups.clear()
            self._changed.notify_all()

    def copy_to(self, writer: DataWriter) -> None:
        """Copy all flats. Blocks. Raises the error of a read or write; the file is then useless."""
        try:
            # One buffer for each read in flight, and the BUFFERS - READ_AHEAD buffers for writes.
            with slab_buffers(self._size, self._ahead + BUFFERS - READ_AHEAD) as buffers:
                # `reusable` waits only until the data file's executor has copied the buffer.
                pipeline = ChunkPipeline(
                    buffers,
                    ahead=self._ahead,
                    read=self._open,
                    transform=lambda group, _buffer: self._was_read(group),
                    write=lambda group, buffer: writer.store(
                        group.rows,
                        np.where(group.at >= 0, group.at + buffer.ctypes.data, 0).astype(np.uint64),
                    ),
                    # Raise the error of a full or failing drive now, not after the last chunk.
                    finish=lambda _group, _buffer: writer.check(),
                    reusable=lambda ticket: ticket.wait_filled(),
                    # Waits in a way that lets a pending update pass parameters to the next forward.
                    wait_read=lambda group, _ticket: group.ticket.wait_turn(),
                )
                pipeline.run(iter(self._take, None))
        finally:
            # Also after an error: jobs that wait for reads must continue.
            self.end()

    def _take(self) -> _Group | None:
        with self._changed:
            groups = self._urgent or self._queue
            group = next(iter(groups), None)
            if not self._urgent:
                # Prefer states that an update leaves in a staging buffer: they need no read.
                upcoming = (
                    each
                    for each in self._coming
                    if each in self._queue and each.ticket.follows_update
                )
                group = next(upcoming, group)
            if group is not None:
                del groups[group]
            return group

    def _open(self, group: _Group, buffer: Bytes) -> Ticket:
        # The data file's checksums cover the padding of sections, which must be zero.
        for start, end in group.pads:
            buffer[start:end] = 0
        if not group.gate.open([buffer.ctypes.data]):
            raise AioClosedError("the engine was closed during the save", op="read")
        return group.ticket

    def _was_read(self, group: _Group) -> None:
        with self._changed:
            for flat in group.flats:
                del self._unread[flat][group]
            self._changed.notify_all()
        self._progress(group.size_bytes)


class Linkable(Protocol):
    """A durable run, whose files a checkpoint may share by hard links (durable/run.py)."""

    def link(self, directory: Path, generation: int) -> StoredStates | None:
        """Make hard links in `directory` to the newest generation's files. Returns None if links
        are not possible.

        Raises: AioError.
        """


@dataclasses.dataclass(frozen=True)
class _Captured:
    """Small state of a save, the saved layout, and the saved flats."""

    layout: Layout
    flats: tuple[Flat, ...]
    optimizers: tuple[OptimizerEntry, ...]
    buffers: bytes | None
    extra: bytes | None
    rows: npt.NDArray[np.void]


class Save:
    """A save into `directory`, running or ended. step: optimizer steps completed when the save
    began. generation: the checkpoint's number in the directory. hurry: lets pending updates end
    without a forward.

    size_bytes: bytes of this rank's states. copied_bytes: bytes that are copied; 0 if the files of
    a durable run are hard-linked instead.
    """

    def __init__(
        self,
        directory: Path,
        *,
        step: int,
        generation: int,
        size_bytes: int,
        copied_bytes: int,
        hurry: Callable[[], None],
    ) -> None:
        self.directory = directory
        self._hurry = hurry
        self.step = step
        self.generation = generation
        self.size_bytes = size_bytes
        self.copied_bytes = copied_bytes
        # Set by the save's thread; any thread may wait.
        self._ended = threading.Event()
        self._error: BaseException | None = None
        # True once the error was reported to the user; otherwise a later call of the engine raises
        # the error.
        self.reported = False
        # True if only `wait` shall raise the error, and has not raised it.
        self.left = False

    @property
    def done(self) -> bool:
        """True once the save has ended or failed. Does not block."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is complete and on the drive, on all ranks.

        Raises: at every call, the error that stopped the save (SwapFullError, DeviceFailedError,
        ChecksumError of stored states, AioError if another rank failed); the directory then has the
        same checkpoint as before the save. TimeoutError after `timeout` seconds.
        """
        ended = self._ended.wait(PATIENCE_S if timeout is None else min(timeout, PATIENCE_S))
        if not ended and (timeout is None or timeout > PATIENCE_S):
            # Pending updates wait for a forward, which perhaps only this thread can run.
            self._hurry()
            ended = self._ended.wait(None if timeout is None else timeout - PATIENCE_S)
        if not ended:
            raise TimeoutError(f"the save into {self.directory} is not done after {timeout} s")
        if self._error is not None:
            self.reported, self.left = True, False
            raise self._error

    def leave_error_to_wait(self) -> None:
        """Let only `wait` raise the error of this save. If `wait` was not called when the next save
        begins, or the engine closes, the error is logged once as a warning.
        """
        self.reported = self.left = True

    def report_error(self) -> None:
        """Warn once of an error that only `wait` would raise, if `wait` has not raised it. Does not
        block.
        """
        if self.left and self.done and self._error is not None:
            self.left = False
            text = str(self._error) or type(self._error).__name__
            log.warning("no checkpoint of step %d was written: %s", self.step, text)

    def end(self, error: BaseException | None) -> None:
        # Set before the event, since threads that the event wakes read the error.
        self._error = error
        self._ended.set()

    def __repr__(self) -> str:
        state = (
            "running"
            if not self.done
            else "done"
            if self._error is None
            else f"failed: {self._error}"
        )
        return f"Save({str(self.directory)!r}, step={self.step}, {state})"


class Saver:
    """Makes the saves of one model, one at a time. One thread calls it; another thread copies the
    states.
    """

    def __init__(
        self,
        states: States,
        *,
        units: Sequence[Unit],
        executor: Executor,
        comm: Comm,
        policy: Policy,
        optimizer_of: Callable[[Param], object],
        mode: UpdateMode,
        drives: Drives,
        alarm: Alarm,
    ) -> None:
        self._alarm = alarm
        self.states = states
        self.drives = drives
        self.units = units
        self.comm = comm
        self.policy = policy
        self.optimizer_of = optimizer_of
        self.mode = mode
        self.executor = executor
        self._aside: Comm | None = None
        self._last: Save | None = None

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def check_between_steps(self, what: str) -> None:
        """Raise RuntimeError inside forward, backward and `gather()`, and while some parameters of
        a step are updated and others are not."""
        busy = next((unit for unit in self.units if unit.refs), None)
        if busy is not None:
            raise RuntimeError(
                f"{what} while unit {busy.name} is in use: call it outside of forward, backward "
                "and gather()"
            )
        self.mode.check_whole()

    def begin(
        self,
        model: torch.nn.Module,
        given: object,
        target: Path,
        *,
        step: int,
        extra: Any,
        run: Linkable | None = None,
        frozen: bool = True,
    ) -> Save:
        """Capture small state and start copying to `target`, an absolute path, since the current
        directory may change while the thread runs. Blocks until an earlier save ends. Collective.

        run: the durable run whose files may be linked instead. frozen: also save flats without
        trainable parameters.

        Raises: ValueError, RuntimeError, MemoryError; AioError if another rank cannot save; the
        error of the earlier save, if it was not raised yet.
        """
        # One save at a time: two would need twice the memory, and would guard the same states.
        self.wait_for_last()
        self.raise_fault()
        self.report_last()
        problem: BaseException | None = None
        mine = [0.0, 0.0, 0.0]
        # The save closes the stack when it has ended.
        undo = contextlib.ExitStack()
        try:
            captured = self._capture(model, given, extra, frozen=frozen)
            # inf.restore would read a durable run in the directory instead of the checkpoint.
            check_no_run(target)
            make_directory(target)
            if self.comm.rank == 0:
                # Rank 0 takes the lock, and draws the numbers for all ranks.
                undo.callback(DirectoryLock(target).release)
                # The second number is random, so that manifests of different saves never form a
                # generation. Both are below 2^53, so floats represent them exactly.
                mine = [float(next_generation(target)), float(secrets.randbits(48)), 0.0]
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            problem, mine[2] = error, 1.0
        # Releases the directory if the save does not start.
        with undo:
            # Other ranks contribute zeros to the two numbers. The third sum counts failed ranks.
            agreed = self.comm.all_reduce_sum(mine)
            if problem is not None:
                raise problem
            if agreed[2]:
                raise AioError(
                    "another rank cannot save; its error gives the cause",
                    path=str(target),
                    op="write",
                )
            # Checked before an older checkpoint is replaced.
            if self._differs(captured.layout):
                raise ValueError(
                    "inf.save() would save different parameters on some ranks: give the same "
                    "frozen=, and freeze the same parameters on all ranks"
                )
            try:
                return self._start(captured, target, agreed, step, undo, run)
            except BaseException as error:
                # All other ranks have begun, and would wait for this rank's part.
                self.comm.report_failure(error)
                raise

    def _differs(self, layout: Layout) -> bool:
        """Return whether ranks would save different parameters. Blocks. Collective."""
        if self.comm.world == 1:
            return False
        text = repr((layout.flats, layout.left_out))
        return bool(self.comm.differing_indices([digest_of_text(text)]))

    def _start(
        self,
        captured: _Captured,
        target: Path,
        agreed: Sequence[float],
        step: int,
        undo: contextlib.ExitStack,
        run: Linkable | None,
    ) -> Save:
        """Start copying. agreed: the generation's number and the save's. undo: the save closes this
        stack when it has ended.
        """
        # A separate process group, since training uses the model's group meanwhile.
        if self._aside is None:
            self._aside = self.comm.fork()
        flats = captured.layout.flats
        size = int(section_bytes(captured.rows, flats).sum())
        line = ProgressLine(f"saving step {step}", size, shown=self.comm.rank == 0)
        # An error of the link is raised in the thread, where the ranks agree on the result. A save
        # without frozen parameters is copied, since the run's files contain these parameters.
        linked, refused = _try_link(
            None if captured.layout.left_out else run, target, int(agreed[0])
        )
        copies = linked is None and refused is None
        save = Save(
            target,
            step=step,
            generation=int(agreed[0]),
            size_bytes=size,
            copied_bytes=size if copies else 0,
            hurry=self.executor.release_gates,
        )
        snapshot: Snapshot | None = None
        if copies:
            snapshot = Snapshot(
                self.executor,
                [self.states.store[flat] for flat in captured.flats],
                flats,
                captured.rows,
                order=self._order(captured.flats),
                drives=len(self.policy.directories),
                progress=line.advance,
            )
            undo.callback(self.states.store.guard, None)
            undo.callback(snapshot.end)
            # From now on the snapshot first reads states for which a writing job waits.
            self.states.store.guard(snapshot)
        job = _SaveJob(
            save,
            captured,
            snapshot,
            linked,
            refused,
            self._aside,
            int(agreed[1]),
            self.policy.io_backend,
        )
        # From now on the thread releases the directory's lock.
        kept = undo.pop_all()
        # Not a daemon: at exit the interpreter waits for the thread, so that the save ends.
        thread = threading.Thread(target=self._run, args=(job, line, kept), name="infinity-save")
        # Set only now, since later calls wait for this save's end.
        self._last = save
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            # The system cannot start a thread. Run the job in this thread with the error, so that
            # it informs all ranks, and releases states, lock and progress line.
            self._run(dataclasses.replace(job, refused=error), line, kept)
        return save

    def _capture(
        self, model: torch.nn.Module, given: object, extra: Any, *, frozen: bool
    ) -> _Captured:
        # During a step, states and small state would belong to different steps.
        self.check_between_steps("inf.save()")
        optimizers = metadata.optimizers_of(given, self.units)
        metadata.check_all_held(self.units, optimizers, self.optimizer_of)
        entries = tuple(
            metadata.describe_optimizer(optimizer, self.optimizer_of) for optimizer in optimizers
        )
        flats = [flat for flat in self.flats if frozen or any(map(self.learns, flat.params))]
        if self.flats and not flats:
            raise ValueError(
                "inf.save(frozen=False) would save no parameter: none requires a gradient or has "
                "optimizer states; save with frozen=True"
            )
        # All tiles of a weight are saved or none: a part would look like a smaller weight.
        whole = {param.keys[0] for flat in flats for param in flat.params}
        flats = [flat for flat in self.flats if any(p.keys[0] in whole for p in flat.params)]
        held = set(flats)
        left_out = [flat for flat in self.flats if flat not in held]
        layout = metadata.layout_of(flats, self.states.store, self.policy, left_out)
        rows = rows_of([self.states.store[flat] for flat in flats], key=secrets.randbits(62))
        buffers, kept = metadata.buffer_bytes(model), extra_bytes(extra)
        return _Captured(layout, tuple(flats), entries, buffers, kept, rows)

    def learns(self, param: Param) -> bool:
        """Return whether training changes a parameter: it requires a gradient, or has optimizer
        states."""
        return param.at_rest.requires_grad or self.optimizer_of(param) is not None

    def _order(self, saved: Sequence[Flat]) -> list[Flat]:
        """Return these flats in the order in which the next step updates them."""
        units = list(self.units)
        if self.policy.last_unit_first:
            # Updates during backward begin with the last unit, which is therefore copied first.
            units.reverse()
        wanted = set(saved)
        return [flat for unit in units for flat in unit.flats if flat in wanted]

    def _run(self, job: _SaveJob, line: ProgressLine, undo: contextlib.ExitStack) -> None:
        error: BaseException | None = None
        try:
            job.save()
        except BaseException as met:  # noqa: BLE001 - raised by `Save.wait`, or by a later call
            error = met
        finally:
            line.end()
            # Release states and directory before `Save.done` becomes true.
            undo.close()
            if error is None:
                self.drives.saved(job.handle.step, job.handle.directory)
            job.handle.end(error)
            if error is not None:
                self._alarm.sound()  # the next gather raises it

    def wait_for_last(self) -> None:
        """Block until no save is running. Does not raise the save's error."""
        if self._last is not None:
            # `raise_fault`, or the user's `Save.wait`, raises the error.
            with contextlib.suppress(Exception):
                # Restore both flags: this wait does not report the error to the user.
                reported, left = self._last.reported, self._last.left
                try:
                    self._last.wait()
                finally:
                    self._last.reported, self._last.left = reported, left

    def raise_fault(self) -> None:
        """Raise the error of the last save, if it was not raised before. Does not block."""
        if self._last is not None and self._last.done and not self._last.reported:
            # The error is raised once; then further saves are possible.
            self._last.reported = True
            self._last.wait()

    def report_last(self) -> None:
        """Warn of the last save's error if only `Save.wait` would raise it, and the user has not
        called `wait`. Does not block."""
        if self._last is not None:
            self._last.report_error()


def _try_link(
    run: Linkable | None, target: Path, generation: int
) -> tuple[StoredStates | None, Exception | None]:
    """Return (linked states, or None if states are to be copied; the error of linking, or None)."""
    if run is None:
        return None, None
    try:
        return run.link(target, generation), None
    except Exception as error:  # noqa: BLE001 - raised by `_SaveJob.save`: other ranks wait
        return None, error


@dataclasses.dataclass(frozen=True)
class _SaveJob:
    """The work of one save's thread."""

    handle: Save
    captured: _Captured
    snapshot: Snapshot | None
    linked: StoredStates | None
    refused: Exception | None
    comm: Comm
    number: int
    backend: str

    def save(self) -> None:
        """Write this rank's files, agree, commit, agree, remove older checkpoints. Collective."""
        directory, rank = self.handle.directory, self.comm.rank
        try:
            # The data of all ranks is on the drives before the first manifest gets its name.
            self._raise(*self._together(self._write))
        except BaseException:
            remove_part(directory, self.handle.generation, rank)
            raise
        # From now on this rank's part may belong to a complete checkpoint. It is removed only if
        # the ranks agree that some rank has not committed.
        problem, failed = self._together(self._commit)
        if failed:
            remove_part(directory, self.handle.generation, rank)
            self._raise(problem, failed)
        # Every rank's manifest now has its final name. After a crash before this point, the older
        # checkpoint is valid.
        if rank == 0:
            self._remove_older()

    def _together(self, part: Callable[[], None]) -> tuple[BaseException | None, bool]:
        """Run `part` on all ranks. Returns (its error on this rank, whether it failed on any rank).
        Collective."""
        problem: BaseException | None = None
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - returned: the other ranks wait for this one
            problem = error
        return problem, self.comm.all_reduce_any([problem is not None])[0]

    def _raise(self, problem: BaseException | None, failed: bool) -> None:
        if problem is not None:
            raise problem
        if failed:
            raise AioError(
                "another rank failed to write its part of the checkpoint, so there is no new "
                "checkpoint; that rank's error gives the cause",
                path=str(self.handle.directory),
                op="write",
            )

    def _write(self) -> None:
        captured = self.captured
        part = new_part(
            captured.layout,
            captured.optimizers,
            captured.rows,
            generation=self.handle.generation,
            save=self.number,
            rank=self.comm.rank,
            world=self.comm.world,
            step=self.handle.step,
        )
        with contextlib.ExitStack() as undo:
            if self.snapshot is not None:
                # Also if no copy began: training must not wait until all ranks have written.
                undo.callback(self.snapshot.end)
            self._write_part(part)

    def _write_part(self, part: Manifest) -> None:
        captured = self.captured
        try:
            if self.refused is not None:
                # Raised here, so that `_together` informs all ranks.
                raise self.refused
            write_part(
                self.handle.directory,
                part,
                self.snapshot.copy_to if self.snapshot is not None else None,
                buffers=captured.buffers,
                extra=captured.extra,
                backend=self.backend,
                stored=self.linked,
            )
        # The new message has the bytes of the whole save, not of the file that did not fit.
        except SwapFullError as error:
            raise SwapFullError(
                f"no space for a checkpoint of {self.handle.size_bytes} bytes in "
                f"{str(self.handle.directory)!r} in addition to the existing checkpoint, which is "
                "unchanged: free space, or save to another drive",
                errno=error.errno or 0,
                path=error.path,
                op=error.op,
                offset=error.offset,
                length=error.length,
            ) from error

    def _commit(self) -> None:
        commit_part(self.handle.directory, self.handle.generation, self.comm.rank)

    def _remove_older(self) -> None:
        try:
            # A file that cannot be removed does not fail this save; a later save removes it.
            remove_others(self.handle.directory, self.handle.generation)
        except OSError as error:
            log.warning(
                "%s: an older checkpoint could not be removed: %s", self.handle.directory, error
            )
