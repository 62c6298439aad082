"""Gradients on their way from autograd to where they wait: into their slots, or, split over ranks, reduced first.

    one rank        drain(p, grad) -> take(p, grad)
    several ranks   drain(p, grad) -> its unit is done -> reduction begins -> that of units before is there -> take(p, its part)
    local           drain(p, grad) -> whole sums of this rank, which the first backward outside of no_sync reduces

`take` puts the gradient into its slot; update="backward" takes it straight into an update instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import xxhash

from infinity._src.distributed.collectives import Comm
from infinity._src.distributed.exchange import Exchange, Parts
from infinity._src.distributed.lanes import Op
from infinity._src.grads.buffers import GradBuffers, UnreducedGrads
from infinity._src.grads.slot import GradRegistry, GradSlot
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.update_hooks import UpdateHooks

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Wholes = Mapping[Param, Sequence[torch.Tensor]]
"""For each parameter what adds up to its gradient on this rank: [shape] or [numel] tensors."""


@dataclasses.dataclass
class PendingReduce:
    """One unit's gradients under way. Its results are valid once `op` is done."""

    unit: Unit
    op: Op
    flats: list[Flat]
    means: list[torch.Tensor]  # [shard] each, in the dtype in which gradients wait
    size_bytes: int  # of fresh gradients that it holds
    held: dict[Param, Sequence[torch.Tensor]]  # until the stream that computes is behind the lane's, which reads them
    present: torch.Tensor  # uint8, a flag for each parameter of these flats

    def shards(self, rank: int) -> list[tuple[Param, torch.Tensor]]:
        """This rank's part of each gradient that some rank has. Blocks until it is there. Raises: RankFailed."""
        self.op.wait()
        self.held.clear()
        found = []
        flags = iter(self.present.tolist())
        for flat, mean in zip(self.flats, self.means, strict=True):
            for param in flat.params:
                if next(flags):
                    start, _, numel = flat.layout.shard_range(param.slot_index, rank)
                    found.append((param, mean[start : start + numel]))
        return found


