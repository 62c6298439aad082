"""Unsharder: allocates units' memory on the device, and loads it.

    unshard(u)   begin to load u unless loaded -> prefetch the schedule's next units -> wait for u
    release(u)   u is not in use any more: it stays until another unit needs its memory

`UnitState` (`params.unit`) has the states of a unit, and the transitions. A released unit keeps its
memory until another unit needs it, so the units at a turning point (last in forward, first in
backward; last in backward, first in the next forward) are read once. The idle unit with the
farthest next use is evicted first. A prefetch never evicts a unit that is needed sooner than the
prefetched one.

A unit is filled by reads of this rank's shards, then by an all_gather of the others:

    one rank        tickets                                           ready when they are filled
    several ranks   tickets -> gather stream: all_gather, store       ready when these are done

On several ranks all decisions depend on the program's calls alone, never on the times at which
reads end. Every rank unshards and evicts the same units in the same order, and no rank cancels a
collective that has begun, since the others wait for it. A rank whose update failed lacks its shard
of the unit. Then no
rank gathers the unit (`distributed.comm_streams`), and all ranks, which wait for it, undo the step
(`optim.step`).

Between `opt.step()` and the next forward the new values of a unit are still being computed: its
update was submitted behind a *gate*. Loading such a unit opens the gate with the unit's buffers as
targets, and the update writes the new parameters into them. A gate *escapes* if no forward opens it
in time: then its update changes only the states at rest, and the unit is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.dtypes import copied, copy_
from infinity._src.base.sizes import format_size
from infinity._src.base.telemetry import SHORT_NS, Timeline
from infinity._src.base.torch_compat import graph_is_kept, profiled
from infinity._src.distributed.collectives import Collectives
from infinity._src.distributed.comm_streams import CollectiveRefused, PendingCollective
from infinity._src.distributed.communicator import Comm, digest, fingerprinted
from infinity._src.kernels.quantized import DTYPES
from infinity._src.memory.constants import SUMS_UNITS
from infinity._src.memory.device import Device
from infinity._src.memory.device_capacity import (
    Passes,
    capacity_bytes,
    gathered_capacity,
    retained_capacity,
)
from infinity._src.memory.heap import Heap
from infinity._src.params import unsharded_param
from infinity._src.params.cleanup import cancel_and_wait
from infinity._src.params.materialize import ModuleBuffers
from infinity._src.params.param_copies import DelayedCopy, SecondaryShards
from infinity._src.params.prefetch_schedule import AHEAD_MAX, NEVER, Phase, Progress
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import PENDING, SHARDED, STALE, UNSHARDED, Flat, Param, Unit
from infinity._src.params.update_hooks import Access, UpdateHooks
from infinity.aio import Executor, Gate, Priority, Ticket
from infinity.errors import AioError

log = logging.getLogger("infinity")

# Shared by all spans: the timeline keeps many.
_FORWARD = {"pass": "forward"}
_BACKWARD = {"pass": "backward"}


CHECK_S = 1.0
"""Interval in seconds of a gather's checks without an alarm: a step may take minutes, and drives
must be watched meanwhile."""


@dataclasses.dataclass
class PendingUpdate:
    """A submitted update of a unit, whose gate may still be closed."""

    ticket: Ticket
    gate: Gate
    opened: bool = False


class ParamVersion(NamedTuple):
    """The version of the values that a unit's memory holds, or is being loaded with. Without flags:
    the values at rest.

    delayed: the values before a delayed update. quantized: rounded to int8 groups, as communicated.
    """

    delayed: bool = False
    quantized: bool = False


AT_REST = ParamVersion()
"""The version for `gather()`, reads and exports."""


class Unsharder:
    """The unsharded units of one model. One thread uses it at a time.

    gathered_bytes_max bounds the memory of units, prefetches included, as far as units in use allow
    (`memory.device_capacity`). passes: the use of the device; with whole parameters all units stay
    once unsharded. in_any_order: ranks may use different units, which needs whole parameters.
    access: checks the engine before values are read; a gather calls it only after an `alarm`, or
    after CHECK_S. qwz: weights are communicated as int8 groups, and forward and backward compute
    with those. secondary: see `PendingUnshards`.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        store: StateStore,
        executor: Executor,
        gradients: GradReducer,
        progress: Progress,
        device: Device,
        comm: Comm,
        mode: UpdateHooks,
        access: Access,
        alarm: Alarm,
        heap: Heap,
        passes: Passes,
        timeline: Timeline,
        buffers: ModuleBuffers,
        in_any_order: bool = False,
        qwz: bool = False,
        secondary: SecondaryShards | None = None,
    ) -> None:
        self.units = units
        self._in_any_order = in_any_order
        self._buffers = buffers
        self.demands = self.demand_reads = self.gathered_bytes_peak = 0
        self._passes, self._schedule = progress.passes, progress.schedule
        self._clock, self._waits = progress.clock, progress.waits
        self._device = device
        self._gradients = gradients
        self._delayed_params = mode.delayed_params
        self._store = store
        self._executor = executor
        self._comm = comm
        self._never_evict = passes.whole
        self._timeline = timeline
        self._pending = PendingUnshards(comm, access, secondary=secondary)
        # One rank sends no weights, so they are not quantized.
        self._quantized = qwz and comm.world > 1
        # The version in memory, or being loaded, of each unit that is not SHARDED. Only the state
        # says whether a unit has memory.
        self._versions: dict[Unit, ParamVersion] = {}
        self._gathered_bytes = 0
        sizes = [unit.on_device for unit in units]
        self.gathered_bytes_max = gathered_capacity(sizes, passes)
        self._kept = KeptUnits(retained_capacity(sizes, passes))
        # Units whose sums of gradients are prefetched to the device together.
        self._sums_bytes_max = capacity_bytes([unit.size_bytes for unit in units], SUMS_UNITS - 1)
        self._updates: dict[Unit, PendingUpdate] = {}
        # The unit being unsharded has no reference yet; its prefetches must not evict it.
        self._unsharding: Unit | None = None
        # Units in use by a pass, for the timeline.
        self._used_since_ns: dict[Unit, int] = {}
        self._prefetches = True  # False: a prefetch of this pass found no capacity
        self._no_room_noted = False
        self._mode = mode
        self._access = access
        self._alarm = alarm
        self._check_at_s = 0.0
        self._heap = heap

    # -- unshard, release, prefetch, evict ---------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Block until the unit is unsharded, with its current values."""
        # Also for a gathered unit: a captured CUDA graph would keep the address of its memory.
        self._device.refuse_capture(f"the gather of {unit.name}")
        # First raise faults, and undo updates that ran ahead of their step, before the values are
        # used. Without an alarm this costs two comparisons.
        if self._alarm.word.value or time.monotonic() > self._check_at_s:
            self._check_at_s = time.monotonic() + CHECK_S
            self._access.before_read(unit)
        self._unsharding = unit
        try:
            with profiled(f"infinity: gather {unit.name}"):
                self._unshard(unit)
        finally:
            self._unsharding = None
        if self._passes.trains or self._passes.evaluates:
            self._used_since_ns[unit] = time.monotonic_ns()

    def _unshard(self, unit: Unit) -> None:
        version = self._wanted(unit)
        if unit in self._kept and unit.state is UNSHARDED and self._versions[unit] == version:
            # A later slice: the schedule records one demand for all slices.
            self.prefetch_ahead()
            return
        self.demands += 1
        # First: evictions and prefetches below use distances from this demand.
        self._schedule.record_unshard(unit.index)
        # Without gradients each module runs once, so nothing is kept.
        if self._passes.trains:
            self._kept.keep(unit)
        self._match_version(unit, version)
        if unit.state is SHARDED:
            self.demand_reads += 1
            self._allocate_and_fill(unit, Priority.DEMAND, version)
        elif unit.state is STALE:  # its values were undone, or an interrupt aborted the load
            self._fill(unit, Priority.DEMAND, version)
        # Before waiting, so that reads of the next units overlap the wait.
        self.prefetch_ahead()
        if self._passes.in_backward:
            # Spilled or offloaded sums of gradients are fetched together with their parameters.
            soon = [self.units[i] for i in itertools.islice(self._schedule.upcoming(), 1)]
            if sum(each.size_bytes for each in (unit, *soon)) > self._sums_bytes_max:
                soon = []  # two huge units that are not neighbours
            self._gradients.prefetch([unit, *soon])
        if unit.state is PENDING:
            self._finish_fill(unit)

    def mixes(self, unit: Unit, *, window: bool) -> bool:
        """Return whether the unit holds another version than the running training pass uses; with
        `window`: than the version at rest, for `gather()`.
        """
        # Without memory a unit counts as at rest: a closed window may get a gradient after its unit
        # was evicted.
        version = self._versions[unit] if unit.state is not SHARDED else AT_REST
        if window:
            return version != AT_REST
        return self._passes.trains and version != self._trained(unit)

    def trains_on_rest(self, unit: Unit) -> bool:
        """Return whether training computes with the values at rest, as `gather()` does."""
        return self._trained(unit) == AT_REST

    def shows_newest(self, unit: Unit) -> bool:
        """Return whether the unit holds values at rest although training uses delayed ones."""
        if unit.state is SHARDED:
            return False
        return self._versions[unit].delayed != self._trained(unit).delayed

    def _trained(self, unit: Unit) -> ParamVersion:
        delayed = self._delayed_params is not None and self._delayed_params.computes(unit)
        return ParamVersion(delayed, self._quantized)

    def _wanted(self, unit: Unit) -> ParamVersion:
        """Return the version for the running pass, or for `gather()`."""
        if self._passes.trains:
            return self._trained(unit)
        return ParamVersion(False, self._quantized and self._passes.evaluates)

    def release(self, unit: Unit) -> None:
        """Allow the eviction of the unit, which is not in use any more."""
        since_ns = self._used_since_ns.pop(unit, None)
        if since_ns is not None:
            args = _BACKWARD if self._passes.in_backward else _FORWARD
            self._timeline.add("compute", unit.name, since_ns, time.monotonic_ns(), args)
        self._mode.unit_released(unit)
        # Record the use now as well as at eviction, when another stream may be current.
        if unit.state is not SHARDED:
            unsharded_param.note_use(unit, self._device)
        # Units in use may have exceeded the bound: free the excess.
        if not self._never_evict and self._gathered_bytes > self.gathered_bytes_max:
            self._make_room(0, NEVER)

    def _allocate_and_fill(self, unit: Unit, priority: Priority, version: ParamVersion) -> None:
        """Allocate the unit's memory and begin to load it. Blocks only if the device lacks memory.
        Raises: torch.OutOfMemoryError.
        """
        size_bytes = unit.size_bytes
        if priority is Priority.DEMAND:
            # Evict units that were prefetched by a wrong prediction.
            while not self._make_room(size_bytes, NEVER) and self._evict_prefetched(unit):
                pass
        # Recorded before the state changes, so that an interrupt in between leaves no unrecorded
        # memory.
        self._versions[unit] = version
        self._gathered_bytes += size_bytes
        try:
            self._allocate(unit, demand=priority is Priority.DEMAND)
        finally:
            if unit.state is SHARDED:  # no memory
                self._unbook(unit)
        self.gathered_bytes_peak = max(self.gathered_bytes_peak, self._gathered_bytes)
        self._fill(unit, priority, version)

    def _allocate(self, unit: Unit, *, demand: bool) -> None:
        """Allocate the unit's memory. On one rank a demand may evict idle units; a prefetch tries
        once.
        """
        # On several ranks nothing is evicted here: other ranks' devices may not lack memory, and
        # all ranks must evict the same units. Whole parameters are never evicted.
        alone = self._comm.world == 1 and not self._never_evict
        while True:
            try:
                unsharded_param.allocate(unit, self._device, insist=demand or not alone)
                return
            except torch.OutOfMemoryError as error:
                evicts = demand and alone
                if not evicts or not (
                    self._evict_farthest(NEVER)
                    or self._evict_prefetched(unit)
                    or self._stop_keeping(error)
                ):
                    raise torch.OutOfMemoryError(self._no_room(unit, error)) from error

    def _stop_keeping(self, error: torch.OutOfMemoryError) -> bool:
        """Allow the eviction of units kept for the next slice, in this pass. Returns whether there
        were any."""
        if not self._kept.pause():
            return False
        log.warning(
            "the device lacks memory to keep units gathered from slice to slice: in this pass they "
            "are gathered for each slice: %s",
            error,
        )
        return True

    def _evict_prefetched(self, wanted: Unit) -> bool:
        """Evict the pending prefetched unit with the farthest next use. Blocks for its reads.
        Returns whether there was one.
        """
        return self._evict_last(
            each
            for each in self._versions
            if each.state is PENDING and not each.refs and each is not wanted
        )

    def _no_room(self, unit: Unit, error: torch.OutOfMemoryError) -> str:
        # `_gathered_bytes` already includes this unit.
        units = self._gathered_bytes - unit.size_bytes
        others = max(self._device.allocated_bytes() - units, 0)
        return (
            f"{unit.name} cannot be gathered: {self._device.torch_device} lacks memory for its "
            f"{format_size(unit.size_bytes)}, also after torch's cache was emptied. Gathered units "
            f"hold {format_size(units)} (at most {format_size(self.gathered_bytes_max)}), and "
            f"activations, gradients and other tensors {format_size(others)}. Make micro-batches "
            "smaller, checkpoint activations, or divide large units with "
            f"Policy(unit_bytes_max=...). torch says: {error}"
        )

    def _fill(self, unit: Unit, priority: Priority, version: ParamVersion) -> None:
        """Begin to load the unit into its memory: from its update, from secondary shards, or from
        its tier.
        """
        self._versions[unit] = version
        delayed_params = self._delayed_params if version.delayed else None
        update = self._updates.get(unit)
        if update is not None and not update.opened:
            # Marked first: a gate is opened only once, even if it has escaped.
            update.opened = True
            # The update writes to this memory after kernels that still read it.
            self._device.behind()
            if update.gate.open(self.targets(unit)):
                self._begin(unit, [update.ticket], version)
                return
        same_codec = version.quantized == self._quantized
        if same_codec and self._pending.in_secondary(unit, (unit.generation, version)):
            self._pending.begin_from_secondary(unit)
            return
        tickets = [
            self._store.fetch(flat, 0, self._target(flat), priority=priority, on_device=True)
            for flat in unit.flats
            # Flats with delayed parameters are copied from those.
            if delayed_params is None or flat not in delayed_params
        ]
        copy = delayed_params.copy_to(unit, self._comm.rank) if delayed_params else None
        self._begin(unit, tickets, version, delayed=copy)

    def _begin(
        self,
        unit: Unit,
        tickets: Sequence[Ticket],
        version: ParamVersion,
        *,
        delayed: DelayedCopy | None = None,
    ) -> None:
        """Record that these tickets, and the copy of delayed shards, load `version` into this
        rank's shards.
        """
        self._versions[unit] = version
        # Store secondary shards only in the encoding that passes use: `gather()` may load another.
        key = (unit.generation, version) if version.quantized == self._quantized else None
        self._pending.begin(
            unit, tickets, key, quantized=version.quantized, delayed=delayed
        )

    def _match_version(self, unit: Unit, version: ParamVersion) -> None:
        """Reload the unit if it holds another version, unless the unit is in use."""
        if unit.state is SHARDED or unit.refs or self._versions[unit] == version:
            return
        # A load in flight would overwrite the new values.
        self._finish_pending(unit)
        unit.move_to(STALE)
        self._fill(unit, Priority.DEMAND, version)

    def _target(self, flat: Flat) -> int:
        return flat.tensor.data_ptr() + self._comm.rank * flat.layout.shard_bytes

    def _finish_fill(self, unit: Unit, *, tries: int = 0) -> None:
        """Wait until the unit is loaded. After a fault the unit is evicted. tries: failed reads so
        far. On one rank a failed read is repeated, and once more if the fault could be repaired.
        """
        start_ns, version = time.monotonic_ns(), self._versions[unit]
        try:
            self._pending.wait(unit)
        except BaseException as error:
            # Evicting waits for transfers into the memory.
            self._evict(unit)
            if isinstance(error, CollectiveRefused):
                # All ranks wait for this gather, and reach this line.
                self._access.undo_together(error.__cause__)
            if isinstance(error, AioError):
                # Raises the fault of a failed update; otherwise a read failed.
                self._access.before_read(unit)
                # Other ranks wait for a collective that has begun.
                if tries < 2 and error.op == "read" and self._comm.world == 1:
                    if tries:
                        self._access.read_failed(error)
                    self._allocate_and_fill(unit, Priority.DEMAND, version)
                    self._finish_fill(unit, tries=tries + 1)
                    return
                error.args = (f"{unit.name} cannot be gathered: {error}",)
            raise
        end_ns = time.monotonic_ns()
        self._waits.units_s += (end_ns - start_ns) / 1e9
        if end_ns - start_ns > SHORT_NS:
            self._timeline.add("wait", unit.name, start_ns, end_ns)

    def _evict(self, unit: Unit) -> None:
        interrupt = self._pending.cancel(unit) if unit.state is PENDING else None
        try:
            unsharded_param.evict(unit, self._device)
        finally:
            if unit.state is SHARDED:  # not if an interrupt came before the transition
                self._unbook(unit)
        self._heap.freed()
        if interrupt is not None:
            raise interrupt

    def _unbook(self, unit: Unit) -> None:
        del self._versions[unit]
        self._gathered_bytes -= unit.size_bytes

    def prefetch_ahead(self) -> None:
        """Begin to load the schedule's next units, as many as fit (in bytes). Does not block."""
        self._pending.advance()
        if not self._prefetches:
            return
        if self._never_evict and len(self._versions) == len(self.units):
            return
        for index in itertools.islice(self._schedule.upcoming(), AHEAD_MAX):
            unit = self.units[index]
            if unit.state is not SHARDED:
                continue
            if not self._make_room(unit.size_bytes, self._schedule.distance(index)):
                # Strictly in order: a smaller, later unit must not take this one's memory.
                return
            # Not `_wanted`: between passes `gather()` also prefetches for the next training pass.
            if self._passes.evaluates:
                version = ParamVersion(False, self._quantized)
            else:
                version = self._trained(unit)
            try:
                self._allocate_and_fill(unit, Priority.PREFETCH, version)
            except torch.OutOfMemoryError as error:
                if self._comm.world > 1:  # every rank prefetches the same units
                    raise
                # The unit is not in use yet; activations may be freed before it is.
                self._pause_prefetch(error)
                return

    def _pause_prefetch(self, error: torch.OutOfMemoryError) -> None:
        """Stop prefetching in this pass: further tries would find no memory, either."""
        self._prefetches = False
        if not self._no_room_noted:
            self._no_room_noted = True
            log.warning("units are gathered on demand, not ahead, until the next pass: %s", error)

    def _make_room(self, size_bytes: int, distance: int) -> bool:
        """Evict idle units whose next use is later than `distance`, farthest first, until
        `size_bytes` more fit. Returns whether they fit.
        """
        if self._never_evict:
            return True
        while self._gathered_bytes + size_bytes > self.gathered_bytes_max:
            if not self._evict_farthest(distance):
                return False
        return True

    def _evict_farthest(self, distance: int) -> bool:
        """Evict the idle unit with the farthest next use, if later than `distance`. Returns whether
        there was one.
        """
        return self._evict_last(filter(self._may_evict, self._versions), distance)

    def _evict_last(self, units: Iterable[Unit], distance: int = NEVER) -> bool:
        """Evict the unit of `units` with the farthest next use, if later than `distance`."""
        # The index breaks ties, so that all ranks choose the same unit.
        far = max(
            units,
            key=lambda unit: (self._schedule.distance(unit.index), unit.index),
            default=None,
        )
        if far is None:
            return False
        # NEVER: a demand, which may evict any idle unit.
        if distance is not NEVER and self._schedule.distance(far.index) <= distance:
            return False
        self._evict(far)
        return True

    def _may_evict(self, unit: Unit) -> bool:
        """Return whether the unit is idle, without transfers into its memory."""
        # `_versions` contains a SHARDED unit while its memory is being allocated.
        if unit.refs or unit is self._unsharding or unit.state is SHARDED or unit in self._kept:
            return False
        if self._comm.world > 1:
            # Do not ask whether a load has ended: that depends on timing, and all ranks must
            # evict the same.
            return True
        return unit.state is not PENDING or self._pending.filled(unit)

    def invalidate(self, unit: Unit) -> None:
        """Forget the values of the unit, which is not in use: they were overwritten. The next
        `unshard` reads them again.
        """
        if unit.state is SHARDED:
            return
        if self._never_evict:
            # Keep whole parameters' memory, where users may have tensors, and drop the values.
            self._cancel(unit)
        else:
            self._evict(unit)

    def targets(self, unit: Unit) -> list[int]:
        """Return the addresses of this rank's shards in the unit's flats, which have memory."""
        return [self._target(flat) for flat in unit.flats]

    def shard_of(self, flat: Flat) -> torch.Tensor:
        """Return this rank's shard [shard_numel] of a flat, which has memory."""
        start = self._comm.rank * flat.layout.shard_numel
        return flat.tensor[start : start + flat.layout.shard_numel]

    def renew(self, unit: Unit) -> None:
        """Begin to reload the unit, whose values have changed, if it has memory."""
        if unit.state is not SHARDED:
            self._cancel(unit)
            self._fill(unit, Priority.PREFETCH, self._trained(unit))

    def _changed(self, unit: Unit) -> None:
        unit.generation += 1
        self._pending.changed(unit)

    def _finish_pending(self, unit: Unit) -> None:
        """Finish a load that no gather has waited for; load again if the values were undone."""
        if unit.state is STALE:
            self._fill(unit, Priority.DEMAND, self._versions[unit])
        if unit.state is PENDING:
            self._finish_fill(unit)

    def _cancel(self, unit: Unit) -> None:
        """Drop the unit's values, and cancel its load. The memory stays allocated."""
        if unit.state is UNSHARDED:
            unit.move_to(STALE)
        elif unit.state is PENDING:
            interrupt = self._pending.cancel(unit)
            if interrupt is not None:
                raise interrupt

    # -- passes ------------------------------------------------------------------------------------

    def expect_forward(self, follows: bool) -> None:
        """Record whether another training forward or a backward follows the next forward, to
        prefetch for it at the end.
        """
        self._schedule.forward_follows = follows

    def unfrozen(self, param: Param) -> None:
        self._access.unfrozen(param)

    def forward_start(self) -> None:
        """Begin the outermost forward: a training forward if gradients are enabled."""
        # A forward inside backward recomputes: the phase stays the backward.
        if not self._passes.in_backward:
            trains = torch.is_grad_enabled()
            self._access.before_pass()
            if trains:
                self._access.before_training()
            self._store.pin()
            self._gradients.free_done()
            self._passes.forward_start(trains=trains)
            quiet = trains and not self._mode.updates_pending
            self._clock.enter("forward" if trains else "evaluation", quiet=quiet)
            self._schedule.start(Phase.TRAIN if trains else Phase.EVAL)
            self._prefetches = True
            self._kept.clear()
            if self._updates:
                # Forward opens the gates in order. An escaped gate would cost a read.
                self._executor.hold_gates(True)
            if self._in_any_order:
                self._fill_all()

    def _fill_all(self) -> None:
        """Begin to load all units without the new pass's values: in the same order on all ranks,
        whichever units they use."""
        for unit in self.units:
            version = self._wanted(unit)
            self._match_version(unit, version)
            if unit.state is SHARDED:
                self._allocate_and_fill(unit, Priority.PREFETCH, version)
            elif unit.state is STALE:
                self._fill(unit, Priority.PREFETCH, version)

    def forward_end(self) -> None:
        """End the outermost forward, which has returned or raised."""
        # A forward inside backward has begun no phase: see `forward_start`.
        if not self._passes.in_backward:
            self._passes.forward_end()
            self._kept.clear()
            self._schedule.end()
            self._executor.hold_gates(False)
            self._clock.enter("idle")

    def backward_start(self) -> None:
        if self._in_any_order:
            # Rank 0 may have skipped a gather for which another rank waits. After rank 0 begins a
            # reduction, that gather cannot be launched any more (`order_agreement`).
            for unit in self.units:
                self._finish_pending(unit)
        self._passes.backward_start(retain_graph=graph_is_kept())
        self._gradients.backward_start(self._passes.expects_uses)
        self._clock.enter("backward")
        self._schedule.start(Phase.BACKWARD)
        self._prefetches = True
        self._kept.clear()
        self._mode.backward_begin()

    def backward_end(self) -> None:
        """End a backward, and reduce the remaining gradients."""
        self._kept.clear()
        self._passes.backward_end()
        try:
            self._schedule.end()
            self._gradients.backward_end()
            self._mode.backward_end()
            self._buffers.backward_end()
        except BaseException:
            self._passes.in_backward = True  # `reset` must know that the backward was aborted
            raise
        self._clock.enter("idle")

    def broke(self, where: str, error: BaseException) -> None:
        """Report an exception of a forward or backward to the other ranks, which may wait."""
        self._comm.report_exception(where, error)

    def reset(self) -> None:
        """Clean up after an interrupted forward or backward."""
        # Before `passes.reset`, which forgets the running backward.
        if self._passes.in_backward:
            self._mode.backward_aborted()
        self._passes.reset()
        self._kept.clear()
        self._gradients.reset()
        self._executor.hold_gates(False)
        self._schedule.abandon()
        self._clock.enter("idle")

    def unit_done(self, unit: Unit) -> None:
        """Count an ended use of the unit; after the last its gradients are reduced."""
        self._passes.use_ended(unit)
        # Ranks reduce a unit once, with the gradients of all its modules and calls.
        if self._comm.world == 1 or self._passes.all_ended(unit):
            self._gradients.unit_done(unit)

    # -- updates -----------------------------------------------------------------------------------

    def hand_over(self, unit: Unit, ticket: Ticket, gate: Gate) -> None:
        """Record that an update of the unit was submitted behind `gate`. If the unit has memory,
        that becomes the gate's target.
        """
        self._changed(unit)
        update = self._updates[unit] = PendingUpdate(ticket, gate)
        if unit.state is SHARDED:
            return
        self._cancel(unit)
        # This call opens the gate; `_fill` must not open it a second time.
        update.opened = True
        # The update writes to this memory after kernels that still read it.
        self._device.behind()
        if gate.open(self.targets(unit)):
            self._begin(unit, [ticket], self._trained(unit))
        else:
            # The gate has escaped: the update leaves the new values only at rest.
            self._fill(unit, Priority.PREFETCH, self._trained(unit))

    def can_update_in_place(self, unit: Unit) -> bool:
        """Return whether an update may read the unit's parameters from its memory and write the new
        ones there.
        """
        # The optimizer needs values that were not quantized.
        return unit.state is UNSHARDED and unit.refs == 0 and not self._versions[unit].quantized

    def updated(self, unit: Unit, ticket: Ticket, *, in_place: bool) -> None:
        """Record that an update of the unit was submitted without a gate; in_place: it also writes
        the unit's memory.
        """
        self._changed(unit)
        if in_place:
            unit.move_to(STALE)
            self._begin(unit, [ticket], self._versions[unit])
        else:
            self.renew(unit)

    def rewritten(self, unit: Unit, *, in_place: bool) -> None:
        """Record that the unit's values were replaced; in_place: also in its memory."""
        self._changed(unit)
        if not in_place:
            self.renew(unit)
        elif self._comm.world > 1:
            # This rank wrote its shards; gather the other ranks' shards again.
            unit.move_to(STALE)
            self._begin(unit, (), self._versions[unit])

    def end_copies(self, unit: Unit) -> None:
        self._pending.end_copies(unit)

    def mark_stale(self, units: Iterable[Unit]) -> None:
        """Drop the values of these units, because a write to them was undone. Blocks while they are
        being loaded.
        """
        for unit in units:
            self._changed(unit)
            self._updates.pop(unit, None)
            self._cancel(unit)

    def touched(self, unit: Unit) -> None:
        """Record that the unit's values at rest will change, and evict it."""
        self._changed(unit)
        self.invalidate(unit)

    def updates_ended(self) -> None:
        self._updates.clear()

    # -- single values -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def borrowed(self, unit: Unit) -> Iterator[None]:
        """Unshard the unit for the block, with the values at rest, without recording it in the
        schedule.
        """
        # Not `unshard`: the schedule must not learn single reads.
        self._access.before_read(unit)
        self._match_version(unit, AT_REST)
        if unit.state is SHARDED:
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
        """Return the current value [param.shape] as an ordinary CPU tensor. Waits for pending
        updates of its unit.
        """
        with self.borrowed(param.unit), torch.no_grad():
            values = param.flat.tensor[param.offset :][: param.numel]
            return copied(values.view(param.shape))

    def written(self, here: list[bool]) -> list[bool]:
        """Return for each window being closed whether any rank has written to it.

        here: whether this rank has written to it.
        """
        # With whole parameters one rank may open a window alone, so no collective.
        return here if self._never_evict else self._comm.all_reduce_any(here)

    def chosen(self, here: list[bool]) -> list[bool]:
        """Return which tiles of experts to gather, the same on all ranks. Collective if parameters
        are sharded.

        here: for each tile, whether tokens of this rank chose one of its experts.
        """
        # Whole parameters all stay gathered, so that a rank may evaluate alone.
        if self._never_evict and self._comm.world > 1:
            return [True] * len(here)
        return self._comm.all_reduce_any(here)

    def write_alike(self, param: Param, value: torch.Tensor) -> None:
        """Set the value as `write` does, on all ranks. Raises: RanksDiverged if the ranks' values
        differ."""
        self._comm.check_same_collective(
            lambda: fingerprinted(f"writing {param.name}", digest(value))
        )
        self.write(param, value)

    def write(self, param: Param, value: torch.Tensor) -> None:
        """Set the value, master included. value: [param.shape], any floating dtype (cast as copy_
        does).
        """
        # Wait for all updates: a later failure would undo this value with the step.
        self._access.before_write()
        flat_value = value.detach().to("cpu", param.dtype).reshape(-1).contiguous()
        assert flat_value.numel() == param.numel
        # A read in flight would overwrite the new value with the old one.
        self._finish_pending(param.unit)
        layout = param.flat.layout
        start, source, numel = layout.shard_range(param.param_index, self._comm.rank)
        # A rank may have no part of a small parameter.
        if numel:
            values = flat_value[source : source + numel]
            self._store.overwrite(param.flat, start, values)
            # Otherwise training would use the old value until the next step.
            if self._delayed_params is not None:
                self.end_copies(param.unit)
                self._delayed_params.write(param.flat, start, values)
        unit = param.unit
        self._changed(unit)
        if unit.state is SHARDED:
            return
        if unit.refs == 0 and not self._never_evict:
            self._evict(unit)
        elif unit.refs == 0 and self._versions[unit].quantized:
            # Only an all_gather quantizes weights, so gather the unit again.
            self.renew(unit)
        else:
            # `_finish_pending` has ended all transfers: the unit stays UNSHARDED.
            with torch.no_grad():
                copy_(param.flat.tensor[param.offset :][: param.numel], flat_value)

    def close(self) -> None:
        """Evict all units. No update may be pending."""
        self._pending.close()
        self._updates.clear()
        for unit in list(self._versions):
            self._evict(unit)


