"""Prediction of the memory that a job needs on a machine and of the time of a step, computed from
the placement of states and from the limits of the hardware.

    seconds per step = limit of the update mode (`infinity._src.memory.roofline`) / EFFICIENCY

No budget counts checkpoints and set-up. A plan assumes that checkpoints are on the same drives as
the states. Set-up reads parameters from their source and writes them to the drives; it does not
write moments, which begin as zeros. On one node each rank reads its part of the source. On several
nodes each rank reads the whole source, since the engine does not know whether all nodes have the
same files. With `init=` set-up reads nothing: each rank draws all values, on one core.
"""

from __future__ import annotations

import dataclasses

from infinity._src.base.sizes import format_size, round_size
from infinity._src.config.choices import OPTIMIZERS, SCHEDULES
from infinity._src.memory.pcie import (
    BusyTime,
    Copied,
    Copies,
    LinkSpeed,
    ModelBytes,
    copies,
    dram_s,
)
from infinity._src.memory.roofline import (
    AtRest,
    Compute,
    Limits,
    Moved,
    Traffic,
    compute_flops,
    days_of_life,
    limits,
    traffic,
    update_threads,
)
from infinity._src.plan.machine import CHECKSUMS_PER_CORE, Machine
from infinity._src.plan.matrices import MatrixWork, matrix_work
from infinity._src.plan.memory import (
    BESIDE_BUDGET,
    Need,
    Placed,
    RamBeside,
    again_share,
    boundary_bytes,
    bytes_at_rest,
    gpu_need,
    least_need,
    place_in_ram,
    reads_in_parts,
    spare_bytes,
    ways_to_fit,
)
from infinity._src.plan.ranks import Exchanges, exchanges
from infinity._src.plan.workload import Job, JobShape, ModelShape, gathered_share, shape_in

EFFICIENCY = 0.9
"""Share of the limit that a plan assumes the engine to reach: a goal of this project, which the
benchmarks measure.
"""

NEWTON_SCHULZ = "Newton-Schulz"
"""Name of the term of a step in which the optimizer transforms whole matrices."""

PASS_SHARE = 0.5
"""Share of the memory bandwidth that the engine's passes over data reach if the CPU computes: the
passes also compute checksums and updates, and share the cores with forward and backward. Measured
on two cores (`bench/predict.py`)."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Needs and times of one job on one machine. Bytes are sums over the ranks of a node, unless
    stated otherwise; seconds are per step.

    gpu: memory of one device. ram: RAM of a node, including the host overhead `ram_beside` and, if
        the CPU computes, the device memory of all ranks. policy_ram: largest `Policy.ram` of each
        rank; if the machine has too little RAM, the smallest that works.
    at_rest: all states by kind. on_nvme: the part of `at_rest` on drives. moved: traffic of the
        drives. copied: copies between the CPU and all GPUs; zero if the CPU computes.
    model_flops: floating-point operations of forward and backward, without recomputation, over all
        nodes.
    exchanged: collectives, with the bytes that one rank receives from other ranks.
    matrices: work on whole matrices.
    limits: lower bounds of a step. terms_s: busy seconds of each resource.
    touched: share of the parameters that a pass gathers; below 1 if tokens choose no expert of some
        tiles.
    again: share of the parameters that the vertical schedule gathers separately for each
        micro-batch, because the GPU has no capacity to retain them.
    why_not: for each kind of memory that is too small, a text with changes that would help; empty
        if the job fits. If it is not empty, the times are for the smallest placement that works.
    days: days until the drives have written the bytes that they are rated for.
    """

    job: Job
    machine: Machine
    gpu: Need
    ram: Need
    ram_beside: RamBeside
    policy_ram: int
    nvme: Need
    at_rest: AtRest
    on_nvme: AtRest
    moved: Traffic
    copied: Copied
    model_flops: float
    exchanged: Exchanges
    matrices: MatrixWork
    limits: Limits
    terms_s: dict[str, float]
    step_s: float
    why_not: tuple[str, ...]
    touched: float = 1.0
    again: float = 0.0

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def budget_bytes(self) -> float:
        """RAM in the budgets of a node's ranks, plus the RAM for stored activations."""
        return self.ram.bytes - self.ram_beside.peak - self.ram.parts.get("device memory", 0.0)

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.step_s

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of each device."""
        return self.model_flops / self.step_s / self.machine.world

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilization: the share of the GPU's peak, 0 to 1. None if the CPU computes.
        """
        return self.flops_per_gpu / self.machine.flops_peak_per_gpu if self.machine.gpus else None

    @property
    def written_per_day(self) -> float:
        return self.moved.total.written / self.step_s * 86_400

    @property
    def days(self) -> float:
        rated = self.machine.tbw_per_drive / 1e12
        return days_of_life(self.moved.total.written, self.step_s, rated, self.machine.worn_drives)

    @property
    def bottleneck(self) -> str:
        """Name of the largest term of `terms_s`."""
        return max(self.terms_s, key=lambda name: self.terms_s[name])