class ReduceScatter:
    """Reduces gradients of one model. One thread uses it at a time.

    flats: those that learn from the start. dtype_of: in which gradients wait. reduce_dtype: in which they travel, None: in that.
    qgz: as int4 groups. error_feedback: what their rounding took is added the next time; it is kept in CPU memory.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        comm: Comm,
        *,
        dtype_of: Callable[[Flat], torch.dtype],
        reduce_dtype: torch.dtype | None,
        qgz: bool,
        error_feedback: bool,
    ) -> None:
        self._comm = comm
        self._dtype_of = dtype_of
        self._reduce_dtype = reduce_dtype
        self._qgz = qgz
        self._error_feedback = error_feedback
        self._errors: dict[Flat, tuple[torch.Tensor, ...]] = {}
        self.allocate(flats)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make room for what rounding takes from gradients of these flats, where there is none yet. Raises: MemoryError."""
        topology = self._comm.topology
        for flat in flats if self._error_feedback else ():
            if flat not in self._errors:
                shapes = self.error_shapes(flat, topology.nodes, topology.local_world)
                self._errors[flat] = tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)

    @staticmethod
    def error_shapes(flat: Flat, nodes: int, local_world: int) -> list[tuple[int, int]]:
        """Of what rounding takes, in each turn of the exchange: (parts, elements); 2 bytes each."""
        shard = flat.layout.shard_numel
        first = (flat.layout.world, shard)
        return [first] if min(nodes, local_world) == 1 else [first, (nodes, shard)]

    @property
    def feedback_bytes(self) -> int:
        """Bytes of what rounding took."""
        return sum(error.numel() * error.element_size() for errors in self._errors.values() for error in errors)

    @classmethod
    def error_bytes(cls, flats: Sequence[Flat], nodes: int, local_world: int) -> int:
        """Bytes of what rounding takes from the gradients of these flats."""
        return sum(2 * math.prod(shape) for flat in flats for shape in cls.error_shapes(flat, nodes, local_world))

    def start(self, unit: Unit, gradients: Wholes, *, size_bytes: int) -> PendingReduce:
        """Begin the reduction of a unit. Does not block. `gradients` may be changed by nobody until it is done; size_bytes: of
        those that nobody else holds.

        Raises: ValueError for a dtype that ranks do not reduce.
        """
        flats = [flat for flat in unit.flats if flat.learns]
        _check_reducible(flats, self._dtype_of)
        self.allocate(flats)  # what was thawed, and no optimizer holds
        params = [param for flat in flats for param in flat.params]
        present = torch.tensor([param in gradients for param in params], dtype=torch.uint8)
        device = unit.flats[0].tensor.device
        means = [torch.empty(flat.layout.shard_numel, dtype=self._dtype_of(flat), device=device) for flat in flats]
        held = dict(gradients)

        def work(exchange: Exchange) -> None:
            with torch.no_grad():
                self._reduce(exchange, flats, held, means, present)

        op = self._comm.reduce(_title(unit), work)
        return PendingReduce(unit, op, flats, means, size_bytes, held, present)

    def _reduce(
        self,
        exchange: Exchange,
        flats: Sequence[Flat],
        gradients: Wholes,
        means: Sequence[torch.Tensor],
        present: torch.Tensor,
    ) -> None:
        wholes: list[Parts] = []
        for index, flat in enumerate(flats):
            whole = exchange.buffer(f"whole {index}", flat.layout.numel, self._reduce_dtype or self._dtype_of(flat))
            end = 0
            for param in flat.params:
                whole[end : param.offset].zero_()  # what lies between parameters
                end = param.offset + param.numel
                _sum_into(whole[param.offset : end], gradients.get(param, ()))
            whole[end:].zero_()
            wholes.append(list(whole.view(flat.layout.world, -1)))
        flags = present.to(means[0].device)
        exchange.union(flags)
        present.copy_(flags)
        if not self._qgz:
            exchange.sums(wholes, means)
            return
        device = means[0].device
        # Where the device has memory of its own they go there and back.
        taken = {flat: [error.to(device) for error in self._errors[flat]] for flat in flats if flat in self._errors}
        exchange.sums_quantized(
            wholes, means, lambda turn, index: list(taken[flats[index]][turn]) if flats[index] in taken else None
        )
        for flat, errors in taken.items():
            for kept, error in zip(self._errors[flat], errors, strict=True):
                if kept is not error:
                    kept.copy_(error)

    def forget(self) -> None:
        """What rounding took belongs to other states than those that rest now."""
        for errors in self._errors.values():
            for error in errors:
                error.zero_()

    def close(self) -> None:
        """Free the memory. Nothing may be under way."""
        self._errors.clear()


def _check_reducible(flats: Sequence[Flat], dtype_of: Callable[[Flat], torch.dtype]) -> None:
    """Raise ValueError for a flat whose gradients wait in a dtype that ranks do not reduce."""
    for flat in flats:
        if dtype_of(flat) not in _DTYPES:
            raise ValueError(
                f"the gradient of {flat.params[0].name} is {dtype_of(flat)}; several ranks reduce bfloat16, float16 and float32 "
                "gradients: cast the model before inf.offload, or freeze the parameter"
            )


def _title(unit: Unit) -> str:
    """What a reduction is called, by which ranks meet: one that trains other parameters of the unit has come to another."""
    flags = bytes(param.gathered.requires_grad for param in unit.params)
    if all(flags):
        return f"gradients of {unit.name}"
    return f"gradients of {unit.name}, trained {sum(flags)} of its {len(flags)} parameters ({xxhash.xxh32_hexdigest(flags)})"


