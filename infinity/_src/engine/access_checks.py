"""Checks of an engine before values are read or written: it is open, and nothing has failed in the
background. `Handle.gather` itself is in hooks/gather_context.py.
"""

from __future__ import annotations

from typing import NamedTuple

from infinity._src.base.alarm import Alarm
from infinity._src.checkpoint.save import Saver
from infinity._src.distributed.communicator import Comm
from infinity._src.engine.optimizer_owners import OptimizerRegistry
from infinity._src.engine.storage import Storage
from infinity._src.hooks.whole_params import WholeParams
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.unit import Param, Unit
from infinity.errors import AioError, EngineClosed


class Background(NamedTuple):
    """The parts that have pending work between calls.

    pipeline, saving: updates and saves in the background; later calls raise their faults. whole:
    the loop's writes to whole parameters, not stored yet. registry: unfrozen parameters, without
    optimizer states yet."""

    pipeline: StepPipeline
    saving: Saver
    whole: WholeParams
    registry: OptimizerRegistry


class EngineAccess:
    """The checks of one engine (`infinity._src.params.update_hooks.Access`). One thread uses it at
    a time.

    alarm: if set, the next gather calls `before_read`, which clears it unless it raises.
    """

    _background: Background

    def __init__(self, comm: Comm, storage: Storage, mode: UpdateMode, alarm: Alarm) -> None:
        self.closed = False
        self._comm = comm
        self._storage = storage
        self._mode = mode
        self._alarm = alarm
        comm.on_failure(alarm.sound)

    def attach(self, background: Background) -> None:
        """Set the parts that are built later than this object. Called once, before all other
        methods."""
        self._background = background

    def close(self) -> None:
        """Make every later check raise EngineClosed."""
        self.closed = True
        self._alarm.sound()

    def check_open(self) -> None:
        """Raise EngineClosed after `close`, DriveLostError if a drive is lost, the fault of a
        background update or save, or RankFailed if another rank has failed."""
        if self.closed:
            raise EngineClosed(
                "the engine of this model was closed; build the model anew and offload the new one"
            )
        self.check_drives()
        # The call that began the background work has returned, so the next call raises its fault.
        self._background.pipeline.raise_fault()
        self._background.saving.raise_fault()
        # Before a collective would wait for a rank that has died.
        self._comm.check()

    def check_drives(self) -> None:
        """If a drive is lost, report that to all other ranks, so that they end, and raise
        DriveLostError."""
        lost = self._storage.drives.lost
        if lost is not None:
            self._comm.report_failure(lost)
            self._storage.drives.check()

    def before_pass(self) -> None:
        """Check the process group, and store the loop's writes to whole parameters. Called before
        an outermost forward, a write, and each method of the handle.
        """
        # If the process group has changed, ranks would silently train different models.
        self._comm.check_group()
        self._background.whole.keep_writes()

    def unfrozen(self, param: Param) -> None:
        self._background.registry.unfrozen(param)

    def before_training(self) -> None:
        self._background.registry.register_unfrozen()

    def before_read(self, unit: Unit) -> None:
        """Check the engine, and undo an update that ran ahead of its step, before the unit's values
        are read. Raises: EngineClosed; the fault of an update, of a save, of a drive or a rank."""
        # Cleared before the checks: a fault that happens during the checks sets it again.
        self._alarm.lower()
        try:
            self.check_open()
            self._mode.before_read(unit)
        except BaseException:
            self._alarm.sound()
            raise
        if self._mode.guards_reads:
            self._alarm.sound()
        self._storage.observe_sometimes()

    @property
    def undoes_together(self) -> bool:
        return self._background.pipeline.undoes_together

    def may_undo(self, error: AioError) -> bool:
        return self._background.pipeline.may_undo(error)

    def undo_together(self, read: BaseException | None) -> None:
        self._background.pipeline.undo_together(read)

    def read_failed(self, error: AioError) -> None:
        self._background.pipeline.read_failed(error)

    def before_write(self) -> None:
        """Check the engine before values are written. Blocks until no update is pending."""
        self.before_copy()
        self._background.pipeline.wait()

    def before_copy(self) -> None:
        """Check the engine before values are copied. Does not block: the copy waits for pending
        updates."""
        self.check_open()
        self.before_pass()
