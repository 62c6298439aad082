"""Hierarchical collectives over a transport, without a thread (that is `comm_streams`).

    all_gather            every rank has one part of a whole, and gets the others       (weights)
    reduce_scatter_mean   every rank has a whole, and gets the mean of one part of it   (gradients)

With several nodes of several ranks both have two levels, so that no byte crosses between nodes
twice. Counterparts are the ranks with the same local rank, one of each node.

    all_gather            counterparts exchange their parts, then each node those it has
    reduce_scatter_mean   each node sums, then counterparts sum the results of the nodes

**Order of sums**: fp32, in the order of ranks, divided by their number, and rounded once. With two
levels it is rounded twice: the mean of a node in the order of its ranks, rounded to the dtype that
travels, and the mean of these in the order of nodes. The sum depends on nothing else: not on the
backend of torch.distributed, its algorithms, sizes, or timing. So the bits are the same in every
run, which is why all_reduce and reduce_scatter of the backend are not used.

Quantized parts (ZeRO++: Wang et al. 2023, sections 3.1 and 3.3) travel as
`infinity._src.kernels.comm_codec` lays them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from infinity._src.distributed.topology import Topology
from infinity._src.distributed.transport import Message, Transport
from infinity._src.kernels import comm_codec as wire
from infinity._src.kernels.quantized import wire_bytes

SCALE_GROUP_NUMEL = 64
"""Elements that share a scale. Parameters start at multiples of it: no group spans two of them."""
WEIGHT_BITS, GRADIENT_BITS = 8, 4

Parts = Sequence[torch.Tensor]
"""One tensor for each rank, in the order of ranks."""


@dataclasses.dataclass
class Volume:
    """Bytes that this rank has sent, to ranks of its node and to those of others."""

    inside: int = 0
    across: int = 0


class Collectives:
    """Collectives of one queue. Methods block; one thread calls at a time.

    transport: of tensors of `device`.
    """

    def __init__(self, topology: Topology, transport: Transport, device: torch.device) -> None:
        self.topology = topology
        self.volume = Volume()
        self._transport = transport
        self._device = device
        # Kept between collectives: a step allocates nothing once the largest unit has passed.
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Buffer [numel], not initialized, that is reused under this name by later collectives.

        Its memory grows to the largest size ever asked for.
        """
        size_bytes = numel * dtype.itemsize
        found = self._buffers.get(name)
        if found is None or found.numel() < size_bytes:
            # The smaller one goes first, so that both are never held.
            self._buffers.pop(name, None)
            found = self._buffers[name] = torch.empty(
                size_bytes, dtype=torch.uint8, device=self._device
            )
        return found[:size_bytes].view(dtype)

    def all_gather(self, wholes: Sequence[torch.Tensor], *, across: bool = True) -> None:
        """Complete each whole [world, part]. This rank has its part.

        across: False where it has the parts of its counterparts, too (secondary shards): then
        nothing travels between nodes.
        """
        t = self.topology
        if min(t.nodes, t.local_world) == 1 and (across or t.nodes == 1):
            # One level: each rank's part goes to all others, which a backend may have a better way
            # for than messages. Counted alike: in a ring, too, a rank sends so many bytes.
            for whole in wholes:
                self._count((rank, whole[t.rank]) for rank in range(t.world) if rank != t.rank)
            self._transport.all_gather(wholes, t.rank)
            return
        # Across nodes first: each byte crosses once, and the node then shares what it has.
        if across and t.nodes > 1:
            others = [rank for rank in t.counterparts if rank != t.rank]
            self._send_receive(
                [(rank, parts[t.rank]) for rank in others for parts in wholes],
                [(rank, parts[rank]) for rank in others for parts in wholes],
            )
        others = [rank for rank in t.node_ranks if rank != t.rank]
        # A rank gives its node the parts of all its counterparts: in the node it alone has them.
        self._send_receive(
            [(rank, parts[mine]) for rank in others for parts in wholes for mine in t.counterparts],
            [
                (rank, parts[theirs])
                for rank in others
                for parts in wholes
                for theirs in self._column(rank)
            ],
        )

    def all_gather_quantized(self, wholes: Sequence[torch.Tensor]) -> None:
        """All-gather in groups of int8 (ZeRO++: qwZ).

        This rank's own part is rounded, too, so that all ranks compute with the same weights.
        """
        t = self.topology
        wires = [
            self._coded_buffers(f"all_gather {index}", parts, WEIGHT_BITS)
            for index, parts in enumerate(wholes)
        ]
        for parts, coded in zip(wholes, wires, strict=True):
            wire.encode(
                parts[t.rank], coded[t.rank], bits=WEIGHT_BITS, group_numel=SCALE_GROUP_NUMEL
            )
        # The codes travel, and each rank decodes all of them, its own included.
        self.all_gather(wires)
        for parts, coded in zip(wholes, wires, strict=True):
            for part, one in zip(parts, coded, strict=True):
                wire.decode(one, part, bits=WEIGHT_BITS, group_numel=SCALE_GROUP_NUMEL)

    def all_reduce_or(self, flags: torch.Tensor) -> None:
        """Combine flags (uint8) in place: each is set if any rank has set it."""
        # Level by level: flags of the whole world reach each rank without a message to every rank.
        for ranks in self._levels():
            others = [rank for rank in ranks if rank != self.topology.rank]
            # Buffers of their own: `flags` is being sent, and changes only after all have arrived.
            found = [torch.empty_like(flags) for _ in others]
            self._send_receive(
                [(rank, flags) for rank in others], list(zip(others, found, strict=True))
            )
            for each in found:
                flags |= each

    def reduce_scatter_mean(self, wholes: Sequence[Parts], means: Sequence[torch.Tensor]) -> None:
        """Write the mean over all ranks of this rank's part of whole i into means[i], in its dtype.

        The wholes are overwritten.
        """
        t = self.topology
        # One level is enough on one node, or with one rank on each. Then the mean is rounded once.
        if min(t.nodes, t.local_world) == 1:
            self._reduce_level(wholes, range(t.world), means, divisor=t.world)
            return
        # Sums of the node go where this rank's own values were: no further buffer of a whole's
        # size.
        partial = [[parts[rank] for rank in t.counterparts] for parts in wholes]
        flat = [part for parts in partial for part in parts]
        self._reduce_level(
            # Node first, so that what crosses between nodes is one sum, not one part of each rank.
            [self._for_node(parts, rank) for parts in wholes for rank in range(t.nodes)],
            t.node_ranks,
            flat,
            divisor=t.local_world,
        )
        self._reduce_level(
            # `_reduce_level` looks a rank's part up by the rank, also where only some take part.
            [_placed(parts, t.counterparts, t.world) for parts in partial],
            t.counterparts,
            means,
            divisor=t.nodes,
        )

    def reduce_scatter_mean_quantized(
        self,
        wholes: Sequence[Parts],
        means: Sequence[torch.Tensor],
        errors: Callable[[int, int], Parts | None],
    ) -> None:
        """Reduce-scatter in groups of int4 (ZeRO++: qgZ). The wholes are overwritten.

        errors(level, index): error-feedback buffers of whole `index` on this level of the
        hierarchy, one tensor for each part, or None. They hold what rounding took last time, which
        is added now, and then what it takes this time.
        """
        t = self.topology
        levels = self._levels()
        work: list[Parts] = list(wholes)
        for level, ranks in enumerate(levels):
            last = level == len(levels) - 1
            # On the last level a rank ends with its own part; before, with those of its
            # counterparts.
            columns = [[rank] for rank in ranks] if last else [self._column(rank) for rank in ranks]
            # The first level cuts a whole into parts of all ranks, the second those of the
            # counterparts.
            places = {
                rank: place for place, rank in enumerate(range(t.world) if level == 0 else ranks)
            }
            next_work: list[Parts] = []
            for index, parts in enumerate(work):
                mine = columns[ranks.index(t.rank)]
                outs = (
                    [means[index]] if last else self._partials(index, len(mine), parts[0].numel())
                )
                # Divided once, at the end: partial sums are fp32, and int4 groups scale with them.
                divisor = t.world if last else 1
                self._reduce_level_quantized(
                    level, index, parts, ranks, columns, places, outs, errors, divisor
                )
                next_work.append(outs)
            work = next_work

    # -- inside ------------------------------------------------------------------------------------

    def _levels(self) -> list[Sequence[int]]:
        """Levels of the hierarchy: the ranks that exchange with each other, one level after the
        other."""
        t = self.topology
        if min(t.nodes, t.local_world) == 1:
            return [range(t.world)]
        # The node first: then one sum of each node crosses between nodes, not one of each rank.
        return [t.node_ranks, t.counterparts]

    def _column(self, rank: int) -> list[int]:
        """Counterparts of any rank: the ranks with its local rank, one of each node."""
        t = self.topology
        return [node * t.local_world + rank % t.local_world for node in range(t.nodes)]

    def _for_node(self, parts: Parts, node: int) -> Parts:
        """Select, for each rank, the part that its counterpart in `node` will have."""
        t = self.topology
        return [parts[node * t.local_world + rank % t.local_world] for rank in range(t.world)]

    def _partials(self, index: int, count: int, numel: int) -> list[torch.Tensor]:
        # fp32: the next level rounds to int4, and a first rounding here would add to its error.
        return list(
            self.buffer(f"partial {index}", count * numel, torch.float32).view(count, numel)
        )

    def _coded_buffers(self, name: str, parts: Parts | torch.Tensor, bits: int) -> torch.Tensor:
        """Buffers for so many parts as codes: [parts, bytes]."""
        size_bytes = wire_bytes(parts[0].numel(), bits, SCALE_GROUP_NUMEL)
        return self.buffer(name, len(parts) * size_bytes, torch.uint8).view(len(parts), size_bytes)

    def _reduce_level(
        self,
        wholes: Sequence[Parts],
        ranks: Sequence[int],
        sums: Sequence[torch.Tensor],
        *,
        divisor: int,
    ) -> None:
        """Send each of `ranks` its parts, and sum those of this rank into sums[i], in the order of
        `ranks`."""
        me = self.topology.rank
        others = [rank for rank in ranks if rank != me]
        # All wholes travel in one batch: one round trip for a unit, not one for each of its flats.
        sends, receives, found = [], [], []
        for index, parts in enumerate(wholes):
            here = parts[me]
            # One buffer for each whole: all are received before the first is summed.
            space = self.buffer(f"sums {index}", len(others) * here.numel(), here.dtype).view(
                len(others), -1
            )
            theirs = dict(zip(others, space, strict=True))
            sends += [(rank, parts[rank]) for rank in others]
            receives += [(rank, theirs[rank]) for rank in others]
            found.append([here if rank == me else theirs[rank] for rank in ranks])
        self._send_receive(sends, receives)
        # All pieces are there before the first is added: their order is that of ranks, not of
        # arrival.
        for pieces, out in zip(found, sums, strict=True):
            wire.sum_in_order(pieces, out, divisor=divisor)

    def _reduce_level_quantized(
        self,
        level: int,
        index: int,
        parts: Parts,
        ranks: Sequence[int],
        columns: Sequence[Sequence[int]],
        places: dict[int, int],
        outs: Parts,
        errors: Callable[[int, int], Parts | None],
        divisor: int,
    ) -> None:
        """Reduce whole `index` over `ranks` on one level: encode, exchange, decode and sum.

        columns: the parts that each of `ranks` ends with. places: where a rank's part is in
            `parts`.
        outs: receive the sums of the parts in this rank's column.
        """
        me = self.topology.rank
        wires = self._coded_buffers(f"coded {level} {index}", parts, GRADIENT_BITS)
        # By level: rounding inside a node and between nodes makes different errors.
        taken = errors(level, index)
        for place, (part, coded) in enumerate(zip(parts, wires, strict=True)):
            error = None if taken is None else taken[place]
            wire.encode(part, coded, bits=GRADIENT_BITS, group_numel=SCALE_GROUP_NUMEL, error=error)
        others = [rank for rank in ranks if rank != me]
        mine = columns[ranks.index(me)]
        # Parts are equally long, so all wires are.
        size_bytes = wires[0].numel()
        space = self.buffer(
            f"came {level} {index}", len(others) * len(mine) * size_bytes, torch.uint8
        )
        theirs = dict(zip(others, space.view(len(others), len(mine), size_bytes), strict=True))
        self._send_receive(
            [(rank, wires[places[part]]) for rank in others for part in columns[ranks.index(rank)]],
            [(rank, one) for rank in others for one in theirs[rank]],
        )
        for at, whose in enumerate(mine):
            # This rank's own part is rounded as the others' are, or the sum would depend on who
            # sums.
            pieces = [wires[places[whose]] if rank == me else theirs[rank][at] for rank in ranks]
            wire.decode_sum(
                pieces, outs[at], bits=GRADIENT_BITS, group_numel=SCALE_GROUP_NUMEL, divisor=divisor
            )

    def _send_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send each tensor to its rank, and receive each from its rank, and count them. Blocks."""
        self._count(sends)
        self._transport.exchange(sends, receives)

    def _count(self, sends: Iterable[Message]) -> None:
        here = self.topology.node_ranks
        for rank, tensor in sends:
            # Counted where they are sent: each byte once, over all ranks.
            if rank in here:
                self.volume.inside += tensor.nbytes
            else:
                self.volume.across += tensor.nbytes


def _placed(parts: Parts, ranks: Sequence[int], world: int) -> Parts:
    """Place the parts of `ranks` in a list for all ranks, each at the index of its rank."""
    placed = [parts[0]] * world  # the other entries are never read
    for part, rank in zip(parts, ranks, strict=True):
        placed[rank] = part
    return placed
