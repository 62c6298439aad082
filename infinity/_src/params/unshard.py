"""What is gathered: units that have memory and are filled, or being filled; what is fetched ahead, and what goes for it.

    demand(u)  -> start reading u if nobody has -> start reading what the schedule wants next -> wait for u

A released unit stays gathered until its buffer is wanted, so the units at a turning point (last in forward, first in
backward; last in backward, first in the next forward) are not read twice. When room is wanted, the idle unit whose
next use is farthest goes; a prefetch never evicts a unit that is needed sooner than what it brings.

On several ranks all of this follows the program alone, never what has arrived by when: what is gathered, and given up, is
so on all of them.

Between `opt.step()` and the next forward a unit's values are on their way: its update was submitted behind a *gate*.
Filling such a unit means opening the gate with the unit's buffers as targets: the update hands the new parameters over
as it computes them. A gate that escaped (no forward came) has updated the states at rest, and the unit is read as ever.

What is on its way into the buffers of gathered units: the reads of this rank's shards, then the shards of the others.

    one rank        tickets                                             ready when they are filled
    several ranks   tickets -> gather lane: wait, exchange, keep        ready when the lane has done it

On several ranks what begins is never broken off, since the others count on it, and everything here follows the program
alone: all ranks exchange the same units in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from infinity._src._torch_compat import graph_is_kept, profiled
from infinity._src.cleanup import cancel_and_wait
from infinity._src.distributed.collectives import Comm
from infinity._src.distributed.exchange import Exchange
from infinity._src.distributed.fingerprint import digest, named
from infinity._src.distributed.lanes import Op
from infinity._src.grads.reducer import GradReducer
from infinity._src.kernels.quantize import DTYPES
from infinity._src.memory.device import Device
from infinity._src.memory.heap import Heap
from infinity._src.params import unsharded_param
from infinity._src.params.prefetch_schedule import AHEAD_MAX, NEVER, PassTracker, Phase, Schedule
from infinity._src.params.secondary_shards import SecondaryShards
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.update_hooks import Access, UpdateHooks
from infinity._src.telemetry import Marks, PhaseClock, Timeline
from infinity.aio import Executor, Gate, Priority, Ticket
from infinity.errors import AioError

AHEAD = 2
"""There is room for so many of the largest units besides the one in use."""


@dataclasses.dataclass
class PendingUpdate:
    """An update of a unit that was submitted and whose gate may still be closed."""

    ticket: Ticket
    gate: Gate
    opened: bool = False


class ParamVersion(NamedTuple):
    """Which values of a unit are gathered. delayed: those before an update that is delayed; quantized: as they travel, in int8 groups.
    Neither: those that rest."""

    delayed: bool = False
    quantized: bool = False


AT_REST = ParamVersion()
"""What `gather()`, reads and exports show."""


class Unsharder:
    """The gathered units of one model, over an executor (see `params.unit.UnsharderInterface`). One thread uses it at a time.

    gathered_bytes_max bounds what is gathered, prefetches included, as far as units in use allow: room for AHEAD + 1
    of the largest units. never_evict: units are never evicted (whole parameters on the device). qwz: weights travel as int8 groups, and
    forward and backward compute with them as they travel. secondary: see `PendingUnshards`.
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
        never_evict: bool,
        timeline: Timeline,
        device: Device | None = None,
        qwz: bool = False,
        secondary: SecondaryShards | None = None,
        activations_moved: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.units = units
        self.schedule = Schedule()
        self.passes = PassTracker()
        self.wait_s = 0.0  # for units
        self.update_wait_s = 0.0  # told by the pipeline
        self.demands = self.demand_reads = self.gathered_bytes_peak = 0
        self.device = device or Device(torch.device("cpu"))
        self._rest = rest
        self._executor = executor
        self._comm = comm
        self._never_evict = never_evict
        self._timeline = timeline
        self._pending = PendingUnshards(comm, secondary=secondary)
        self._quantized = qwz and comm.world > 1
        self._gathered_bytes = 0
        self.gathered_bytes_max = (AHEAD + 1) * max((unit.size_bytes for unit in units), default=0)
        self._updates: dict[Unit, PendingUpdate] = {}
        self._unsharding: Unit | None = None  # being demanded: nobody holds it yet, and it must not go
        self.delayed_params = mode.delayed_params
        self._gathered: dict[Unit, ParamVersion] = {}  # gathered or filling, and what with
        self.gradients = gradients
        self.use_left, self.slot = self.passes.use_left, gradients.slot
        self._mode = mode
        self._access = access
        self._heap = heap
        self.clock = PhaseClock(timeline, self._marks, activations_moved)

    # -- units ---------------------------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Block until the unit is gathered with its current values."""
        self._access.before_read(unit)
        self.demands += 1
        self._unsharding = unit
        try:
            with profiled(f"infinity: gather {unit.name}"):
                self._unshard(unit)
        finally:
            self._unsharding = None

    def _unshard(self, unit: Unit) -> None:
        self.schedule.demand(unit.index)
        version = self._wanted(unit)
        self._match_version(unit, version)
        ready = unit.gathered and unit not in self._pending
        if not ready and unit not in self._gathered:
            self.demand_reads += 1
            self._allocate_and_fill(unit, Priority.DEMAND, version)
        elif not ready and unit not in self._pending:  # an interrupt broke its fill off
            self._fill(unit, Priority.DEMAND, version)
        self.prefetch_ahead()
        if self.passes.in_backward:
            self.gradients.ahead([unit, *(self.units[index] for index in itertools.islice(self.schedule.upcoming(), 1))])
        if not ready:
            self._finish_fill(unit)

    def mixes(self, unit: Unit, *, window: bool) -> bool:
        """Whether a training pass would meet the values that `gather()` shows of the unit; with `window`, the reverse."""
        if window:
            return self._gathered.get(unit, AT_REST) != AT_REST
        return self.passes.trains and self._gathered.get(unit, AT_REST) != self._trained(unit)

    def shows_newest(self, unit: Unit) -> bool:
        """Whether the unit is gathered from rest although training computes with delayed ones."""
        return unit in self._gathered and self._gathered[unit].delayed != self._trained(unit).delayed

    def _trained(self, unit: Unit) -> ParamVersion:
        """What training computes with."""
        return ParamVersion(self.delayed_params is not None and self.delayed_params.computes(unit), self._quantized)

    def _wanted(self, unit: Unit) -> ParamVersion:
        """What the pass that runs computes with, or `gather()` shows."""
        if self.passes.trains:
            return self._trained(unit)
        return ParamVersion(False, self._quantized and self.passes.evaluates)

    def release(self, unit: Unit) -> None:
        """The unit may be evicted; it stays until its room is wanted."""
        self._mode.unit_released(unit)
        if not self._never_evict and self._gathered_bytes > self.gathered_bytes_max:
            self._make_room(0, NEVER)

    def _allocate_and_fill(self, unit: Unit, priority: Priority, version: ParamVersion) -> None:
        """Allocate the unit's buffers and start filling them. Does not block."""
        self._make_room(unit.size_bytes, NEVER)
        unsharded_param.allocate(unit, self.device)
        self._gathered[unit] = version
        self._gathered_bytes += unit.size_bytes
        self.gathered_bytes_peak = max(self.gathered_bytes_peak, self._gathered_bytes)
        self._fill(unit, priority, version)

    def _fill(self, unit: Unit, priority: Priority, version: ParamVersion) -> None:
        """Start filling the unit's buffers, which are allocated."""
        self._gathered[unit] = version
        delayed_params = self.delayed_params if version.delayed else None
        update = self._updates.get(unit)
        if update is not None and not update.opened:
            update.opened = True
            self.device.behind()
            if update.gate.open(self.targets(unit)):
                self._begin(unit, [update.ticket], version)
                return
        if version.quantized == self._quantized and self._pending.in_secondary(unit, (unit.generation, version)):
            self._pending.begin_from_secondary(unit)
            return
        tickets = [
            self._rest.fetch(flat, 0, self._target(flat), priority=priority, there=True)
            for flat in unit.flats
            if delayed_params is None or flat not in delayed_params  # those are copied when somebody waits for them
        ]
        self._begin(unit, tickets, version, before_gather=functools.partial(delayed_params.copy_to, unit, self._comm.rank) if delayed_params else None)

    def _begin(
        self, unit: Unit, tickets: Sequence[Ticket], version: ParamVersion, *, before_gather: Callable[[], None] | None = None
    ) -> None:
        """The tickets fill this rank's shards with what `version` says."""
        self._gathered[unit] = version
        # Only what forward computes with is kept for the next one.
        version_key = (unit.generation, version) if version.quantized == self._quantized else None
        self._pending.begin(unit, tickets, version_key, quantized=version.quantized, before_gather=before_gather)

    def _match_version(self, unit: Unit, version: ParamVersion) -> None:
        """Gather the unit anew if what is gathered is not what is wanted now, unless somebody uses it."""
        if unit not in self._gathered or unit.refs or self._gathered[unit] == version:
            return
        self._finish_pending(unit)
        unsharded_param.invalidate(unit)
        self._fill(unit, Priority.DEMAND, version)

    def _target(self, flat: Flat) -> int:
        """Where this rank's shard lies in the gathered flat."""
        return flat.tensor.data_ptr() + self._comm.rank * flat.layout.shard_numel * flat.layout.itemsize

    def _finish_fill(self, unit: Unit) -> None:
        """Wait until the unit's buffers are filled. After a fault the unit is evicted."""
        fill = self._pending.finish(unit)
        start_ns = time.monotonic_ns()
        try:
            fill.wait()
        except BaseException as error:
            self._pending.put_back(unit, fill)
            self._evict(unit)
            if isinstance(error, AioError):
                self._access.before_read(unit)  # if it was an update that failed, this says so and what helps
                error.args = (f"{unit.name} cannot be gathered: {error}",)
            raise
        end_ns = time.monotonic_ns()
        self.wait_s += (end_ns - start_ns) / 1e9
        if end_ns - start_ns > 20_000:
            self._timeline.add("wait", unit.name, start_ns, end_ns)
        unsharded_param.mark_filled(unit)

    def _evict(self, unit: Unit) -> None:
        interrupt = self._pending.cancel(unit)
        self._gathered.pop(unit, None)
        self._gathered_bytes -= unit.size_bytes
        if unit in self._pending.stuck:
            unsharded_param.invalidate(unit)
        else:
            unsharded_param.evict(unit)
        self._heap.freed()
        if interrupt is not None:
            raise interrupt

    def prefetch_ahead(self) -> None:
        """Start reading the units that the schedule wants next, as many as there is room for (in bytes). Does not block."""
        if self._never_evict and len(self._gathered) == len(self.units):
            return
        for index in itertools.islice(self.schedule.upcoming(), AHEAD_MAX):
            unit = self.units[index]
            if unit in self._gathered:
                continue
            if not self._make_room(unit.size_bytes, self.schedule.distance(index)):
                return
            version = ParamVersion(False, self._quantized) if self.passes.evaluates else self._trained(unit)
            self._allocate_and_fill(unit, Priority.PREFETCH, version)

    def _make_room(self, size_bytes: int, distance: int) -> bool:
        """Evict idle units, farthest next use first, until `size_bytes` more fit; only such as are needed later than
        `distance`. Returns whether they fit."""
        if self._never_evict:
            return True
        while self._gathered_bytes + size_bytes > self.gathered_bytes_max:
            idle = filter(self._may_evict, self._gathered)
            far = max(idle, key=lambda unit: (self.schedule.distance(unit.index), unit.index), default=None)
            if far is None or (distance is not NEVER and self.schedule.distance(far.index) <= distance):
                return False
            self._evict(far)
        return True

    def _may_evict(self, unit: Unit) -> bool:
        """Idle, and nothing is on its way into its buffers."""
        if unit.refs or unit is self._unsharding:
            return False
        if self._comm.world > 1:
            return True  # what is filled already is a matter of timing, and all ranks must evict the same
        return not self._pending.under_way(unit)

    def invalidate(self, unit: Unit) -> None:
        """The gathered values were overwritten and nobody uses them: read them again when they are wanted."""
        if unit in self._gathered:
            self._evict(unit)

    def targets(self, unit: Unit) -> list[int]:
        """Where this rank's shards lie in the unit's flats, which are unsharded_param."""
        return [self._target(flat) for flat in unit.flats]

    def shard_of(self, flat: Flat) -> torch.Tensor:
        """This rank's shard [shard_numel] of a flat, which is unsharded_param."""
        start = self._comm.rank * flat.layout.shard_numel
        return flat.tensor[start : start + flat.layout.shard_numel]

    def renew(self, unit: Unit) -> None:
        """The unit's values have changed: if it is gathered, start filling its buffers again."""
        if unit in self._gathered:
            self._cancel(unit)
            self._fill(unit, Priority.PREFETCH, self._trained(unit))

    def _changed(self, unit: Unit) -> None:
        unit.generation += 1
        self._pending.changed(unit)

    def _finish_pending(self, unit: Unit) -> None:
        """Finish a fill that nobody has waited for, or make it if its values were taken back."""
        if unit in self._gathered and not unit.gathered and unit not in self._pending:
            self._fill(unit, Priority.DEMAND, self._gathered[unit])
        if unit in self._pending:
            self._finish_fill(unit)

    def _cancel(self, unit: Unit) -> None:
        """What is gathered of the unit, or on its way, nobody wants any more. The memory stays allocated."""
        unsharded_param.invalidate(unit)
        interrupt = self._pending.cancel(unit)
        if interrupt is not None:
            raise interrupt

    # -- phases ----------------------------------------------------------------------------------------------------------

    def forward_start(self) -> None:
        """The outermost forward begins: a training forward when gradients are enabled."""
        if not self.passes.in_backward:
            self._rest.pin()
            self.gradients.let_go()
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
        self.passes.backward_start(retain_graph=graph_is_kept())
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
        self._comm.raised(where, error)

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
            self.gradients.drain(param, grad)

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
        if unit not in self._gathered:
            return
        self._cancel(unit)
        update.opened = True
        self.device.behind()
        if gate.open(self.targets(unit)):
            self._begin(unit, [ticket], self._trained(unit))
        else:  # it escaped while this thread was held up: read the values that the update left at rest
            self._fill(unit, Priority.PREFETCH, self._trained(unit))

    def can_update_in_place(self, unit: Unit) -> bool:
        """Whether an update may take the unit's parameters from its buffers and leave the new ones there."""
        ready = unit in self._gathered and unit.gathered and unit.refs == 0 and unit not in self._pending
        return ready and not self._gathered[unit].quantized  # which is not what the optimizer holds

    def updated(self, unit: Unit, ticket: Ticket, *, in_place: bool) -> None:
        """An update of the unit was submitted without a gate; in_place: into its buffers, too."""
        self._changed(unit)
        if in_place:
            unsharded_param.invalidate(unit)
            self._begin(unit, [ticket], self._gathered[unit])
        else:
            self.renew(unit)

    def rewritten(self, unit: Unit, *, in_place: bool) -> None:
        """The unit's values were replaced; in_place: in its buffers, too."""
        self._changed(unit)
        if not in_place:
            self.renew(unit)
        elif self._comm.world > 1:  # this rank's shards; the others are on their way
            unsharded_param.invalidate(unit)
            self._begin(unit, (), self._gathered[unit])
        else:
            unsharded_param.mark_filled(unit)

    def mark_stale(self, units: Iterable[Unit]) -> None:
        """What was written of these units is taken back: what is gathered of them is gathered anew. Blocks while it fills."""
        for unit in units:
            self._changed(unit)
            self._updates.pop(unit, None)
            if unit in self._gathered:
                self._cancel(unit)

    def touched(self, unit: Unit) -> None:
        """The unit's values at rest are about to change: what is gathered of it is gathered anew."""
        self._changed(unit)
        self.invalidate(unit)

    def updates_ended(self) -> None:
        """Every update that was submitted has been waited for."""
        self._updates.clear()

    # -- single values ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def borrowed(self, unit: Unit) -> Iterator[None]:
        """The unit is gathered inside, without a trace in the schedule."""
        self._access.before_read(unit)
        self._match_version(unit, AT_REST)
        if unit not in self._gathered:
            self._allocate_and_fill(unit, Priority.DEMAND, AT_REST)
        self._finish_pending(unit)
        unit.refs += 1
        try:
            yield
        finally:
            unit.refs -= 1
            if unit.refs == 0:
                self.release(unit)

    def read(self, param: Param) -> torch.Tensor:
        """The current value [param.shape] as an ordinary CPU tensor; waits for pending updates of its unit."""
        with self.borrowed(param.unit), torch.no_grad():
            return param.flat.tensor[param.offset :][: param.numel].view(param.shape).to("cpu", copy=True)

    def written(self, here: list[bool]) -> list[bool]:
        """Of windows that all ranks close now, which some rank has written to; where ranks keep all weights, one may look alone,
        and they are asked nothing."""
        return here if self._never_evict else self._comm.any_of(here)

    def write_alike(self, param: Param, value: torch.Tensor) -> None:
        """As `write`, when all ranks have come to it with the same value."""
        self._comm.meet(lambda: named(f"writing {param.name}", digest(value)))
        self.write(param, value)

    def write(self, param: Param, value: torch.Tensor) -> None:
        """Set the value, master included. value: [param.shape], any floating dtype (cast as copy_ does)."""
        self._access.before_write()  # waits for all updates: one that fails later would take the value back together with its step
        flat_value = value.detach().to("cpu", param.dtype).reshape(-1).contiguous()
        assert flat_value.numel() == param.numel
        self._finish_pending(param.unit)
        start, source, numel = param.flat.layout.shard_range(param.slot_index, self._comm.rank)
        if numel:
            values = flat_value[source : source + numel]
            self._rest.overwrite(param.flat, start, values)
            if self.delayed_params is not None:
                self.delayed_params.write(param.flat, start, values)
        unit = param.unit
        self._changed(unit)
        if unit in self._gathered:
            if unit.refs == 0 and not self._never_evict:
                self._evict(unit)
            elif unit.refs == 0 and self._gathered[unit].quantized:
                self.renew(unit)
            else:
                with torch.no_grad():
                    param.flat.tensor[param.offset :][: param.numel].copy_(flat_value)
                unsharded_param.mark_filled(unit)

    def close(self) -> None:
        """Evict everything. Pending work must have been waited for."""
        self._pending.close()
        self._updates.clear()
        for unit in list(self._gathered):
            self._evict(unit)


