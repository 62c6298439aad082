"""What ranks tell each other in a step: bytes that one rank receives (and sends), inside its node and from other nodes.

Each is counted as the engine moves it: hierarchically, first among the ranks with the same place in their nodes, then inside
the node (gathers), or the other way round (reductions), so that no byte comes to a node twice. A shard of a flat counts with
its padding. For N ranks on K nodes of n, of all shards (their bytes: M in bf16)

    gather       (K - 1) / N from other nodes, (n - 1) / n inside             a reduction is the same backwards
    qwZ          the same of shards as int8 groups: 1 B and a scale for each GROUP_NUMEL elements
    hpZ          all gathers of a step but the first are from the node's own copy, in the parameters' dtype: nothing across
    qgZ          the same of gradients as int4 groups: half a byte and a scale for each GROUP_NUMEL elements

All ranks of a node together take (K - 1) / K of M from other nodes with a gather. ZeRO++ counts that as M (`Exchanges.volume`):
a step of one micro-batch under stage 3 is 3 M (two gathers, a reduction) and with all three switches 0.75 M: 0.5, 0 and 0.25
(beside scales). Over the link of two nodes as many bytes go, both directions together.

Stages 1 and 2, whose parameters stay on every device, gather once in a step: what was updated. With a reduction goes a byte for
each parameter: which ones have a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from infinity._src.distributed.exchange import GRADIENT_BITS, SCALE_GROUP_NUMEL, WEIGHT_BITS
from infinity._src.kernels.comm_codec import wire_bytes
from infinity._src.memory.layout import FlatLayout, plan_flat
from infinity._src.perf.pcie import Copied, Copies
from infinity._src.perf.plan.job import Job
from infinity._src.perf.plan.machine import Machine
from infinity._src.perf.plan.shape import FlatShape, ModelShape


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One kind of collective in a step: how often, how many of them while updates run, and what one rank receives each time."""

    name: str
    count: int
    beside_updates: int
    inside: float
    across: float


@dataclasses.dataclass(frozen=True)
class Exchanges:
    """All of a step. plain_bytes: M of the module's formulas, gathered values as they compute with the padding of shards."""

    each: tuple[Exchange, ...]
    plain_bytes: float
    ranks_of_node: int
    nodes: int

    @property
    def inside(self) -> float:
        """Bytes that one rank has from its node in a step."""
        return sum(found.count * found.inside for found in self.each)

    @property
    def across(self) -> float:
        """Bytes that one rank has from other nodes in a step."""
        return sum(found.count * found.across for found in self.each)

    @property
    def volume(self) -> float:
        """What goes between nodes (on one: between its ranks), in units of M: a gather of everything as it is counts 1."""
        parts = self.nodes if self.nodes > 1 else self.ranks_of_node
        if parts == 1 or not self.plain_bytes:
            return 0.0
        size = self.across * self.ranks_of_node if self.nodes > 1 else self.inside
        return size * parts / (parts - 1) / self.plain_bytes

    def copies(self, nodes: bool = False) -> Copies:
        """Received (h2d) and sent (d2h) by one rank inside its node; nodes: by all ranks of a node, from and to the others."""
        window = rest = 0.0
        for found in self.each:
            size = found.across * self.ranks_of_node if nodes else found.inside
            window += found.beside_updates * size
            rest += (found.count - found.beside_updates) * size
        return Copies(Copied(window, window), Copied(rest, rest))


def exchanges(shape: ModelShape, machine: Machine, job: Job) -> Exchanges:
    """What one of several ranks takes part in during a step; nothing where there is one."""
    flats = [(flat, plan_flat(flat.numels, flat.dtype.itemsize, machine.world)) for flat in shape.flats]
    plain = float(sum(layout.numel * layout.itemsize for _, layout in flats))
    if machine.world == 1:
        return Exchanges((), plain, 1, 1)
    trained = [found for found in flats if found[0].trainable]
    weights, grads = _weight_bytes(job), _grad_bytes(job)
    both = _ways(machine, flats, weights)
    flags = sum(len(flat.numels) for flat, _ in trained)
    inside, across = _ways(machine, trained, grads)
    reduced = inside + (machine.ranks - 1) * flags, across + (machine.nodes - 1) * flags
    count, early = job.micro_batches, job.update == "backward"
    late = job.update == "delayed"  # everything is beside the update, which has the whole next step
    found = []
    if job.whole_params(machine.world):
        if trained:
            found.append(Exchange("gather of what was updated", 1, 1, *_ways(machine, trained, weights)))
    else:
        # Under hpZ only the first gather of a step needs other nodes: until the update the node's own copy is current.
        first, again = (1, 2 * count - 1) if job.hpz else (count, count)
        copy = (_ways(machine, flats, _plain)[0], 0.0) if job.hpz else both
        found.append(Exchange("gather in forward", first, first if late else 1, *both))
        name = "gather from the node's copy" if job.hpz else "gather in backward"
        found.append(Exchange(name, again, again if late else int(early), *copy))
    if trained:
        times = job.reductions
        found.append(Exchange("reduction of gradients", times, times if late else int(early), *reduced))
    return Exchanges(tuple(found), plain, machine.ranks, machine.nodes)


_OfShard = Callable[[FlatShape, int], float]


def _plain(flat: FlatShape, numel: int) -> float:
    return float(numel * flat.dtype.itemsize)


def _weight_bytes(job: Job) -> _OfShard:
    """Bytes of a shard's values on the wire."""
    return (lambda _flat, numel: float(wire_bytes(numel, WEIGHT_BITS, SCALE_GROUP_NUMEL))) if job.qwz else _plain


def _grad_bytes(job: Job) -> _OfShard:
    """Bytes of a shard's gradients on the wire."""
    if job.qgz:
        return lambda _flat, numel: float(wire_bytes(numel, GRADIENT_BITS, SCALE_GROUP_NUMEL))
    return lambda flat, numel: float(numel * job.grad_itemsize(flat.dtype))


def _ways(
    machine: Machine, flats: Sequence[tuple[FlatShape, FlatLayout]], size: _OfShard
) -> tuple[float, float]:
    """(inside, across): what one rank receives when every flat is gathered once, or reduced once."""
    shards = sum(size(flat, layout.shard_numel) for flat, layout in flats)
    return (machine.ranks - 1) * machine.nodes * shards, (machine.nodes - 1) * shards
