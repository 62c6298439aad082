"""Where the states of a model to be planned for rest: the engine's own placement, of every rank's share.

A model of 400 billion parameters has a million chunks; what is planned is coarser pieces of at most `PIECES_MAX` in all, which
moves the border between what is resident and what is not by about one part in a thousand. Slots of pieces are larger than
those of chunks; they are counted as chunks want them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from infinity._src.grads.slot import NORM_PIECE_NUMEL
from infinity._src.memory.layout import FlatLayout, plan_flat
from infinity._src.memory.needs import FlatNeed, Load
from infinity._src.memory.placement import Plan, plan_placement
from infinity._src.memory.planner import state_format
from infinity._src.optim.grad_windows import WINDOW_UNITS, window_bytes
from infinity._src.perf.plan.job import Job
from infinity._src.perf.plan.machine import Machine
from infinity._src.perf.plan.shape import FlatShape, ModelShape
from infinity._src.perf.roofline import AtRest
from infinity._src.sizes import round_up
from infinity.aio import Format
from infinity.aio._records import GradSection, chunk_numel
from infinity.errors import BudgetError

PIECES_MAX = 2048


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Bytes on each tier."""

    device: float = 0.0
    cpu: float = 0.0
    nvme: float = 0.0

    def __add__(self, other: Tiers) -> Tiers:
        return Tiers(self.device + other.device, self.cpu + other.cpu, self.nvme + other.nvme)

    def __bool__(self) -> bool:
        return bool(self.device or self.cpu or self.nvme)


def beside_placement(shape: ModelShape, machine: Machine, job: Job) -> dict[str, Tiers]:
    """What a rank holds of several beside what the placement knows: by name, without what there is nothing of."""
    if machine.world == 1:
        return {}
    layouts = [(flat, plan_flat(flat.numels, flat.dtype.itemsize, machine.world)) for flat in shape.flats]
    trained = [(flat, layout) for flat, layout in layouts if flat.trainable]
    found = {}
    if job.accumulates_locally:
        whole = sum(round_up(layout.numel * job.grad_itemsize(flat.dtype), 64) for flat, layout in trained)
        found["whole sums of gradients"] = Tiers(cpu=float(whole))
    shard = float(sum(layout.shard_numel * layout.itemsize for _, layout in layouts))
    if job.hpz:
        copy = machine.nodes * shard
        found["the node's copy (hpZ)"] = Tiers(device=copy) if job.hpz == "device" else Tiers(cpu=copy)
    elif job.params == "device" and not job.whole_params(machine.world):
        found["shards kept on the device"] = Tiers(device=shard)
    if job.qgz and job.error_feedback:
        turns = min(machine.nodes, machine.ranks) > 1  # the second one is over nodes
        numel = sum(layout.numel + turns * machine.nodes * layout.shard_numel for _, layout in trained)
        found["errors fed back (qgZ)"] = Tiers(cpu=2.0 * numel)
    return {name: size for name, size in found.items() if size}


def place(shape: ModelShape, machine: Machine, job: Job, budget: int) -> tuple[list[FlatNeed], Plan]:
    """The needs of one rank and their placement under its `budget` of bytes; where that is too small, the placement that
    takes least, so `ram_bytes` of it is above the budget. What `beside_placement` has is in neither."""
    fine = _needs(shape, machine, job, 1, least=True)
    needs = _needs(shape, machine, job, _grain(shape, machine.world, job.state))
    largest = max((numel for flat in shape.flats if flat.trainable for numel in flat.numels), default=0)

    staging = _staging_bytes(shape, machine, job)
    bandwidths = machine.read_bytes_per_s, machine.write_bytes_per_s
    load = Load("deferred" if job.speculates else job.update, job.micro_batches, bandwidths)

    def plan(which: Sequence[FlatNeed], ram_bytes: int | None, spill: Sequence[bool] | None = None) -> Plan:
        return plan_placement(
            which,
            ram_bytes,
            drive_count=machine.drives,
            scratch_bytes=4 * min(largest, NORM_PIECE_NUMEL) + staging,
            resident=job.resident,
            load=load,
            spill=spill,
            advice="",
        )

    def chunked(found: Plan) -> Plan:
        """With the pools that the engine's chunks want."""
        if not found.pool_bytes:
            return found
        spill = [need.spill_format is not None for need in fine] if any(found.spilled) else None
        return _with_pools(found, plan(fine, None, spill))

    try:
        found = plan(needs, max(budget, 0))
    except BudgetError as error:
        ways = [plan(needs, error.smallest_bytes), plan(needs, None)]
        found = min(ways, key=lambda way: chunked(way).ram_bytes)
        if chunked(found).ram_bytes > budget:
            return needs, chunked(found)
    if found.pool_bytes:
        # So much more of pieces may be held; without pools it would be more than there is.
        with contextlib.suppress(BudgetError):  # another way to spill may want more than that, in coarse pieces: then as found
            larger = plan(needs, budget + found.pool_bytes - chunked(found).pool_bytes)
            found = larger if larger.pool_bytes else found
    return needs, chunked(found)