@dataclasses.dataclass
class PendingUnshard:
    """What fills one unit. op: None on one rank. before: what the thread that waits does once the tickets are filled; submit:
    makes the op then, where it could not run ahead."""

    tickets: Sequence[Ticket]
    op: Op | None = None
    before_gather: Callable[[], None] | None = None
    submit: Callable[[], Op] | None = None
    stuck: bool = False

    @property
    def filled(self) -> bool:
        """Whether nothing is under way any more."""
        return all(ticket.filled for ticket in self.tickets) and (self.op is None or self.op.done)

    def wait(self) -> None:
        """Block until the unit's buffers hold its values. Raises: AioError, RankFailed."""
        if self.op is None:
            for ticket in self.tickets:
                ticket.wait_filled()
        if self.before_gather is not None:
            self.before_gather()
        if self.submit is not None:
            self.op, self.submit = self.submit(), None
        if self.op is not None:
            self.op.wait()

    def cancel_and_wait(self) -> KeyboardInterrupt | None:
        """Return when nothing is on its way into the buffers, whatever became of it; an interrupt that came meanwhile. `stuck` is
        set where that cannot be had: a rank has failed, and a call that waited for it does not return."""
        if self.op is None:
            return cancel_and_wait(self.tickets)
        interrupt = None
        while True:
            try:
                self.stuck = not self.op.finished()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        return cancel_and_wait(self.tickets) or interrupt


