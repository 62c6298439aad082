"""Reduction of gradients over the ranks, between autograd and the gradients' accumulators.

    one rank        accumulate_grad(p, grad) -> accumulate(p, grad)
    several ranks   accumulate_grad(p, grad) -> unit_done -> reduce-scatter, beside the backward
                    -> accumulate(p, this rank's part of the mean)
    no_sync         accumulate_grad(p, grad) -> unit_done -> whole sums of this rank; the first
                    backward outside of no_sync reduces them (accumulate="local" and stage 1)

With update="backward" the mode takes complete gradients in place of `accumulate`
(`UpdateHooks.on_gradient`).

The gradients of a unit are reduced together, in a separate communication stream. The ranks also
combine flags that say which parameters have a gradient. If only some ranks used a parameter, its
mean counts zeros for the other ranks, as with DDP(find_unused_parameters=True); if no rank used it,
it gets no gradient.

Units are reduced when backward is done with them, in the same order on all ranks. If ranks may use
different units, all units are reduced in a fixed order instead (`ReduceOrder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import xxhash

from infinity._src.base.sizes import round_up
from infinity._src.base.telemetry import SHORT_NS, Timeline
from infinity._src.base.torch_compat import profiled
from infinity._src.distributed.collectives import Collectives, Parts
from infinity._src.distributed.comm_streams import PendingCollective
from infinity._src.distributed.communicator import Comm
from infinity._src.memory.constants import REDUCING_UNITS
from infinity._src.memory.device import Device, GradOffload
from infinity._src.memory.device_capacity import overlap_bytes
from infinity._src.params.accumulator import GradAccumulator, GradRegistry
from infinity._src.params.buffers import DevicePrefetch, GradBuffers, UnreducedGrads
from infinity._src.params.cleanup import cancel_and_wait
from infinity._src.params.ram_buffers import ALIGN_BYTES, FlatBuffers
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.update_hooks import UpdateHooks
from infinity.aio import Slab, Ticket

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Wholes = Mapping[Param, Sequence[torch.Tensor]]
"""For each parameter the terms of its gradient on this rank: [shape] or [numel] tensors."""


@dataclasses.dataclass
class PendingReduce:
    """The reduction in flight of one unit's gradients. Its results are valid once `op` is done."""

    unit: Unit
    op: PendingCollective
    flats: list[Flat]  # the unit's flats with `learns`
    means: list[torch.Tensor]  # [shard] each, in the dtype in which gradients wait
    size_bytes: int  # of fresh gradients that it holds
    # Kept alive until the computing stream waits for the communication stream's, which reads them.
    held: dict[Param, Sequence[torch.Tensor]]
    present: torch.Tensor  # uint8, a flag for each parameter of these flats
    # Copies of unreduced sums and of error feedback to the device; the communication stream waits
    # for them.
    tickets: list[Ticket]
    # Error feedback on a device with separate memory; copied back to RAM afterwards.
    errors: dict[Flat, torch.Tensor]

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gradients of all its parameters in their accumulation dtype: the same on all
        ranks."""
        made = zip(self.flats, self.means, strict=True)
        return sum(flat.layout.numel * mean.element_size() for flat, mean in made)

    def shards(self, rank: int) -> list[tuple[Param, torch.Tensor]]:
        """Return this rank's part of each gradient that some rank has. Blocks until they are
        reduced. Raises: RankFailed."""
        # The host reads the flags, so it waits for the communication stream's kernels.
        self.op.finished()
        # `wait` raises if a rank has failed, before flags of an aborted collective are read, and
        # orders this stream after the communication stream's.
        self.op.wait()
        # Not earlier: the communication stream reads these gradients until the op is done.
        self.held.clear()
        found = []
        flags = iter(self.present.tolist())
        for flat, mean in zip(self.flats, self.means, strict=True):
            for param in flat.params:
                if next(flags):
                    start, _, numel = flat.layout.shard_range(param.param_index, rank)
                    found.append((param, mean[start : start + numel]))
        return found

    def finished(self) -> None:
        """Block until the reduction has ended, after an aborted backward."""
        self.op.finished()
        # The communication stream may not have waited for these copies.
        interrupt = cancel_and_wait(self.tickets)
        if interrupt is not None:
            raise interrupt


class FlagBuffers:
    """Pinned memory for flags from the device, so that copying them does not stall the
    communication stream.

    A ring with more buffers than reductions in flight. One thread uses it at a time.
    """

    COUNT = REDUCING_UNITS + 2

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: list[Slab] = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._turn = 0

    @classmethod
    def needs_bytes(cls, flats: Sequence[Flat]) -> int:
        sizes = [round_up(len(flat.unit.params), ALIGN_BYTES) for flat in flats]
        return cls.COUNT * max(sizes, default=0)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make the buffers large enough for these flats. Raises: MemoryError, DeviceCopyError."""
        size_bytes = self.needs_bytes(flats)
        if size_bytes > self._memory.numel():
            # Old buffers stay until `close`: flags may be in flight to them.
            self._slabs.append(Slab(size_bytes))
            self._device.pin(self._slabs[-1])
            self._memory = torch.from_numpy(self._slabs[-1].array(np.uint8))

    def next(self, numel: int) -> torch.Tensor:
        size = self._memory.numel() // self.COUNT
        self._turn = (self._turn + 1) % self.COUNT
        return self._memory[self._turn * size :][:numel]

    def close(self) -> None:
        """Free the memory. No flags may be in flight."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        for slab in self._slabs:
            self._device.unpin(slab)
            slab.close()
        self._slabs.clear()


class ReduceScatter:
    """Reduces gradients of one model. One thread uses it at a time.

    flats: those that are trainable at set-up. dtype_of: accumulation dtype of gradients.
    reduce_dtype: communication dtype; None: the same. qgz: send int4 groups. error_feedback: keep
    qgz's rounding errors in CPU memory and add them to the next gradients. offload: copies from a
    device with separate memory; None on the CPU. With it, the executor copies the errors to the
    device when a reduction starts, and back when `take` returns the result.
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
        device: Device,
        offload: GradOffload | None,
    ) -> None:
        self._comm = comm
        self._dtype_of = dtype_of
        self._reduce_dtype = reduce_dtype
        self._qgz = qgz
        self._error_feedback = error_feedback
        self._device = device
        self._offload = offload
        self._errors = FlatBuffers(
            lambda flat: sum(map(math.prod, self._error_shapes(flat))),
            lambda _flat: torch.bfloat16,
            device,
        )
        # Copies of errors to RAM; the next copy from RAM must wait for them.
        self._stored: dict[Flat, Ticket] = {}
        self._flags = FlagBuffers(device)
        self.allocate(flats)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Allocate missing error feedback of these flats, and flag buffers. Raises: MemoryError,
        DeviceCopyError."""
        # A new slab is zeros: no error yet.
        if self._error_feedback:
            self._errors.allocate(flats)
        if self._offload is not None:
            self._flags.allocate(flats)

    def _error_shapes(self, flat: Flat) -> list[tuple[int, int]]:
        topology = self._comm.topology
        return self.error_shapes(flat, topology.nodes, topology.local_world)

    def _cut(self, flat: Flat, errors: torch.Tensor) -> list[torch.Tensor]:
        shapes = self._error_shapes(flat)
        parts = errors.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @staticmethod
    def error_shapes(flat: Flat, nodes: int, local_world: int) -> list[tuple[int, int]]:
        """Shapes of the error-feedback buffers, one per reduction level: (parts, elements)."""
        shard = flat.layout.shard_numel
        first = (flat.layout.world, shard)
        # Several nodes of several ranks: an exchange has two levels, inside the node, then across.
        return [first] if min(nodes, local_world) == 1 else [first, (nodes, shard)]

    @property
    def feedback_bytes(self) -> int:
        return self._errors.size_bytes

    @classmethod
    def error_bytes(cls, flats: Sequence[Flat], nodes: int, local_world: int) -> int:
        return sum(
            2 * math.prod(shape)
            for flat in flats
            for shape in cls.error_shapes(flat, nodes, local_world)
        )

    def start(
        self,
        unit: Unit,
        gradients: Wholes,
        *,
        size_bytes: int,
        after: Sequence[Ticket] = (),
    ) -> PendingReduce:
        """Begin the reduction of a unit. Blocks only for error feedback that is still being copied
        to RAM. `gradients` must not change until the reduction is done. size_bytes: bytes of
        gradients that are freed then. after: tickets of copies that load some of the gradients.

        Raises: ValueError for a dtype that ranks do not reduce.
        """
        flats = [flat for flat in unit.flats if flat.learns]
        _check_reducible(flats, self._dtype_of)
        self.allocate(flats)  # unfrozen flats without an optimizer
        params = [param for flat in flats for param in flat.params]
        flags = [param in gradients for param in params]
        device = unit.flats[0].tensor.device
        if self._offload is None:
            present = torch.tensor(flags, dtype=torch.uint8)
            there = present
        else:
            # Made by kernels: a copy from the host would stall the communication stream.
            present, there = self._flags.next(len(flags)), _flags_on(device, flags)
        means = [
            torch.empty(flat.layout.shard_numel, dtype=self._dtype_of(flat), device=device)
            for flat in flats
        ]
        # A copy: `PendingReduce.shards` clears it after the communication stream has read the
        # gradients.
        held = dict(gradients)
        errors, tickets = self._fetch_errors(flats)
        tickets += after
        # On the CPU the reduction changes the errors in place, without copies.
        returned = errors if self._offload is not None else {}

        def work(collectives: Collectives) -> None:
            for ticket in tickets:
                ticket.wait_filled()
            with torch.no_grad():
                collectives.all_reduce_or(there)
                if present is not there:
                    # `PendingReduce.shards` reads it after `op`; the communication stream does not
                    # wait for it.
                    present.copy_(there, non_blocking=True)
                self._reduce(collectives, flats, held, means, errors)

        try:
            op = self._comm.submit_reduce_scatter(_title(unit), work)
        except BaseException:
            # Return the errors' memory to torch.
            cancel_and_wait(tickets)
            raise
        return PendingReduce(unit, op, flats, means, size_bytes, held, present, tickets, returned)

    def take(self, pending: PendingReduce) -> list[tuple[Param, torch.Tensor]]:
        """Return this rank's part of each gradient that some rank has. Blocks until they are
        reduced. Raises: RankFailed."""
        shards = pending.shards(self._comm.rank)
        # `shards` made the compute stream wait for the communication stream; these copies run on
        # the compute stream.
        self._store_errors(pending)
        return shards

    def drop(self, pending: PendingReduce) -> None:
        """Block until a reduction has ended, and drop its result."""
        pending.finished()
        # Keep the errors, although the result is dropped: in RAM they have changed in place as
        # well.
        self._store_errors(pending)

    @property
    def moves_errors(self) -> bool:
        """True if error feedback is copied to a device and back: then a flat is in one reduction at
        a time."""
        return self._error_feedback and self._offload is not None

    def _fetch_errors(
        self, flats: Sequence[Flat]
    ) -> tuple[dict[Flat, torch.Tensor], list[Ticket]]:
        """Return the flats' errors on the device, and the copies that load them."""
        errors = {flat: self._errors[flat] for flat in flats if flat in self._errors}
        tickets: list[Ticket] = []
        try:
            for flat, rest in errors.items() if self._offload is not None else ():
                # The two directions use two streams, which do not wait for each other.
                if flat in self._stored:
                    self._device.wait_filled(self._stored[flat])
                    del self._stored[flat]
                there = torch.empty(
                    rest.numel(), dtype=rest.dtype, device=self._device.torch_device
                )
                size_bytes = rest.numel() * rest.element_size()
                tickets.append(
                    self._device.copy(there.data_ptr(), rest.data_ptr(), size_bytes, out=True)
                )
                errors[flat] = there
        except BaseException:
            # Wait for the copies that have begun: torch will reuse their memory.
            cancel_and_wait(tickets)
            raise
        return errors, tickets

    def _store_errors(self, pending: PendingReduce) -> None:
        for flat, errors in pending.errors.items():
            assert self._offload is not None
            self._stored[flat] = self._offload.copy_out(errors, self._errors[flat])
        pending.errors.clear()

    def _reduce(
        self,
        collectives: Collectives,
        flats: Sequence[Flat],
        gradients: Wholes,
        means: Sequence[torch.Tensor],
        errors: Mapping[Flat, torch.Tensor],
    ) -> None:
        wholes: list[Parts] = []
        for index, flat in enumerate(flats):
            whole = collectives.buffer(
                f"whole {index}", flat.layout.numel, self._reduce_dtype or self._dtype_of(flat)
            )
            end = 0
            for param in flat.params:
                # The padding between parameters is reduced and encoded, too: it must be zeros.
                whole[end : param.offset].zero_()
                end = param.offset + param.numel
                _sum_into(whole[param.offset : end], gradients.get(param, ()))
            whole[end:].zero_()
            wholes.append(list(whole.view(flat.layout.world, -1)))
        if not self._qgz:
            collectives.reduce_scatter_mean(wholes, means)
            return
        cut = {flat: self._cut(flat, made) for flat, made in errors.items()}
        collectives.reduce_scatter_mean_quantized(
            wholes,
            means,
            lambda turn, index: list(cut[flats[index]][turn]) if flats[index] in cut else None,
        )

    def forget(self) -> None:
        """Zero the error feedback, since states of another step were restored. Blocks until no copy
        is in flight."""
        for ticket in self._stored.values():
            self._device.wait_filled(ticket)
        self._stored.clear()
        for errors in self._errors.tensors:
            errors.zero_()

    def close(self) -> None:
        """Free the memory. No reduction may be in flight."""
        self._stored.clear()
        self._errors.close()
        self._flags.close()


