"""What a model on a machine will need and how long its step will take: placement and limits, nothing else.

The placement is the engine's own (`infinity.memory.placement`), for every rank's share of the model. A model of 400 billion
parameters has a million chunks; what is planned is coarser pieces of at most `PIECES_MAX` in all, which moves the border between
what is resident and what is not by about one part in a thousand.

    seconds per step = limit of the update mode (`infinity.limits`) / EFFICIENCY
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from infinity.aio.plan import Format, GradSection, chunk_numel
from infinity.errors import BudgetError
from infinity.limits import (
    AtRest,
    Compute,
    Limits,
    Moved,
    Traffic,
    compute_flops,
    days_of_life,
    dram_s,
    limits,
    passes,
    pcie_s,
    traffic,
)
from infinity.memory.layout import FlatLayout, plan_flat
from infinity.memory.needs import FlatNeed, Load
from infinity.memory.placement import Plan, plan_placement
from infinity.optim.early import UNITS_AHEAD
from infinity.params.residency import AHEAD
from infinity.params.stand_in import NORM_PIECE_NUMEL
from infinity.placing import state_format
from infinity.planning.machine import Machine
from infinity.planning.shape import FlatShape, ModelShape

EFFICIENCY = 0.9
"""What share of its limit the engine is taken to reach: what this project demands of itself, and measures."""

PASS_SHARE = 0.5
"""What share of the memory's bandwidth the engine's own passes reach where the CPU computes: they also compute checksums and
updates, and share the cores with forward and backward. Measured on two cores (`bench/predict.py`)."""

PIECES_MAX = 2048


@dataclasses.dataclass(frozen=True)
class Job:
    """How the model is trained. tokens: per step, over all devices and micro-batches; micro_batches: of each device.

    compute_s: measured (forward, backward) seconds of one micro-batch, where they are better known than from FLOP/s.
    """

    tokens: int
    sequence: int
    micro_batches: int = 1
    state: str = "exact"
    update: str = "deferred"
    params: str = "nvme"
    optim: str = "nvme"
    grads: str = "cpu"
    activations: str = "device"
    checkpointing: bool = True
    compute_s: tuple[float, float] | None = None

    def micro_batch_tokens(self, ranks: int) -> int:
        """Tokens of one micro-batch on one device."""
        return -(-self.tokens // (self.micro_batches * ranks))


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
class Prediction:
    """What one job on one machine will need and give. Bytes over all ranks, but gpu: of one GPU. Seconds per step.

    at_rest: all states by kind; on_nvme: of them on drives. why_not: what does not fit and what would help, empty where all does;
    the times are then those of the least that would work. days: until the drives had their rating.
    """

    job: Job
    machine: Machine
    gpu: Need
    ram: Need
    nvme: Need
    at_rest: AtRest
    on_nvme: AtRest
    moved: Traffic
    limits: Limits
    terms_s: dict[str, float]
    step_s: float
    why_not: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return not self.why_not

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return self.job.tokens / self.step_s

    @property
    def written_per_day(self) -> float:
        """Bytes written per day."""
        return self.moved.total.written / self.step_s * 86_400

    @property
    def days(self) -> float:
        """Days of the drives' life at this rate."""
        rated = self.machine.tbw_per_drive / 1e12
        return days_of_life(self.moved.total.written, self.step_s, rated, max(self.machine.drives, 1))

    @property
    def bottleneck(self) -> str:
        """What a step waits for most."""
        return max(self.terms_s, key=lambda name: self.terms_s[name])