class PendingUnshards:
    """The fills of one model. One thread uses it at a time.

    kept: where they may come from instead of from rest.
    """

    def __init__(self, comm: Comm, *, secondary: SecondaryShards | None = None) -> None:
        self._comm = comm
        self.secondary = secondary
        self._by_unit: dict[Unit, PendingUnshard] = {}
        self.stuck: set[Unit] = set()  # whose memory must stay

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._by_unit

    def under_way(self, unit: Unit) -> bool:
        """Whether something is on its way into the unit's buffers."""
        fill = self._by_unit.get(unit)
        return fill is not None and not fill.filled

    def in_secondary(self, unit: Unit, version: Hashable) -> bool:
        """Whether the unit's weights of this age need not come from rest."""
        return self.secondary is not None and self.secondary.has(unit, version)

    def begin(
        self,
        unit: Unit,
        tickets: Sequence[Ticket],
        version: Hashable,
        *,
        quantized: bool = False,
        before_gather: Callable[[], None] | None = None,
    ) -> None:
        """The tickets fill this rank's shards, of weights of this age; gather the others' behind them. Does not block.

        age: None for what shall not be kept. quantized: they travel as int8 groups, and are rounded to these here, too.
        late: to be called by the thread that waits, between the tickets and the exchange.
        """
        if self._comm.world == 1:
            self._by_unit[unit] = PendingUnshard(tickets, before_gather=before_gather)
        elif before_gather is None:
            self._by_unit[unit] = PendingUnshard(tickets, self._submit(unit, tickets, version, quantized))
        else:
            self._by_unit[unit] = PendingUnshard(tickets, before_gather=before_gather, submit=lambda: self._submit(unit, tickets, version, quantized))

    def begin_from_secondary(self, unit: Unit) -> None:
        """Gather the unit from what is kept of it. Does not block."""
        assert self.secondary is not None
        load, flats = self.secondary.load(unit), list(unit.flats)
        across = len(self.secondary.ranks) == 1

        def work(exchange: Exchange) -> None:
            with torch.no_grad():
                load()
                exchange.spread([_parts(flat) for flat in flats], across=across)

        self._by_unit[unit] = PendingUnshard((), self._comm.gather(f"gather of {unit.name} as it is kept", work))

    def finish(self, unit: Unit) -> PendingUnshard:
        """Take the unit's fill, for the caller to wait for."""
        return self._by_unit.pop(unit)

    def put_back(self, unit: Unit, fill: PendingUnshard) -> None:
        """Waiting for it has failed: it is to be abandoned."""
        self._by_unit[unit] = fill

    def cancel(self, unit: Unit) -> KeyboardInterrupt | None:
        """Nobody wants what is on its way into the unit's buffers; returns when nothing is."""
        fill = self._by_unit.pop(unit, None)
        if fill is None:
            return None
        interrupt = fill.cancel_and_wait()
        if fill.stuck:
            self.stuck.add(unit)
        return interrupt

    def changed(self, unit: Unit) -> None:
        """The unit's weights have changed: nothing that is kept of them counts."""
        if self.secondary is not None:
            self.secondary.forget(unit)

    def _submit(self, unit: Unit, tickets: Sequence[Ticket], version: Hashable, quantized: bool) -> Op:
        store = self.secondary.store(unit, version) if self.secondary is not None and version is not None else None
        coded = [flat for flat in unit.flats if quantized and flat.dtype in DTYPES]
        plain = [flat for flat in unit.flats if flat not in coded]

        def work(exchange: Exchange) -> None:
            for ticket in tickets:
                ticket.wait_filled()
            with torch.no_grad():
                exchange.spread([_parts(flat) for flat in plain])
                exchange.spread_quantized([_parts(flat) for flat in coded])
                if store is not None:
                    store()

        how = " in int8 groups" if quantized else ""
        return self._comm.gather(f"gather of {unit.name}{how}", work)

    def close(self) -> None:
        """Return when nothing is under way, and forget everything."""
        for unit in list(self._by_unit):
            self.cancel(unit)
        if self.secondary is not None:
            self.secondary.close()


def _parts(flat: Flat) -> list[torch.Tensor]:
    """The shards of all ranks in a gathered flat."""
    return list(flat.tensor.view(-1, flat.layout.shard_numel))
