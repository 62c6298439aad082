"""What is gathered: units that have memory and are filled, or being filled; what is fetched ahead, and what goes for it.

    demand(u)  -> start reading u if nobody has -> start reading what the schedule wants next -> wait for u

A released unit stays gathered until its buffer is wanted, so the units at a turning point (last in forward, first in
backward; last in backward, first in the next forward) are not read twice. When room is wanted, the idle unit whose
next use is farthest goes; a prefetch never evicts a unit that is needed sooner than what it brings.

On several ranks all of this follows the program alone, never what has arrived by when: what is gathered, and given up, is
so on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from infinity._src._torch_compat import profiled
from infinity._src.distributed.collectives import Comm
from infinity._src.grads.reduce import GradReducer
from infinity._src.memory.constants import AHEAD
from infinity._src.memory.device import Device
from infinity._src.memory.heap import Heap
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.pass_tracker import Passes
from infinity._src.params.pending_unshards import PendingUnshards
from infinity._src.params.prefetch_schedule import AHEAD_MAX, NEVER, Schedule
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity._src.params.update_hooks import Access, UpdateHooks
from infinity._src.telemetry import Timeline
from infinity.aio import Gate, Priority, Ticket
from infinity.errors import AioError


@dataclasses.dataclass
class PendingUpdate:
    """An update of a unit that was submitted and whose gate may still be closed."""

    ticket: Ticket
    gate: Gate
    opened: bool = False


class ParamVersion(NamedTuple):
    """Which values of a unit are gathered. lags: those before an update that is delayed; coarse: as they travel, in int8 groups.
    Neither: those that rest."""

    lags: bool = False
    coarse: bool = False


AT_REST = ParamVersion()
"""What `gather()`, reads and exports show."""


class Gathering:
    """The gathered units of one model. One thread uses it at a time.

    gathered_bytes_max bounds what is gathered, prefetches included, as far as units in use allow: room for AHEAD + 1
    of the largest units. keep: units are never evicted. coarse: forward and backward compute with weights as they travel, in int8
    groups.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        rest: StateStore,
        comm: Comm,
        keep: bool,
        timeline: Timeline,
        device: Device,
        fills: PendingUnshards,
        coarse: bool,
        gradients: GradReducer,
        mode: UpdateHooks,
        access: Access,
        heap: Heap,
    ) -> None:
        self.units = units
        self.schedule = Schedule()
        self.passes = Passes()
        self.wait_s = 0.0  # for units
        self.demands = self.demand_reads = self.gathered_bytes_peak = 0
        self.device = device
        self._rest = rest
        self._comm = comm
        self._keep = keep
        self._timeline = timeline
        self._fills = fills
        self._coarse = coarse
        self._held: set[Unit] = set()  # gathered or filling
        self._held_bytes = 0
        self.gathered_bytes_max = (AHEAD + 1) * max((unit.size_bytes for unit in units), default=0)
        self._updates: dict[Unit, PendingUpdate] = {}
        self._current: Unit | None = None  # being demanded: nobody holds it yet, and it must not go
        self.shadow = mode.delayed_params
        self._views: dict[Unit, ParamVersion] = {}  # of what is held
        self.gradients = gradients
        self._mode = mode
        self._access = access
        self._heap = heap

    def demand(self, unit: Unit) -> None:
        """Block until the unit is gathered with its current values."""
        self._access.before_read(unit)
        self.demands += 1
        self._current = unit
        try:
            with profiled(f"infinity: gather {unit.name}"):
                self._demand(unit)
        finally:
            self._current = None

    def _demand(self, unit: Unit) -> None:
        self.schedule.demand(unit.index)
        view = self._wanted(unit)
        self._refill(unit, view)
        ready = unit.gathered and unit not in self._fills
        if not ready and unit not in self._held:
            self.demand_reads += 1
            self._start_fill(unit, Priority.DEMAND, view)
        elif not ready and unit not in self._fills:  # an interrupt broke its fill off
            self._fill(unit, Priority.DEMAND, view)
        self.prefetch_ahead()
        if self.passes.in_backward:
            self.gradients.prefetch([unit, *(self.units[index] for index in itertools.islice(self.schedule.upcoming(), 1))])
        if not ready:
            self._finish_fill(unit)

    def mixes(self, unit: Unit, *, window: bool) -> bool:
        """Whether a training pass would meet the values that `gather()` shows of the unit; with `window`, the reverse."""
        if window:
            return self._views.get(unit, AT_REST) != AT_REST
        return self.passes.trains and self._views.get(unit, AT_REST) != self._trained(unit)

    def shows_newest(self, unit: Unit) -> bool:
        """Whether the unit is gathered from rest although the shadow computes."""
        return unit in self._views and self._views[unit].lags != self._trained(unit).lags

    def _trained(self, unit: Unit) -> ParamVersion:
        """What training computes with."""
        return ParamVersion(self.shadow is not None and self.shadow.computes(unit), self._coarse)

    def _wanted(self, unit: Unit) -> ParamVersion:
        """What the pass that runs computes with, or `gather()` shows."""
        if self.passes.trains:
            return self._trained(unit)
        return ParamVersion(False, self._coarse and self.passes.evaluates)

    def idle(self, unit: Unit) -> None:
        """The unit may be evicted; it stays until its room is wanted."""
        self._mode.unit_released(unit)
        if not self._keep and self._held_bytes > self.gathered_bytes_max:
            self._make_room(0, NEVER)

    def _start_fill(self, unit: Unit, priority: Priority, view: ParamVersion) -> None:
        """Allocate the unit's buffers and start filling them. Does not block."""
        self._make_room(unit.size_bytes, NEVER)
        gathered.allocate(unit, self.device)
        self._held.add(unit)
        self._held_bytes += unit.size_bytes
        self.gathered_bytes_peak = max(self.gathered_bytes_peak, self._held_bytes)
        self._fill(unit, priority, view)

    def _fill(self, unit: Unit, priority: Priority, view: ParamVersion) -> None:
        """Start filling the unit's buffers, which are allocated."""
        self._views[unit] = view
        shadow = self.shadow if view.lags else None
        update = self._updates.get(unit)
        if update is not None and not update.opened:
            update.opened = True
            self.device.behind()
            if update.gate.open(self.targets(unit)):
                self._begin(unit, [update.ticket], view)
                return
        if view.coarse == self._coarse and self._fills.has_kept(unit, (unit.generation, view)):
            self._fills.begin_kept(unit)
            return
        tickets = [
            self._rest.fetch(flat, 0, self._target(flat), priority=priority, there=True)
            for flat in unit.flats
            if shadow is None or flat not in shadow  # those are copied when somebody waits for them
        ]
        self._begin(unit, tickets, view, late=functools.partial(shadow.copy_to, unit, self._comm.rank) if shadow else None)

    def _begin(
        self, unit: Unit, tickets: Sequence[Ticket], view: ParamVersion, *, late: Callable[[], None] | None = None
    ) -> None:
        """The tickets fill this rank's shards with what `view` says."""
        self._views[unit] = view
        # Only what forward computes with is kept for the next one.
        age = (unit.generation, view) if view.coarse == self._coarse else None
        self._fills.begin(unit, tickets, age, coarse=view.coarse, late=late)

    def _refill(self, unit: Unit, view: ParamVersion) -> None:
        """Gather the unit anew if what is gathered is not what is wanted now, unless somebody uses it."""
        if unit not in self._held or unit.refs or self._views[unit] == view:
            return
        self._settle(unit)
        gathered.invalidate(unit)
        self._fill(unit, Priority.DEMAND, view)

    def _target(self, flat: Flat) -> int:
        """Where this rank's shard lies in the gathered flat."""
        return flat.tensor.data_ptr() + self._comm.rank * flat.layout.shard_numel * flat.layout.itemsize

    def _finish_fill(self, unit: Unit) -> None:
        """Wait until the unit's buffers are filled. After a fault the unit is evicted."""
        fill = self._fills.finish(unit)
        start_ns = time.monotonic_ns()
        try:
            fill.wait()
        except BaseException as error:
            self._fills.put_back(unit, fill)
            self._forget(unit)
            if isinstance(error, AioError):
                self._access.before_read(unit)  # if it was an update that failed, this says so and what helps
                error.args = (f"{unit.name} cannot be gathered: {error}",)
            raise
        end_ns = time.monotonic_ns()
        self.wait_s += (end_ns - start_ns) / 1e9
        if end_ns - start_ns > 20_000:
            self._timeline.add("wait", unit.name, start_ns, end_ns)
        gathered.mark_filled(unit)

    def _forget(self, unit: Unit) -> None:
        interrupt = self._fills.abandon(unit)
        self._held.discard(unit)
        self._views.pop(unit, None)
        self._held_bytes -= unit.size_bytes
        if unit in self._fills.stuck:
            gathered.invalidate(unit)
        else:
            gathered.evict(unit)
        self._heap.freed()
        if interrupt is not None:
            raise interrupt

    def prefetch_ahead(self) -> None:
        """Start reading the units that the schedule wants next, as many as there is room for (in bytes). Does not block."""
        if self._keep and len(self._held) == len(self.units):
            return
        for index in itertools.islice(self.schedule.upcoming(), AHEAD_MAX):
            unit = self.units[index]
            if unit in self._held:
                continue
            if not self._make_room(unit.size_bytes, self.schedule.distance(index)):
                return
            view = ParamVersion(False, self._coarse) if self.passes.evaluates else self._trained(unit)
            self._start_fill(unit, Priority.PREFETCH, view)

    def _make_room(self, size_bytes: int, distance: int) -> bool:
        """Evict idle units, farthest next use first, until `size_bytes` more fit; only such as are needed later than
        `distance`. Returns whether they fit."""
        if self._keep:
            return True
        while self._held_bytes + size_bytes > self.gathered_bytes_max:
            idle = filter(self._may_evict, self._held)
            far = max(idle, key=lambda unit: (self.schedule.distance(unit.index), unit.index), default=None)
            if far is None or (distance is not NEVER and self.schedule.distance(far.index) <= distance):
                return False
            self._forget(far)
        return True

    def _may_evict(self, unit: Unit) -> bool:
        """Idle, and nothing is on its way into its buffers."""
        if unit.refs or unit is self._current:
            return False
        if self._comm.world > 1:
            return True  # what is filled already is a matter of timing, and all ranks must evict the same
        return not self._fills.under_way(unit)

    def discard(self, unit: Unit) -> None:
        """The gathered values were overwritten and nobody uses them: read them again when they are wanted."""
        if unit in self._held:
            self._forget(unit)

    def targets(self, unit: Unit) -> list[int]:
        """Where this rank's shards lie in the unit's flats, which are gathered."""
        return [self._target(flat) for flat in unit.flats]

    def shard_of(self, flat: Flat) -> torch.Tensor:
        """This rank's shard [shard_numel] of a flat, which is gathered."""
        start = self._comm.rank * flat.layout.shard_numel
        return flat.tensor[start : start + flat.layout.shard_numel]

    def renew(self, unit: Unit) -> None:
        """The unit's values have changed: if it is gathered, start filling its buffers again."""
        if unit in self._held:
            self._abandon(unit)
            self._fill(unit, Priority.PREFETCH, self._trained(unit))

    def _changed(self, unit: Unit) -> None:
        unit.generation += 1
        self._fills.changed(unit)

    def _settle(self, unit: Unit) -> None:
        """Finish a fill that nobody has waited for, or make it if its values were taken back."""
        if unit in self._held and not unit.gathered and unit not in self._fills:
            self._fill(unit, Priority.DEMAND, self._views[unit])
        if unit in self._fills:
            self._finish_fill(unit)

    def _abandon(self, unit: Unit) -> None:
        """What is gathered of the unit, or on its way, nobody wants any more. The memory stays allocated."""
        gathered.invalidate(unit)
        interrupt = self._fills.abandon(unit)
        if interrupt is not None:
            raise interrupt