def predict(shape: ModelShape, machine: Machine, job: Job) -> Prediction:
    """Plan and time one job. Pure; takes a fraction of a second for the largest models.

    Raises: ValueError for a job that makes no sense, naming field and fix.
    """
    _check(job, machine)
    placed, plan, problem = _place(shape, machine, job)
    ranks = machine.ranks
    rests = [_rests(need, row, found) for need, row, found in zip(placed, plan.nvme_masks, plan.formats, strict=True)]
    at_rest = sum((everything for everything, _ in rests), AtRest()).scaled(params=ranks, optim=ranks, grads=ranks)
    on_nvme = sum((nvme for _, nvme in rests), AtRest()).scaled(params=ranks, optim=ranks, grads=ranks)
    tokens = job.micro_batch_tokens(ranks)
    boundary = ranks * tokens * shape.boundary_bytes_per_token if job.checkpointing else 0
    moved = traffic(on_nvme, job.update, job.micro_batches, activations=boundary if job.activations == "nvme" else 0)
    compute = _compute(shape, machine, job, at_rest.states)
    terms = {
        "compute": compute.total_s,
        "drives": machine.bandwidths.io_s(moved.total) if machine.bandwidths else 0.0,
        "PCIe": _pcie_s(shape, machine, job, boundary),
        "CPU memory": _dram_s(shape, machine, job, at_rest, moved),
    }
    update_s = (2 * at_rest.states + _grad_bytes(shape)) / machine.dram_bytes_per_s
    others = (terms["PCIe"], terms["CPU memory"])
    found = limits(moved, compute, machine.bandwidths, job.update, update_s=update_s, others_s=others)
    ram, gpu = _ram(plan, machine, job, boundary), gpu_need(shape, machine, job)
    nvme = Need(on_nvme.total, machine.nvme_bytes if machine.drives else 0.0, _parts(on_nvme))
    return Prediction(
        job=job,
        machine=machine,
        gpu=gpu,
        ram=ram,
        nvme=nvme,
        at_rest=at_rest,
        on_nvme=on_nvme,
        moved=moved,
        limits=found,
        terms_s=terms,
        step_s=found.schedule_s / EFFICIENCY,
        why_not=_why_not(problem, gpu, ram, nvme, machine),
    )


def _check(job: Job, machine: Machine) -> None:
    for name in ("tokens", "sequence", "micro_batches"):
        if getattr(job, name) < 1:
            raise ValueError(f"{name}={getattr(job, name)} must be at least 1")
    if job.tokens < machine.ranks * job.micro_batches:
        raise ValueError(
            f"tokens={job.tokens} per step leave nothing for {machine.ranks} devices x {job.micro_batches} micro-batches; "
            "give more tokens or fewer micro-batches"
        )
    if "nvme" in (job.params, job.optim, job.grads, job.activations) and not machine.drives:
        raise ValueError("a state may rest on NVMe and the machine has no drive; give drives=1 or more, or tiers above 'nvme'")
    passes(job.update, job.micro_batches)  # checks the mode


# -- placement ---------------------------------------------------------------------------------------------------------------


def _place(shape: ModelShape, machine: Machine, job: Job) -> tuple[list[FlatNeed], Plan, str]:
    """The needs of one rank, their placement under its share of the RAM, and what does not fit (empty: all does)."""
    grain = _grain(shape, machine.ranks, job.state)
    fine, needs = _needs(shape, machine, job, 1, least=True), _needs(shape, machine, job, grain)
    largest = max((numel for flat in shape.flats if flat.trainable for numel in flat.numels), default=0)

    def plan(which: Sequence[FlatNeed], ram_bytes: int | None) -> Plan:
        return plan_placement(
            which,
            ram_bytes,
            drive_count=machine.drives,
            scratch_bytes=4 * min(largest, NORM_PIECE_NUMEL),
            load=Load(job.update, job.micro_batches, (machine.read_bytes_per_s, machine.write_bytes_per_s)),
            advice="",
        )

    # Slots of coarse pieces are larger than those of chunks: so much more may be held.
    excess = plan(needs, None).pool_bytes - plan(fine, None).pool_bytes
    boundary = _boundary_ram(shape, job, machine)
    budget = int(machine.ram_bytes / machine.ranks - boundary)
    problem = ""
    try:
        found = plan(needs, max(budget, 0))
        if found.pool_bytes:
            larger = plan(needs, budget + excess)
            found = larger if larger.pool_bytes else found  # without pools it would hold more than there is
    except BudgetError:
        try:
            found = plan(needs, max(budget + excess, 0))
        except BudgetError:
            found = plan(needs, None)
            problem = f"{machine.ranks * (found.ram_bytes - excess + boundary) / 2**30:,.0f} GiB"
    if found.pool_bytes:
        found = _with_pools(found, plan(fine, None))
    return needs, found, problem


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
    stores = job.update != "backward" or job.micro_batches > 1
    for flat in shape.flats:
        held = state_format(job.state, flat.dtype) if flat.trainable else None
        size = chunk_numel(held or Format.RAW) * grain
        key = (flat.numels, flat.dtype.itemsize, size)
        if key not in layouts:
            layouts[key] = plan_flat(flat.numels, flat.dtype.itemsize, machine.ranks, size)
        layout = layouts[key]
        if least:
            # Slots are as large as the largest chunk: one of each length up to a whole chunk says it.
            kind = (held, flat.dtype, min(layout.shard_numel, size))
            if kind in seen:
                continue
            seen.add(kind)
            layout = dataclasses.replace(layout, shard_numel=min(layout.shard_numel, size))
        needs.append(_need(flat, layout, held, job, stores=stores))
    return needs