def predict(model: ModelShape, machine: Machine, job: Job) -> Prediction:
    """Predict needs and times of one job. The function is pure and takes a fraction of a second for
    the largest models. model: the uncut shape; this function cuts it into the job's tiles of
    experts.

    Raises: ValueError, whose text names field and fix, for a job that cannot run on the machine.
    """
    check_job(job, machine)
    shape = shape_in(job, model)
    ranks = machine.ranks
    placed = place_in_ram(shape, machine, job)
    plan = placed.plan
    of_rank = bytes_at_rest(placed.needs, plan)
    at_rest, on_nvme = (_of_node(found, ranks) for found in of_rank)
    again = again_share(shape, machine, job)
    step = time_step(shape, machine, job, at_rest, on_nvme, again=again)
    gpu, ram = gpu_need(shape, machine, job), _ram(placed, machine)
    nvme = _nvme(on_nvme, placed, machine, job)
    return Prediction(
        job=job,
        machine=machine,
        gpu=gpu,
        ram=ram,
        ram_beside=placed.outside,
        policy_ram=max(placed.left, plan.ram_bytes + placed.held),
        nvme=nvme,
        at_rest=at_rest,
        on_nvme=on_nvme,
        moved=step.moved,
        copied=step.copied,
        exchanged=step.exchanged,
        matrices=matrix_work(shape, machine, job),
        touched=step.touched,
        again=again,
        # By definition MFU does not count recomputation.
        model_flops=sum(_flops(shape, job, recompute=False)),
        limits=step.limits,
        terms_s=step.terms_s,
        step_s=step.limits.schedule_s / EFFICIENCY,
        why_not=_why_not(model, gpu, ram, nvme, machine, job),
    )


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Traffic and times of one step; `Prediction` documents the fields."""

    moved: Traffic
    copied: Copied
    exchanged: Exchanges
    touched: float
    terms_s: dict[str, float]
    limits: Limits


def time_step(
    shape: JobShape,
    machine: Machine,
    job: Job,
    at_rest: AtRest,
    on_nvme: AtRest,
    *,
    again: float,
) -> StepTime:
    """Return traffic and times of a step. No time falls when `on_nvme` or `again` grows.

    at_rest: all states of a node. on_nvme: the part of `at_rest` on the node's drives. again: as in
    `Prediction`.
    """
    policy, waiting = job.policy, boundary_bytes(shape, machine, job)
    spilled = waiting if policy.activations == "nvme" else 0.0
    # All ranks gather a tile if one rank has a token for it, so count the tokens of all ranks.
    touched = gathered_share(shape, job.expert_tile, -(-job.tokens // job.passes))
    moved = _without_untouched(_traffic(on_nvme, job, spilled), on_nvme, job, touched)
    moved = _with_again(moved, on_nvme, job, touched * again)
    compute = _compute(shape, machine, job, at_rest, on_nvme, again)
    off_device = waiting if policy.activations != "device" else 0.0
    sizes = _model_bytes(shape, machine, job, at_rest, off_device, touched)
    exchanged = exchanges(shape, machine, job, again)
    between = _apart(job, exchanged.copies())
    work = matrix_work(shape, machine, job)
    copied = _copies(machine, job, sizes, between, again) + _matrix_copies(machine, job, work)
    busy = _busy_times(machine, job, sizes, moved, copied, between)
    busy |= _busy_beside(shape, machine, job, on_nvme, exchanged)
    terms = {
        "compute": compute.passes_s,
        **({NEWTON_SCHULZ: compute.matrices_s} if work.numel else {}),
        "drives": machine.bandwidths.io_s(moved.total) if machine.bandwidths else 0.0,
        **{name: each.total_s for name, each in busy.items()},
    }
    # With GPUs, `busy` counts the update as traffic of the CPU's memory or of the GPUs' memory.
    update_s = 0.0 if machine.gpus else (2 * sizes.states + sizes.grads) / machine.dram_bytes_per_s
    found = limits(
        moved,
        compute,
        machine.bandwidths,
        policy.update,
        update_s=update_s,
        others=busy.values(),
        apart=policy.update_on == "device",
    )
    # If the CPU computes, these are copies inside CPU memory, which the term "CPU memory" counts.
    outside_cpu = copied.total if machine.gpus else Copied()
    return StepTime(moved, outside_cpu, exchanged, touched, terms, found)


def check_job(job: Job, machine: Machine) -> None:
    """Check the job's numbers, and whether the machine can run the job. `Policy` has checked its
    fields already.

    Raises: ValueError, whose text names field and fix.
    """
    policy = job.policy
    for name in ("tokens", "sequence", "micro_batches"):
        if getattr(job, name) < 1:
            raise ValueError(f"{name}={getattr(job, name)} must be at least 1")
    if job.tokens < machine.world * job.micro_batches:
        raise ValueError(
            f"{job.tokens} tokens per step leave nothing for {machine.world} devices x "
            f"{job.micro_batches} micro-batches; "
            "give more tokens or fewer micro-batches"
        )
    if job.schedule not in SCHEDULES:
        raise ValueError(f"schedule={job.schedule!r} is not known; use {' or '.join(SCHEDULES)}")
    if job.vertical and not job.checkpointing:
        raise ValueError(
            "schedule='vertical' checkpoints each block: a plan without checkpointing is for "
            "schedule='horizontal'"
        )
    below = [
        name
        for name in ("params", "optim", "grads", "activations")
        if getattr(policy, name) == "nvme"
    ]
    if below and not machine.drives:
        raise ValueError(
            f"{', '.join(below)} may rest on NVMe and the machine has no drive; give it one, or "
            "tiers above 'nvme'"
        )
    if job.optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={job.optimizer!r} is not known; use {' or '.join(OPTIMIZERS)}")
    if job.refusal:
        raise ValueError(job.refusal)
    if job.policy.update_on == "device" and not machine.gpus:
        raise ValueError(
            "update_on='device' is for GPUs; here the CPU computes and updates: leave it out"
        )
    for name in ("tiles", "loss_tiles"):
        value = getattr(job, name)
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if job.expert_tile < 0:
        raise ValueError(f"expert_tile={job.expert_tile} must not be negative")
    if machine.world == 1 and (policy.qwz or policy.hpz or policy.qgz):
        raise ValueError(
            "qwz, hpz and qgz change the exchanges between ranks, and this job has one rank: leave "
            "them out"
        )


# -- Time ------------------------------------------------------------------------------------------


def _compute(
    shape: JobShape, machine: Machine, job: Job, at_rest: AtRest, on_nvme: AtRest, again: float
) -> Compute:
    """Return the times of the passes. Without GPUs these times include the engine's work on the
    same cores (`_beside`).
    """
    work, found = matrix_work(shape, machine, job), _passes(shape, machine, job)
    matrices_s = work.seconds(machine)
    if machine.gpus:
        return dataclasses.replace(found, matrices_s=matrices_s)
    forward_s, backward_s, update_s = _beside(shape, machine, at_rest.updated)
    # The same cores also update the momenta: they read gradients, and overwrite them with matrices.
    first = 2 * at_rest.first + 2 * work.grad_bytes / machine.nodes
    matrices_s += first / (PASS_SHARE * machine.dram_bytes_per_s)
    # A gather takes as long in backward as in forward, so add all further gathers to backward.
    backward_s += again * job.gathers_again * forward_s
    # The same cores run the update's kernels and move the data; the longer time bounds the update.
    update_s = max(update_s, _kernels_s(shape, machine, job, on_nvme))
    # The engine adds up the gradients of micro-batches in one pass: two reads and one write for
    # each micro-batch after the first.
    added = (job.micro_batches - job.passes) * machine.ranks * shape.trained_bytes
    backward_s += 3 * added / machine.dram_bytes_per_s
    # The update takes CPU time from the pass that runs concurrently.
    between_s = (job.passes - 1) * (forward_s + backward_s)
    last_s = backward_s + (update_s if job.policy.update == "backward" else 0.0)
    first_s = forward_s + (update_s if job.policy.update == "deferred" else 0.0)
    between_s += update_s if job.policy.update == "delayed" else 0.0
    return Compute(
        found.first_forward_s + first_s, found.last_backward_s + last_s,
        found.between_s + between_s, matrices_s,
    )  # fmt: skip


def _beside(shape: ModelShape, machine: Machine, states: float) -> tuple[float, float, float]:
    """Return the engine's CPU seconds (in a forward, in a backward, for the update), estimated from
    the bytes that the engine moves through CPU memory.

    A gather verifies and copies: 3 passes over the parameters. In backward the engine also copies
    the gradients and computes their norm: 3 passes over the gradients. An update reads and writes
    every state once, and reads the gradients.
    """
    params, grads = machine.ranks * _param_bytes(shape), machine.ranks * shape.trained_bytes
    rate = PASS_SHARE * machine.dram_bytes_per_s
    return 3 * params / rate, (3 * params + 3 * grads) / rate, (2 * states + grads) / rate


def _kernels_s(shape: ModelShape, machine: Machine, job: Job, on_nvme: AtRest) -> float:
    """Return the seconds that a node's cores take for the update's kernels, and for the checksums
    of the states that the update reads and writes.
    """
    policy = job.policy
    # `update_threads` takes processors and cores; a plan knows only cores, so pass them for both.
    threads = policy.update_threads or update_threads(
        machine.cores, machine.cores, machine.ranks, on_gpu=bool(machine.gpus)
    )
    trained = shape.trainable / machine.nodes
    summed = {"full": 2.0, "sample": 1.0 + 1 / 16, "off": 0.0}[policy.verify] * (
        on_nvme.updated + on_nvme.first
    )
    seconds = trained / machine.updates_per_core[policy.state] + summed / CHECKSUMS_PER_CORE
    return seconds / min(threads * machine.ranks, machine.cores)


def _passes(shape: ModelShape, machine: Machine, job: Job) -> Compute:
    if job.compute_s is not None:
        forward_s, backward_s = job.compute_s
        share = job.micro_batches / job.passes
        return Compute.of(share * forward_s, share * backward_s, job.passes)
    forward, backward = _flops(shape, job, recompute=job.checkpointing)
    return Compute.of(
        forward / job.passes / machine.flops / machine.nodes,
        backward / job.passes / machine.flops / machine.nodes,
        job.passes,
    )


def _flops(shape: ModelShape, job: Job, *, recompute: bool) -> tuple[float, float]:
    return compute_flops(
        shape.active_params,
        job.tokens,
        recompute=recompute,
        frozen_params=shape.frozen_params,
        layers=shape.layers,
        attention_width=shape.attention_width,
        sequence=job.sequence,
    )


def waiting_grad_bytes(shape: ModelShape, job: Job) -> int:
    """Return the bytes of all gradients, in the dtype in which the engine stores them."""
    return shape.remember(
        ("waiting_grad_bytes", job.policy.grad_dtype),
        lambda: sum(
            count * flat.numel * job.grad_itemsize(flat.dtype)
            for flat, count in shape.kinds_of_flats
            if flat.trainable
        ),
    )


def _param_bytes(shape: ModelShape) -> float:
    return float(shape.gathered_bytes())


def _traffic(on_nvme: AtRest, job: Job, spilled: float) -> Traffic:
    """Count the traffic of the drives. spilled: bytes of one pass's activations on drives."""
    moved = traffic(on_nvme, job.policy.update, job.passes, activations=spilled)
    moved = _from_copies(moved, on_nvme, job)
    if job.policy.update_on == "device":
        # The update ends before the next forward begins. So forward reads the updated parameters
        # from the drives, instead of from the update's buffers.
        moved = dataclasses.replace(moved, params_read=moved.params_read + on_nvme.params)
    return moved