@dataclasses.dataclass
class PendingUnshard:
    """A unit's load in flight.

    op: the collective on the gather stream; None on one rank. delayed: on one rank, the ticket that
    copies delayed parameters; `advance` or `wait_filled` begins the copy.
    """

    tickets: Sequence[Ticket]
    op: PendingCollective | None = None
    delayed: DelayedCopy | None = None
    stuck: bool = False

    @property
    def filled(self) -> bool:
        # Called for many units at each gather: a loop is faster than a generator.
        for ticket in self.tickets:
            if not ticket.filled:
                return False
        return self.op is None or self.op.done

    def wait(self) -> None:
        """Block until the unit's memory holds its values. Raises: AioError, RankFailed."""
        if self.op is not None:
            self.op.wait()  # the communication stream waits for the tickets
            return
        for ticket in self.tickets:
            ticket.wait_filled()

    def cancel_and_wait(self) -> KeyboardInterrupt | None:
        """Block until all writes to the memory have ended. Returns an interrupt that arrived
        meanwhile.

        Sets `stuck` if the wait cannot end: a rank has failed, and a collective that waits for it
        does not return.
        """
        if self.op is None:
            return cancel_and_wait(self.tickets)
        interrupt = None
        # Never cancel a collective: the other ranks wait for it.
        while True:
            try:
                self.stuck = not self.op.finished()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        return cancel_and_wait(self.tickets) or interrupt


