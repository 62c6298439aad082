"""Gradients on their way from autograd to where they wait: into their slots, or, split over ranks, reduced first.

    one rank        drain(p, grad) -> take(p, grad)
    several ranks   drain(p, grad) -> waits until its unit is done -> mean over the ranks -> take(p, this rank's part)

`take` puts the gradient into its slot; update="backward" takes it straight into an update instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.comm.collectives import Comm
from infinity.params.gradients import GradientMemory
from infinity.params.stand_in import GradBook, GradSlot
from infinity.params.unit import Flat, Param, Unit


class Drain:
    """The gradients of one model. One thread uses it at a time.

    take: what is done with a complete gradient (this rank's part of it); `accumulate` by default.
    """

    def __init__(self, units: Sequence[Unit], *, gradients: GradientMemory, book: GradBook, comm: Comm) -> None:
        self._units = units
        self._gradients = gradients
        self._book = book
        self._comm = comm
        self._fresh: dict[Unit, dict[Param, torch.Tensor]] = {}  # several ranks: gradients not yet reduced
        self._fresh_bytes = 0
        self.fresh_bytes_peak = 0  # the most that autograd's gradients took here at once
        self.take: Callable[[Param, torch.Tensor], None] = self.accumulate
        self.before_assign: Callable[[Param], None] = lambda _param: None  # raises where it would come too late

    def dtype(self, flat: Flat) -> torch.dtype:
        """The dtype in which gradients of this flat wait."""
        return self._gradients.dtype(flat)

    def slot(self, param: Param) -> GradSlot:
        """The gradient slot of a parameter; made when it is first wanted."""
        if param.grad is None:
            param.grad = self._book.add(
                param.name, param.shape, self._gradients.of(param), param.flat.tensor.device
            )
            self._gradients.take_in(param)
            if param.grad.stand_in.dtype is not param.dtype:
                param.at_rest.grad_dtype = param.grad.stand_in.dtype  # what torch lets `.grad` be
        return param.grad

    def drain(self, param: Param, grad: torch.Tensor) -> None:
        """Take one fresh gradient [param.shape]; on several ranks it waits until its unit is reduced."""
        size_bytes = grad.numel() * grad.element_size()
        if self._comm.world == 1:
            self.fresh_bytes_peak = max(self.fresh_bytes_peak, size_bytes)
            self.take(param, grad)
            return
        fresh = self._fresh.setdefault(param.unit, {})
        if param not in fresh:
            self._fresh_bytes += size_bytes
            self.fresh_bytes_peak = max(self.fresh_bytes_peak, self._fresh_bytes)
        fresh[param] = fresh[param] + grad if param in fresh else grad

    def assign(self, param: Param, grad: torch.Tensor) -> None:
        """Make `grad` [param.shape] the whole gradient. Raises: RuntimeError on several ranks, which must do so together."""
        if self._comm.world > 1:
            raise RuntimeError(
                f"{param.name}.grad = tensor works on one rank only; inf.handle(model).set_full_grad(parameter, tensor) on all"
            )
        self.replace(param, grad)

    def replace(self, param: Param, part: torch.Tensor) -> None:
        """Make `part` (this rank's) the whole gradient; on several ranks all do. Raises: what `before_assign` raises, and then
        the gradient is as it was."""
        self.before_assign(param)
        param.at_rest.grad = None
        self.accumulate(param, part)
        self.slot(param).arrive()  # it is the loop's tensor, which may change it from here on

    def unit_done(self, unit: Unit) -> None:
        """Several ranks: mean of the unit's gradients over the ranks, each rank keeping its shard."""
        # Also without a gradient here: another rank may have one, and all must take part.
        if self._comm.world > 1 and any(flat.trainable for flat in unit.flats):
            self._reduce(unit)
        self._gradients.unit_done(unit)

    def ahead(self, units: Sequence[Unit]) -> None:
        """Backward comes to these units: start reading back gradients that spilled. Does not block."""
        for unit in units:
            self._gradients.ahead(unit)

    def settle(self, unit: Unit | None = None) -> None:
        """Return when gradients that spill (of a unit; None: of all) are where updates read them. Raises: AioError."""
        self._gradients.settle(unit)

    def let_go(self) -> None:
        """A forward begins: free gradients on the device that have left it. Never blocks."""
        if self._gradients.leaving is not None:
            self._gradients.leaving.let_go()

    def backward_end(self) -> None:
        """Reduce what no Use claimed, in the order of units."""
        if self._comm.world > 1:
            waiting = self._comm.any_of([bool(self._fresh.get(unit)) for unit in self._units])
            for unit, has_some in zip(self._units, waiting, strict=True):
                if has_some:
                    self._reduce(unit)
        self._gradients.backward_end()

    def reset(self) -> None:
        """Forget what an interrupted backward left."""
        self._fresh.clear()
        self._fresh_bytes = 0
        self._gradients.reset()

    def accumulate(self, param: Param, grad: torch.Tensor) -> None:
        """Copy or add a gradient (this rank's part) into its slot, and show its stand-in in `p.grad`."""
        slot = self.slot(param)
        slot.reconcile(param.at_rest.grad)
        slot.accumulate(grad)
        param.at_rest.grad = slot.stand_in

    def _reduce(self, unit: Unit) -> None:
        fresh = self._fresh.pop(unit, {})
        self._fresh_bytes -= sum(grad.numel() * grad.element_size() for grad in fresh.values())
        for flat in unit.flats:
            present = self._comm.any_of([param in fresh for param in flat.params])
            if not any(present):
                continue
            dtype = self._gradients.dtype(flat)
            whole = torch.zeros(flat.layout.numel, dtype=dtype)
            for param in flat.params:
                if param in fresh:
                    whole[param.offset : param.offset + param.numel].copy_(fresh[param].reshape(-1))
            shard = self._comm.reduce_mean(whole, flat.layout.shard_numel)
            for param, has_grad in zip(flat.params, present, strict=True):
                if has_grad:
                    start, _, numel = flat.layout.shard_range(param.slot_index, self._comm.rank)
                    self.take(param, shard[start : start + numel])
