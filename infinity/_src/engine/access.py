"""Checks of an engine before values are read or written: it is open, and nothing has failed in the
background.
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
    """The parts whose work is not done when a call returns: parts that work in the background,
    whose faults are sticky, writes of the loop to whole parameters, and parameters that were
    unfrozen and have no states yet."""

    pipeline: StepPipeline
    saving: Saver
    whole: WholeParams
    registry: OptimizerRegistry


class EngineAccess:
    """The checks of one engine (`infinity._src.params.update_hooks.Access`). One thread uses it at
    a time.

    alarm: has the next gather call `before_read`. It stays sounded as long as that raises.
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
        """Take the parts whose faults are sticky. They are made after this object, which they need.
        Called once, before anything else.
        """
        self._background = background

    def close(self) -> None:
        """Let every later check raise EngineClosed."""
        self.closed = True
        self._alarm.sound()

    def check_open(self) -> None:
        """Raise after close, and the sticky fault of a background update."""
        if self.closed:
            raise EngineClosed(
                "the engine of this model was closed; build the model anew and offload that"
            )
        self.check_drives()
        # A fault of the background is raised by whatever comes next: no caller waited for it.
        self._background.pipeline.raise_fault()
        self._background.saving.raise_fault()
        # A rank that has died is reported here, before a collective waits for it.
        self._comm.check()

    def check_drives(self) -> None:
        """Raise DriveLostError if a drive is known to be lost, and end all ranks."""
        lost = self._storage.drives.lost
        if lost is not None:
            self._comm.report_failure(lost)
            self._storage.drives.check()

    def before_pass(self) -> None:
        """Check the engine before an outermost forward, a write, or a call of its user. Keeps what
        the loop has written to whole parameters.
        """
        # Each rank would continue with a different model, and no loss would show it.
        self._comm.check_group()
        self._background.whole.keep_writes()

    def unfrozen(self, param: Param) -> None:
        self._background.registry.unfrozen(param)

    def before_training(self) -> None:
        self._background.registry.register_unfrozen()

    def before_read(self, unit: Unit) -> None:
        """Check the engine, and undo an update that ran ahead of its step, before the unit's values
        are read. Raises: EngineClosed; the fault of an update, of a save, of a drive or a rank."""
        # First: what is found from here on sounds it again.
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
        self.check_open()
        self.before_pass()
        self._background.pipeline.wait()