class PendingUnshards:
    """The loads of PENDING units. One thread uses it at a time.

    A call that begins a load makes the unit PENDING; a call that ends it makes the unit UNSHARDED
    or STALE. A load is recorded before its unit is PENDING and removed after it, so that an
    interrupt never leaves a PENDING unit without a load.

    secondary: stored copies of shards; units are gathered from them instead of from the tier.
    """

    def __init__(
        self, comm: Comm, access: Access, *, secondary: SecondaryShards | None = None
    ) -> None:
        self._comm = comm
        self._access = access
        self.secondary = secondary
        self._by_unit: dict[Unit, PendingUnshard] = {}
        # Several ranks: each unit's last op that copies delayed parameters. Only the compute stream
        # waits for it.
        self._copying: dict[Unit, PendingCollective] = {}

    def filled(self, unit: Unit) -> bool:
        """Return whether all transfers into the memory of a PENDING unit have ended."""
        return self._by_unit[unit].filled

    def in_secondary(self, unit: Unit, version: Hashable) -> bool:
        return self.secondary is not None and self.secondary.has(unit, version)

    def begin(
        self,
        unit: Unit,
        tickets: Sequence[Ticket],
        version: Hashable,
        *,
        quantized: bool = False,
        delayed: DelayedCopy | None = None,
    ) -> None:
        """Begin the all_gather after the tickets that load this rank's shards. Does not block.

        version: of the secondary shards to store; None: store none. quantized: communicate int8
        groups; this rank's weights are rounded, too. delayed: copies the delayed parameters: on one
        rank one of the tickets, on several in the communication stream.
        """
        # Checked before the collective, which cannot be undone.
        assert unit.state is STALE, f"{unit.name} is {unit.state}, and was to be filled"
        if self._comm.world > 1:
            op = self._submit(unit, tickets, version, quantized, delayed)
            if delayed is not None:
                self._copying[unit] = op
            fill = PendingUnshard(tickets, op)
        elif delayed is not None:
            fill = PendingUnshard((*tickets, delayed), delayed=delayed)
        else:
            fill = PendingUnshard(tickets)
        self._by_unit[unit] = fill
        unit.move_to(PENDING)
        if fill.delayed is not None:
            # If the reads have ended, begin now, so that a prefetch copies, too. Last, so that an
            # interrupt leaves no unrecorded copy.
            fill.delayed.advance()

    def advance(self) -> None:
        """Begin the copies of delayed parameters whose reads have ended. Never blocks."""
        for fill in self._by_unit.values():
            if fill.delayed is not None:
                fill.delayed.advance()

    def end_copies(self, unit: Unit) -> None:
        """Block until copies of the unit's delayed parameters to the device have ended."""
        op = self._copying.get(unit)
        if op is not None:
            op.finished()
            del self._copying[unit]
        fill = self._by_unit.get(unit)
        if fill is not None and fill.delayed is not None:
            fill.delayed.end()

    def begin_from_secondary(self, unit: Unit) -> None:
        """Begin to gather the unit from secondary shards. Does not block."""
        assert self.secondary is not None
        load, flats = self.secondary.load(unit), list(unit.flats)
        # If each rank stores only its shard, gather from all ranks; else within the node.
        across = len(self.secondary.ranks) == 1

        def work(collectives: Collectives) -> None:
            with torch.no_grad():
                load()
                collectives.all_gather([_parts(flat) for flat in flats], across=across)

        op = self._comm.submit_all_gather(f"gather of {unit.name} from secondary shards", work)
        self._by_unit[unit] = PendingUnshard((), op)
        unit.move_to(PENDING)

    def wait(self, unit: Unit) -> None:
        """Block until a PENDING unit is UNSHARDED. On failure it stays PENDING, for the caller to
        cancel. Raises: AioError, CollectiveRefused, RankFailed.
        """
        self._by_unit[unit].wait()
        unit.move_to(UNSHARDED)
        del self._by_unit[unit]

    def cancel(self, unit: Unit) -> KeyboardInterrupt | None:
        """Cancel the load of a PENDING unit, and block until writes to its memory have ended: the
        unit is STALE. Returns an interrupt that arrived meanwhile.
        """
        fill = self._by_unit[unit]
        interrupt = fill.cancel_and_wait()
        unit.stuck = unit.stuck or fill.stuck
        # The secondary shards were recorded at submission, but a refused collective stored none.
        if fill.op is not None and fill.op.refused:
            self.changed(unit)
        unit.move_to(STALE)
        del self._by_unit[unit]
        return interrupt

    def changed(self, unit: Unit) -> None:
        """Forget the unit's secondary shards: the weights have changed, or were not stored."""
        if self.secondary is not None:
            self.secondary.forget(unit)

    def _submit(
        self,
        unit: Unit,
        tickets: Sequence[Ticket],
        version: Hashable,
        quantized: bool,
        delayed: DelayedCopy | None,
    ) -> PendingCollective:
        secondary = self.secondary if version is not None else None
        # Recorded now, in program order, the same on all ranks. The communication stream stores
        # them later.
        store = secondary.store(unit, version) if secondary is not None else None
        coded = [flat for flat in unit.flats if quantized and flat.dtype in DTYPES]
        plain = [flat for flat in unit.flats if flat not in coded]

        def work(collectives: Collectives) -> None:
            with torch.no_grad():
                # This rank's delayed shard must be in place before the all_gather sends it.
                if delayed is not None:
                    delayed.run()
                collectives.all_gather([_parts(flat) for flat in plain])
                collectives.all_gather_quantized([_parts(flat) for flat in coded])
                if store is not None:
                    store()

        how = " in int8 groups" if quantized else ""
        # The collective is launched only after `needs`: once launched, it delays later ones.
        needs = tickets if delayed is None else [*tickets, *delayed.reads]
        excuses = self._access.may_undo if self._access.undoes_together else None
        return self._comm.submit_all_gather(f"gather of {unit.name}{how}", work, needs, excuses)

    def close(self) -> None:
        """Block until all loads have ended, and forget them. Raises: RankFailed if the wait cannot
        end; then nothing is freed."""
        for unit in list(self._by_unit):
            if unit.state is PENDING:
                self.cancel(unit)
        # No ticket covers copies from and to pinned memory, which is freed next.
        self._comm.drain()
        self._copying.clear()
        if self.secondary is not None:
            self.secondary.close()