def _without_untouched(moved: Traffic, on_nvme: AtRest, job: Job, touched: float) -> Traffic:
    """Subtract the reads of tiles that no pass gathers, because no token chose their experts.
    Updates still read and write all states: weight decay also applies to experts without tokens.
    """
    backward = job.policy.update == "backward"
    # With update="backward" one gather also supplies the update with parameters. The update reads
    # untouched parameters itself, so do not subtract these reads.
    fed = min(on_nvme.params, moved.params_read) if backward else 0.0
    left_out = (moved.params_read - fed) * (1.0 - touched)
    # 2M - 1 gathers remain. With update="backward" one of them runs in the window of the updates,
    # with "delayed" all of them do.
    gathers = 2 * job.passes - 1
    of_window = {"backward": 1 / gathers, "delayed": 1.0}.get(job.policy.update, 0.0)
    return dataclasses.replace(
        moved,
        params_read=moved.params_read - left_out,
        beside_states=moved.beside_states - Moved(of_window * left_out),
    )


def _with_again(moved: Traffic, on_nvme: AtRest, job: Job, share: float) -> Traffic:
    """Add the reads of parameters that are gathered separately for each micro-batch. share: share
    of the parameters.
    """
    # Under hpZ these gathers read the node's copy; with delayed updates they read a copy in memory.
    params = 0.0 if job.policy.update == "delayed" else on_nvme.params
    size = 0.0 if job.policy.hpz else params + on_nvme.frozen
    read = moved.params_read + share * job.gathers_again * size
    return dataclasses.replace(moved, params_read=read)