def _staging_bytes(shape: ModelShape, machine: Machine, job: Job) -> int:
    """Pinned memory by way of which gradients leave a GPU for updates during backward, as `optim.staging` has it."""
    if not machine.gpus or job.update != "backward" or job.speculates:
        return 0
    windows = (
        window_bytes(numel * job.grad_itemsize(flat.dtype) for flat in unit.flats if flat.trainable for numel in flat.numels)
        for unit in shape.units
    )
    return WINDOW_UNITS * max(windows, default=0)


def _with_pools(plan: Plan, fine: Plan) -> Plan:
    """A plan of coarse pieces with the pools that the engine's chunks want."""
    return dataclasses.replace(
        plan,
        small_count=fine.small_count,
        small_bytes=fine.small_bytes,
        large_count=fine.large_count,
        large_bytes=fine.large_bytes,
    )


def _grain(shape: ModelShape, ranks: int, state: str) -> int:
    """How many chunks make a piece, so that there are not more than PIECES_MAX of them."""
    pieces = 0
    for flat in shape.flats:
        held = state_format(state, flat.dtype) if flat.trainable else None
        pieces += -(-flat.numel // (ranks * chunk_numel(held or Format.RAW)))
    return -(-pieces // PIECES_MAX)


def _needs(shape: ModelShape, machine: Machine, job: Job, grain: int, *, least: bool = False) -> list[FlatNeed]:
    """The flats as the placement sees them. least: one chunk of each kind only, for the sizes of slots."""
    needs: list[FlatNeed] = []
    seen: set[tuple[object, ...]] = set()
    layouts: dict[tuple[tuple[int, ...], int, int], FlatLayout] = {}
    for flat in shape.flats:
        held = state_format(job.state, flat.dtype) if flat.trainable else None
        size = chunk_numel(held or Format.RAW) * grain
        key = (flat.numels, flat.dtype.itemsize, size)
        if key not in layouts:
            layouts[key] = plan_flat(flat.numels, flat.dtype.itemsize, machine.world, size)
        layout = layouts[key]
        if least:
            # Slots are as large as the largest chunk: one of each length up to a whole chunk says it.
            kind = (held, flat.dtype, min(layout.shard_numel, size))
            if kind in seen:
                continue
            seen.add(kind)
            layout = dataclasses.replace(layout, shard_numel=min(layout.shard_numel, size))
        needs.append(_need(flat, layout, held, job))
    return needs


def _need(flat: FlatShape, layout: FlatLayout, held: Format | None, job: Job) -> FlatNeed:
    if held is None:
        return FlatNeed(layout, Format.RAW, job.params, job.optim, versions=2 if job.durable else 1)
    stores = job.stores_gradients
    itemsize = job.grad_itemsize(flat.dtype)
    size = layout.shard_numel * itemsize
    delayed = job.update == "delayed"
    grads = size * (2 if delayed else 1) if stores else 0
    spills = job.grads == "nvme" and stores
    section = {2: GradSection.BF16, 4: GradSection.FP32}[itemsize]
    return FlatNeed(
        layout,
        held,
        job.params,
        job.optim,
        grad_bytes=grads,
        shadow_bytes=layout.shard_numel * flat.dtype.itemsize if delayed else 0,
        spill_format=held.with_grad(section) if spills else None,
        window_bytes=size if spills else 0,
        versions=job.generations,
    )


def rests(need: FlatNeed, masks: Sequence[int], placed: Format) -> tuple[AtRest, AtRest]:
    """(everything, what is on NVMe) of one flat by kind, in bytes."""
    need = dataclasses.replace(need, format=placed)
    totals = [AtRest(), AtRest()]
    for index, section in enumerate(need.sections):
        kind = "grads" if index and need.kind(index) == "grad" else "optim" if index else "params"
        if kind == "params" and not need.held:
            kind = "frozen"
        whole = sum(section.size_bytes(numel) for numel in need.numels)
        nvme = sum(
            section.size_bytes(numel) for numel, mask in zip(need.numels, masks, strict=True) if mask >> index & 1
        )
        totals[0] += AtRest(**{kind: float(whole)})
        totals[1] += AtRest(**{kind: float(nvme)})
    return totals[0], totals[1]