class KeptUnits:
    """The units that stay gathered from slice to slice of their block (`inf.microbatched`), of one
    block at a time. bytes_max: for each block (`memory.device_capacity.retained_capacity`).

    A block runs its forward once for each slice, and backward takes it slice by slice. The first
    demand of a unit gathers it. It is not evicted until a unit of another block is demanded, so
    later slices find it. Ranks that demand the same units keep the same.
    """

    def __init__(self, bytes_max: Mapping[int, int]) -> None:
        self._bytes_max = bytes_max
        self._block: int | None = None
        self._units: set[Unit] = set()
        self._remaining_bytes = 0
        self._paused = False

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def keep(self, unit: Unit) -> None:
        """Record a demand of the unit: keep it if it fits, and drop units of another block."""
        if unit.block != self._block:
            self._let_go()
            self._block = unit.block
            self._remaining_bytes = self._bytes_max[unit.block] if unit.block is not None else 0
        stays = unit.block is not None and unit not in self._units and not self._paused
        if stays and unit.size_bytes <= self._remaining_bytes:
            self._units.add(unit)
            self._remaining_bytes -= unit.size_bytes

    def pause(self) -> bool:
        """Stop keeping units in this pass. Returns whether any were kept."""
        had_some = bool(self._units)
        self._let_go()
        self._paused = True
        return had_some

    def clear(self) -> None:
        """Drop all kept units: a pass begins or ends."""
        self._let_go()
        self._paused = False

    def _let_go(self) -> None:
        self._units.clear()
        self._block = None


def _parts(flat: Flat) -> torch.Tensor:
    return flat.tensor.view(-1, flat.layout.shard_numel)
