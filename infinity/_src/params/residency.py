"""Residency: which units are gathered, what is fetched ahead, what is evicted. The life cycle asks, this decides.

`infinity._src.params.unshard` has what is gathered; here is what passes, gradients, updates and single values ask of it.

Between `opt.step()` and the next forward a unit's values are on their way: its update was submitted behind a *gate*.
Filling such a unit means opening the gate with the unit's buffers as targets: the update hands the new parameters over
as it computes them. A gate that escaped (no forward came) has updated the states at rest, and the unit is read as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from infinity._src._torch_compat import graph_is_kept, profiled
from infinity._src.distributed.collectives import Comm, digest, fingerprinted
from infinity._src.grads.reduce import GradReducer
from infinity._src.memory.device import Device
from infinity._src.memory.heap import Heap
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.pending_unshards import PendingUnshards
from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.secondary_shards import SecondaryShards
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Param, Unit
from infinity._src.params.unshard import AT_REST, Gathering, PendingUpdate
from infinity._src.params.update_hooks import Access, UpdateHooks
from infinity._src.telemetry import Marks, PhaseClock, Timeline
from infinity.aio import Executor, Gate, Priority, Ticket


class Unsharder(Gathering):
    """The real residency (see `params.unit.Residency`), over an executor. One thread uses it at a time.

    keep: units are never evicted (whole parameters on the device). qwz: weights travel as int8 groups. kept: see `PendingUnshards`.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        rest: StateStore,
        executor: Executor,
        gradients: GradReducer,
        comm: Comm,
        mode: UpdateHooks,
        access: Access,
        heap: Heap,
        keep: bool,
        timeline: Timeline,
        device: Device | None = None,
        qwz: bool = False,
        kept: SecondaryShards | None = None,
        activations_moved: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(
            units,
            rest=rest,
            comm=comm,
            keep=keep,
            timeline=timeline,
            device=device or Device(torch.device("cpu")),
            fills=PendingUnshards(comm, kept=kept),
            coarse=qwz and comm.world > 1,
            gradients=gradients,
            mode=mode,
            access=access,
            heap=heap,
        )
        self.update_wait_s = 0.0  # told by the pipeline
        self._executor = executor
        self.use_left, self.slot = self.passes.use_left, gradients.slot
        self.clock = PhaseClock(timeline, self._marks, activations_moved)

    # -- phases ----------------------------------------------------------------------------------------------------------

    def forward_start(self) -> None:
        """The outermost forward begins: a training forward when gradients are enabled."""
        if not self.passes.in_backward:
            self._rest.pin()
            self.gradients.free_done()
            trains = torch.is_grad_enabled()
            self.passes.forward_start(trains=trains)
            self.clock.enter("forward" if trains else "evaluation", quiet=trains and not self._mode.updates_pending)
            self.schedule.start(Phase.TRAIN if trains else Phase.EVAL)
            if self._updates:
                self._executor.hold_gates(True)

    def forward_end(self) -> None:
        """The outermost forward has returned or raised."""
        if not self.passes.in_backward:
            self.passes.forward_end()
            self.schedule.end()
            self._executor.hold_gates(False)
            self.clock.enter("idle")

    def backward_start(self) -> None:
        """A backward begins."""
        self.passes.backward_start(kept=graph_is_kept())
        self.clock.enter("backward")
        self.schedule.start(Phase.BACKWARD)
        self._mode.backward_begin()

    def backward_end(self) -> None:
        """A backward has ended: gradients that no Use claimed are reduced."""
        self.passes.backward_end()
        try:
            self.schedule.end()
            self.gradients.backward_end()
            self._mode.backward_end()
        except BaseException:
            self.passes.in_backward = True  # it has broken off, as what comes next is to know
            raise
        self.clock.enter("idle")

    def broke(self, where: str, error: BaseException) -> None:
        """A forward or backward of this rank has raised: the others, which may wait for it, are told."""
        self._comm.report_exception(where, error)

    def reset(self) -> None:
        """Forget what an interrupted forward or backward left."""
        if self.passes.in_backward:
            self._mode.backward_aborted()
        self.passes.reset()
        self.gradients.reset()
        self._executor.hold_gates(False)
        self.schedule.abandon()
        self.clock.enter("idle")

    def _marks(self) -> Marks:
        """What the clock divides into phases."""
        grads = self._rest.grads_read_bytes, self._rest.grads_written_bytes
        return Marks.of(self._executor.stats(), self._rest.params_read_bytes, self.wait_s + self.update_wait_s, grads)

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def accumulate_grad(self, param: Param, grad: torch.Tensor) -> None:
        """Take one fresh gradient [param.shape]."""
        with profiled(f"infinity: drain {param.name}"):
            self.gradients.accumulate_grad(param, grad)

    def assign_gradient(self, param: Param, grad: torch.Tensor) -> None:
        """Make `grad` [param.shape] the parameter's whole gradient."""
        self.gradients.assign(param, grad)

    def unit_done(self, unit: Unit) -> None:
        """A Use of the unit has ended; its gradients are reduced."""
        self.passes.use_ended(unit)
        # Ranks reduce a unit once: what several of its modules gave it, or several calls of one, comes together.
        if self._comm.world == 1 or self.passes.all_ended(unit):
            self.gradients.unit_done(unit)

    # -- updates -----------------------------------------------------------------------------------------------------------

    def hand_over(self, unit: Unit, ticket: Ticket, gate: Gate) -> None:
        """An update of the unit was submitted behind `gate`. If the unit is gathered it becomes the gate's target."""
        self._changed(unit)
        update = self._updates[unit] = PendingUpdate(ticket, gate)
        if unit not in self._held:
            return
        self._abandon(unit)
        update.opened = True
        self.device.behind()
        if gate.open(self.targets(unit)):
            self._begin(unit, [ticket], self._trained(unit))
        else:  # it escaped while this thread was held up: read the values that the update left at rest
            self._fill(unit, Priority.PREFETCH, self._trained(unit))

    def can_update_in_place(self, unit: Unit) -> bool:
        """Whether an update may take the unit's parameters from its buffers and leave the new ones there."""
        ready = unit in self._held and unit.gathered and unit.refs == 0 and unit not in self._fills
        return ready and not self._views[unit].coarse  # which is not what the optimizer holds

    def updated(self, unit: Unit, ticket: Ticket, *, in_place: bool) -> None:
        """An update of the unit was submitted without a gate; in_place: into its buffers, too."""
        self._changed(unit)
        if in_place:
            gathered.invalidate(unit)
            self._begin(unit, [ticket], self._views[unit])
        else:
            self.renew(unit)

    def rewritten(self, unit: Unit, *, in_place: bool) -> None:
        """The unit's values were replaced; in_place: in its buffers, too."""
        self._changed(unit)
        if not in_place:
            self.renew(unit)
        elif self._comm.world > 1:  # this rank's shards; the others are on their way
            gathered.invalidate(unit)
            self._begin(unit, (), self._views[unit])
        else:
            gathered.mark_filled(unit)

    def stale(self, units: Iterable[Unit]) -> None:
        """What was written of these units is taken back: what is gathered of them is gathered anew. Blocks while it fills."""
        for unit in units:
            self._changed(unit)
            self._updates.pop(unit, None)
            if unit in self._held:
                self._abandon(unit)

    def touched(self, unit: Unit) -> None:
        """The unit's values at rest are about to change: what is gathered of it is gathered anew."""
        self._changed(unit)
        self.discard(unit)

    def updates_ended(self) -> None:
        """Every update that was submitted has been waited for."""
        self._updates.clear()

    # -- single values ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def borrowed(self, unit: Unit) -> Iterator[None]:
        """The unit is gathered inside, without a trace in the schedule."""
        self._access.before_read(unit)
        self._refill(unit, AT_REST)
        if unit not in self._held:
            self._start_fill(unit, Priority.DEMAND, AT_REST)
        self._settle(unit)
        unit.refs += 1
        try:
            yield
        finally:
            unit.refs -= 1
            if unit.refs == 0:
                self.idle(unit)

    def read(self, param: Param) -> torch.Tensor:
        """The current value [param.shape] as an ordinary CPU tensor; waits for pending updates of its unit."""
        with self.borrowed(param.unit), torch.no_grad():
            return param.flat.tensor[param.offset :][: param.numel].view(param.shape).to("cpu", copy=True)

    def written(self, here: list[bool]) -> list[bool]:
        """Of windows that all ranks close now, which some rank has written to; where ranks keep all weights, one may look alone,
        and they are asked nothing."""
        return here if self._keep else self._comm.all_reduce_any(here)

    def write_alike(self, param: Param, value: torch.Tensor) -> None:
        """As `write`, when all ranks have come to it with the same value."""
        self._comm.check_same_collective(lambda: fingerprinted(f"writing {param.name}", digest(value)))
        self.write(param, value)

    def write(self, param: Param, value: torch.Tensor) -> None:
        """Set the value, master included. value: [param.shape], any floating dtype (cast as copy_ does)."""
        self._access.before_write()  # waits for all updates: one that fails later would take the value back together with its step
        flat_value = value.detach().to("cpu", param.dtype).reshape(-1).contiguous()
        assert flat_value.numel() == param.numel
        self._settle(param.unit)
        start, source, numel = param.flat.layout.shard_range(param.slot_index, self._comm.rank)
        if numel:
            values = flat_value[source : source + numel]
            self._rest.overwrite(param.flat, start, values)
            if self.shadow is not None:
                self.shadow.write(param.flat, start, values)
        unit = param.unit
        self._changed(unit)
        if unit in self._held:
            if unit.refs == 0 and not self._keep:
                self._forget(unit)
            elif unit.refs == 0 and self._views[unit].coarse:
                self.renew(unit)
            else:
                with torch.no_grad():
                    param.flat.tensor[param.offset :][: param.numel].copy_(flat_value)
                gathered.mark_filled(unit)

    def close(self) -> None:
        """Evict everything. Pending work must have been waited for."""
        self._fills.close()
        self._updates.clear()
        for unit in list(self._held):
            self._forget(unit)