def _from_copies(moved: Traffic, on_nvme: AtRest, job: Job) -> Traffic:
    """Reduce the reads under hpZ: only the first gather of a step reads the drives, and reads only
    the parameters that the update does not supply from memory.
    """
    if not job.policy.hpz or job.policy.update == "delayed":
        return moved
    # A deferred update supplies the first gather with trained parameters. With update="backward"
    # the first gather reads trained parameters from the drives.
    once = on_nvme.frozen + (on_nvme.params if job.policy.update == "backward" else 0.0)
    # The window of update="backward" has two gathers. The gather of the last backward reads the
    # node's copy and no drive.
    in_window = once if job.policy.update == "backward" else 0.0
    return dataclasses.replace(
        moved, params_read=once, beside_states=moved.beside_states - Moved(in_window)
    )


def _of_node(rank: AtRest, ranks: int) -> AtRest:
    return rank.scaled(params=ranks, optim=ranks, grads=ranks)


def _model_bytes(
    shape: JobShape,
    machine: Machine,
    job: Job,
    at_rest: AtRest,
    activations: float,
    touched: float,
) -> ModelBytes:
    """Return the sizes from which `copies` counts, over all ranks of a node. activations: bytes of
    stored activations. touched: share of the parameters that a pass gathers.
    """
    params, grads = shape.trained_bytes, waiting_grad_bytes(shape, job)
    return ModelBytes(
        params=touched * params / machine.nodes,
        states=at_rest.updated,
        grads=grads / machine.nodes,
        first=2 * at_rest.first + 2 * matrix_work(shape, machine, job).grad_bytes / machine.nodes,
        frozen=(_param_bytes(shape) - params) / machine.nodes,
        activations=activations,
    )


