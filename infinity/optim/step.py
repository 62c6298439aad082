"""The step's pipeline: one submission per unit, run to the end by the executor without Python.

    opt.step()                    native threads
    --------------------------    ------------------------------------------------------------
    check, take the gradients     .
    submit unit 0, 1, 2 ...  -->  read chunk | update | copy hi to the gathered unit | write chunk
    return                        (chunks of all units in flight up to the pools' size)
    next forward                  opens the gate of each unit with its buffers as targets

Units are submitted in the order in which the next forward wants them. A gradient's memory belongs to the update until
its ticket is done: whoever wants to change it earlier waits (`GradSlot.before_mutation`).

A fault in the background is sticky: it is raised by the next call that meets the engine. Which parameters it left
half written the executor knows per chunk, and refuses to read them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity.aio import Executor, Priority, Ticket
from infinity.aio.plan import HYPER, JOB, SEG, Format, GradDtype, JobKind
from infinity.comm.collectives import Comm
from infinity.errors import AioError, NonFiniteGradient, StateInvalid
from infinity.params.gradients import GradientMemory
from infinity.params.residency import UnitResidency
from infinity.params.rest import Rest
from infinity.params.schedule import Phase
from infinity.params.unit import Flat, Param, Unit

_GRAD_DTYPES = {torch.bfloat16: GradDtype.BF16, torch.float32: GradDtype.FP32}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step does to one parameter: the scalars of its update as one HYPER record."""

    param: Param
    hyper: npt.NDArray[Any]  # a HYPER record, shape ()


@dataclasses.dataclass(frozen=True)
class _FlatPlan:
    """The jobs and segments of a flat if every parameter has a gradient; a step filters them.

    `owner` is for each segment the position of its parameter in flat.params; `chunk` the position of its chunk.
    """

    flat: Flat
    jobs: npt.NDArray[Any]
    segs: npt.NDArray[Any]
    owner: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]


