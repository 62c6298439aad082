"""What one rank holds: bytes by state and tier, for each ZeRO stage.

                 parameters                            gradients                              optimizer states
    stage 1      whole on every device                 split; whole sums of micro-batches     split over the ranks
    stage 2      whole on every device                 split                                  split over the ranks
    stage 3      split; gathered unit by unit          split                                  split over the ranks

Where what is split rests is the engine's own placement (`planning.placed`), of one rank's shards with their padding. With
params="device", as stages 1 and 2 have it, the shard of the parameters that rests is the upper half of their masters, beside the
optimizer's states; what computes is on the device, under stage 3 a shard of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from infinity._src.memory.layout import aligned_section_bytes
from infinity._src.memory.placement import FlatNeed, PlacementPlan
from infinity._src.perf.plan.device_memory import gathered_bytes
from infinity._src.perf.plan.job import Job
from infinity._src.perf.plan.machine import Machine
from infinity._src.perf.plan.placed import Tiers, beside_placement, place
from infinity._src.perf.plan.shape import ModelShape

STAGES = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """What one rank holds under one stage. states: by name; of device memory only values of parameters are among them."""

    stage: int
    states: dict[str, Tiers]

    @property
    def total(self) -> Tiers:
        """Of all states."""
        return sum(self.states.values(), Tiers())


def bytes_of_rank(shape: ModelShape, machine: Machine, job: Job, *, waiting: float = 0.0) -> RankBytes:
    """What each rank holds under `job.zero`. waiting: bytes of CPU memory that all ranks of a node need for something else."""
    beside = beside_placement(shape, machine, job)
    held = int(sum(size.cpu for size in beside.values()))
    needs, plan = place(shape, machine, job, int(machine.ram_bytes - waiting) // machine.ranks - held)
    return RankBytes(job.zero, _states(shape, machine, job, needs, plan) | beside)


def stages(shape: ModelShape, machine: Machine, job: Job) -> list[RankBytes]:
    """The same job under each stage; stages 1 and 2 with parameters on the device, and without what they do not have. Beside
    one of these, stage 3 is shown with parameters where the optimizer's states are."""
    found = []
    for stage in STAGES:
        other = dataclasses.replace(job, zero=stage, accumulate=job.accumulate if stage == job.zero else None)
        if stage == 3 > job.zero:
            other = dataclasses.replace(other, params=job.optim)
        if stage != job.zero and stage < 3:
            # What of these a stage does not have; `resident` is for what rests on NVMe.
            kept = {kind: part for kind, part in (job.resident or {}).items() if kind != "params"}
            other = dataclasses.replace(other, params="device", hpz=None, durable=False, resident=kept or None)
        found.append(bytes_of_rank(shape, machine, other))
    return found


def _states(shape: ModelShape, machine: Machine, job: Job, needs: Sequence[FlatNeed], plan: PlacementPlan) -> dict[str, Tiers]:
    cpu = dict.fromkeys(("params", "optim", "grads"), 0.0)
    nvme = dict(cpu)
    for need, placed, row in zip(needs, plan.formats, plan.nvme_masks, strict=True):
        need = dataclasses.replace(need, format=placed)
        for index, section in enumerate(need.sections):
            spilled = need.kind(index) == "grad"
            kind = "grads" if spilled else "optim" if index else "params"
            versions = 1 if spilled else need.versions
            for numel, mask in zip(need.numels, row, strict=True):
                if mask >> index & 1:
                    nvme[kind] += versions * aligned_section_bytes(section, numel)
                else:
                    cpu[kind] += versions * section.size_bytes(numel)
    stays = job.whole_params(machine.world)
    found = {
        "parameters at rest": Tiers(cpu=cpu["params"], nvme=nvme["params"]),
        "parameters on the device" if stays else "parameters gathered, at most": Tiers(
            device=gathered_bytes(shape, machine, job)
        ),
        "gradients": Tiers(cpu=float(plan.grad_bytes), nvme=nvme["grads"]),
        "optimizer states": Tiers(cpu=cpu["optim"], nvme=nvme["optim"]),
        "parameters of the step before": Tiers(cpu=float(plan.shadow_bytes)),
        "buffers and checksums": Tiers(cpu=float(plan.ram_bytes - plan.grad_bytes - plan.shadow_bytes - plan.resident_bytes)),
    }
    return {name: size for name, size in found.items() if size}
