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
    """Parts with work that is not done when a call returns: pipeline and saving run in the
    background, and their faults stay; whole has the loop's writes to whole parameters; registry has
    unfrozen parameters without states."""

    pipeline: StepPipeline
    saving: Saver
    whole: WholeParams
    registry: OptimizerRegistry


class EngineAccess:
    """The checks of one engine (`infinity._src.params.update_hooks.Access`). One thread uses it at
    a time.

    alarm: makes the next gather call `before_read`. It stays sounded while `before_read` raises.
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
        """Set the parts that are made after this object, since they need it. Called once, before
        all other calls."""
        self._background = background

    def close(self) -> None:
        """Make every later check raise EngineClosed."""
        self.closed = True
        self._alarm.sound()

    def check_open(self) -> None:
        """Raise EngineClosed after `close`; DriveLostError; the fault of a background update or
        save; the error of a rank that has failed."""
        if self.closed:
            raise EngineClosed(
                "the engine of this model was closed; build the model anew and offload that"
            )
        self.check_drives()
        # Any next call raises a background fault: the call that began the work has returned.
        self._background.pipeline.raise_fault()
        self._background.saving.raise_fault()
        # A rank that has died is reported here, before a collective waits for it.
        self._comm.check()

    def check_drives(self) -> None:
        """If a drive is lost, report it to all ranks, which end, and raise DriveLostError."""
        lost = self._storage.drives.lost
        if lost is not None:
            self._comm.report_failure(lost)
            self._storage.drives.check()

    def before_pass(self) -> None:
        """Check the engine before an outermost forward, a write, or a call of its user, and store
        the loop's writes to whole parameters.
        """
        # With another process group ranks would silently continue with different models.
        self._comm.check_group()
        self._background.whole.keep_writes()

    def unfrozen(self, param: Param) -> None:
        self._background.registry.unfrozen(param)

    def before_training(self) -> None:
        self._background.registry.register_unfrozen()

    def before_read(self, unit: Unit) -> None:
        """Check the engine, and undo an update that ran ahead of its step, before the unit's values
        are read. Raises: EngineClosed; the fault of an update, of a save, of a drive or a rank."""
        # Cleared first: a later fault sets it again.
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
        """Check the engine before a copy of values begins, which waits for each pending update."""
        self.check_open()
        self.before_pass()
