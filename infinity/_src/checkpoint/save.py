"""Saving a model's states while it trains on: capture what is small, copy what is large aside, commit by manifests.

    inf.save    waits for updates; captures scalars, groups, buffers, extra; starts ->  a thread: data file, small files
    training    goes on; who writes states waits until they were read                   all ranks wrote?  -> manifests
                                                                                        all there?        -> older ones go

The ranks agree in a group of their own, so that training's collectives and these do not meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.checkpoint import metadata as describing
from infinity._src.checkpoint.directory import DirectoryLock, make_directory, next_generation
from infinity._src.checkpoint.manifest import Layout, OptimizerEntry, section_bytes
from infinity._src.checkpoint.progress import ProgressLine
from infinity._src.checkpoint.run_files import check_no_run
from infinity._src.checkpoint.snapshot import Copy, rows_of
from infinity._src.checkpoint.user_state import extra_bytes
from infinity._src.checkpoint.writer import (
    NewPart,
    Placed,
    commit_part,
    remove_others,
    remove_part,
    write_part,
)
from infinity._src.config import Policy
from infinity._src.distributed.collectives import Comm
from infinity._src.optim.state_access import States
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Executor
from infinity.errors import AioError, SwapFullError

log = logging.getLogger("infinity")


@dataclasses.dataclass(frozen=True)
class _Captured:
    """What a save writes besides the states."""

    layout: Layout
    optimizers: tuple[OptimizerEntry, ...]
    buffers: bytes | None
    extra: bytes | None
    rows: npt.NDArray[np.void]


class Save:
    """A save under way. directory: where; step: steps completed in it; generation: its number there.

    size_bytes: of this rank's states; copied_bytes: of those, 0 where files of a durable run got second names instead.
    """

    def __init__(self, directory: Path, *, step: int, generation: int, size_bytes: int, copied_bytes: int) -> None:
        self.directory = directory
        self.step = step
        self.generation = generation
        self.size_bytes = size_bytes
        self.copied_bytes = copied_bytes
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.told = False  # whether somebody was told of the error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is whole and on the drive, on all ranks.

        Raises: what went wrong, every time (SwapFullError, DeviceFailedError, ChecksumError of what rested, AioError when it
        was another rank): then the directory has what it had before. TimeoutError after `timeout` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save into {self.directory} is not done after {timeout} s")
        if self._error is not None:
            self.told = True
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """It has ended."""
        self._error = error
        self._ended.set()

    def __repr__(self) -> str:
        state = "under way" if not self.done else "done" if self._error is None else f"failed: {self._error}"
        return f"Save({str(self.directory)!r}, step={self.step}, {state})"


class Linkable(Protocol):
    """A durable run, whose files a checkpoint may share (`infinity._src.checkpoint.durable`)."""

    def link(self, directory: Path, generation: int) -> Placed | None:
        """Give the newest generation's files second names in `directory`. None: it cannot be. Raises: AioError."""


