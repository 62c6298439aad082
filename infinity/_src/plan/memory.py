"""Memory that a job needs: placement of the states of each rank, and device memory, part by part.

The engine's planner places the states (`memory.ram_budget`). A model of 400 billion parameters has
a million chunks. A plan places coarser pieces instead, about `PIECES_MAX` at most, which moves the
border between resident and spilled states by about one part in a thousand. Staging buffers for
pieces are larger than for chunks; a plan counts the buffers for chunks.

Device memory is the memory of one GPU. If the CPU computes, it is a part of the RAM, outside of the
budget. The parts of device memory, each at its peak in a step:

    gathered units       the unit in use and units gathered ahead of it, within the engine's bound
                         (`memory.device_capacity`); all units where whole parameters stay on the
                         device
    shards on the device several ranks: this rank's share of the node's copy (hpZ), or of parameters
                         that stay on the device under stage 3
    exchange buffers     several ranks: the largest unit's gradients before reduction, the parts
                         received from other ranks, and the quantized codes of both
    fresh gradients      gradients of the unit in backward and of units whose gradients are being
                         copied off or reduced, within the engine's bound; vertical schedule: one
                         parameter's gradient of one micro-batch, and its copy in the dtype of sums
    sums of gradients    sums of earlier micro-batches, copied back to a GPU, which adds the next
                         gradients: whole sums of SUMS_UNITS units or, on several ranks, this rank's
                         parts of the units in reduction; vertical schedule: sums of the block in
                         backward and of blocks whose sums are being copied off or reduced
    errors on their way  qgZ on a GPU: error feedback of the units in reduction
    inputs of blocks     retained for recomputation, one for each layer; only the last few if the
                         policy stores activations on the CPU or on drives; vertical schedule: of
                         all micro-batches
    one boundary         vertical schedule: inputs and outputs of the current block for all
                         micro-batches, and the outputs concatenated; or the gradients of these
    one block at work,   the larger of: activations of one block in backward, logits and loss (they
    or logits and loss   exist at different times); without checkpointing: activations of all
                         blocks, and logits and loss
    matrices in update   GPU, optimizer of whole matrices: the matrices of the units that are
                         exchanged at the same time, and scratch (`plan.matrices`)
    states in update     update on the GPU: chunks being read, updated and written
    tuning of tiles      if Triton computes tiles: memory to measure a kernel's configurations at
                         the first product of each shape
    CUDA and libraries   context, kernels and cuBLAS workspaces; with several ranks NCCL's buffers
                         (assumed)

In the vertical schedule a block stays gathered, with all its units and tiles, until the last
micro-batch has passed it, and its gradients stay on the device as long. If the device has no
capacity for all units of a block, as many units stay as fit
(`memory.device_capacity.retained_capacity`).

Activations are estimates (`plan.workload`). A plan does not count fragmentation of the allocator.

The ranks of a node take RAM in addition to their budgets, `Policy.ram`: records of chunks and
units, and more in each phase (`memory.host_overhead`). A node needs RAM for the whole budgets and
the peak of this overhead. That is conservative for the fill, during which no gradients exist. A
plan does not count the interpreter, torch, CUDA's host memory, memory of the training loop, and
memory of a source that converts tensors, which depends on the files (`inf.offload` counts it).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from infinity._src.base.sizes import MIB, round_up
from infinity._src.cabi.records import GradSection, chunk_numel
from infinity._src.kernels import choice
from infinity._src.memory.constants import (
    AHEAD_CHUNKS,
    HELD_CALLS,
    REDUCING_UNITS,
    SPARES_PER_DRIVE,
    STORING_BYTES_MAX,
    SUMS_UNITS,
)
from infinity._src.memory.device_capacity import (
    Passes,
    UnitBytes,
    fresh_capacity,
    gathered_capacity,
    gradients_capacity,
    regathered_bytes,
    slice_grad_bytes,
    sums_capacity,
)
from infinity._src.memory.flat_layout import FlatLayout, plan_flat, state_format
from infinity._src.memory.host_overhead import fill_bytes, held_bytes, passing_bytes
from infinity._src.memory.ram_budget import (
    FlatNeed,
    PlacementPlan,
    StepLoad,
    chunks_alike,
    idle_mask_of,
    plan_placement,
    run_bytes_of,
)
from infinity._src.memory.roofline import AtRest, Moves
from infinity._src.optim.grad_windows import windows_bytes
from infinity._src.optim.whole_matrices import scratch_bytes
from infinity._src.params.grad_norms import NORM_PIECE_NUMEL
from infinity._src.plan.machine import Machine
from infinity._src.plan.matrices import chunk_shares, matrix_work, moves_of
from infinity._src.plan.workload import FlatShape, Job, JobShape, ModelShape, UnitShape, shape_in
from infinity.aio import Format
from infinity.errors import BudgetError

# -- CPU memory and drives -------------------------------------------------------------------------


PIECES_MAX = 2048
"""Largest number of pieces of a rank, about. A piece is then about one part in a thousand of the
model, which is the resolution of the resident share.
"""


@dataclasses.dataclass(frozen=True)
class TierBytes:
    """Bytes on each tier: device memory, CPU memory, drives."""

    device: float = 0.0
    cpu: float = 0.0
    nvme: float = 0.0

    def __add__(self, other: TierBytes) -> TierBytes:
        return TierBytes(self.device + other.device, self.cpu + other.cpu, self.nvme + other.nvme)

    def __bool__(self) -> bool:
        return bool(self.device or self.cpu or self.nvme)


def beside_placement(shape: JobShape, machine: Machine, job: Job) -> dict[str, TierBytes]:
    """Return the bytes that each rank holds in addition to its placed states, by name. Zeros are
    left out; a single rank has none.
    """
    if machine.world == 1:
        return {}
    flats = [
        (flat, flat.shard_numel(machine.world), count) for flat, count in shape.kinds_of_flats
    ]
    trained = [each for each in flats if each[0].trainable]
    found = {}
    # Inside `no_sync` every rank adds up whole gradients; the ranks reduce the sums once.
    if job.policy.accumulates_locally:
        whole = sum(
            count * round_up(machine.world * shard * job.grad_itemsize(flat.dtype), 64)
            for flat, shard, count in trained
        )
        found["whole sums of gradients"] = TierBytes(cpu=float(whole))
    shards = float(sum(count * shard * flat.dtype.itemsize for flat, shard, count in flats))
    if job.policy.hpz:
        # Counterparts are the ranks with the same local rank on other nodes. A rank also keeps the
        # shards of its counterparts, so each node has every value once.
        copy = machine.nodes * shards
        found["the node's copy (hpZ)"] = (
            TierBytes(device=copy) if job.policy.hpz == "device" else TierBytes(cpu=copy)
        )
    elif job.policy.params == "device" and not job.whole_params(machine.world):
        found["shards kept on the device"] = TierBytes(device=shards)
    if job.policy.qgz and job.policy.error_feedback:
        # Ranks quantize gradients twice: whole gradients inside the node, then the node's sums for
        # other nodes. Each level has separate errors. With one rank per node, or on one node, there
        # is one level.
        turns = min(machine.nodes, machine.ranks) > 1
        numel = sum(
            count * (machine.world + turns * machine.nodes) * shard for _, shard, count in trained
        )
        # Each error is stored in 2 bytes (`Policy.error_feedback`).
        found["errors fed back (qgZ)"] = TierBytes(cpu=2.0 * numel)
    return {name: size for name, size in found.items() if size}


def place_states(
    shape: JobShape, machine: Machine, job: Job, budget: int
) -> tuple[list[PlannedNeed], PlacementPlan]:
    """Return the needs of one rank and their placement under `budget` bytes of RAM. If the budget
    is too small, return the smallest placement, whose `ram_bytes` exceed the budget. Neither result
    counts the bytes of `beside_placement`.
    """
    fine = _needs(shape, machine, job, 1, least=True)
    needs = _needs(shape, machine, job, _grain(shape, machine.world, job.policy.state))
    trained = (flat for flat, _ in shape.kinds_of_flats if flat.trainable)
    largest = max((numel for flat in trained for numel in flat.numels), default=0)

    scratch = _windows_bytes(shape, machine, job) + _matrix_scratch_bytes(shape, machine, job)
    bandwidths = machine.read_bytes_per_s, machine.write_bytes_per_s
    # As in the engine's planner: gradients of a speculative update are stored until the step, like
    # gradients of a deferred update.
    load = StepLoad(
        job.policy.placement_update, job.passes, bandwidths
    )

    def plan(
        which: Sequence[FlatNeed], ram_bytes: int | None, spill: Sequence[bool] | None = None
    ) -> PlacementPlan:
        return plan_placement(
            which,
            ram_bytes,
            drive_count=machine.drives,
            # The engine computes the norm of a gradient in pieces, and widens each to fp32.
            scratch_bytes=4 * min(largest, NORM_PIECE_NUMEL) + scratch,
            resident=job.policy.resident_parts,
            load=load,
            spill=spill,
            advice="",
        )

    def chunked(found: PlacementPlan) -> PlacementPlan:
        """Replace the pools for coarse pieces with the pools that the engine's chunks need."""
        if not found.pool_bytes:
            return found
        spill = [need.spill_format is not None for need in fine] if any(found.spilled) else None
        return _with_pools(found, plan(fine, None, spill))

    try:
        found = plan(needs, max(budget, 0))
    except BudgetError as error:
        # Pools of coarse pieces differ from the engine's, so either placement may be smaller.
        ways = [plan(needs, error.smallest_bytes), plan(needs, None)]
        found = min(ways, key=lambda way: chunked(way).ram_bytes)
        if chunked(found).ram_bytes > budget:
            return needs, chunked(found)
    if found.pool_bytes:
        # Staging buffers of coarse pieces are larger than the engine's; use the difference for
        # states. A placement without pools has no such difference, and would exceed the budget. If
        # the planner spills other gradients and needs even more, keep the first placement.
        with contextlib.suppress(BudgetError):
            larger = plan(needs, budget + found.pool_bytes - chunked(found).pool_bytes)
            found = larger if larger.pool_bytes else found
    return needs, chunked(found)


