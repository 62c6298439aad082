"""Hierarchical collectives over a transport. `comm_streams` calls them in its threads.

    all_gather            each rank has one part of a whole, and receives the others    (weights)
    reduce_scatter_mean   each rank has a whole, and gets the mean of its part          (gradients)

With several nodes of several ranks both collectives have two levels, so that each byte crosses
between nodes once. Counterparts are the ranks with the same local rank, one per node.

    all_gather            counterparts exchange their parts, then the ranks of each node
    reduce_scatter_mean   the ranks of each node sum, then counterparts sum these sums

**Order of sums**: a mean is summed in fp32 in the order of ranks, divided by their number, and
rounded once. With two levels it is rounded twice: each node's mean, in the order of its ranks, is
rounded to the dtype of the messages, and then the mean of these, in the order of nodes. So a mean
has the same bits in every run, whatever the backend of torch.distributed, its algorithms, sizes and
timing. A backend's all_reduce and reduce_scatter do not guarantee that.

Quantized parts (ZeRO++: Wang et al. 2023, sections 3.1 and 3.3) are sent in the layout of
`infinity._src.kernels.comm_codec`.
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
"""Elements per scale. Parameters start at multiples of this number, so no group spans two of them.
"""
WEIGHT_BITS, GRADIENT_BITS = 8, 4

Parts = Sequence[torch.Tensor]
"""One tensor per rank, in the order of ranks."""


@dataclasses.dataclass
class Volume:
    """Bytes that this rank has sent: inside its node, and across nodes."""

    inside: int = 0
    across: int = 0


class Collectives:
    """Collectives of one queue. Methods block. Not thread-safe.

    transport: for tensors on `device`.
    """

    def __init__(self, topology: Topology, transport: Transport, device: torch.device) -> None:
        self.topology = topology
        self.volume = Volume()
        self._transport = transport
        self._device = device
        # Reused by later collectives, so that steps allocate no memory after the first.
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized buffer [numel]; later calls with this name reuse its memory.

        The memory grows to the largest requested size.
        """
        size_bytes = numel * dtype.itemsize
        found = self._buffers.get(name)
        if found is None or found.numel() < size_bytes:
            # Free the smaller buffer before allocating the larger one.
            self._buffers.pop(name, None)
            found = self._buffers[name] = torch.empty(
                size_bytes, dtype=torch.uint8, device=self._device
            )
        return found[:size_bytes].view(dtype)

    def all_gather(self, wholes: Sequence[torch.Tensor], *, across: bool = True) -> None:
        """All-gather into each whole [world, part], in which this rank's part is set.

        across: False if the counterparts' parts are also set (secondary shards); then no message
        crosses nodes.
        """
        t = self.topology
        if min(t.nodes, t.local_world) == 1 and (across or t.nodes == 1):
            # One level: the transport may use the backend's all_gather. Its ring algorithm sends
            # as many bytes per rank as counted here.
            for whole in wholes:
                self._count((rank, whole[t.rank]) for rank in range(t.world) if rank != t.rank)
            self._transport.all_gather(wholes, t.rank)
            return
        if across and t.nodes > 1:
            others = [rank for rank in t.counterparts if rank != t.rank]
            self.exchange(
                [(rank, parts[t.rank]) for rank in others for parts in wholes],
                [(rank, parts[rank]) for rank in others for parts in wholes],
            )
        others = [rank for rank in t.node_ranks if rank != t.rank]
        # Inside the node each rank sends the parts of its counterparts, which no other rank of the
        # node has.
        self.exchange(
            [(rank, parts[mine]) for rank in others for parts in wholes for mine in t.counterparts],
            [
                (rank, parts[theirs])
                for rank in others
                for parts in wholes
                for theirs in self._column(rank)
            ],
        )

    def all_gather_quantized(self, wholes: Sequence[torch.Tensor]) -> None:
        """All-gather quantized to int8 with a scale per group (ZeRO++: qwZ).

        This rank's part is quantized, too, so that all ranks have the same weights.
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
        # Each rank decodes all parts, also the part that it has encoded.
        self.all_gather(wires)
        for parts, coded in zip(wholes, wires, strict=True):
            for part, one in zip(parts, coded, strict=True):
                wire.decode(one, part, bits=WEIGHT_BITS, group_numel=SCALE_GROUP_NUMEL)

    def all_reduce_or(self, flags: torch.Tensor) -> None:
        """OR flags (uint8) over the ranks, in place."""
        # By levels, so that no rank sends a message to every other rank.
        for ranks in self._levels():
            others = [rank for rank in ranks if rank != self.topology.rank]
            # Receive into separate buffers: `flags` must not change while it is sent.
            found = [torch.empty_like(flags) for _ in others]
            self.exchange(
                [(rank, flags) for rank in others], list(zip(others, found, strict=True))
            )
            for each in found:
                flags |= each

    def reduce_scatter_mean(self, wholes: Sequence[Parts], means: Sequence[torch.Tensor]) -> None:
        """Write the mean over ranks of this rank's part of whole i to means[i], in its dtype.

        The wholes are overwritten.
        """
        t = self.topology
        # One level, which rounds the mean once.
        if min(t.nodes, t.local_world) == 1:
            self._reduce_level(wholes, range(t.world), means, divisor=t.world)
            return
        # The node's means overwrite this rank's values, which saves a buffer.
        partial = [[parts[rank] for rank in t.counterparts] for parts in wholes]
        flat = [part for parts in partial for part in parts]
        self._reduce_level(
            # Inside the node first, so that one mean per node crosses between nodes.
            [self._for_node(parts, rank) for parts in wholes for rank in range(t.nodes)],
            t.node_ranks,
            flat,
            divisor=t.local_world,
        )
        self._reduce_level(
            # `_reduce_level` indexes parts by rank, also for a subset of ranks.
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
        """Reduce-scatter quantized to int4 with a scale per group (ZeRO++: qgZ). Overwrites the
        wholes.

        errors(level, index): error-feedback buffers of whole `index` on this level, one tensor per
        part, or None. Encoding adds the previous rounding errors in the buffers, and replaces them
        by the new ones.
        """
        t = self.topology
        levels = self._levels()
        work: list[Parts] = list(wholes)
        for level, ranks in enumerate(levels):
            last = level == len(levels) - 1
            # A rank ends with its part on the last level, before that with its counterparts' parts.
            columns = [[rank] for rank in ranks] if last else [self._column(rank) for rank in ranks]
            # The first level has a part for every rank, the second for each counterpart.
            places = {
                rank: place for place, rank in enumerate(range(t.world) if level == 0 else ranks)
            }
            next_work: list[Parts] = []
            for index, parts in enumerate(work):
                mine = columns[ranks.index(t.rank)]
                outs = (
                    [means[index]] if last else self._partials(index, len(mine), parts[0].numel())
                )
                # Only the last level divides: partial sums are fp32, and the scales of the int4
                # groups adapt to their size.
                divisor = t.world if last else 1
                self._reduce_level_quantized(
                    level, index, parts, ranks, columns, places, outs, errors, divisor
                )
                next_work.append(outs)
            work = next_work

    # -- inside ------------------------------------------------------------------------------------

    def _levels(self) -> list[Sequence[int]]:
        """Return the ranks that exchange with this rank, level by level."""
        t = self.topology
        if min(t.nodes, t.local_world) == 1:
            return [range(t.world)]
        # Inside the node first, so that one sum per node crosses between nodes, not one per rank.
        return [t.node_ranks, t.counterparts]

    def _column(self, rank: int) -> list[int]:
        """Return the counterparts of `rank`, including itself."""
        t = self.topology
        return [node * t.local_world + rank % t.local_world for node in range(t.nodes)]

    def _for_node(self, parts: Parts, node: int) -> Parts:
        """Select, for each rank, the part of its counterpart in `node`."""
        t = self.topology
        return [parts[node * t.local_world + rank % t.local_world] for rank in range(t.world)]

    def _partials(self, index: int, count: int, numel: int) -> list[torch.Tensor]:
        # fp32: the next level quantizes, and rounding here would add to its error.
        return list(
            self.buffer(f"partial {index}", count * numel, torch.float32).view(count, numel)
        )

    def _coded_buffers(self, name: str, parts: Parts | torch.Tensor, bits: int) -> torch.Tensor:
        """Return a buffer for the codes of these parts: uint8 [parts, bytes]."""
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
        """Exchange parts with `ranks`, and sum this rank's part of whole i into sums[i], in the
        order of `ranks`.
        """
        me = self.topology.rank
        others = [rank for rank in ranks if rank != me]
        # One batch for all wholes: one round trip per unit, not one per flat.
        sends, receives, found = [], [], []
        for index, parts in enumerate(wholes):
            here = parts[me]
            # A buffer per whole: all are received before the first is summed.
            space = self.buffer(f"sums {index}", len(others) * here.numel(), here.dtype).view(
                len(others), -1
            )
            theirs = dict(zip(others, space, strict=True))
            sends += [(rank, parts[rank]) for rank in others]
            receives += [(rank, theirs[rank]) for rank in others]
            found.append([here if rank == me else theirs[rank] for rank in ranks])
        self.exchange(sends, receives)
        # All pieces have arrived, so they are added in the order of ranks, not of arrival.
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

        columns: the parts that each of `ranks` ends with. places: rank -> index in `parts`. outs:
            the sums of the parts in this rank's column.
        """
        me = self.topology.rank
        wires = self._coded_buffers(f"coded {level} {index}", parts, GRADIENT_BITS)
        # Separate error feedback per level, since each level rounds different values.
        taken = errors(level, index)
        for place, (part, coded) in enumerate(zip(parts, wires, strict=True)):
            error = None if taken is None else taken[place]
            wire.encode(part, coded, bits=GRADIENT_BITS, group_numel=SCALE_GROUP_NUMEL, error=error)
        others = [rank for rank in ranks if rank != me]
        mine = columns[ranks.index(me)]
        # Parts have equal lengths, and so do their codes.
        size_bytes = wires[0].numel()
        space = self.buffer(
            f"came {level} {index}", len(others) * len(mine) * size_bytes, torch.uint8
        )
        theirs = dict(zip(others, space.view(len(others), len(mine), size_bytes), strict=True))
        self.exchange(
            [(rank, wires[places[part]]) for rank in others for part in columns[ranks.index(rank)]],
            [(rank, one) for rank in others for one in theirs[rank]],
        )
        for at, whose in enumerate(mine):
            # The sum takes this rank's quantized part, too; otherwise it would depend on the rank
            # that sums.
            pieces = [wires[places[whose]] if rank == me else theirs[rank][at] for rank in ranks]
            wire.decode_sum(
                pieces, outs[at], bits=GRADIENT_BITS, group_numel=SCALE_GROUP_NUMEL, divisor=divisor
            )

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send each tensor to its rank, and receive each from its rank, as `Transport.exchange`.
        Counts the sent bytes. Blocks."""
        self._count(sends)
        self._transport.exchange(sends, receives)

    def _count(self, sends: Iterable[Message]) -> None:
        here = self.topology.node_ranks
        for rank, tensor in sends:
            # The sender counts, so that the sum over ranks has each byte once.
            if rank in here:
                self.volume.inside += tensor.nbytes
            else:
                self.volume.across += tensor.nbytes


def _placed(parts: Parts, ranks: Sequence[int], world: int) -> Parts:
    """Return a list of all ranks with the parts of `ranks` at their indices."""
    placed = [parts[0]] * world  # the other entries are never read
    for part, rank in zip(parts, ranks, strict=True):
        placed[rank] = part
    return placed
