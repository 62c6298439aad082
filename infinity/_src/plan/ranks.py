"""Collectives of several ranks in a step, and the bytes that each rank holds.

A plan counts the bytes that one rank receives, inside its node and from other nodes; a rank sends
as many bytes as it receives. Collectives are hierarchical, as in the engine: a gather runs first
among the ranks with the same local rank on each node, then inside the node; a reduction runs in the
opposite order. So no byte reaches a node twice. Sizes of shards include the padding. Shares of M,
the bytes of all shards in the parameters' dtype, for N ranks on K nodes of n ranks:

    gather     (K - 1) / N from other nodes, (n - 1) / n inside; a reduction receives the same bytes
    qwZ        the same for gathers, with shards as int8 groups: 1 B for each element, and a scale
               for each SCALE_GROUP_NUMEL elements
    hpZ        all gathers of a step but the first read the node's copy, in the parameters' dtype:
               nothing from other nodes
    qgZ        the same for reductions, with gradients as int4 groups: half a byte for each element,
               and a scale for each SCALE_GROUP_NUMEL elements

In a gather all ranks of a node together receive (K - 1) / K of M from other nodes. ZeRO++ counts
that as M (`Exchanges.volume`): a step of one micro-batch under stage 3 is 3 M (two gathers, a
reduction). With all three switches it is 0.75 M in bf16: 0.5, 0 and 0.25 (without scales). The link
between two nodes carries as many bytes, both directions together.

Under stages 1 and 2 parameters stay on every device, and a step gathers the updated values once.
For an optimizer of whole matrices, ranks send each part of a matrix directly to the matrix's owner,
and the owner sends that part of the result back (`plan.matrices`).

With each reduction, ranks exchange a byte for each parameter, which says whether the parameter has
a gradient.

A rank holds, under each ZeRO stage:

               parameters                    gradients                       optimizer states
    stage 1    whole on every device         split; whole micro-batch sums   split over the ranks
    stage 2    whole on every device         split                           split over the ranks
    stage 3    split; gathered by units      split                           split over the ranks

Split states rest where the engine's planner places them (`plan.memory`), with the padding of
shards. With params="device", which stages 1 and 2 require, the optimizer states include a shard of
the parameters: the upper half of the masters. The device has the values for forward and backward:
all of them under stages 1 and 2, a shard under stage 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from infinity._src.distributed.collectives import GRADIENT_BITS, SCALE_GROUP_NUMEL, WEIGHT_BITS
from infinity._src.kernels.quantized import wire_bytes
from infinity._src.memory.flat_layout import aligned_section_bytes
from infinity._src.memory.pcie import Copied, Copies
from infinity._src.memory.ram_budget import FlatNeed, PlacementPlan, chunks_alike
from infinity._src.plan.machine import Machine
from infinity._src.plan.matrices import matrix_work
from infinity._src.plan.memory import (
    BESIDE_BUDGET,
    TierBytes,
    gathered_bytes,
    place_in_ram,
)
from infinity._src.plan.workload import FlatShape, Job, JobShape, ModelShape, shape_in

# -- Traffic of a rank -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """One kind of collective in a step.

    count: number of times per step. beside_updates: the part of `count` that runs while updates
    run. before_updates: the part of `count` that runs before the step's last updates (only for
    whole matrices). inside, across: bytes that one rank receives each time, from ranks of its node
    and from other nodes.
    """

    name: str
    count: int
    beside_updates: int
    inside: float
    across: float
    before_updates: int = 0


@dataclasses.dataclass(frozen=True)
class Exchanges:
    """Collectives of a step. plain_bytes: M of the module's formulas: the bytes of all shards in
    the parameters' dtype, with padding.
    """

    each: tuple[PlannedCollective, ...]
    plain_bytes: float
    ranks_of_node: int
    nodes: int

    @property
    def inside(self) -> float:
        """Bytes that one rank receives from its node in a step."""
        return sum(found.count * found.inside for found in self.each)

    @property
    def across(self) -> float:
        """Bytes that one rank receives from other nodes in a step."""
        return sum(found.count * found.across for found in self.each)

    @property
    def volume(self) -> float:
        """Bytes between nodes (on one node: between its ranks) in units of M. An unquantized gather
        of all parameters counts 1.
        """
        parts = self.nodes if self.nodes > 1 else self.ranks_of_node
        if parts == 1 or not self.plain_bytes:
            return 0.0
        size = self.across * self.ranks_of_node if self.nodes > 1 else self.inside
        # A gather receives (parts - 1) / parts of M; the factor counts it as M, as ZeRO++ does.
        return size * parts / (parts - 1) / self.plain_bytes

    def copies(self, nodes: bool = False) -> Copies:
        """Return the bytes that one rank receives (h2d) and sends (d2h) inside its node.

        nodes: count instead the bytes that all ranks of a node receive from and send to other
        nodes.
        """
        window = rest = matrices = 0.0
        for found in self.each:
            size = found.across * self.ranks_of_node if nodes else found.inside
            window += found.beside_updates * size
            matrices += found.before_updates * size
            rest += (found.count - found.beside_updates - found.before_updates) * size
        # A rank sends as many bytes as it receives.
        return Copies(*(Copied(part, part) for part in (window, rest, matrices)))


def exchanges(shape: JobShape, machine: Machine, job: Job, regathered: float) -> Exchanges:
    """List the collectives of a step; one rank has none. regathered: share of the parameters that
    the vertical schedule gathers separately for each micro-batch.
    """
    plain = float(shape.gathered_bytes(machine.world))
    if machine.world == 1:
        return Exchanges((), plain, 1, 1)
    trained = [(flat, count) for flat, count in shape.kinds_of_flats if flat.trainable]
    weights = WEIGHT_BITS if job.policy.qwz else None
    both = _ways(machine, _shards(shape, machine.world, weights))
    flags = sum(count * len(flat.numels) for flat, count in trained)
    coded = GRADIENT_BITS if job.policy.qgz else None
    grads = _shards(shape, machine.world, coded, job.policy.grad_dtype, trained=True)
    inside, across = _ways(machine, grads)
    # Add a byte for each parameter, which says whether the parameter has a gradient; ranks exchange
    # these bytes inside the node and between nodes, too.
    reduced = inside + (machine.ranks - 1) * flags, across + (machine.nodes - 1) * flags
    count, in_backward = job.passes, job.policy.update == "backward"
    # A delayed update may take the whole next step, so every exchange overlaps the update.
    late = job.policy.delays
    found = []
    if job.whole_params(machine.world):
        # Frozen values never change, so only trained parameters are gathered.
        if trained:
            found.append(
                PlannedCollective(
                    "gather of what was updated", 1, 1,
                    *_ways(machine, _shards(shape, machine.world, weights, trained=True)),
                )
            )  # fmt: skip
    else:
        # Under hpZ only the first gather of a step reads from other nodes: the node's copy stays
        # current until the update.
        first, again = (1, 2 * count - 1) if job.policy.hpz else (count, count)
        copy = (_ways(machine, _shards(shape, machine.world))[0], 0.0) if job.policy.hpz else both
        # A deferred update runs concurrently with the next forward, and so with a gather.
        found.append(PlannedCollective("gather in forward", first, first if late else 1, *both))
        name = "gather from the node's copy" if job.policy.hpz else "gather in backward"
        # Updates in backward run concurrently with the gather of the last backward, and with the
        # reduction that is added below.
        found.append(PlannedCollective(name, again, again if late else int(in_backward), *copy))
        if regathered:
            name, more = "gather for each micro-batch", job.gathers_again
            of_share = (regathered * copy[0], regathered * copy[1])
            found.append(PlannedCollective(name, more, more if late else 0, *of_share))
    if trained:
        times = job.reductions
        found.append(
            PlannedCollective(
                "reduction of gradients", times, times if late else int(in_backward), *reduced
            )
        )
    work = matrix_work(shape, machine, job)
    for name in ("matrices to their owners", "results back") if work.numel else ():
        ways, before = work.received(machine), int(not in_backward)
        found.append(PlannedCollective(name, 1, 1 - before, *ways, before_updates=before))
    return Exchanges(tuple(found), plain, machine.ranks, machine.nodes)


def _shards(
    shape: JobShape,
    world: int,
    bits: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    trained: bool = False,
) -> float:
    """Return the bytes that a transfer of one rank's shards of all FlatParameters takes. bits: bits
    of a quantized element; None: not quantized. dtype: dtype of an element; None: the parameter's.
    trained: count only trained FlatParameters.
    """

    def size(flat: FlatShape) -> float:
        numel = flat.shard_numel(world)
        if bits is not None:
            return float(wire_bytes(numel, bits, SCALE_GROUP_NUMEL))
        return float(numel * (dtype or flat.dtype).itemsize)

    flats = shape.kinds_of_flats
    return shape.remember(
        ("shards", world, bits, dtype, trained),
        lambda: sum(count * size(flat) for flat, count in flats if flat.trainable or not trained),
    )


def _ways(machine: Machine, shards: float) -> tuple[float, float]:
    """Return the bytes that one rank receives when the ranks gather, or reduce, every FlatParameter
    once: (inside its node, from other nodes). shards: bytes that a transfer of one rank's shards
    takes.
    """
    # Counterparts are the ranks with the same local rank on other nodes. A rank first receives the
    # counterparts' shards. Then each rank of the node sends its shards and its counterparts'.
    return (machine.ranks - 1) * machine.nodes * shards, (machine.nodes - 1) * shards


# -- Memory of a rank ------------------------------------------------------------------------------


STAGES = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank under one stage, by the name of the state. Device memory includes only
    parameters, no gradients or activations.
    """

    stage: int
    states: dict[str, TierBytes]

    @property
    def total(self) -> TierBytes:
        return sum(self.states.values(), TierBytes())