def _flags_on(device: torch.device, flags: Sequence[bool]) -> torch.Tensor:
    """Make flags on a device [len(flags)], uint8."""
    found = torch.zeros(len(flags), dtype=torch.uint8, device=device)
    start = 0
    # One kernel for each run of set flags; most units have one run.
    for is_set, run in itertools.groupby(flags):
        count = sum(1 for _ in run)
        if is_set:
            found[start : start + count].fill_(1)
        start += count
    return found


def _check_reducible(flats: Sequence[Flat], dtype_of: Callable[[Flat], torch.dtype]) -> None:
    """Raise ValueError for a flat whose accumulation dtype ranks cannot reduce."""
    for flat in flats:
        if dtype_of(flat) not in _DTYPES:
            raise ValueError(
                f"the gradient of {flat.params[0].name} is {dtype_of(flat)}; several ranks reduce "
                "bfloat16, float16 and float32 gradients: cast the model before inf.offload, or "
                "freeze the parameter"
            )


def _title(unit: Unit) -> str:
    """Name a reduction. Ranks compare the name first, so a rank that trains other parameters of the
    unit causes an error."""
    flags = bytes(param.gathered.requires_grad for param in unit.params)
    if all(flags):
        return f"gradients of {unit.name}"
    trained = f"trained {sum(flags)} of its {len(flags)} parameters"
    return f"gradients of {unit.name}, {trained} ({xxhash.xxh32_hexdigest(flags)})"