def _copies(machine: Machine, job: Job, sizes: ModelBytes, between: Copies, again: float) -> Copies:
    """Count the copies between the CPU and all GPUs of a node. between: exchanges of one GPU with
    other GPUs of the node, which are added if GPUs have no direct links: they go through CPU
    memory. again: share of the parameters that is gathered separately for each micro-batch.
    """
    # If the CPU computes, params="device" means CPU memory, so no parameters stay on a GPU.
    stay = job.policy.params == "device" and machine.gpus > 0
    found = copies(
        sizes,
        job.policy.update,
        job.passes,
        update_on=job.policy.update_on,
        params_stay=stay,
        # The step may repeat a speculative update, so the engine retains the gradients.
        grads_wait=job.policy.speculates,
    )
    if not stay:
        more = again * job.gathers_again * (sizes.params + sizes.frozen)
        found += Copies(rest=Copied(h2d=more))
    # Under hpZ every gather but the first reads the node's copy. If the copy is in CPU memory, each
    # rank copies one shard for each node to the GPU. A copy on the device needs no transfer.
    if job.policy.hpz and machine.gpus:
        share = sizes.params + sizes.frozen
        more = (machine.nodes - 1) * share if job.policy.hpz == "cpu" else -share
        # One of these gathers may run in the window of the updates: keep the rest at 0 or above.
        found += Copies(rest=Copied(h2d=max((2 * job.passes - 1) * more, -found.rest.h2d)))
    if machine.gpus > 1 and machine.peers_per_gpu is None:
        found += between.scaled(machine.gpus)
    return found