def _sum_into(target: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """The terms' sum [numel], in the dtype of the first; zeros without any."""
    if not terms:
        target.zero_()
        return
    first, *others = terms
    for other in others:
        first.view(-1).add_(other.reshape(-1).to(first))
    target.copy_(first.reshape(-1))


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
        buffers: GradBuffers,
        registry: GradRegistry,
        comm: Comm,
        mode: UpdateHooks,
        reduce_scatter: ReduceScatter | None = None,
        unreduced: UnreducedGrads | None = None,
    ) -> None:
        self._units = units
        self._reduce_scatter = reduce_scatter
        self._unreduced = unreduced
        self._in_no_sync = False  # inside no_sync, with `local`
        self._pending: deque[PendingReduce] = deque()
        self._mode = mode
        self._buffers = buffers
        self._registry = registry
        self._comm = comm
        self._fresh: dict[Unit, dict[Param, torch.Tensor]] = {}  # several ranks: gradients not yet reduced
        self._fresh_bytes = 0
        self.wait_s = 0.0  # for reductions
        self.fresh_bytes_peak = 0  # the most that autograd's gradients took here at once

    def dtype(self, flat: Flat) -> torch.dtype:
        """The dtype in which gradients of this flat wait."""
        return self._buffers.dtype(flat)

    def slot(self, param: Param) -> GradSlot:
        """The gradient slot of a parameter; made when it is first wanted."""
        if param.grad is None:
            param.grad = self._registry.add(
                param.name,
                param.shape,
                self._buffers.shard_of(param),
                param.flat.tensor.device,
                on_zero=functools.partial(self._unreduced.zero, param) if self._unreduced is not None else None,
            )
            self._buffers.place_slot(param)
            if param.grad.stand_in.dtype is not param.dtype:
                param.at_rest.grad_dtype = param.grad.stand_in.dtype  # what torch lets `.grad` be
        return param.grad

    def allocate(self) -> None:
        """Make room for what the gradients of all that learns need on their way, if there is none yet. Raises: MemoryError."""
        flats = [flat for unit in self._units for flat in unit.flats if flat.learns]
        if self._reduce_scatter is not None:
            self._reduce_scatter.allocate(flats)
        if self._unreduced is not None:
            self._unreduced.allocate(flats)

    def accumulate_grad(self, param: Param, grad: torch.Tensor) -> None:
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
        self.slot(param).wait_d2h()  # it is the loop's tensor, which may change it from here on

    def unit_done(self, unit: Unit) -> None:
        """A Use of the unit has ended. Several ranks: its gradients are reduced, each rank keeping its shard of the mean. Blocks
        while too many units are under way."""
        if self._comm.world == 1:
            self._buffers.unit_done(unit)
        elif self._in_no_sync:
            self._add_unreduced(unit)
        elif any(flat.learns for flat in unit.flats):
            # Also without a gradient here: another rank may have one, and all must take part.
            self._reduce(unit)

    @property
    def reduces_later(self) -> bool:
        """Whether gradients that come now are reduced later."""
        return self._in_no_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up in this rank's whole sums, if the policy keeps such."""
        if self._unreduced is not None:
            self.allocate()  # what was thawed, and no optimizer holds
            # Slots in one order on all ranks, whichever of their parameters each uses.
            for unit in self._units:
                for param in unit.params:
                    if param.flat.learns:
                        self.slot(param)
        before, self._in_no_sync = self._in_no_sync, self._unreduced is not None
        try:
            yield
        finally:
            self._in_no_sync = before

    def check_reduced(self) -> None:
        """Raise RuntimeError while whole sums of this rank wait for a reduction."""
        if self._unreduced is not None:
            for unit in self._units:
                self._forget_cleared(unit)
            waiting = next((param for unit in self._units for param in unit.params if self._unreduced.has(param)), None)
            if waiting is not None:
                raise RuntimeError(
                    f"the gradient of {waiting.name} was added up inside handle.no_sync() and is not reduced over the ranks yet: "
                    "run the last micro-batch of a step outside of no_sync()"
                )

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Backward comes to these units: start reading back gradients that spilled. Does not block."""
        for unit in units:
            self._buffers.prefetch(unit)

    def flush_spilled(self, unit: Unit | None = None) -> None:
        """Return when gradients that spill (of a unit; None: of all) are where updates read them. Raises: AioError."""
        self._buffers.flush(unit)

    def free_offloaded(self) -> None:
        """A forward begins: free gradients on the device that have left it. Never blocks."""
        if self._buffers.offload is not None:
            self._buffers.offload.free_done()

    def backward_end(self) -> None:
        """Reduce what no Use claimed, in the order of units, and take all that is under way. Blocks."""
        if self._comm.world > 1:
            if self._in_no_sync:
                for unit in list(self._fresh):
                    self._add_unreduced(unit)
            else:
                waiting = self._comm.any_of([self._waits(unit) for unit in self._units])
                for unit, has_some in zip(self._units, waiting, strict=True):
                    if has_some:
                        self._reduce(unit)
            self._finish(0)
        self._buffers.backward_end()

    def reset(self) -> None:
        """Forget what an interrupted backward left. Blocks until nothing of it is under way."""
        self._fresh.clear()
        self._fresh_bytes = 0
        while self._pending:
            self._pending.popleft().op.finished()
        self._buffers.reset()

    def forget(self) -> None:
        """The states are those of another step: nothing of the gradients before counts."""
        if self._reduce_scatter is not None:
            self._reduce_scatter.forget()
        if self._unreduced is not None:
            self._unreduced.clear()

    def accumulate(self, param: Param, grad: torch.Tensor) -> None:
        """Copy or add a gradient (this rank's part) into its slot, and show its stand-in in `p.grad`."""
        slot = self.slot(param)
        slot.reconcile(param.at_rest.grad)
        slot.accumulate(grad)
        param.at_rest.grad = slot.stand_in

    def _waits(self, unit: Unit) -> bool:
        if self._unreduced is not None:
            self._forget_cleared(unit)
        return bool(self._fresh.get(unit)) or (self._unreduced is not None and self._unreduced.any(unit))

    def _add_unreduced(self, unit: Unit) -> None:
        """Add the unit's fresh gradients to this rank's whole sums."""
        assert self._unreduced is not None
        fresh = self._fresh.pop(unit, {})
        self._fresh_bytes -= sizes(fresh)
        for param, grad in fresh.items():
            slot = self.slot(param)
            if slot.expect_reduction(param.at_rest.grad):
                self._unreduced.drop(param)
            self._unreduced.add(param, grad)
            if param.at_rest.grad is None:
                param.at_rest.grad = slot.stand_in

    def _forget_cleared(self, unit: Unit) -> None:
        """Drop sums whose gradients the loop has cleared."""
        assert self._unreduced is not None
        for param in unit.params if self._unreduced.any(unit) else ():
            slot = param.grad
            if param.at_rest.grad is None or slot is None or (self._unreduced.has(param) and not slot.unreduced):
                self._unreduced.drop(param)

    def _reduce(self, unit: Unit) -> None:
        assert self._reduce_scatter is not None
        terms: dict[Param, list[torch.Tensor]] = {}
        if self._unreduced is not None and self._unreduced.any(unit):
            self._forget_cleared(unit)
            terms = self._unreduced.pop(unit)
            for param in terms:
                assert param.grad is not None
                param.grad.unreduced = False
        fresh = self._fresh.pop(unit, {})
        for param, grad in fresh.items():
            terms.setdefault(param, []).append(grad)
        self._pending.append(self._reduce_scatter.start(unit, terms, size_bytes=sizes(fresh)))
        self._finish(REDUCING_UNITS)

    def _finish(self, but: int) -> None:
        """Take what was reduced, in order, until no more than `but` units are under way. Blocks."""
        while len(self._pending) > but:
            reduction = self._pending.popleft()
            self._fresh_bytes -= reduction.size_bytes
            start = time.perf_counter()
            shards = reduction.shards(self._comm.rank)
            self.wait_s += time.perf_counter() - start
            for param, part in shards:
                if param.grad is not None and param.grad.unreduced:
                    param.grad.unreduced = False
                self._mode.grad_ready(param, part)
            self._buffers.unit_done(reduction.unit)
            if reduction.unit.refs == 0:  # it went idle before this: the mode is told again
                self._mode.unit_released(reduction.unit)


def sizes(buffers: Mapping[Param, torch.Tensor]) -> int:
    """Bytes of these gradients."""
    return sum(grad.numel() * grad.element_size() for grad in buffers.values())
