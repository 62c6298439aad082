"""How shards travel between ranks: the data of collectives, without a thread of its own (`infinity._src.distributed.lanes` has that).

    spread   every rank has one part of a whole, and gets the others                       (gather of weights)
    sums     every rank has a whole, and gets the sum of one part of it over all ranks     (reduction of gradients)

With several nodes of several ranks both go in two turns, so that no byte crosses between nodes twice:

    spread   ranks with the same place in their node (counterparts) exchange their parts, then each node those it has
    sums     each node sums, then counterparts sum what the nodes found

**Order of sums**: fp32, in the order of ranks, divided by their number, and rounded once. With two turns so twice: the mean of a
node in the order of its ranks, rounded to the dtype that travels, and the mean of these in the order of nodes. It depends on
nothing else: not on the backend of torch.distributed, its algorithms, sizes, or timing.

Quantized parts (ZeRO++: Wang et al. 2023, sections 3.1 and 3.3) travel as `infinity._src.kernels.comm_codec` lays them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from infinity._src.distributed.topology import Topology
from infinity._src.kernels import comm_codec as wire
from infinity.errors import RanksDiverged

HEADER_BYTES = 128
"""Of the name of a collective, by which ranks know that they have come to the same one."""

SCALE_GROUP_NUMEL = 64
"""Elements that share a scale; parameters start at multiples of it, so no group holds two of them."""
WEIGHT_BITS, GRADIENT_BITS = 8, 4

Parts = Sequence[torch.Tensor]
"""One tensor for each rank, in their order."""


@dataclasses.dataclass
class Volume:
    """Bytes that this rank has sent, to ranks of its node and to those of others."""

    inside: int = 0
    across: int = 0


class Exchange:
    """What one lane exchanges, over its process group. Blocks; one thread uses it at a time.

    check_group: of gloo, for names of collectives where `group` is of another backend.
    """

    def __init__(self, topology: Topology, group: Any, device: torch.device, *, check_group: Any = None) -> None:
        self.topology = topology
        self.volume = Volume()
        self._group = group
        self._check_group = check_group or group
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory [numel] that is kept under this name for the next exchange, and grows to what was ever asked for. Contents are
        what they were."""
        size_bytes = numel * dtype.itemsize
        found = self._buffers.get(name)
        if found is None or found.numel() < size_bytes:
            self._buffers.pop(name, None)
            found = self._buffers[name] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return found[:size_bytes].view(dtype)

    def check_same_collective(self, what: str) -> None:
        """Return when the ranks that this one exchanges with have come to the collective `what`, too. Without this, ranks whose
        programs differ would take each other's data for what they expect.

        Raises: RanksDiverged.
        """
        t = self.topology
        others = sorted({*t.node_ranks, *t.counterparts} - {t.rank})
        mine, theirs = _header(what), [torch.zeros(HEADER_BYTES, dtype=torch.uint8) for _ in others]
        operations = [dist.P2POp(dist.isend, mine, rank, self._check_group) for rank in others]
        operations += [dist.P2POp(dist.irecv, to, rank, self._check_group) for to, rank in zip(theirs, others, strict=True)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for rank, found in zip(others, theirs, strict=True):
            if not torch.equal(found, mine):
                name = bytes(found.tolist()).rstrip(b"\0").decode(errors="replace")
                raise RanksDiverged(
                    f"rank {t.rank} has come to {what}, and rank {rank} to {name}: all ranks must run the same modules in "
                    "the same order, and call what is collective together, with the same values (control flow by rank? a "
                    "state_dict on one? a learning rate that follows the loss of one?)",
                    rank=rank,
                )

    def all_gather(self, wholes: Sequence[Parts], *, across: bool = True) -> None:
        """Complete each whole, of which this rank has its own part; with `across` False, those of its counterparts, too."""
        t = self.topology
        if across and t.nodes > 1:
            others = [rank for rank in t.counterparts if rank != t.rank]
            self._swap(
                [(rank, parts[t.rank]) for rank in others for parts in wholes],
                [(rank, parts[rank]) for rank in others for parts in wholes],
            )
        others = [rank for rank in t.node_ranks if rank != t.rank]
        self._swap(
            [(rank, parts[mine]) for rank in others for parts in wholes for mine in t.counterparts],
            [(rank, parts[theirs]) for rank in others for parts in wholes for theirs in self._column(rank)],
        )

    def all_gather_quantized(self, wholes: Sequence[Parts]) -> None:
        """As `spread`, in groups of int8. This rank's part becomes what the others get."""
        t = self.topology
        wires = [self._wires(f"spread {index}", parts, WEIGHT_BITS) for index, parts in enumerate(wholes)]
        for parts, coded in zip(wholes, wires, strict=True):
            wire.encode(parts[t.rank], coded[t.rank], bits=WEIGHT_BITS, group_numel=SCALE_GROUP_NUMEL)
        self.all_gather(wires)
        for parts, coded in zip(wholes, wires, strict=True):
            for part, one in zip(parts, coded, strict=True):
                wire.decode(one, part, bits=WEIGHT_BITS, group_numel=SCALE_GROUP_NUMEL)

    def all_reduce_or(self, flags: torch.Tensor) -> None:
        """Set each flag (uint8) that is set on any rank."""
        for ranks in self._turns():
            others = [rank for rank in ranks if rank != self.topology.rank]
            found = [torch.empty_like(flags) for _ in others]
            self._swap([(rank, flags) for rank in others], list(zip(others, found, strict=True)))
            for each in found:
                flags |= each

    def reduce_scatter_mean(self, wholes: Sequence[Parts], means: Sequence[torch.Tensor]) -> None:
        """In means[i] the mean over all ranks of this rank's part of whole i, in its own dtype. The wholes are used up."""
        t = self.topology
        if min(t.nodes, t.local_world) == 1:
            self._swap_and_sum(wholes, range(t.world), means, divisor=t.world)
            return
        partial = [[parts[rank] for rank in t.counterparts] for parts in wholes]  # of the node: in the place of this rank's own
        flat = [part for parts in partial for part in parts]
        self._swap_and_sum(
            [self._for_node(parts, rank) for parts in wholes for rank in range(t.nodes)],
            t.node_ranks,
            flat,
            divisor=t.local_world,
        )
        self._swap_and_sum(
            [_placed(parts, t.counterparts, t.world) for parts in partial], t.counterparts, means, divisor=t.nodes
        )

    def reduce_scatter_mean_quantized(
        self, wholes: Sequence[Parts], means: Sequence[torch.Tensor], errors: Callable[[int, int], Parts | None]
    ) -> None:
        """As `sums`, in groups of int4. errors(turn, index): what rounding took from the parts of whole `index` in this turn
        before, one tensor for each part, which then have what it takes now; or None."""
        t = self.topology
        turns = self._turns()
        work: list[Parts] = list(wholes)
        for number, ranks in enumerate(turns):
            last = number == len(turns) - 1
            columns = [[rank] for rank in ranks] if last else [self._column(rank) for rank in ranks]
            places = {rank: place for place, rank in enumerate(range(t.world) if number == 0 else ranks)}
            next_work: list[Parts] = []
            for index, parts in enumerate(work):
                mine = columns[ranks.index(t.rank)]
                outs = [means[index]] if last else self._partials(index, len(mine), parts[0].numel())
                self._quantized_turn(number, index, parts, ranks, columns, places, outs, errors, t.world if last else 1)
                next_work.append(outs)
            work = next_work

    # -- inside --------------------------------------------------------------------------------------------------------

    def _turns(self) -> list[Sequence[int]]:
        """The ranks that exchange with each other, turn after turn, until all have what all have."""
        t = self.topology
        if min(t.nodes, t.local_world) == 1:
            return [range(t.world)]
        return [t.node_ranks, t.counterparts]

    def _column(self, rank: int) -> list[int]:
        """The ranks with the same place in their node as `rank`, one of each node."""
        t = self.topology
        return [node * t.local_world + rank % t.local_world for node in range(t.nodes)]

    def _for_node(self, parts: Parts, node: int) -> Parts:
        """For each rank: the part that its counterpart in `node` will have."""
        t = self.topology
        return [parts[node * t.local_world + rank % t.local_world] for rank in range(t.world)]

    def _partials(self, index: int, count: int, numel: int) -> list[torch.Tensor]:
        return list(self.buffer(f"partial {index}", count * numel, torch.float32).view(count, numel))

    def _wires(self, name: str, parts: Parts, bits: int) -> list[torch.Tensor]:
        size_bytes = wire.wire_bytes(parts[0].numel(), bits, SCALE_GROUP_NUMEL)
        return list(self.buffer(name, len(parts) * size_bytes, torch.uint8).view(len(parts), size_bytes))

    def _swap_and_sum(
        self, wholes: Sequence[Parts], ranks: Sequence[int], sums: Sequence[torch.Tensor], *, divisor: int
    ) -> None:
        """sums[i]: that of this rank's part of whole i over `ranks`, in their order."""
        me = self.topology.rank
        others = [rank for rank in ranks if rank != me]
        sends, receives, found = [], [], []
        for index, parts in enumerate(wholes):
            here = parts[me]
            space = self.buffer(f"sums {index}", len(others) * here.numel(), here.dtype).view(len(others), -1)
            theirs = dict(zip(others, space, strict=True))
            sends += [(rank, parts[rank]) for rank in others]
            receives += [(rank, theirs[rank]) for rank in others]
            found.append([here if rank == me else theirs[rank] for rank in ranks])
        self._swap(sends, receives)
        for pieces, out in zip(found, sums, strict=True):
            wire.sum_in_order(pieces, out, divisor=divisor)

    def _quantized_turn(
        self,
        number: int,
        index: int,
        parts: Parts,
        ranks: Sequence[int],
        columns: Sequence[Sequence[int]],
        places: dict[int, int],
        outs: Parts,
        errors: Callable[[int, int], Parts | None],
        divisor: int,
    ) -> None:
        """outs: sums over `ranks` of the parts that this rank's column names; columns: what each of the ranks will have."""
        me = self.topology.rank
        wires = self._wires(f"coded {number} {index}", parts, GRADIENT_BITS)
        taken = errors(number, index)
        for place, (part, coded) in enumerate(zip(parts, wires, strict=True)):
            error = None if taken is None else taken[place]
            wire.encode(part, coded, bits=GRADIENT_BITS, group_numel=SCALE_GROUP_NUMEL, error=error)
        others = [rank for rank in ranks if rank != me]
        mine = columns[ranks.index(me)]
        size_bytes = wires[0].numel()
        space = self.buffer(f"came {number} {index}", len(others) * len(mine) * size_bytes, torch.uint8)
        theirs = dict(zip(others, space.view(len(others), len(mine), size_bytes), strict=True))
        self._swap(
            [(rank, wires[places[part]]) for rank in others for part in columns[ranks.index(rank)]],
            [(rank, one) for rank in others for one in theirs[rank]],
        )
        for at, whose in enumerate(mine):
            pieces = [wires[places[whose]] if rank == me else theirs[rank][at] for rank in ranks]
            wire.decode_sum(pieces, outs[at], bits=GRADIENT_BITS, group_numel=SCALE_GROUP_NUMEL, divisor=divisor)

    def _swap(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send each tensor to its rank and receive each from its rank; between two ranks both name them in one order."""
        if not sends and not receives:
            return
        here = set(self.topology.node_ranks)
        for rank, tensor in sends:
            size_bytes = tensor.numel() * tensor.element_size()
            if rank in here:
                self.volume.inside += size_bytes
            else:
                self.volume.across += size_bytes
        operations = [dist.P2POp(dist.isend, tensor, rank, self._group) for rank, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, rank, self._group) for rank, tensor in receives]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _header(what: str) -> torch.Tensor:
    """The end of a name, which tells most."""
    text = what.encode()[-HEADER_BYTES:]
    return torch.tensor(list(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _placed(parts: Parts, ranks: Sequence[int], world: int) -> Parts:
    """The parts of these ranks, each at its rank's place."""
    placed = [parts[0]] * world
    for part, rank in zip(parts, ranks, strict=True):
        placed[rank] = part
    return placed
