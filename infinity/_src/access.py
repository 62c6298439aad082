"""Whether an engine can be used, asked before values are read or written: it is open, and nothing
has failed in the background."""

from __future__ import annotations

from infinity._src.checkpoint.save import Saver
from infinity._src.distributed.collectives import Comm
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.unit import Unit
from infinity._src.storage import Storage
from infinity.errors import EngineClosed


class EngineAccess:
    """The checks of one engine (`infinity._src.params.update_hooks.Access`). One thread uses it at
    a time."""

    _pipeline: StepPipeline
    _saving: Saver

    def __init__(self, comm: Comm, storage: Storage, mode: UpdateMode) -> None:
        self.closed = False
        self._comm = comm
        self._storage = storage
        self._mode = mode

    def attach(self, pipeline: StepPipeline, saving: Saver) -> None:
        """Take those whose faults are sticky, which need what asks here to be made. Called once,
        before anything else."""
        self._pipeline = pipeline
        self._saving = saving

    def check_open(self) -> None:
        """Raise after close, and the sticky fault of a background update."""
        if self.closed:
            raise EngineClosed(
                "the engine of this model was closed; build the model anew and offload that"
            )
        self._pipeline.raise_fault()
        self._saving.raise_fault()
        self._comm.check()

    def before_read(self, unit: Unit) -> None:
        """Somebody wants the unit's values. On the way of every gather: no call here is
        superfluous."""
        self.check_open()
        self._mode.before_read(unit)
        self._storage.observe_sometimes()

    def before_write(self) -> None:
        """Values are about to be written. Blocks until no update is pending."""
        self.check_open()
        self._pipeline.wait()