def bytes_of_rank(model: ModelShape, machine: Machine, job: Job) -> RankBytes:
    """Count the bytes of each rank under the policy's stage. model: uncut (without tiles)."""
    shape = shape_in(job, model)
    placed = place_in_ram(shape, machine, job)
    states = _states(shape, machine, job, placed.needs, placed.plan)
    beside = {BESIDE_BUDGET: TierBytes(cpu=placed.outside.peak / machine.ranks)}
    return RankBytes(job.policy.zero, states | placed.beside | beside)


def stages(shape: ModelShape, machine: Machine, job: Job) -> list[RankBytes]:
    """Count the bytes of the same job under each stage. For stages 1 and 2 the job is changed to
    params="device", without the settings that these stages refuse. If the job has stage 1 or 2, its
    parameters are placed under stage 3 on the tier of the optimizer states.
    """
    found, policy = [], job.policy
    for stage in STAGES:
        fields: dict[str, Any] = {}
        if stage != policy.zero:
            # The user chose `accumulate` for the job's stage: use the default of other stages.
            fields = {"zero": stage, "accumulate": None}
            if stage == 3:
                fields["params"] = policy.optim
            else:
                # Stages 1 and 2 refuse these settings. `resident` is for states on NVMe, so remove
                # the part for parameters.
                resident = {k: part for k, part in policy.resident_parts.items() if k != "params"}
                fields |= {
                    "params": "device",
                    "hpz": None,
                    "durable": False,
                    "resident": resident or None,
                }
        found.append(bytes_of_rank(shape, machine, job.replace(**fields)))
    return found