def _need(flat: FlatShape, layout: FlatLayout, held: Format | None, job: Job, *, stores: bool) -> FlatNeed:
    if held is None:
        return FlatNeed(layout, Format.RAW, job.params, job.optim)
    size = layout.shard_numel * flat.dtype.itemsize
    delayed = job.update == "delayed"
    grads = size * (2 if delayed else 1) if stores else 0
    spills = job.grads == "nvme" and stores
    section = {2: GradSection.BF16, 4: GradSection.FP32}[flat.dtype.itemsize]
    return FlatNeed(
        layout,
        held,
        job.params,
        job.optim,
        grad_bytes=grads,
        shadow_bytes=size if delayed else 0,
        spill_format=held.with_grad(section) if spills else None,
        window_bytes=size if spills else 0,
    )


def _rests(need: FlatNeed, masks: Sequence[int], placed: Format) -> tuple[AtRest, AtRest]:
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


# -- time --------------------------------------------------------------------------------------------------------------------


def _compute(shape: ModelShape, machine: Machine, job: Job, states: float) -> Compute:
    """The passes of a step. Where the CPU computes, what the engine does there takes its time from them (`_beside`)."""
    found = _passes(shape, machine, job)
    if machine.gpus:
        return found
    forward_s, backward_s, update_s = _beside(shape, machine, states)
    between_s = (job.micro_batches - 1) * (forward_s + backward_s)
    last_s = backward_s + (update_s if job.update == "backward" else 0.0)
    first_s = forward_s + (update_s if job.update == "deferred" else 0.0)
    between_s += update_s if job.update == "delayed" else 0.0
    return Compute(found.first_forward_s + first_s, found.last_backward_s + last_s, found.between_s + between_s)


def _beside(shape: ModelShape, machine: Machine, states: float) -> tuple[float, float, float]:
    """CPU time of the engine beside (a forward, a backward, and for the update), as bytes through the CPU's memory.

    A gather verifies and copies (3 passes over the parameters), a backward also takes the gradients (copy and norm: 3 passes),
    an update reads, verifies and writes every state once, with the gradients.
    """
    params, grads = _param_bytes(shape), _grad_bytes(shape)
    rate = PASS_SHARE * machine.dram_bytes_per_s
    return 3 * params / rate, (3 * params + 3 * grads) / rate, (2 * states + grads) / rate


def _passes(shape: ModelShape, machine: Machine, job: Job) -> Compute:
    if job.compute_s is not None:
        return Compute.of(*job.compute_s, job.micro_batches)
    forward, backward = compute_flops(
        shape.active_params,
        job.tokens / job.micro_batches,
        recompute=job.checkpointing,
        layers=shape.layers,
        attention_width=shape.attention_width,
        sequence=job.sequence,
    )
    return Compute.of(forward / machine.flops, backward / machine.flops, job.micro_batches)


def _grad_bytes(shape: ModelShape) -> float:
    return float(sum(flat.size_bytes for flat in shape.flats if flat.trainable))


def _param_bytes(shape: ModelShape) -> float:
    return float(sum(flat.size_bytes for flat in shape.flats))


