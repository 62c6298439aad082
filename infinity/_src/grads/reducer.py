"""Gradients on their way from autograd to where they wait: into their slots, or, split over ranks, reduced first.

    one rank        drain(p, grad) -> take(p, grad)
    several ranks   drain(p, grad) -> its unit is done -> reduction begins -> that of units before is there -> take(p, its part)
    local           drain(p, grad) -> whole sums of this rank, which the first backward outside of no_sync reduces

`take` puts the gradient into its slot; update="backward" takes it straight into an update instead.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from infinity._src.distributed.collectives import Comm
from infinity._src.grads.buffers import GradBuffers
from infinity._src.grads.proxy import GradRegistry, GradSlot
from infinity._src.grads.reduce_scatter import PendingReduce, ReduceScatter
from infinity._src.grads.unreduced import UnreducedGrads
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.update_hooks import UpdateHooks

REDUCING_UNITS = 2
"""Gradients of so many units may be under way between the ranks; then backward waits."""


class GradReducer:
    """The gradients of one model. One thread uses it at a time.

    reducer: on several ranks. local: where micro-batches inside of `no_sync` add up, if not in the shards.
    mode: gets each complete gradient (this rank's part of it), and is told when all that came of a unit was taken.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        gradients: GradBuffers,
        book: GradRegistry,
        comm: Comm,
        mode: UpdateHooks,
        reducer: ReduceScatter | None = None,
        local: UnreducedGrads | None = None,
    ) -> None:
        self._units = units
        self._reducer = reducer
        self._local = local
        self._accumulates = False  # inside no_sync, with `local`
        self._under_way: deque[PendingReduce] = deque()
        self._mode = mode
        self._gradients = gradients
        self._book = book
        self._comm = comm
        self._fresh: dict[Unit, dict[Param, torch.Tensor]] = {}  # several ranks: gradients not yet reduced
        self._fresh_bytes = 0
        self.wait_s = 0.0  # for reductions
        self.fresh_bytes_peak = 0  # the most that autograd's gradients took here at once

    def dtype(self, flat: Flat) -> torch.dtype:
        """The dtype in which gradients of this flat wait."""
        return self._gradients.dtype(flat)

    def slot(self, param: Param) -> GradSlot:
        """The gradient slot of a parameter; made when it is first wanted."""
        if param.grad is None:
            param.grad = self._book.add(
                param.name,
                param.shape,
                self._gradients.of(param),
                param.flat.tensor.device,
                on_zero=functools.partial(self._local.zero, param) if self._local is not None else None,
            )
            self._gradients.take_in(param)
            if param.grad.stand_in.dtype is not param.dtype:
                param.at_rest.grad_dtype = param.grad.stand_in.dtype  # what torch lets `.grad` be
        return param.grad

    def allocate(self) -> None:
        """Make room for what the gradients of all that learns need on their way, if there is none yet. Raises: MemoryError."""
        flats = [flat for unit in self._units for flat in unit.flats if flat.learns]
        if self._reducer is not None:
            self._reducer.allocate(flats)
        if self._local is not None:
            self._local.allocate(flats)

    def drain(self, param: Param, grad: torch.Tensor) -> None:
        """Take one fresh gradient [param.shape]; on several ranks it waits until its unit is reduced."""
        if self._comm.world == 1:
            self.fresh_bytes_peak = max(self.fresh_bytes_peak, grad.numel() * grad.element_size())
            self._mode.grad_ready(param, grad)
            return
        fresh = self._fresh.setdefault(param.unit, {})
        if param in fresh:  # several drains in one backward
            before = fresh.pop(param)
            self._fresh_bytes -= before.numel() * before.element_size()
            grad = before.to(self.dtype(param.flat)) + grad
        fresh[param] = grad
        self._fresh_bytes += grad.numel() * grad.element_size()
        self.fresh_bytes_peak = max(self.fresh_bytes_peak, self._fresh_bytes)

    def assign(self, param: Param, grad: torch.Tensor) -> None:
        """Make `grad` [param.shape] the whole gradient. Raises: RuntimeError on several ranks, which must do so together."""
        if self._comm.world > 1:
            raise RuntimeError(
                f"{param.name}.grad = tensor works on one rank only; inf.handle(model).set_full_grad(parameter, tensor) on all"
            )
        self.replace(param, grad)

    def replace(self, param: Param, part: torch.Tensor) -> None:
        """Make `part` (this rank's) the whole gradient; on several ranks all do. Raises: what the mode's `before_assign` raises; then
        the gradient is as it was."""
        self._mode.before_assign(param)
        param.at_rest.grad = None
        self.accumulate(param, part)
        self.slot(param).arrive()  # it is the loop's tensor, which may change it from here on

    def unit_done(self, unit: Unit) -> None:
        """A Use of the unit has ended. Several ranks: its gradients are reduced, each rank keeping its shard of the mean. Blocks
        while too many units are under way."""
        if self._comm.world == 1:
            self._gradients.unit_done(unit)
        elif self._accumulates:
            self._add_up(unit)
        elif any(flat.learns for flat in unit.flats):
            # Also without a gradient here: another rank may have one, and all must take part.
            self._reduce(unit)

    @property
    def waits_local(self) -> bool:
        """Whether gradients that come now are reduced later."""
        return self._accumulates

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients add up in this rank's whole sums, if the policy keeps such."""
        if self._local is not None:
            self.allocate()  # what was thawed, and no optimizer holds
            # Slots in one order on all ranks, whichever of their parameters each uses.
            for unit in self._units:
                for param in unit.params:
                    if param.flat.learns:
                        self.slot(param)
        before, self._accumulates = self._accumulates, self._local is not None
        try:
            yield
        finally:
            self._accumulates = before

    def check_reduced(self) -> None:
        """Raise RuntimeError while whole sums of this rank wait for a reduction."""
        if self._local is not None:
            for unit in self._units:
                self._forget_cleared(unit)
            waiting = next((param for unit in self._units for param in unit.params if self._local.has(param)), None)
            if waiting is not None:
                raise RuntimeError(
                    f"the gradient of {waiting.name} was added up inside handle.no_sync() and is not reduced over the ranks yet: "
                    "run the last micro-batch of a step outside of no_sync()"
                )

    def ahead(self, units: Sequence[Unit]) -> None:
        """Backward comes to these units: start reading back gradients that spilled. Does not block."""
        for unit in units:
            self._gradients.ahead(unit)

    def settle(self, unit: Unit | None = None) -> None:
        """Return when gradients that spill (of a unit; None: of all) are where updates read them. Raises: AioError."""
        self._gradients.settle(unit)

    def free_done(self) -> None:
        """A forward begins: free gradients on the device that have left it. Never blocks."""
        if self._gradients.grad_offload is not None:
            self._gradients.grad_offload.free_done()

    def backward_end(self) -> None:
        """Reduce what no Use claimed, in the order of units, and take all that is under way. Blocks."""
        if self._comm.world > 1:
            if self._accumulates:
                for unit in list(self._fresh):
                    self._add_up(unit)
            else:
                waiting = self._comm.all_reduce_any([self._waits(unit) for unit in self._units])
                for unit, has_some in zip(self._units, waiting, strict=True):
                    if has_some:
                        self._reduce(unit)
            self._take_all(0)
        self._gradients.backward_end()

    def reset(self) -> None:
        """Forget what an interrupted backward left. Blocks until nothing of it is under way."""
        self._fresh.clear()
        self._fresh_bytes = 0
        while self._under_way:
            self._under_way.popleft().op.finished()
        self._gradients.reset()

    def restored(self) -> None:
        """The states are those of another step: nothing of the gradients before counts."""
        if self._reducer is not None:
            self._reducer.forget()
        if self._local is not None:
            self._local.forget()

    def accumulate(self, param: Param, grad: torch.Tensor) -> None:
        """Copy or add a gradient (this rank's part) into its slot, and show its stand-in in `p.grad`."""
        slot = self.slot(param)
        slot.reconcile(param.at_rest.grad)
        slot.accumulate(grad)
        param.at_rest.grad = slot.stand_in

    def _waits(self, unit: Unit) -> bool:
        if self._local is not None:
            self._forget_cleared(unit)
        return bool(self._fresh.get(unit)) or (self._local is not None and self._local.any(unit))

    def _add_up(self, unit: Unit) -> None:
        """Add the unit's fresh gradients to this rank's whole sums."""
        assert self._local is not None
        fresh = self._fresh.pop(unit, {})
        self._fresh_bytes -= sizes(fresh)
        for param, grad in fresh.items():
            slot = self.slot(param)
            if slot.expect(param.at_rest.grad):
                self._local.drop(param)
            self._local.add(param, grad)
            if param.at_rest.grad is None:
                param.at_rest.grad = slot.stand_in

    def _forget_cleared(self, unit: Unit) -> None:
        """Drop sums whose gradients the loop has cleared."""
        assert self._local is not None
        for param in unit.params if self._local.any(unit) else ():
            slot = param.grad
            if param.at_rest.grad is None or slot is None or (self._local.has(param) and not slot.unreduced):
                self._local.drop(param)

    def _reduce(self, unit: Unit) -> None:
        assert self._reducer is not None
        terms: dict[Param, list[torch.Tensor]] = {}
        if self._local is not None and self._local.any(unit):
            self._forget_cleared(unit)
            terms = self._local.take(unit)
            for param in terms:
                assert param.grad is not None
                param.grad.unreduced = False
        fresh = self._fresh.pop(unit, {})
        for param, grad in fresh.items():
            terms.setdefault(param, []).append(grad)
        self._under_way.append(self._reducer.start(unit, terms, size_bytes=sizes(fresh)))
        self._take_all(REDUCING_UNITS)

    def _take_all(self, but: int) -> None:
        """Take what was reduced, in order, until no more than `but` units are under way. Blocks."""
        while len(self._under_way) > but:
            reduction = self._under_way.popleft()
            self._fresh_bytes -= reduction.size_bytes
            start = time.perf_counter()
            shards = reduction.shards(self._comm.rank)
            self.wait_s += time.perf_counter() - start
            for param, part in shards:
                if param.grad is not None and param.grad.unreduced:
                    param.grad.unreduced = False
                self._mode.grad_ready(param, part)
            self._gradients.unit_done(reduction.unit)
            if reduction.unit.refs == 0:  # it went idle before this: the mode is told again
                self._mode.unit_released(reduction.unit)


def sizes(gradients: Mapping[Param, torch.Tensor]) -> int:
    """Bytes of these gradients."""
    return sum(grad.numel() * grad.element_size() for grad in gradients.values())
