"""Gradients of a unit, reduced over the ranks while backward goes on: one exchange for each unit, in a lane of its own.

    fresh gradients (and local sums) -> one whole for each flat -> exchange -> mean of this rank's shard

Which parameters have a gradient on any rank goes along: a parameter that is used on some ranks only gets the mean with zeros of
the others, as with DDP(find_unused_parameters=True); one that no rank used keeps no gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from infinity._src.distributed.collectives import Comm
from infinity._src.distributed.exchange import Exchange, Parts
from infinity._src.distributed.lanes import Op
from infinity._src.params.unit import Flat, Param, Unit

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

        op = self._comm.submit_reduce_scatter(_title(unit), work)
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
        exchange.all_reduce_or(flags)
        present.copy_(flags)
        if not self._qgz:
            exchange.reduce_scatter_mean(wholes, means)
            return
        device = means[0].device
        # Where the device has memory of its own they go there and back.
        taken = {flat: [error.to(device) for error in self._errors[flat]] for flat in flats if flat in self._errors}
        exchange.reduce_scatter_mean_quantized(
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