def _pcie_s(shape: ModelShape, machine: Machine, job: Job, boundary: float) -> float:
    if not machine.gpus or job.params == "device":
        return 0.0
    spilled = boundary if job.activations != "device" else 0.0
    return pcie_s(
        _param_bytes(shape), _grad_bytes(shape), job.micro_batches, machine.pcie_bytes_per_s, activations=spilled
    )


def _dram_s(shape: ModelShape, machine: Machine, job: Job, at_rest: AtRest, moved: Traffic) -> float:
    total = Moved(moved.total.read, moved.total.written)
    return dram_s(
        at_rest.states, total, _param_bytes(shape), _grad_bytes(shape), job.micro_batches, machine.dram_bytes_per_s
    )


# -- what is needed ----------------------------------------------------------------------------------------------------------


def _boundary_ram(shape: ModelShape, job: Job, machine: Machine) -> int:
    """RAM of one rank for activations that wait there."""
    if job.activations != "cpu" or not job.checkpointing:
        return 0
    return job.micro_batch_tokens(machine.ranks) * shape.boundary_bytes_per_token


def _ram(plan: Plan, machine: Machine, job: Job, boundary: float) -> Need:
    ranks = machine.ranks
    parts = {
        "pools": plan.pool_bytes,
        "gradients": plan.grad_bytes,
        "windows of spilled gradients": plan.staging_bytes,
        "parameters of the step before": plan.shadow_bytes,
        "resident states": plan.resident_bytes,
        "checksums and scratch": plan.sums_bytes + plan.scratch_bytes,
    }
    found = {name: float(ranks * size) for name, size in parts.items() if size}
    if job.activations == "cpu" and boundary:
        found["activations"] = boundary
    return Need(sum(found.values()), machine.ram_bytes, found)


def gpu_need(shape: ModelShape, machine: Machine, job: Job) -> Need:
    """Device memory of one GPU: units gathered and ahead, fresh gradients of the one in backward, activations."""
    tokens = job.micro_batch_tokens(machine.ranks)
    if job.params == "device":
        gathered = float(sum(unit.size_bytes for unit in shape.units))
    else:
        gathered = float((AHEAD + 1) * shape.largest_unit_bytes)
    activations = shape.activation_bytes(
        tokens, checkpointing=job.checkpointing, boundaries_on_device=job.activations == "device"
    )
    fresh = float((UNITS_AHEAD if job.update == "backward" else 1) * shape.largest_unit_bytes)
    parts = {"gathered units": gathered, "fresh gradients": fresh, "activations (estimated)": activations}
    return Need(sum(parts.values()), machine.gpu_mem_bytes, parts)


def _parts(found: AtRest) -> dict[str, float]:
    parts = {
        "parameters": found.params + found.frozen,
        "optimizer states": found.optim,
        "spilled gradients": found.grads,
    }
    return {name: size for name, size in parts.items() if size}


def _why_not(problem: str, gpu: Need, ram: Need, nvme: Need, machine: Machine) -> tuple[str, ...]:
    found = []
    if not gpu.fits:
        what = "GPU memory" if machine.gpus else "device memory (the CPU's)"
        found.append(
            f"{what}: {gpu.bytes / 2**30:,.1f} GiB are needed on each, {machine.gpu_mem_bytes / 2**30:,.1f} are there; more "
            "micro-batches, gradient checkpointing, or activations on the CPU need less"
        )
    if problem:
        found.append(
            f"RAM: {problem} is the least that works, {machine.ram_bytes / 2**30:,.0f} GiB are there; spilled gradients "
            "(--grads nvme), update backward with one micro-batch, or lower tiers need less"
        )
    elif not ram.fits:
        found.append(f"RAM: {ram.bytes / 2**30:,.0f} GiB are needed, {machine.ram_bytes / 2**30:,.0f} are there")
    if not nvme.fits:
        room = nvme.there_is or 0.0
        found.append(f"NVMe: {nvme.bytes / 1e12:,.2f} TB are needed, {room / 1e12:,.2f} are there; compact states need less")
    return tuple(found)