def _apart(job: Job, found: Copies) -> Copies:
    """Move all exchanges out of the window of the updates if updates run on the device: no pass,
    and so no exchange, runs during such an update.
    """
    if job.policy.update_on == "device":
        return Copies(rest=found.beside_states + found.rest, matrices=found.matrices)
    return found


def _matrix_copies(machine: Machine, job: Job, work: MatrixWork) -> Copies:
    """Count the copies of matrices from the CPU to all GPUs of a node, and back."""
    each = work.grad_bytes / machine.nodes if machine.gpus else 0.0
    copied = Copied(each, each)
    if job.policy.update == "backward":
        return Copies(beside_states=copied)
    return Copies(matrices=copied)


def _busy_times(
    machine: Machine, job: Job, sizes: ModelBytes, moved: Traffic, copied: Copies, between: Copies
) -> dict[str, BusyTime]:
    updated = 2 * sizes.states + sizes.grads
    on_cpu = job.policy.update_on == "cpu"
    # A GPU adds up the gradients of micro-batches in GPU memory, not in CPU memory.
    added = 0.0 if machine.gpus else (job.micro_batches - 1) * sizes.grads
    early = updated if on_cpu else 0.0
    first = sizes.first
    if job.policy.update == "backward":
        early, first = early + first, 0.0
    window, rest, matrices = moved.beside_states, moved.rest, moved.matrices
    found = {
        "CPU memory": BusyTime.sum_of(
            dram_s(
                window.read + window.written,
                copied.beside_states.total,
                early,
                machine.dram_bytes_per_s,
            ),
            dram_s(
                rest.read + rest.written,
                copied.rest.total,
                0.0,
                machine.dram_bytes_per_s,
                added_bytes=added,
            ),
            dram_s(
                matrices.read + matrices.written,
                copied.matrices.total,
                first,
                machine.dram_bytes_per_s,
            ),
        )
    }
    if not machine.gpus:
        return found
    pcie = machine.pcie_bytes_per_s
    found = {"PCIe": LinkSpeed(pcie, pcie).busy_time(copied)} | found
    if machine.gpus > 1 and machine.peers_per_gpu is not None:
        link = LinkSpeed(machine.peers_per_gpu, machine.peers_per_gpu)
        found["links between GPUs"] = link.busy_time(between)
    if not on_cpu:
        # Each GPU updates an even share of the states in GPU memory.
        update_s = updated / machine.gpus / machine.hbm_per_gpu
        found["update in GPU memory"] = BusyTime.sum_of(update_s)
    return found


def _busy_beside(
    shape: ModelShape, machine: Machine, job: Job, on_nvme: AtRest, exchanged: Exchanges
) -> dict[str, BusyTime]:
    found = {}
    if machine.gpus and job.policy.update_on == "cpu":
        found["update kernels"] = BusyTime.sum_of(_kernels_s(shape, machine, job, on_nvme))
    if machine.nodes > 1:
        # All ranks of a node share the node's link.
        link = LinkSpeed(machine.link_bytes_per_s, machine.link_bytes_per_s)
        found["link between nodes"] = link.busy_time(_apart(job, exchanged.copies(nodes=True)))
    return found


# -- Needs -----------------------------------------------------------------------------------------