def reserved_bytes(shape: JobShape, machine: Machine, job: Job) -> float:
    """Return the bytes of a node's RAM that hold neither states, gradients nor activations: host
    overhead, windows of gradients, and what `beside_placement` counts.
    """
    held = sum(size.cpu for size in beside_placement(shape, machine, job).values())
    windows = _windows_bytes(shape, machine, job)
    return ram_beside(shape, machine, job).peak + machine.ranks * (held + windows)


def _windows_bytes(shape: ModelShape, machine: Machine, job: Job) -> int:
    """Return the bytes of pinned memory through which updates in backward copy gradients from a GPU
    (`optim.grad_windows`).
    """
    policy, copies = job.policy, bool(machine.gpus)

    def count() -> int:
        sizes: list[tuple[int, ...]] = []
        for unit, run in shape.runs:
            sizes += [_grad_sizes(unit, job)] * len(run)
        return windows_bytes(policy, sizes, copies=copies)

    key = "windows_bytes", policy.consumes_grads, policy.grad_dtype, copies
    return shape.remember(key, count)


def _matrix_scratch_bytes(shape: JobShape, machine: Machine, job: Job) -> int:
    """Return the bytes of RAM that an optimizer of whole matrices needs as scratch; see
    `Matrixwise.scratch_bytes`.
    """
    found, world = [(0, 0, 0)], 1 if machine.gpus else machine.world
    for flat, _ in shape.kinds_of_flats:
        shapes, itemsize = list(filter(None, flat.matrices)), job.grad_itemsize(flat.dtype)
        scratch, exchanged, _ = scratch_bytes([] if machine.gpus else shapes, itemsize, world)
        _, _, copied = scratch_bytes(shapes, itemsize, machine.world)
        found.append((scratch, exchanged, copied * job.policy.speculates))
    return sum(map(max, zip(*found, strict=True)))


