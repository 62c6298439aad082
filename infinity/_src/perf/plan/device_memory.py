"""Memory of one GPU (or, where the CPU computes, of the process as a device): what a step takes at most, part by part.

    gathered units       (AHEAD + 1) times the largest: the bound that the engine keeps (`params.unshard`); all where whole
                         parameters stay on the device
    shards on the device of several ranks: this one's share of its node's copy (hpZ), or of parameters that stay under stage 3
    exchange buffers     of several ranks: the largest unit's gradients to be reduced, and those that come; codes besides
    fresh gradients      of the unit in backward and, where a GPU computes, of those that may be on their way from it: of
                         LEAVING_UNITS, of WINDOW_UNITS with update="backward"; where the CPU does, of UNITS_AHEAD then
    inputs of blocks     kept for recomputing, of every layer; of a few where they wait on the CPU or on drives
    one block at work,   what a block computes in backward, or the logits and their loss: the larger, since they come at
    or logits and loss   different times; without checkpointing all blocks, and the logits
    states in update     chunks on their way, with the update on the GPU
    CUDA and libraries   context, kernels and cuBLAS workspaces; NCCL's buffers where there are several GPUs (assumed)

Activations are estimates (`planning.shape`). What the allocator leaves unused between blocks of memory is in none of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from infinity._src.hooks.activation_offload import HELD_CALLS, LEAVING_BYTES
from infinity._src.memory.device import LEAVING_UNITS
from infinity._src.optim.backward_update import UNITS_AHEAD
from infinity._src.optim.device_update import AHEAD_CHUNKS
from infinity._src.optim.grad_windows import WINDOW_UNITS
from infinity._src.params.unshard import AHEAD
from infinity._src.perf.plan.job import Job
from infinity._src.perf.plan.machine import Machine
from infinity._src.perf.plan.placed import beside_placement
from infinity._src.perf.plan.shape import ModelShape
from infinity._src.sizes import MIB
from infinity.aio import Format
from infinity.aio._records import chunk_numel

CUDA_BYTES = 640 * MIB
"""What a process holds of a GPU before it computes anything: context, kernels, cuBLAS workspaces (assumed)."""

NCCL_BYTES = 512 * MIB
"""What NCCL holds besides (assumed)."""

CHUNKS_IN_UPDATE = 2 * AHEAD_CHUNKS
"""Chunks of states that are on a GPU at once when it updates them: on their way in, in the kernel, on their way out."""

TILES = (2, 4, 8, 16, 32, 64)
WORDS = (8192, 2048)  # whose logits are computed at once


@dataclasses.dataclass(frozen=True)
class Need:
    """How much of something a plan takes, of how much there is (None: not known), and what it consists of."""

    bytes: float
    there_is: float | None
    parts: dict[str, float]

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.there_is is None or self.bytes <= self.there_is


@dataclasses.dataclass(frozen=True)
class Way:
    """One change of a job that makes it fit a GPU: what it is, how the engine is told, and what it then needs."""

    name: str
    how: str
    job: Job
    need: Need


def loss_tiles(shape: ModelShape, words: int = WORDS[0]) -> int:
    """Tiles of the loss that have so many words at most."""
    return max(1, -(-shape.vocabulary // words))


def gpu_need(shape: ModelShape, machine: Machine, job: Job) -> Need:
    """Device memory of one GPU; the module has the parts."""
    whole = float(shape.gathered_bytes(machine.world))
    largest = float(shape.largest_tiled_bytes(job.tiles, job.loss_tiles, machine.world))
    early = job.update == "backward" and not job.speculates
    if machine.gpus:
        waiting = 1 + (WINDOW_UNITS if early else LEAVING_UNITS)
    else:
        waiting = UNITS_AHEAD if early else 1
    parts = {
        "gathered units": gathered_bytes(shape, machine, job),
        **{name: size.device for name, size in beside_placement(shape, machine, job).items()},
        "exchange buffers": _exchange_bytes(machine, job, largest),
        "fresh gradients": min(waiting * largest, whole),
        **_activations(shape, machine, job),
    }
    if machine.gpus:
        if job.update_on == "device":
            numel = chunk_numel(Format.SPLIT)
            parts["states in update"] = float(CHUNKS_IN_UPDATE * numel * 14)  # 12 B of states and 2 B of gradient
        parts["CUDA and libraries (assumed)"] = float(CUDA_BYTES + (NCCL_BYTES if machine.world > 1 else 0))
    parts = {name: size for name, size in parts.items() if size}
    return Need(sum(parts.values()), machine.gpu_mem_bytes, parts)


def _exchange_bytes(machine: Machine, job: Job, largest: float) -> float:
    """The whole of a unit to be reduced and the parts that come; with codes, a quarter and (weights) half of it twice, and fp32
    sums of what goes to other nodes."""
    if machine.world == 1:
        return 0.0
    coded = (0.5 if job.qgz else 0.0) + (0.5 if job.qwz else 0.0)
    partial = 2.0 / machine.ranks if job.qgz and machine.nodes > 1 else 0.0
    return ((1.0 if job.qgz else 2.0) + coded + partial) * largest


def gathered_bytes(shape: ModelShape, machine: Machine, job: Job) -> float:
    """The most that values of parameters take on the device of a rank."""
    whole = float(shape.gathered_bytes(machine.world))
    if job.whole_params(machine.world):
        return whole
    return min((AHEAD + 1) * float(shape.largest_tiled_bytes(job.tiles, job.loss_tiles, machine.world)), whole)


def _activations(shape: ModelShape, machine: Machine, job: Job) -> dict[str, float]:
    tokens = job.micro_batch_tokens(machine.world)
    block = float(tokens * shape.block_bytes_per_token)
    logits = float(tokens * shape.logits_bytes_per_token(job.loss_tiles))
    if not job.checkpointing:
        return {"activations of all blocks (estimated)": shape.layers * block, "logits and loss (estimated)": logits}
    one = float(tokens * shape.itemsize * shape.width)
    inputs = float(tokens * shape.boundary_bytes_per_token)
    if job.activations != "device":
        inputs = min(inputs, HELD_CALLS * one + max(2 * one, LEAVING_BYTES))
    found = {"inputs of blocks": inputs}
    if logits > block:
        found["logits and loss (estimated)"] = logits
    else:
        found["one block at work (estimated)"] = block
    return found


def ways_to_fit(shape: ModelShape, machine: Machine, job: Job) -> list[Way]:
    """The single changes after each of which a job that does not fit a GPU does, with what they then need; each as small as it
    may be."""
    found = []
    for options in _options(shape, machine, job):
        for option in options:
            changed = dataclasses.replace(job, **option.fields)
            need = gpu_need(shape, machine, changed)
            if need.fits:
                found.append(Way(option.name, option.how, changed, need))
                break
    return found


def least_need(shape: ModelShape, machine: Machine, job: Job) -> Need:
    """What is needed with all of these changes together, as far as each goes."""
    for options in _options(shape, machine, job):
        if options:
            job = dataclasses.replace(job, **options[-1].fields)
    return gpu_need(shape, machine, job)


@dataclasses.dataclass(frozen=True)
class _Option:
    """Something to be tried: its name, how the engine is told, fields of the job."""

    name: str
    how: str
    fields: dict[str, Any]


def _options(shape: ModelShape, machine: Machine, job: Job) -> list[list[_Option]]:
    """For each kind of change what may be tried, the smallest first."""
    found = [
        [
            _Option(f"linears in {count} tiles", f"inf.tile_linears(model, tiles={count})", {"tiles": count})
            for count in TILES
            if count > job.tiles
        ]
    ]
    found.append(
        [
            _Option(f"the loss in {count} tiles", f"inf.tile_loss(model, tiles={count})", {"loss_tiles": count})
            for count in (loss_tiles(shape, words) for words in WORDS)
            if count > job.loss_tiles
        ]
    )
    if not job.checkpointing:
        found.append(
            [_Option("gradient checkpointing", "model.gradient_checkpointing_enable()", {"checkpointing": True})]
        )
    elif job.activations == "device":
        tiers = [("cpu", "the CPU")] if machine.gpus else []
        tiers += [("nvme", "the drives")] if machine.drives else []
        found += [
            [_Option(f"activations on {place}", f"activations={tier!r}", {"activations": tier})] for tier, place in tiers
        ]
    found.append(_fewer_tokens(machine, job))
    return found


def _fewer_tokens(machine: Machine, job: Job) -> list[_Option]:
    """More micro-batches of fewer tokens each, down to one sequence."""
    found = []
    now = job.micro_batch_tokens(machine.world)
    count = 2 * job.micro_batches
    while job.tokens >= count * machine.world:
        tokens = dataclasses.replace(job, micro_batches=count).micro_batch_tokens(machine.world)
        if tokens < job.sequence:
            break
        told = f"{tokens:,} tokens in each, not {now:,}"
        found.append(_Option(f"{count} micro-batches", told, {"micro_batches": count}))
        count *= 2
    return found