def _ram(placed: Placed, machine: Machine) -> Need:
    of_rank = {name: size.cpu for name, size in placed.beside.items()}
    parts = {
        name: float(machine.ranks * size)
        for name, size in {**placed.plan.ram_parts, **of_rank}.items()
    }
    parts |= {
        "activations": placed.waiting,
        "device memory": placed.on_device,
        BESIDE_BUDGET: float(placed.outside.peak),
    }
    found = {name: size for name, size in parts.items() if size}
    return Need(sum(found.values()), machine.ram_bytes, found)


def _nvme(on_nvme: AtRest, placed: Placed, machine: Machine, job: Job) -> Need:
    """Count the capacity that a job needs on a node's drives. A second generation, and each older
    commit of a durable run, needs space for the states once more.
    """
    plan, trained = placed.plan, on_nvme.params + on_nvme.optim
    # Each rank has a file on every drive.
    files = machine.ranks * machine.drives
    other = trained + (on_nvme.frozen if job.policy.durable else 0.0)
    parts = {
        "parameters": on_nvme.params + on_nvme.frozen,
        "optimizer states": on_nvme.optim,
        "the other generation": other if job.policy.generations > 1 else 0.0,
        # A run with less capacity also works, but retains fewer commits.
        "older commits": job.policy.older_commits * trained,
        "spilled gradients": on_nvme.grads,
        "activations": placed.spilled,
        "spare ranges": float(files * spare_bytes(placed.needs, plan)),
    }
    found = {name: size for name, size in parts.items() if size}
    # Without drives the capacity is 0; None would mean that it is not known.
    return Need(sum(found.values()), machine.nvme_bytes if machine.drives else 0.0, found)


def _why_not(
    shape: ModelShape, gpu: Need, ram: Need, nvme: Need, machine: Machine, job: Job
) -> tuple[str, ...]:
    found = []
    if not gpu.fits:
        what = "GPU memory" if machine.gpus else "device memory (the CPU's)"
        found.append(f"{what}: {_lacks(gpu, ' on each')}; {_what_fits(shape, machine, job)}")
    if not ram.fits:
        less = []
        if machine.drives and job.policy.grads != "nvme":
            less.append("spilled gradients (--grads nvme)")
        # A durable run needs the second generation. With one generation and one pass, an update in
        # backward consumes each gradient immediately, so RAM stores no gradients.
        if job.policy.generations > 1:
            less += [] if job.policy.durable else ["one generation"]
        elif job.stores_gradients:
            how = "" if job.passes == 1 else " in one pass (--schedule vertical)"
            less.append(f"update backward{how}")
        if machine.drives and not job.policy.params == job.policy.optim == "nvme":
            less.append("lower tiers")
        less += ["leaving --resident out"] if job.policy.resident else []
        less += [] if machine.gpus or not _fewer(machine, job) else ["more micro-batches"]
        there = format_size(ram.there_is or 0.0)
        found.append(
            f"RAM: {round_size(ram.bytes)} is the least that this job takes, {there} is there; "
            f"{_join(less)}"
        )
    if not nvme.fits:
        less = [] if job.policy.state == "compact" else ["compact states"]
        if job.policy.durable:
            less += ["two generations"] if job.policy.older_commits else []
        elif job.policy.generations > 1:
            less.append("one generation")
        found.append(f"NVMe: {_lacks(nvme)}; {_join(less)}")
    # `_join` returns "" if no change would need less: remove the separator.
    return tuple(text.removesuffix("; ") for text in found)


def _fewer(machine: Machine, job: Job) -> bool:
    """Return whether a micro-batch can have fewer tokens."""
    return max(job.micro_batch_counts(machine.world), default=1) > job.micro_batches


def _what_fits(shape: ModelShape, machine: Machine, job: Job) -> str:
    """Name the single changes that make the job fit a GPU, each with the changed need; if there is
    none, state the need after all changes together.
    """
    ways = ways_to_fit(shape, machine, job)
    if ways:
        return "it fits with " + ", or ".join(
            f"{way.name} ({way.how}): {format_size(way.need.bytes)}" for way in ways
        )
    least = least_need(shape, machine, job)
    units = ("gathered units", "fresh gradients", "sums of gradients")
    of_units = sum(size for name, size in least.parts.items() if name in units)
    enough = "enough" if least.fits else "too much still; shorter sequences need less"
    # Shorter sequences would not help if most of the need is units and gradients.
    if not least.fits and 2 * of_units > least.bytes:
        enough = f"too much still; {format_size(of_units)} of it are units and gradients"
    return (
        "no single change of the job is enough: all of them together need "
        f"{round_size(least.bytes)}, {enough}"
    )