class Pipeline:
    """Submits updates and waits for them. One thread uses it at a time."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        rest: Rest,
        executor: Executor,
        gradients: GradientMemory,
        residency: UnitResidency,
        comm: Comm,
    ) -> None:
        self._units = list(units)
        self._rest = rest
        self._executor = executor
        self._gradients = gradients
        self._residency = residency
        self._comm = comm
        self._plans: dict[Flat, _FlatPlan] = {}
        self._pending: dict[Unit, Ticket] = {}
        self._fault: Exception | None = None
        self.update_wait_s = 0.0
        self.steps = 0
        self.on_step: Callable[[int], object] = lambda _steps: None  # told the steps before each one

    def plan(self, flats: Sequence[Flat]) -> None:
        """Prepare the jobs of every flat; call it again when formats or places changed."""
        self._plans = {flat: self._plan_flat(flat) for flat in flats}

    # -- faults and waiting ------------------------------------------------------------------------------------------------

    def raise_fault(self) -> None:
        """Raise what an update met in the background, now and ever after."""
        if self._fault is None:
            for ticket in self._pending.values():
                if ticket.failed:
                    self._record_fault(ticket)
                    break
        if self._fault is not None:
            raise self._fault

    def _record_fault(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except AioError as error:
            fault = StateInvalid(
                f"an optimizer update failed in the background ({error}); the step is incomplete and "
                "the states cannot be trusted; close this engine and start again from the last export"
            )
            fault.__cause__ = error
            self._fault = fault

    def wait(self) -> None:
        """Block until no update is pending. Raises the sticky fault."""
        start = time.perf_counter()
        for ticket in self._pending.values():
            try:
                ticket.wait()
            except AioError:
                self._record_fault(ticket)
        self.update_wait_s += time.perf_counter() - start
        if self._pending:
            self._pending.clear()
            self._residency.updates_ended()
        self.raise_fault()

    # -- the step ------------------------------------------------------------------------------------------------------------

    def check_finite(self, params: Sequence[Param]) -> list[Param]:
        """The parameters whose gradient is not finite on some rank. Collective: all ranks pass the same parameters."""
        bad = self._comm.any_of([param.grad is not None and not param.grad.finite() for param in params])
        return [param for param, is_bad in zip(params, bad, strict=True) if is_bad]

    def check_idle(self, params: Sequence[Param]) -> None:
        """Raise RuntimeError if a forward, a backward or `gather()` uses the unit of one of these parameters."""
        busy = next((param.unit for param in params if param.unit.refs), None)
        if busy is not None:
            raise RuntimeError(
                f"opt.step() while unit {busy.name} is in use: call it after forward and backward have ended, and "
                "outside handle.gather()"
            )

    def submit(self, work: Sequence[Work]) -> None:
        """Start the update of these parameters. Their gradients' logs are in the hyper records already. Does not block
        on I/O; waits for the previous step's updates.

        Raises: RuntimeError while a forward or backward is running; the sticky fault of an earlier step.
        """
        self.wait()
        by_unit: dict[Unit, dict[Param, Work]] = {}
        for item in work:
            by_unit.setdefault(item.param.unit, {})[item.param] = item
        self.check_idle([item.param for item in work])
        self.on_step(self.steps)
        for unit in self._next_order(by_unit):
            self._submit_unit(unit, by_unit[unit])
        self.steps += 1
        self._residency.prefetch_ahead()

    def _next_order(self, by_unit: dict[Unit, dict[Param, Work]]) -> list[Unit]:
        """Units in the order of the next training forward, then those that it does not use."""
        place: dict[int, int] = {}
        for index in self._residency.schedule.order(Phase.TRAIN):
            place.setdefault(index, len(place))
        return sorted(by_unit, key=lambda unit: (place.get(unit.index, len(self._units)), unit.index))

    def _submit_unit(self, unit: Unit, work: dict[Param, Work]) -> None:
        jobs: list[npt.NDArray[Any]] = []
        segs: list[npt.NDArray[Any]] = []
        seg_count = 0
        hypers: list[npt.NDArray[Any]] = []
        for base, flat in enumerate(unit.flats):
            plan = self._plans[flat]
            rows = np.full(len(flat.params), -1, dtype=np.int64)
            for param in flat.params:
                if param in work:
                    rows[param.slot_index] = len(hypers)
                    hypers.append(work[param].hyper)
            job, seg = _filter(plan, rows, seg_count)
            job["base"] = base
            jobs.append(job)
            segs.append(seg)
            seg_count += len(seg)
        gate = self._executor.gate()
        ticket = self._executor.submit(
            np.concatenate(jobs),
            np.concatenate(segs),
            np.stack(hypers) if hypers else np.zeros(0, HYPER),
            priority=Priority.WRITEBACK,
            gate=gate,
        )
        self._pending[unit] = ticket
        for param in work:
            assert param.grad is not None
            param.grad.before_mutation = _waits_for(ticket)
        self._residency.hand_over(unit, ticket, gate)

    def _plan_flat(self, flat: Flat) -> _FlatPlan:
        rest = self._rest[flat]
        spans = flat.layout.chunks
        jobs = np.zeros(len(spans), dtype=JOB)
        jobs["chunk"] = rest.ids
        jobs["mask"] = 1
        jobs["ptr"][:, 0] = rest.starts.astype(np.uint64) * np.uint64(flat.layout.itemsize)
        shard = self._gradients.shard(flat)
        if rest.format is Format.RAW or shard is None:
            empty = np.zeros(0, np.int64)
            return _FlatPlan(flat, jobs, np.zeros(0, SEG), empty, empty)
        rows = []
        for position in range(len(flat.params)):
            start, _, numel = flat.layout.shard_range(position, self._comm.rank)
            for index, span in enumerate(spans):
                low, high = max(start, span.start), min(start + numel, span.start + span.numel)
                if low < high:
                    address = shard.data_ptr() + low * shard.element_size()
                    rows.append((index, position, low - span.start, high - low, address))
        rows.sort(key=lambda row: (row[0], row[2]))
        segs = np.zeros(len(rows), dtype=SEG)
        segs["start"] = [row[2] for row in rows]
        segs["numel"] = [row[3] for row in rows]
        segs["grad"] = np.array([row[4] for row in rows], dtype=np.uint64)
        segs["grad_dtype"] = _GRAD_DTYPES[shard.dtype]
        owner = np.array([row[1] for row in rows], dtype=np.int64)
        chunk = np.array([row[0] for row in rows], dtype=np.int64)
        return _FlatPlan(flat, jobs, segs, owner, chunk)


def _filter(
    plan: _FlatPlan, rows: npt.NDArray[np.int64], seg_first: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The plan's jobs and segments for the parameters that have a row in the hyper array (-1: no gradient).

    A chunk without segments is only fetched, so that a unit's hand-over is complete; if its gate escapes it is skipped.
    """
    jobs = plan.jobs.copy()
    taken = rows[plan.owner] >= 0 if len(plan.owner) else np.zeros(0, bool)
    segs = plan.segs[taken]
    if len(segs):
        segs["hyper"] = rows[plan.owner[taken]]
    counts = (
        np.bincount(plan.chunk[taken], minlength=len(jobs)) if len(segs) else np.zeros(len(jobs), np.int64)
    )
    jobs["seg_count"] = counts
    jobs["seg_first"] = seg_first + np.cumsum(counts) - counts
    jobs["kind"] = np.where(counts > 0, int(JobKind.UPDATE), int(JobKind.FETCH))
    return jobs, segs


def _waits_for(ticket: Ticket) -> Callable[[], None]:
    """A function that blocks until the ticket is done; its fault is raised elsewhere, once, as the sticky one."""

    def wait() -> None:
        if not ticket.done:
            try:
                ticket.wait()
            except AioError:
                return  # sticky: Pipeline.raise_fault finds the failed ticket

    return wait


def refuse_nonfinite(bad: Sequence[Param], mode: str) -> bool:
    """Apply `on_nonfinite` to the parameters found by `check_finite`. Returns whether the step goes on.

    Raises: NonFiniteGradient when mode is "raise".
    """
    if not bad or mode == "ignore":
        return True
    if mode == "skip":
        return False
    names = ", ".join(param.name for param in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    raise NonFiniteGradient(
        f"gradients of {names} are not finite; no state was touched. Policy(on_nonfinite='skip') skips such steps, "
        "'ignore' applies them"
    )