def _grad_sizes(unit: UnitShape, job: Job) -> tuple[int, ...]:
    """Return the bytes of the unit's gradients, in the dtype in which the engine stores them."""
    return tuple(
        numel * job.grad_itemsize(flat.dtype)
        for flat in unit.flats
        if flat.trainable
        for numel in flat.numels
    )


def _with_pools(plan: PlacementPlan, fine: PlacementPlan) -> PlacementPlan:
    return dataclasses.replace(
        plan,
        small_count=fine.small_count,
        small_bytes=fine.small_bytes,
        large_count=fine.large_count,
        large_bytes=fine.large_bytes,
    )


def _grain(shape: ModelShape, ranks: int, state: str) -> int:
    """Return the number of chunks in a piece with which a rank has about PIECES_MAX pieces."""
    pieces = 0
    for flat, count in shape.kinds_of_flats:
        held = state_format(state, flat.dtype) if flat.trainable else None
        pieces += count * -(-flat.numel // (ranks * chunk_numel(held or Format.RAW)))
    return -(-pieces // PIECES_MAX)


@dataclasses.dataclass(frozen=True)
class Placed:
    """Placement of one rank's states in its part of a node's RAM, and all other uses of RAM.

    waiting, spilled: bytes of stored activations of all ranks of a node, in RAM and on drives.
    on_device: bytes of device memory in RAM, for all ranks. beside: parts of `beside_placement`.
    held: RAM in the parts `beside`. outside: RAM in addition to the budgets. left: bytes of RAM
    that one rank has for its placement and `held`. needs, plan: results of `place_states`.
    """

    waiting: float
    spilled: float
    on_device: float
    beside: dict[str, TierBytes]
    held: int
    outside: RamBeside
    left: int
    needs: list[PlannedNeed]
    plan: PlacementPlan


def place_in_ram(shape: JobShape, machine: Machine, job: Job) -> Placed:
    """Place the states of one rank. Each rank of a node has an even part of the RAM that remains
    after activations, host overhead and, if the CPU computes, device memory.
    """
    boundary = boundary_bytes(shape, machine, job)
    waiting = boundary if job.policy.activations == "cpu" else 0.0
    spilled = boundary if job.policy.activations == "nvme" else 0.0
    beside = beside_placement(shape, machine, job)
    held = int(sum(size.cpu for size in beside.values()))
    outside = ram_beside(shape, machine, job)
    on_device = device_in_ram(shape, machine, job)
    left = int(machine.ram_bytes - waiting - outside.peak - on_device) // machine.ranks
    needs, plan = place_states(shape, machine, job, left - held)
    return Placed(waiting, spilled, on_device, beside, held, outside, left, needs, plan)


def boundary_bytes(shape: ModelShape, machine: Machine, job: Job) -> float:
    """Return the bytes of the inputs of checkpointed blocks in one pass, on all ranks of a node.
    Autograd holds all other activations, so without checkpointing none can leave the device.
    """
    tokens = machine.ranks * job.pass_tokens(machine.world) if job.checkpointing else 0
    return float(tokens * shape.boundary_bytes_per_token)


def _needs(
    shape: ModelShape, machine: Machine, job: Job, grain: int, *, least: bool = False
) -> list[PlannedNeed]:
    """Return the FlatParameters as the planner takes them. grain: chunks in a piece. least: return
    only one chunk of each kind, which is enough to find the sizes of staging buffers.
    """
    needs: list[PlannedNeed] = []
    seen: set[tuple[object, ...]] = set()
    for flat, _ in shape.kinds_of_flats:
        widest = state_format(job.policy.state, flat.dtype) if flat.trainable else None
        held = widest and state_format(job.policy.state, flat.dtype, flat.moments)
        chunk = chunk_numel(widest or Format.RAW)
        size = chunk * grain
        layout = plan_flat(flat.numels, flat.dtype.itemsize, machine.world, size)
        if least:
            # A staging buffer is as large as the largest chunk, and one chunk of each format, dtype
            # and length is enough to find the largest.
            kind = (held, flat.dtype, min(layout.shard_numel, size))
            if kind in seen:
                continue
            seen.add(kind)
            layout = dataclasses.replace(layout, shard_numel=min(layout.shard_numel, size))
        need = _need(flat, layout, held, job)
        if held and flat.matrix_numel:
            shares = chunk_shares(flat, machine.world, chunk)
            moves = tuple(moves_of(held, shares))
            numels = {1: flat.matrix_numel, 2: flat.numel - flat.matrix_numel}
            idle = idle_mask_of(held, numels)
            need = dataclasses.replace(need, moves=moves, idle_mask=idle)
        needs.append(need)
    # Layers repeat: FlatParameters of one kind share a need.
    return needs if least else [needs[place] for place in shape.places_of_flats]


@dataclasses.dataclass(frozen=True)
class PlannedNeed(FlatNeed):
    """A need whose chunks are a plan's pieces. moves: shares of each section that the updates move;
    empty: one update moves each section."""

    moves: Moves = ()


def _need(flat: FlatShape, layout: FlatLayout, held: Format | None, job: Job) -> PlannedNeed:
    if held is None:
        return PlannedNeed(
            layout,
            Format.RAW,
            job.policy.params,
            job.policy.optim,
            versions=2 if job.policy.durable else 1,
        )
    stores = job.stores_gradients
    itemsize = job.grad_itemsize(flat.dtype)
    size = layout.shard_numel * itemsize
    delayed = job.policy.delays
    # Delayed updates read one set of gradients while backward fills another.
    grads = size * (2 if delayed else 1) if stores else 0
    spills = job.policy.grads == "nvme" and stores
    section = {2: GradSection.BF16, 4: GradSection.FP32}[itemsize]
    return PlannedNeed(
        layout,
        held,
        job.policy.params,
        job.policy.optim,
        grad_bytes=grads,
        delayed_params_bytes=layout.shard_bytes if delayed else 0,
        spill_format=held.with_grad(section) if spills else None,
        window_bytes=size if spills else 0,
        versions=job.policy.places,
    )


def bytes_at_rest(needs: Sequence[PlannedNeed], plan: PlacementPlan) -> tuple[AtRest, AtRest]:
    """Return the bytes of a rank's states by kind: (on all tiers, on NVMe)."""
    found = [dict.fromkeys((each.name for each in dataclasses.fields(AtRest)), 0.0) for _ in "12"]
    for need, numel, mask, count in chunks_alike(plan.in_formats(needs), plan.nvme_masks):
        assert isinstance(need, PlannedNeed)
        for index, section in enumerate(need.sections):
            first = "params" if need.held else "frozen"
            other = "grads" if need.kind(index) == "grad" else "optim"
            size = float(count * section.size_bytes(numel))
            # `moves` has no entry for a section of spilled gradients. A step reads and writes that
            # section once more if the FlatParameter has matrices.
            once_more = (float(bool(need.moves)), 1.0)
            first_moves, moves = (*need.moves, once_more)[min(index, len(need.moves))]
            for totals in found if mask >> index & 1 else found[:1]:
                totals[other if index else first] += size
                totals["first"] += first_moves * size
                totals["idle"] += (1.0 - moves) * size
    everything, nvme = (AtRest(**totals) for totals in found)
    return everything, nvme


def spare_bytes(needs: Sequence[FlatNeed], plan: PlacementPlan) -> int:
    """Return the bytes of the extents that a rank reserves on each of its drives for writes that
    fail.
    """
    chunks = chunks_alike(plan.in_formats(needs), plan.nvme_masks)
    sizes = (run_bytes_of(need.sections, numel, mask) for need, numel, mask, _ in chunks)
    return SPARES_PER_DRIVE * max(sizes, default=0)


# -- Device memory ---------------------------------------------------------------------------------


CUDA_BYTES = 640 * MIB
"""GPU memory of CUDA's context, kernels and cuBLAS workspaces in one process (assumed)."""

NCCL_BYTES = 512 * MIB
"""GPU memory of NCCL's buffers in one process (assumed)."""

TUNING_BYTES = 256 * MIB
"""GPU memory that Triton's benchmark overwrites before each run to clear the L2 cache."""

CHUNKS_IN_UPDATE = 2 * AHEAD_CHUNKS
"""Chunks of states on a GPU at the same time during an update on the GPU: chunks that are being
copied in, updated, or copied out.
"""

TILES = (2, 4, 8, 16, 32, 64)
"""Numbers of tiles of a linear to try."""
WORDS = (8192, 2048)
"""Numbers of vocabulary entries in one tile of the loss to try."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes that a job needs of one kind of memory. parts: the same bytes by name. there_is: bytes
    that the machine has; None: not known.
    """

    bytes: float
    there_is: float | None
    parts: dict[str, float]

    @property
    def fits(self) -> bool:
        """True if the machine has enough memory, or if its capacity is not known."""
        return self.there_is is None or self.bytes <= self.there_is


@dataclasses.dataclass(frozen=True)
class Way:
    """One change after which a job fits its GPU.

    how: the call or setting that makes the change. job: the changed job. need: device memory of the
    changed job.
    """

    name: str
    how: str
    job: Job
    need: Need


def tile_counts(shape: ModelShape, job: Job) -> tuple[int, ...]:
    """Return the numbers of tiles of linears to try; empty if the optimizer needs whole matrices.
    """
    return TILES if shape.has_linears and job.optimizer == "adamw" else ()


def loss_tiles(shape: ModelShape, words: int = WORDS[0]) -> int:
    """Return the number of tiles of the loss with at most `words` vocabulary entries in a tile."""
    return max(1, -(-shape.vocabulary // words))


def gpu_need(model: ModelShape, machine: Machine, job: Job) -> Need:
    """Count the bytes of device memory of one rank, by the parts of the module's table. model: the
    uncut shape; this function cuts it into the job's tiles of experts.
    """
    shape = shape_in(job, model)
    units = _units(shape, machine, job)
    largest = shape.remember(
        ("largest unit", id(units)),
        lambda: float(max((unit.gathered for unit in units), default=0)),
    )
    parts = {
        "gathered units": gathered_bytes(shape, machine, job),
        **{name: size.device for name, size in beside_placement(shape, machine, job).items()},
        "exchange buffers": _exchange_bytes(machine, job, largest),
        **_gradients(shape, machine, job, units),
        **(_returning_bytes(shape, machine, job, units) if machine.gpus else {}),
        **activation_bytes(shape, machine, job),
        "matrices in update": matrix_work(shape, machine, job).device_bytes,
    }
    if machine.gpus:
        if job.policy.update_on == "device":
            numel = chunk_numel(Format.SPLIT)
            # Each element takes 12 B of states and 2 B of gradient.
            parts["states in update"] = float(CHUNKS_IN_UPDATE * numel * 14)
        parts["tuning of tiles"] = _tuning_bytes(shape, job, machine.world)
        parts["CUDA and libraries (assumed)"] = float(
            CUDA_BYTES + (NCCL_BYTES if machine.world > 1 else 0)
        )
    parts = {name: size for name, size in parts.items() if size}
    return Need(sum(parts.values()), machine.device_bytes, parts)


def device_in_ram(model: ModelShape, machine: Machine, job: Job) -> float:
    """Return the bytes of a node's RAM that are device memory; zero unless the CPU computes."""
    return 0.0 if machine.gpus else machine.ranks * gpu_need(model, machine, job).bytes


def beside_budgets(model: ModelShape, machine: Machine, job: Job) -> float:
    """Return the bytes of a node's RAM that are in no budget, without stored activations."""
    beside = ram_beside(shape_in(job, model), machine, job).peak
    return beside + device_in_ram(model, machine, job)


def _tuning_bytes(shape: JobShape, job: Job, world: int) -> float:
    """Count the bytes that Triton takes while it measures the products of tiles: a buffer that
    clears the L2 cache, and a copy of the output to which the product is added.
    """
    if not any(map(choice.may_be_triton, ("tile_matmul", "linear_cross_entropy"))):
        return 0.0
    tokens = job.micro_batch_tokens(world)
    copies = []
    for linear in shape.kinds_of_linears:
        tiles = shape.tiles_of(linear, tiles=job.tiles, loss_tiles=job.loss_tiles)
        if tiles > 1:
            rows = -(-linear.out_features // tiles)
            # The output is fp32: a tile's output, the input's gradient, or the weight's gradient.
            output = max(tokens * max(rows, linear.in_features), rows * linear.in_features)
            copies.append(4.0 * output)
    return TUNING_BYTES + max(copies) if copies else 0.0


def _passes(machine: Machine, job: Job) -> Passes:
    return Passes(
        copies=bool(machine.gpus),
        several=machine.world > 1,
        in_backward=job.policy.consumes_grads,
        whole=job.whole_params(machine.world),
        device_bytes=int(machine.device_bytes),
    )


def _units(shape: JobShape, machine: Machine, job: Job) -> list[UnitBytes]:
    # `ModelShape.remember` keeps this list alive, so callers may use the list's id in their keys.
    return shape.unit_bytes(job.tiles, job.loss_tiles, machine.world, in_slices=job.vertical)


def _blocks(shape: ModelShape, machine: Machine, job: Job) -> list[UnitBytes]:
    return [
        UnitBytes(block.gathered_bytes(machine.world), _grad_sizes(block, job), block.around)
        for block in shape.in_blocks.units
    ]


def _sums_bytes(shape: ModelShape, machine: Machine, job: Job) -> int:
    passes = _passes(machine, job)
    key = "sums_capacity", machine.world, job.policy.grad_dtype, passes
    return shape.remember(key, lambda: sums_capacity(_blocks(shape, machine, job), passes))


def _gradients(
    shape: ModelShape, machine: Machine, job: Job, units: Sequence[UnitBytes]
) -> dict[str, float]:
    passes = _passes(machine, job)
    if not job.vertical:
        key = "fresh_capacity", id(units), passes
        fresh = shape.remember(key, lambda: fresh_capacity(units, passes))
        return {"fresh gradients": float(fresh)}
    sums = _sums_bytes(shape, machine, job)
    largest = shape.remember(
        ("largest gradient", id(units)),
        lambda: max((size for unit in units for size in unit.grads), default=0),
    )
    # The largest gradient may have any dtype of the trained parameters: take the largest result.
    trained = [flat.dtype for flat, _ in shape.kinds_of_flats if flat.trainable]
    widths = {dtype.itemsize: job.grad_itemsize(dtype) for dtype in trained}
    slices = max((slice_grad_bytes(largest, *each) for each in widths.items()), default=0)
    return {"fresh gradients": float(slices), "sums of gradients": float(sums)}


def _returning_bytes(
    shape: ModelShape, machine: Machine, job: Job, units: Sequence[UnitBytes]
) -> dict[str, float]:
    """Count the bytes that a GPU copies back from CPU memory in backward: sums of gradients, and
    error feedback.
    """

    def capacity(count: int) -> int:
        key = "gradients_capacity", id(units), count
        return shape.remember(key, lambda: gradients_capacity(units, count))

    found = {}
    # Gradients of the unit in backward, and of REDUCING_UNITS units whose reductions may still run.
    reducing = capacity(REDUCING_UNITS)
    if job.passes > 1:
        if machine.world == 1 or job.policy.accumulates_locally:
            found["sums of gradients"] = float(capacity(SUMS_UNITS - 1))
        else:
            found["sums of gradients"] = reducing / machine.world
    if job.policy.qgz and job.policy.error_feedback and machine.world > 1:
        # Several nodes with several ranks each quantize at two levels (see `beside_placement`).
        turns = min(machine.nodes, machine.ranks) > 1
        found["errors on their way"] = reducing * (1 + turns / machine.ranks)
    return found


def _exchange_bytes(machine: Machine, job: Job, largest: float) -> float:
    """Count the bytes of the buffers for the largest unit's collectives: the whole gradients to
    reduce, the parts received from other ranks, and codes. largest: gathered bytes of that unit.
    """
    if machine.world == 1:
        return 0.0
    # Codes as shares of bf16 values: int4 gradients, sent and received (twice 1/4); int8 weights
    # (1/2).
    coded = (0.5 if job.policy.qgz else 0.0) + (0.5 if job.policy.qwz else 0.0)
    # The sums that this rank computes inside the node for other nodes are fp32, twice as wide.
    partial = 2.0 / machine.ranks if job.policy.qgz and machine.nodes > 1 else 0.0
    # Without qgZ the received parts need a second buffer; under qgZ ranks send codes instead.
    return ((1.0 if job.policy.qgz else 2.0) + coded + partial) * largest


def gathered_bytes(shape: JobShape, machine: Machine, job: Job) -> float:
    """Return the most bytes of gathered parameters on a rank's device."""
    units, passes = _units(shape, machine, job), _passes(machine, job)
    key = "gathered_capacity", id(units), passes
    return shape.remember(key, lambda: float(gathered_capacity(units, passes)))


def again_share(shape: JobShape, machine: Machine, job: Job) -> float:
    """Return the share of the parameters that the vertical schedule gathers separately for each
    micro-batch, because the device has no capacity to retain them; 0.0 in the horizontal schedule.
    """
    if not job.vertical:
        return 0.0
    units, passes = _units(shape, machine, job), _passes(machine, job)
    whole = sum(unit.gathered * unit.repeat for unit in units)
    key = "regathered_bytes", id(units), passes
    return shape.remember(key, lambda: regathered_bytes(units, passes)) / max(whole, 1)


def activation_bytes(shape: ModelShape, machine: Machine, job: Job) -> dict[str, float]:
    """Count the activations on a rank's device, by the parts of the module's table."""
    tokens = job.micro_batch_tokens(machine.world)
    block = float(tokens * shape.block_bytes_per_token)
    logits = float(tokens * shape.logits_bytes_per_token(job.loss_tiles))
    if not job.checkpointing:
        return {
            "activations of all blocks (estimated)": shape.layers * block,
            "logits and loss (estimated)": logits,
        }
    one = float(tokens * shape.itemsize * shape.width)
    together = job.pass_tokens(machine.world)
    inputs = float(together * shape.boundary_bytes_per_token)
    if job.policy.activations != "device":
        # The inputs of the last HELD_CALLS calls stay on the device. An earlier input is freed on
        # the device when the copy is complete.
        inputs = min(inputs, HELD_CALLS * one + max(2 * one, STORING_BYTES_MAX))
    found = {"inputs of blocks": inputs}
    if job.vertical:
        found["one boundary (estimated)"] = 3.0 * together * shape.itemsize * shape.width
    if logits > block:
        found["logits and loss (estimated)"] = logits
    else:
        found["one block at work (estimated)"] = block
    return found


def ways_to_fit(shape: ModelShape, machine: Machine, job: Job) -> list[Way]:
    """List single changes after which a job fits its GPU: the smallest sufficient change of each
    kind.
    """
    found = []
    for options in _options(shape, machine, job):
        for option in options:
            changed = job.replace(**option.fields)
            need = gpu_need(shape, machine, changed)
            if need.fits:
                found.append(Way(option.name, option.how, changed, need))
                break
    return found


def least_need(shape: ModelShape, machine: Machine, job: Job) -> Need:
    """Count the device memory of the job with the largest change of every kind."""
    for options in _options(shape, machine, job):
        if options:
            job = job.replace(**options[-1].fields)
    return gpu_need(shape, machine, job)


@dataclasses.dataclass(frozen=True)
class _Option:
    """A change to try. how: the call or setting that makes the change. fields: new values of the
    job's fields.
    """

    name: str
    how: str
    fields: dict[str, Any]


def _options(shape: ModelShape, machine: Machine, job: Job) -> list[list[_Option]]:
    found = [
        [
            _Option(
                f"linears in {count} tiles",
                f"inf.tile_linears(model, tiles={count})",
                {"tiles": count},
            )
            for count in tile_counts(shape, job)
            if count > job.tiles
        ]
    ]
    found.append(
        [
            _Option(
                f"the loss in {count} tiles",
                f"inf.tile_loss(model, tiles={count})",
                {"loss_tiles": count},
            )
            for count in (loss_tiles(shape, words) for words in WORDS)
            if count > job.loss_tiles
        ]
    )
    if not job.checkpointing:
        found.append(
            [
                _Option(
                    "gradient checkpointing",
                    "model.gradient_checkpointing_enable()",
                    {"checkpointing": True},
                )
            ]
        )
    elif job.policy.activations == "device":
        # Only inputs of checkpointed blocks can leave the device. If the CPU computes, CPU memory
        # is the device's memory, so activations="cpu" saves nothing.
        tiers = [("cpu", "the CPU")] if machine.gpus else []
        tiers += [("nvme", "the drives")] if machine.drives else []
        found += [
            [_Option(f"activations on {place}", f"activations={tier!r}", {"activations": tier})]
            for tier, place in tiers
        ]
    found.append(_smaller_tiles(shape, job))
    found.append(_fewer_tokens(machine, job))
    return found


def _smaller_tiles(shape: ModelShape, job: Job) -> list[_Option]:
    """List smaller tiles of stacks of experts: halves, quarters, down to single experts."""
    found = []
    tile = (job.expert_tile or shape.experts) // 2
    while shape.has_stacks and tile:
        experts = f"{tile} expert{'s' if tile > 1 else ''}"
        how = f"inf.tile_experts(model, experts={tile})"
        found.append(_Option(f"stacks in tiles of {experts}", how, {"expert_tile": tile}))
        tile //= 2
    return found


def _fewer_tokens(machine: Machine, job: Job) -> list[_Option]:
    """List larger numbers of micro-batches, until a micro-batch has one sequence."""
    found = []
    now = job.micro_batch_tokens(machine.world)
    for count in job.micro_batch_counts(machine.world):
        if count > job.micro_batches:
            tokens = job.replace(micro_batches=count).micro_batch_tokens(machine.world)
            how = f"{tokens:,} tokens in each, not {now:,}"
            found.append(_Option(f"{count} micro-batches", how, {"micro_batches": count}))
    return found


# -- Host overhead ---------------------------------------------------------------------------------


BESIDE_BUDGET = "beside the budget"
"""Name of the host overhead among the parts of a node's RAM."""


@dataclasses.dataclass(frozen=True)
class RamBeside:
    """Host overhead of all ranks of a node: bytes of RAM that no budget counts.

    chunks: chunks of one rank. held: bytes from set-up until the end. passing: peak of the bytes
    that each phase adds. fill_without_files: peak of a fill from `init=`, a callable or a
    `TensorSource`, which return whole weights; neither `passing` nor `peak` counts these bytes.
    """

    chunks: int
    held: int
    passing: dict[str, int]
    fill_without_files: int

    @property
    def peak(self) -> int:
        """Largest overhead at any time. Phases do not overlap, except that steps run during a save.
        """
        phases = dict(self.passing)
        together = phases.pop("step") + phases.pop("save")
        return self.held + max(together, *phases.values())


def ram_beside(shape: JobShape, machine: Machine, job: Job) -> RamBeside:
    """Count the host overhead of the ranks of a node, which does not depend on the RAM."""
    ranks, policy = machine.ranks, job.policy
    chunks = 0
    for flat, count in shape.kinds_of_flats:
        held = state_format(policy.state, flat.dtype) if flat.trainable else None
        chunks += count * -(-flat.shard_numel(machine.world) // chunk_numel(held or Format.RAW))
    passing = passing_bytes(
        chunks,
        # The step repeats undone speculative updates, together with all other updates.
        all_at_once=not policy.consumes_grads,
        durable=bool(policy.durable),
        drives=machine.drives,
        fill=_fill_bytes(shape, machine.world),
    )
    return RamBeside(
        chunks,
        ranks * held_bytes(chunks, len(shape.units), policy.generations),
        {name: ranks * size for name, size in passing.items()},
        ranks * (_fill_bytes(shape, machine.world) + _weights_bytes(shape)),
    )


def _fill_bytes(shape: JobShape, world: int) -> int:
    def count() -> int:
        kinds = (flat for flat, _ in shape.kinds_of_flats)
        shards = (flat.shard_numel(world) * flat.dtype.itemsize for flat in kinds)
        return fill_bytes(max(shards, default=0))

    return shape.remember(("fill_bytes", world), count)


def _weights_bytes(shape: JobShape) -> int:
    """Count the bytes of a whole weight that stay in memory while the engine fills the weight's
    pieces or, for stacks of experts, the tiles of one layer. `shape` has linears whole, even if the
    job tiles them.
    """
    kinds = (flat for flat, _ in shape.kinds_of_flats)
    largest = (max(flat.numels, default=0) * flat.dtype.itemsize for flat in kinds)
    stacks: dict[str, int] = {"": max(largest, default=0)}
    for unit, run in shape.runs:
        if unit.tiles:
            layer = unit.name.rpartition("[")[0]
            size = sum(flat.numel * flat.dtype.itemsize for flat in unit.flats)
            stacks[layer] = stacks.get(layer, 0) + len(run) * size
    return max(stacks.values())


def reads_in_parts(machine: Machine) -> bool:
    """Return whether each rank reads only its part of the source. The engine does so only if all
    ranks surely see the same files, which is the case on one node.
    """
    return machine.nodes == 1