def _lacks(need: Need, where: str = "") -> str:
    return (
        f"{round_size(need.bytes)} is needed{where}, {format_size(need.there_is or 0.0)} is there"
    )


def _join(less: list[str]) -> str:
    if not less:
        return ""
    *others, last = less
    return (
        f"{', '.join(others)} or {last}" if others else last
    ) + f" need{'' if others or last.endswith('s') else 's'} less"


# -- Costs that no budget counts -------------------------------------------------------------------


PIN_S_PER_BYTE = 0.1e-9
"""Seconds that a GPU's driver takes to pin a byte of RAM: 0.1 s per GB (assumed, from reports)."""

CHUNK_S = 60e-6
"""CPU seconds of set-up for each chunk, without I/O: 32e-6 for the model and 29e-6 for the
optimizer (tests/slopes.py, states in RAM, 2 cores)."""


DRAW_S = 22e-9
"""Seconds that one core takes to draw an element's initial value twice, as `init=` does: 8.03
billion elements in a set-up of 183 s (docs/performance.md)."""


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Set-up of one rank, in bytes and seconds.

    read: bytes read from the source of parameters. written: bytes written to the drives. seconds:
    time until all ranks are set up; the ranks share the drives, pin the node's RAM one after
    another, and each rank processes its chunks on one core. init_seconds: time of a set-up with
    `init=`, which draws the values and reads nothing.
    """

    read: float
    written: float
    seconds: float
    init_seconds: float


@dataclasses.dataclass(frozen=True)
class Outside:
    """Costs of one job on one machine that no budget counts. disk: largest number of bytes on a
    node's drives, including the states, in each case.
    """

    ram: RamBeside
    disk: dict[str, float]
    set_up: SetUp


def outside(shape: ModelShape, found: Prediction) -> Outside:
    """Count the costs of a predicted job that no budget counts. shape: uncut (without tiles)."""
    machine, job = found.machine, found.job
    return Outside(
        found.ram_beside,
        _disk_peaks(found.nvme, found.at_rest, job),
        _set_up(shape, machine, found),
    )


def _disk_peaks(nvme: Need, at_rest: AtRest, job: Job) -> dict[str, float]:
    states = at_rest.states + at_rest.frozen
    if job.policy.durable:
        # A checkpoint by links takes no bytes at first. The next step writes to new extents, since
        # the checkpoint still refers to the old ones. The committed states of a killed run remain
        # until the new process, with two generations, commits. After a kill during a commit both
        # generations remain, since either may be valid.
        return {
            "training": nvme.bytes,
            "while a killed run is restored": nvme.bytes + states,
            "while one killed amid a commit is": nvme.bytes + 2 * states,
            "with a checkpoint by links": nvme.bytes + states,
        }
    return {
        "training": nvme.bytes,
        "with a checkpoint": nvme.bytes + states,
        "while the next one is written": nvme.bytes + 2 * states,
    }


def _set_up(shape: ModelShape, machine: Machine, found: Prediction) -> SetUp:
    # `found` counts a node's bytes, but one rank's chunks. A plan assumes that the source is on the
    # same drives.
    whole = sum(count * flat.numel * flat.dtype.itemsize for flat, count in shape.kinds_of_flats)
    read = whole / (machine.world if reads_in_parts(machine) else 1)
    written = (found.on_nvme.params + found.on_nvme.frozen) / machine.ranks
    drives = machine.bandwidths

    def io_s(read: float) -> float:
        moved = Moved(machine.ranks * read, machine.ranks * written)
        return drives.io_s(moved) if drives is not None else 0.0

    seconds = CHUNK_S * found.ram_beside.chunks
    if machine.gpus:
        seconds += PIN_S_PER_BYTE * (found.ram.bytes - found.ram_beside.peak)
    drawn_s = DRAW_S * shape.params
    return SetUp(read, written, seconds + io_s(read), seconds + drawn_s + io_s(0.0))