def _sum_into(target: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Write the sum of the terms to `target` [numel]; zeros without terms."""
    if not terms:
        target.zero_()
        return
    # In the first term's dtype, the accumulation dtype, as on one rank.
    first, *others = terms
    for other in others:
        first.view(-1).add_(other.reshape(-1).to(first))
    target.copy_(first.reshape(-1))


class ReduceOrder:
    """Fixed order in which ranks reduce units, whichever units each rank uses.

    It is the reverse of the modules' registration order, as with DDP's buckets. Each unit has one
    turn in each backward. A unit that is done earlier keeps its gradients until its turn. At the
    end of the backward all remaining units are reduced, with zeros for missing gradients.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(reversed(units))
        self._next = 0
        self._done: set[Unit] = set()

    def start(self, unused: Iterable[Unit]) -> None:
        """Begin a backward. unused: the units known not to be used."""
        self._next = 0
        self._done = set(unused)

    def done(self, unit: Unit) -> list[Unit]:
        """Record that backward is done with a unit. Returns the units whose turn it is, in order.
        """
        self._done.add(unit)
        begin = self._next
        while self._next < len(self._units) and self._units[self._next] in self._done:
            self._next += 1
        return self._units[begin : self._next]

    def rest(self) -> list[Unit]:
        """Return the units without a turn so far, in order, at the end of a backward."""
        begin, self._next = self._next, len(self._units)
        return self._units[begin:]


class GradReducer:
    """The gradients of one model. One thread uses it at a time.

    reduce_scatter: on several ranks. unreduced: sums of `no_sync` micro-batches, if the policy has
    them. order: of reductions, if ranks may use different units; None: a unit is reduced when
    backward is done with it. grad_offload: copies from a device with separate memory; then sums are
    also copied back to the device, which adds further gradients. mode: may take each complete
    gradient (this rank's part), and is notified of units that became idle before their gradients
    were reduced.
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
        order: ReduceOrder | None = None,
        grad_offload: GradOffload | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._units = units
        self._order = order
        self._timeline = timeline
        self._reduce_scatter = reduce_scatter
        self._unreduced = unreduced
        # True inside `no_sync` with `unreduced`: a later backward reduces the gradients.
        self.reduces_later = False
        self._pending: deque[PendingReduce] = deque()
        # Bytes in the accumulation dtype: slices of `inf.microbatched` add up gradients in it.
        sizes = (
            [flat.layout.numel * buffers.dtype(flat).itemsize for flat in unit.flats]
            for unit in units
        )
        self._reducing_bytes_max = overlap_bytes([sum(each) for each in sizes], REDUCING_UNITS)
        self._mode = mode
        self._on_gradient = mode.on_gradient or self.accumulate
        self._buffers = buffers
        self._prefetch = DevicePrefetch(grad_offload) if grad_offload is not None else None
        self._registry = registry
        self._comm = comm
        # Several ranks: this backward's gradients whose reduction has not begun.
        self._fresh: dict[Unit, dict[Param, torch.Tensor]] = {}
        self._fresh_bytes = 0
        self.wait_s = 0.0  # time for which this thread waited for reductions
        self.fresh_bytes_peak = 0  # the most bytes of fresh gradients at once

    def dtype(self, flat: Flat) -> torch.dtype:
        return self._buffers.dtype(flat)

    def accumulator(self, param: Param) -> GradAccumulator:
        if param.grad is None:
            unreduced = self._unreduced
            param.grad = self._registry.add(
                param.name,
                param.shape,
                self._buffers.shard_of(param),
                param.flat.tensor.device,
                on_zero=functools.partial(unreduced.zero, param) if unreduced is not None else None,
            )
            self._buffers.place_accumulator(param)
            if param.grad.proxy.dtype is not param.dtype:
                # torch refuses a `.grad` of another dtype unless `grad_dtype` is set.
                param.at_rest.grad_dtype = param.grad.proxy.dtype
        return param.grad

    def allocate(self) -> None:
        """Allocate missing error feedback and unreduced sums of all trainable flats. Raises:
        MemoryError."""
        flats = [flat for unit in self._units for flat in unit.flats if flat.learns]
        if self._reduce_scatter is not None:
            self._reduce_scatter.allocate(flats)
        if self._unreduced is not None:
            self._unreduced.allocate(flats)

    # -- backward ----------------------------------------------------------------------------------

    def backward_start(self, in_use: Callable[[Unit], bool]) -> None:
        """Begin a backward. in_use: returns whether a forward used a unit."""
        if self._order is not None:
            self._order.start(unit for unit in self._units if not in_use(unit))

    def accumulate_grad(self, param: Param, grad: torch.Tensor) -> None:
        """Take one fresh gradient [param.shape]; on several ranks it waits until its unit is
        reduced."""
        with profiled(f"infinity: accumulate {param.name}"):
            if self._comm.world == 1:
                size_bytes = grad.numel() * grad.element_size()
                self.fresh_bytes_peak = max(self.fresh_bytes_peak, size_bytes)
                start_ns = time.monotonic_ns()
                self._on_gradient(param, grad)
                self._note(param.unit, start_ns)
                return
            fresh = self._fresh.setdefault(param.unit, {})
            if param in fresh:
                # Reentrant checkpointing makes several gradients in one backward. They are added in
                # the accumulation dtype, as on one rank.
                before = fresh.pop(param)
                self._fresh_bytes -= before.numel() * before.element_size()
                grad = before.to(self.dtype(param.flat)) + grad
            fresh[param] = grad
            self._fresh_bytes += grad.numel() * grad.element_size()
            self.fresh_bytes_peak = max(self.fresh_bytes_peak, self._fresh_bytes)

    def _note(self, unit: Unit, start_ns: int) -> None:
        """Add the gradient's time so far to the timeline, unless it is short."""
        end_ns = time.monotonic_ns()
        if self._timeline is not None and end_ns - start_ns > SHORT_NS:
            self._timeline.add("gradients", unit.name, start_ns, end_ns)

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Start reading spilled gradients of these units, which backward has reached, and copying
        sums to the device. Does not block."""
        spilled = self._buffers.spilled
        for unit in units:
            if spilled is not None:
                spilled.prefetch(unit)
            if self._unreduced is not None:
                self._unreduced.prefetch(unit)
            # On several ranks accumulators get the mean some units later: see `_reduce`.
            if self._prefetch is not None and self._comm.world == 1:
                self._prefetch.start(unit)

    def unit_done(self, unit: Unit) -> None:
        """Record that a use of the unit has ended. On several ranks start to reduce its gradients;
        each rank keeps its shard of the mean. Blocks while too many units are in flight."""
        if self._comm.world == 1:
            self._flush_unit(unit)
        elif self.reduces_later:
            self._add_unreduced(unit)
        else:
            self._reduce_all([unit] if self._order is None else self._order.done(unit))

    def backward_end(self) -> None:
        """Reduce the remaining gradients, in the order of units, and finish all reductions. Blocks.
        """
        if self._comm.world > 1:
            if self.reduces_later:
                for unit in list(self._fresh):
                    self._add_unreduced(unit)
            else:
                if self._order is not None:
                    self._reduce_all(self._order.rest())
                # Collective, so that ranks agree on the units and their order.
                waiting = self._comm.all_reduce_any([self._waits(unit) for unit in self._units])
                for unit, has_some in zip(self._units, waiting, strict=True):
                    if has_some:
                        self._reduce(unit)
            # The loop reads `p.grad` next, so finish all means.
            self._finish(0)
        self._end_prefetch()
        if self._buffers.spilled is not None:
            self._buffers.spilled.backward_end()

    def reset(self) -> None:
        """Drop the gradients of an interrupted backward. Blocks until its reductions have ended."""
        # Gradients of an aborted backward are incomplete.
        self._fresh.clear()
        self._fresh_bytes = 0
        while self._pending:
            # The reduction reads the gradients and writes the means: both must outlive it.
            assert self._reduce_scatter is not None
            self._reduce_scatter.drop(self._pending[0])
            self._pending.popleft()
        self._end_prefetch()
        if self._buffers.spilled is not None:
            self._buffers.spilled.reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients to this rank's unreduced sums inside the context, if the policy has them.
        """
        if self._unreduced is not None:
            self.allocate()  # unfrozen flats without an optimizer
            # Accumulators are made in one order on all ranks, whichever parameters each rank uses.
            for unit in self._units:
                for param in unit.params:
                    if param.flat.learns:
                        self.accumulator(param)
        # Restored, not cleared: contexts may be nested.
        before, self.reduces_later = self.reduces_later, self._unreduced is not None
        try:
            yield
        finally:
            self.reduces_later = before

    # -- forward and step --------------------------------------------------------------------------

    def free_done(self) -> None:
        """Free gradients on the device that were copied to RAM; a forward begins. Never blocks."""
        if self._prefetch is not None:
            self._prefetch.offload.free_done()

    def flush_spilled(self, unit: Unit | None = None) -> None:
        """Block until spilled gradients (of a unit; None: of all) are on NVMe, where updates read
        them. Raises: AioError of a failed write."""
        if self._buffers.spilled is not None:
            self._buffers.spilled.flush(unit)

    def check_reduced(self) -> None:
        """Raise RuntimeError if unreduced sums of this rank exist."""
        if self._unreduced is None:
            return
        # The loop may have cleared a sum.
        for unit in self._units:
            self._drop_cleared(unit)
        params = (param for unit in self._units for param in unit.params)
        waiting = next((param for param in params if self._unreduced.has(param)), None)
        if waiting is not None:
            raise RuntimeError(
                f"the gradient of {waiting.name} was added up inside handle.no_sync() and is not "
                "reduced over the ranks yet: run the last micro-batch of a step outside of "
                "no_sync()"
            )

    def assign(self, param: Param, grad: torch.Tensor) -> None:
        """Make `grad` [param.shape] the whole gradient. Raises: RuntimeError on several ranks:
        these must call `set_full_grad` together."""
        if self._comm.world > 1:
            raise RuntimeError(
                f"{param.name}.grad = tensor works on one rank only; "
                "inf.handle(model).set_full_grad(parameter, tensor) on all"
            )
        self.replace(param, grad)

    def replace(self, param: Param, part: torch.Tensor) -> None:
        """Replace the gradient by `part` (this rank's); all ranks must. Raises: the error of the
        mode's `before_assign`; then the gradient is unchanged."""
        # Before any change: it raises if the gradient is too late.
        self._mode.before_assign(param)
        # With `p.grad = None`, `accumulate` replaces the gradient instead of adding to it.
        param.at_rest.grad = None
        self.accumulate(param, part)
        # Wait for the copy: the loop may change its tensor after this call.
        self.accumulator(param).wait_d2h()

    def accumulate(self, param: Param, grad: torch.Tensor) -> None:
        """Copy or add a gradient (this rank's part) into its accumulator, and show its proxy in
        `p.grad`."""
        accumulator = self.accumulator(param)
        self._buffers.hold(param)
        accumulator.reconcile(param.at_rest.grad)
        accumulator.accumulate(grad)
        param.at_rest.grad = accumulator.proxy

    def forget(self) -> None:
        """Drop error feedback and unreduced sums, which belong to earlier gradients: states of
        another step were restored."""
        if self._reduce_scatter is not None:
            self._reduce_scatter.forget()
        if self._unreduced is not None:
            self._unreduced.clear()

    # -- helpers -----------------------------------------------------------------------------------

    def _end_prefetch(self) -> None:
        """Drop prefetched sums without a new gradient. Blocks while they are copied."""
        if self._prefetch is not None:
            self._prefetch.backward_end()
        if self._unreduced is not None:
            self._unreduced.cancel_prefetch()

    def _flush_unit(self, unit: Unit) -> None:
        """Free windows and device memory of a unit whose gradients are in their accumulators."""
        if self._prefetch is not None:
            self._prefetch.unit_done(unit)
        if self._buffers.spilled is not None:
            self._buffers.spilled.unit_done(unit)

    def _waits(self, unit: Unit) -> bool:
        if self._unreduced is not None:
            self._drop_cleared(unit)
            if self._unreduced.any(unit):
                return True
        return bool(self._fresh.get(unit))

    def _add_unreduced(self, unit: Unit) -> None:
        assert self._unreduced is not None
        fresh = self._fresh.pop(unit, {})
        self._fresh_bytes -= _bytes_of(fresh)
        for param, grad in fresh.items():
            accumulator = self.accumulator(param)
            if accumulator.expect_reduction(param.at_rest.grad):
                # The loop has cleared the gradient since: drop the old sum.
                self._unreduced.drop(param)
            self._unreduced.add(param, grad)
            # The loop must see a gradient now; the reduction sets its values.
            if param.at_rest.grad is None:
                param.at_rest.grad = accumulator.proxy
        # Sums without new gradients (idle experts) would exhaust the device.
        self._unreduced.cancel_prefetch(unit)

    def _drop_cleared(self, unit: Unit) -> None:
        assert self._unreduced is not None
        for param in unit.params if self._unreduced.any(unit) else ():
            accumulator = param.grad
            # An accumulator that is not `unreduced` any more was emptied meanwhile.
            if (
                param.at_rest.grad is None
                or accumulator is None
                or (self._unreduced.has(param) and not accumulator.unreduced)
            ):
                self._unreduced.drop(param)

    def _reduce_all(self, units: Sequence[Unit]) -> None:
        """Start the reductions of the trainable ones among `units`."""
        for unit in units:
            # Also if this rank has no gradient of the unit: another rank may have one.
            if any(flat.learns for flat in unit.flats):
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        assert self._reduce_scatter is not None
        terms: dict[Param, list[torch.Tensor]] = {}
        tickets: list[Ticket] = []
        if self._reduce_scatter.moves_errors and any(one.unit is unit for one in self._pending):
            # Late gradients of a unit: its errors are still in use by its previous reduction.
            self._finish(0)
        if self._unreduced is not None and self._unreduced.any(unit):
            self._drop_cleared(unit)
            terms, tickets = self._unreduced.pop(unit)
        try:
            for param in terms:
                assert param.grad is not None
                param.grad.unreduced = False
            fresh = self._fresh.pop(unit, {})
            for param, grad in fresh.items():
                terms.setdefault(param, []).append(grad)
            self._pending.append(
                self._reduce_scatter.start(unit, terms, size_bytes=_bytes_of(fresh), after=tickets)
            )
        except BaseException:
            # Wait for the copies of the sums: torch will reuse their memory.
            cancel_and_wait(tickets)
            raise
        # Prefetch the sums to which the mean will be added.
        if self._prefetch is not None:
            self._prefetch.start(unit)
        # Each unit in flight holds its fresh gradients in device memory.
        self._finish(REDUCING_UNITS)

    def _finish(self, but: int) -> None:
        """Accumulate reduced gradients, oldest first, until at most `but` units are in flight, and
        at most one if more do not fit. Blocks."""
        while len(self._pending) > but or (
            # Decided by values equal on all ranks, so that all take results in the same order.
            len(self._pending) > 1
            and sum(one.whole_bytes for one in self._pending) > self._reducing_bytes_max
        ):
            # Oldest first: gradients are accumulated in the same order on all ranks.
            pending = self._pending[0]
            start, start_ns = time.perf_counter(), time.monotonic_ns()
            assert self._reduce_scatter is not None
            shards = self._reduce_scatter.take(pending)
            # Removed after the wait, so that after Ctrl-C `reset` still waits for it.
            self._pending.popleft()
            self._fresh_bytes -= pending.size_bytes
            self.wait_s += time.perf_counter() - start
            for param, part in shards:
                if param.grad is not None and param.grad.unreduced:
                    param.grad.unreduced = False
                self._on_gradient(param, part)
            self._note(pending.unit, start_ns)
            self._flush_unit(pending.unit)
            if pending.unit.refs == 0:
                # The unit became idle before its gradients were reduced: notify the mode again.
                self._mode.unit_released(pending.unit)


def _bytes_of(gradients: Mapping[Param, torch.Tensor]) -> int:
    return sum(grad.numel() * grad.element_size() for grad in gradients.values())