class Saving:
    """The saves of one model. One thread uses it at a time; the states are copied by another."""

    def __init__(
        self,
        states: States,
        *,
        units: Sequence[Unit],
        executor: Executor,
        comm: Comm,
        policy: Policy,
        holder_of: Callable[[Param], object],
        mode: UpdateMode,
    ) -> None:
        self.states = states
        self.units = units
        self.comm = comm
        self.policy = policy
        self.holder_of = holder_of
        self.mode = mode
        self.executor = executor
        self._aside: Comm | None = None
        self._last: Save | None = None

    @property
    def flats(self) -> list[Flat]:
        """All flats, in order."""
        return [flat for unit in self.units for flat in unit.flats]

    def check_between_steps(self, what: str) -> None:
        """Raise RuntimeError inside forward, backward and `gather()`, and where a step is half done."""
        busy = next((unit for unit in self.units if unit.refs), None)
        if busy is not None:
            raise RuntimeError(f"{what} while unit {busy.name} is in use: call it outside of forward, backward and gather()")
        self.mode.check_whole()

    def begin(
        self,
        model: torch.nn.Module,
        given: object,
        directory: str | os.PathLike[str],
        *,
        step: int,
        extra: Any,
        run: Linkable | None = None,
    ) -> Save:
        """Capture everything small and start copying. No update may be pending. Waits for the save before.

        run: the durable run whose files may be linked instead.

        Raises: ValueError, RuntimeError; what the save before met, if nobody was told; MemoryError.
        """
        self.settle()
        self.raise_fault()
        target = Path(directory)
        problem: BaseException | None = None
        mine = [0.0, 0.0, 0.0]
        held = contextlib.ExitStack()  # let go when the save has ended
        try:
            captured = self._capture(model, given, extra)
            check_no_run(target)
            make_directory(target)
            if self.comm.rank == 0:
                held.callback(DirectoryLock(target).release)
                mine = [float(next_generation(target)), float(secrets.randbits(48)), 0.0]
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            problem, mine[2] = error, 1.0
        with held:
            agreed = self.comm.all_reduce_sum(mine)
            if problem is not None:
                raise problem
            if agreed[2]:
                raise AioError("another rank cannot save, and its error says why", path=str(target), op="write")
            return self._start(captured, target, agreed, step, held, run)

    def _start(
        self,
        captured: _Captured,
        target: Path,
        agreed: Sequence[float],
        step: int,
        held: contextlib.ExitStack,
        run: Linkable | None,
    ) -> Save:
        """Start copying. agreed: the generation's number and the save's. held: what is closed when the save has ended."""
        if self._aside is None:
            self._aside = self.comm.fork()
        flats = captured.layout.flats
        size = int(section_bytes(captured.rows, flats).sum())
        line = ProgressLine(f"saving step {step}", size, shown=self.comm.rank == 0)
        rests = [self.states.rest[flat] for flat in self.flats]
        copy = Copy(self.executor, rests, flats, captured.rows, order=self._order(), progress=line.advance)
        linked, refused = _try_link(run, target, int(agreed[0]))
        copies = linked is None and refused is None
        save = Save(target, step=step, generation=int(agreed[0]), size_bytes=size, copied_bytes=size if copies else 0)
        self._last = save
        if copies:
            self.states.rest.guard(copy)
        work = _Work(save, captured, copy, linked, refused, self._aside, int(agreed[1]), self.policy.io_backend)
        undo = held.pop_all()
        threading.Thread(target=self._run, args=(work, line, undo), name="infinity-save").start()
        return save

    def _capture(self, model: torch.nn.Module, given: object, extra: Any) -> _Captured:
        self.check_between_steps("inf.save()")
        optimizers = describing.optimizers_of(given, self.units)
        describing.check_all_held(self.units, optimizers, self.holder_of)
        entries = tuple(describing.describe_optimizer(optimizer, self.holder_of) for optimizer in optimizers)
        layout = describing.layout_of(self.flats, self.states.rest, self.policy)
        rows = rows_of([self.states.rest[flat] for flat in self.flats], key=secrets.randbits(62))
        return _Captured(layout, entries, describing.buffer_bytes(model), extra_bytes(extra), rows)

    def _order(self) -> list[Flat]:
        """The flats as the next step's updates come: of the first forward unit first, or the last if backward updates."""
        units = list(self.units)
        if self.policy.update == "backward":
            units.reverse()
        return [flat for unit in units for flat in unit.flats]

    def _run(self, work: _Work, line: ProgressLine, held: contextlib.ExitStack) -> None:
        error: BaseException | None = None
        try:
            work.run()
        except BaseException as met:  # noqa: BLE001 - told by `Save.wait`, or by the next call that meets the engine
            error = met
        finally:
            work.copy.end()
            line.end()
            held.close()
            self.states.rest.guard(None)
            work.save.end(error)

    def settle(self) -> None:
        """Block until no save is under way, however the last one ended."""
        if self._last is not None:
            with contextlib.suppress(Exception):
                told = self._last.told
                try:
                    self._last.wait()
                finally:
                    self._last.told = told

    def raise_fault(self) -> None:
        """Raise what the last save met, if nobody was told. Does not block."""
        if self._last is not None and self._last.done and not self._last.told:
            self._last.told = True
            self._last.wait()


def _try_link(run: Linkable | None, target: Path, generation: int) -> tuple[Placed | None, Exception | None]:
    """The files that need no copying; and what went wrong, to be raised where all ranks agree."""
    if run is None:
        return None, None
    try:
        return run.link(target, generation), None
    except Exception as error:  # noqa: BLE001 - raised by `_Work.run`: the other ranks wait for this one
        return None, error


@dataclasses.dataclass(frozen=True)
class _Work:
    """What the thread of one save does."""

    save: Save
    captured: _Captured
    copy: Copy
    linked: Placed | None
    refused: Exception | None
    comm: Comm
    number: int
    backend: str

    def run(self) -> None:
        """Write this rank's files, agree, commit, agree, remove what is older."""
        directory, rank = self.save.directory, self.comm.rank
        try:
            self._raise(*self._together(self._write))
        except BaseException:
            remove_part(directory, self.save.generation, rank)
            raise
        # From here on this rank's part may be one of a whole: it goes only if all know that it is not.
        problem, failed = self._together(self._commit)
        if failed:
            remove_part(directory, self.save.generation, rank)
            self._raise(problem, failed)
        if rank == 0:
            self._remove_older()

    def _together(self, part: Callable[[], None]) -> tuple[BaseException | None, bool]:
        """Do a part. Returns what it met here, and whether it failed on any rank."""
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
                "another rank failed to write its part of the checkpoint, and its error says why; there is no new checkpoint",
                path=str(self.save.directory),
                op="write",
            )

    def _write(self) -> None:
        captured = self.captured
        part = NewPart(
            layout=captured.layout,
            generation=self.save.generation,
            save=self.number,
            rank=self.comm.rank,
            world=self.comm.world,
            step=self.save.step,
            optimizers=captured.optimizers,
            rows=captured.rows,
            buffers=captured.buffers,
            extra=captured.extra,
        )
        try:
            if self.refused is not None:
                raise self.refused
            write_part(self.save.directory, part, self.copy.run, backend=self.backend, placed=self.linked)
        except SwapFullError as error:
            raise SwapFullError(
                f"no room for a checkpoint of {self.save.size_bytes} bytes in {str(self.save.directory)!r}; a save needs it "
                "beside the checkpoint that is there, which is as it was: free space, or save elsewhere",
                errno=error.errno or 0,
                path=error.path,
                op=error.op,
                offset=error.offset,
                length=error.length,
            ) from error

    def _commit(self) -> None:
        commit_part(self.save.directory, self.save.generation, self.comm.rank)

    def _remove_older(self) -> None:
        try:
            remove_others(self.save.directory, self.save.generation)
        except OSError as error:
            log.warning("%s: an older checkpoint could not be removed: %s", self.save.directory, error)