def _states(
    shape: JobShape, machine: Machine, job: Job, needs: Sequence[FlatNeed], plan: PlacementPlan
) -> dict[str, TierBytes]:
    cpu = dict.fromkeys(("params", "optim", "grads"), 0.0)
    nvme = dict(cpu)
    for need, numel, mask, count in chunks_alike(plan.in_formats(needs), plan.nvme_masks):
        for index, section in enumerate(need.sections):
            # Spilled gradients need no second generation.
            spilled = need.kind(index) == "grad"
            kind = "grads" if spilled else "optim" if index else "params"
            times = count * (1 if spilled else need.versions)
            # If this bit is set, the section is on NVMe, padded to 4096 bytes.
            if mask >> index & 1:
                nvme[kind] += times * aligned_section_bytes(section, numel)
            else:
                cpu[kind] += times * section.size_bytes(numel)
    stays = job.whole_params(machine.world)
    found = {
        "parameters at rest": TierBytes(cpu=cpu["params"], nvme=nvme["params"]),
        "parameters on the device" if stays else "parameters gathered, at most": TierBytes(
            device=gathered_bytes(shape, machine, job)
        ),
        "gradients": TierBytes(cpu=float(plan.grad_bytes), nvme=nvme["grads"]),
        "optimizer states": TierBytes(cpu=cpu["optim"], nvme=nvme["optim"]),
        "parameters of the step before": TierBytes(cpu=float(plan.delayed_params_bytes)),
        "buffers and checksums": TierBytes(
            cpu=float(
                plan.ram_bytes - plan.grad_bytes
                - plan.delayed_params_bytes - plan.resident_bytes
            )
        ),
    }
    return {name: size for name, size in found.items() if size}
