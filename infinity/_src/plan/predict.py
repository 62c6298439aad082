"""Prediction of what a model needs on a machine and how long its step takes, from placement and
limits alone.

    seconds per step = limit of the update mode (`infinity._src.memory.roofline`) / EFFICIENCY

Some costs lie in no budget. The drives hold checkpoints, too, where these lie on the same drives.
Set-up reads parameters from their source and writes them to the drives; moments that begin as zeros
are not written. The ranks of one node each read a part; of several nodes each rank reads the whole,
since nothing says that their files are the same. `init=` reads nothing: each rank draws all values
on a core of its own.
"""

from __future__ import annotations

import dataclasses

from infinity._src.base.sizes import format_size, round_size
from infinity._src.config.choices import SCHEDULES
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
from infinity._src.plan.memory import (
    BESIDE_BUDGET,
    Need,
    Placed,
    RamBeside,
    again_share,
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
"""Share of its limit that the engine is taken to reach: this project demands it of itself, and
measures it.
"""

PASS_SHARE = 0.5
"""Share of the memory's bandwidth that the engine's own passes reach where the CPU computes: they
also compute checksums and updates, and share the cores with forward and backward. Measured on two
cores (`bench/predict.py`)."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Needs and times of one job on one machine. Bytes over all ranks of a node, but gpu: of
    one GPU. Seconds per step.

    ram: also what lies beside the budgets, `ram_beside`. policy_ram: what each rank may have as
    `Policy.ram`; where that is too little, the least that works.
    at_rest: all states by kind; on_nvme: of them on drives. copied: between the CPU and all GPUs;
    model_flops: flops of the model's forward and backward, without recomputing, over all nodes.
    exchanged: bytes that each rank receives from the others. touched: share of the parameters that
    a pass gathers; less than all where tiles have experts that no token chose. again: share that a
    vertical schedule gathers for each micro-batch, since the GPU has no room for it to stay.
    why_not: the parts that do not fit and what would help; empty where everything fits. Else the
    times are those of the least that would work. days: until the drives have been written as often
    as they are rated for.
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
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.step_s

    @property
    def flops_per_gpu(self) -> float:
        """FLOP/s of the model on each GPU."""
        return self.model_flops / self.step_s / self.machine.world

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilisation: the share of the GPUs' peak. None where the CPU computes."""
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
        """Name of the term that a step waits for most."""
        return max(self.terms_s, key=lambda name: self.terms_s[name])


def predict(model: ModelShape, machine: Machine, job: Job) -> Prediction:
    """Plan and time one job. Pure; takes a fraction of a second for the largest models.

    Raises: ValueError for a job that makes no sense, naming field and fix.
    """
    _check(job, machine)
    shape = shape_in(job, model)
    ranks, policy = machine.ranks, job.policy
    # A tile is gathered by all ranks as soon as one of them has a token for it.
    touched = gathered_share(shape, job.expert_tile, -(-job.tokens // job.passes))
    placed = place_in_ram(shape, machine, job)
    plan, spilled = placed.plan, placed.spilled
    found_bytes = [
        bytes_at_rest(need, row, found)
        for need, row, found in zip(placed.needs, plan.nvme_masks, plan.formats, strict=True)
    ]
    at_rest = _of_node(sum((everything for everything, _ in found_bytes), AtRest()), ranks)
    on_nvme = _of_node(sum((nvme for _, nvme in found_bytes), AtRest()), ranks)
    moved = _without_untouched(_traffic(on_nvme, job, spilled), on_nvme, job, touched)
    again = again_share(shape, machine, job)
    moved = _with_again(moved, on_nvme, job, touched * again)
    compute = _compute(shape, machine, job, at_rest.states, on_nvme)
    sizes = _model_bytes(shape, machine, job, at_rest, placed.waiting + spilled, touched)
    exchanged = exchanges(shape, machine, job)
    between = _apart(job, exchanged.copies())
    copied = _copies(machine, job, sizes, between, again)
    busy = _busy_times(machine, job, sizes, moved, copied, between)
    busy |= _busy_beside(shape, machine, job, on_nvme, exchanged)
    terms = {
        "compute": compute.total_s,
        "drives": machine.bandwidths.io_s(moved.total) if machine.bandwidths else 0.0,
        **{name: each.total_s for name, each in busy.items()},
    }
    # With GPUs the update is a part of `busy`, for the CPU's memory or the GPUs'.
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
        moved=moved,
        # On the CPU these are copies inside its memory, and count there only.
        copied=copied.total if machine.gpus else Copied(),
        exchanged=exchanged,
        touched=touched,
        again=again,
        # Recomputing is no work of the model: MFU does not count it.
        model_flops=sum(_flops(shape, job, recompute=False)),
        limits=found,
        terms_s=terms,
        step_s=found.schedule_s / EFFICIENCY,
        why_not=_why_not(model, gpu, ram, nvme, machine, job),
    )


def _check(job: Job, machine: Machine) -> None:
    """Check how job and machine go together. A policy has checked itself."""
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
            "qwz, hpz and qgz are of what ranks have from each other, and there is one: leave them "
            "out"
        )


# -- Time ------------------------------------------------------------------------------------------


def _compute(
    shape: JobShape, machine: Machine, job: Job, states: float, on_nvme: AtRest
) -> Compute:
    """Return the times of the passes. The engine's own work takes its time from them where the CPU
    computes (`_beside`).
    """
    found = _passes(shape, machine, job)
    if machine.gpus:
        return found
    forward_s, backward_s, update_s = _beside(shape, machine, states)
    # A gather takes the same in forward and in backward.
    backward_s += again_share(shape, machine, job) * job.gathers_again * forward_s
    # The same cores compute and move: the slower of the two is the time of both.
    update_s = max(update_s, _kernels_s(shape, machine, job, on_nvme))
    # Gradients of micro-batches that share a pass are added up in it: two are read, one written.
    added = (job.micro_batches - job.passes) * machine.ranks * _grad_bytes(shape)
    backward_s += 3 * added / machine.dram_bytes_per_s
    # The update's CPU time falls on the pass that it runs beside.
    between_s = (job.passes - 1) * (forward_s + backward_s)
    last_s = backward_s + (update_s if job.policy.update == "backward" else 0.0)
    first_s = forward_s + (update_s if job.policy.update == "deferred" else 0.0)
    between_s += update_s if job.policy.update == "delayed" else 0.0
    return Compute(
        found.first_forward_s + first_s, found.last_backward_s + last_s, found.between_s + between_s
    )


def _beside(shape: ModelShape, machine: Machine, states: float) -> tuple[float, float, float]:
    """Return the engine's own CPU time (beside a forward, beside a backward, for the update), from
    the bytes that it moves through the CPU's memory.

    A gather verifies and copies (3 passes over the parameters). A backward also takes the gradients
    (copy and norm: 3 passes). An update reads, verifies and writes every state once, and reads the
    gradients.
    """
    params, grads = machine.ranks * _param_bytes(shape), machine.ranks * _grad_bytes(shape)
    rate = PASS_SHARE * machine.dram_bytes_per_s
    return 3 * params / rate, (3 * params + 3 * grads) / rate, (2 * states + grads) / rate


def _kernels_s(shape: ModelShape, machine: Machine, job: Job, on_nvme: AtRest) -> float:
    """Return the time of the update's kernels on a node's cores, beside its GPUs or beside the
    passes of the CPU, and of the checksums of what they read and write.
    """
    policy = job.policy
    # A core is counted as one processor.
    threads = policy.update_threads or update_threads(
        machine.cores, machine.cores, machine.ranks, on_gpu=bool(machine.gpus)
    )
    trained = sum(flat.numel for flat in shape.flats if flat.trainable) / machine.nodes
    summed = {"full": 2.0, "sample": 1.0 + 1 / 16, "off": 0.0}[policy.verify] * on_nvme.states
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
        layers=shape.layers,
        attention_width=shape.attention_width,
        sequence=job.sequence,
    )


def _grad_bytes(shape: ModelShape) -> float:
    return float(sum(flat.gathered_bytes() for flat in shape.flats if flat.trainable))


def _param_bytes(shape: ModelShape) -> float:
    return float(shape.gathered_bytes())


def _traffic(on_nvme: AtRest, job: Job, spilled: float) -> Traffic:
    """Count the traffic over the drives. spilled: activations of a pass that wait there."""
    moved = traffic(on_nvme, job.policy.update, job.passes, activations=spilled)
    moved = _from_copies(moved, on_nvme, job)
    if job.policy.update_on == "device":
        # The update is over before the next forward, which reads what it has written.
        moved = dataclasses.replace(moved, params_read=moved.params_read + on_nvme.params)
    return moved


def _without_untouched(moved: Traffic, on_nvme: AtRest, job: Job, touched: float) -> Traffic:
    """Reduce the reads of gathers to what tokens touch. Updates read and write all states: experts
    without tokens decay, too.
    """
    backward = job.policy.update == "backward"
    # One gather feeds that update, which reads by itself what no token touched.
    fed = min(on_nvme.params, moved.params_read) if backward else 0.0
    left_out = (moved.params_read - fed) * (1.0 - touched)
    # The window of update="backward" has one more of 2M gathers, that of "delayed" all of them.
    gathers = 2 * job.passes - 1
    of_window = {"backward": 1 / gathers, "delayed": 1.0}.get(job.policy.update, 0.0)
    return dataclasses.replace(
        moved,
        params_read=moved.params_read - left_out,
        beside_states=moved.beside_states - Moved(of_window * left_out),
    )


def _with_again(moved: Traffic, on_nvme: AtRest, job: Job, share: float) -> Traffic:
    """Add the reads of this share of the parameters, which is gathered for each micro-batch."""
    # hpZ takes these from the node's copy; delayed passes compute from a copy in memory.
    params = 0.0 if job.policy.update == "delayed" else on_nvme.params
    size = 0.0 if job.policy.hpz else params + on_nvme.frozen
    read = moved.params_read + share * job.gathers_again * size
    return dataclasses.replace(moved, params_read=read)


def _from_copies(moved: Traffic, on_nvme: AtRest, job: Job) -> Traffic:
    """Reduce the reads to those of hpZ: the first gather of a step reads the drives, and not even
    that for what the update hands over.
    """
    if not job.policy.hpz or job.policy.update == "delayed":
        return moved
    # A deferred update hands trained parameters to the first gather. After one in backward that
    # gather reads them.
    once = on_nvme.frozen + (on_nvme.params if job.policy.update == "backward" else 0.0)
    # The window of update="backward" has two gathers. The one of the last backward takes the node's
    # copy and reads no drive.
    in_window = once if job.policy.update == "backward" else 0.0
    return dataclasses.replace(
        moved, params_read=once, beside_states=moved.beside_states - Moved(in_window)
    )


def _of_node(rank: AtRest, ranks: int) -> AtRest:
    return rank.scaled(params=ranks, optim=ranks, grads=ranks)


def _model_bytes(
    shape: ModelShape,
    machine: Machine,
    job: Job,
    at_rest: AtRest,
    activations: float,
    touched: float,
) -> ModelBytes:
    """Bytes that a step copies, over all ranks of a node, each its share: gathered values as they
    compute (`touched` of them), states at rest, gradients as they wait."""
    trained = [flat for flat in shape.flats if flat.trainable]
    params = float(sum(flat.gathered_bytes() for flat in trained))
    return ModelBytes(
        params=touched * params / machine.nodes,
        states=at_rest.states,
        grads=sum(flat.numel * job.grad_itemsize(flat.dtype) for flat in trained) / machine.nodes,
        frozen=(_param_bytes(shape) - params) / machine.nodes,
        activations=activations,
    )


def _copies(machine: Machine, job: Job, sizes: ModelBytes, between: Copies, again: float) -> Copies:
    """Count the copies between the CPU and all GPUs. Exchanges of GPUs without links of their own
    (`between`, of one of them) go through the CPU's memory and count, too. again: share of the
    parameters that is gathered for each micro-batch.
    """
    # "device" is the CPU's own memory where the CPU computes.
    stay = job.policy.params == "device" and machine.gpus > 0
    found = copies(
        sizes,
        job.policy.update,
        job.passes,
        update_on=job.policy.update_on,
        params_stay=stay,
        # A speculative update may be made once more, so its gradients are kept.
        grads_wait=job.policy.speculates,
    )
    if not stay:
        more = again * job.gathers_again * (sizes.params + sizes.frozen)
        found += Copies(rest=Copied(h2d=more))
    # Under hpZ every gather but the first takes the node's copy. From the CPU's memory a rank
    # copies the shards of all nodes, its part of the copy; on the device the copy is there already.
    if job.policy.hpz and machine.gpus:
        share = sizes.params + sizes.frozen
        more = (machine.nodes - 1) * share if job.policy.hpz == "cpu" else -share
        # One of these gathers may lie in the window: at most the bytes that the rest has are taken
        # off.
        found += Copies(rest=Copied(h2d=max((2 * job.passes - 1) * more, -found.rest.h2d)))
    if machine.gpus > 1 and machine.peers_per_gpu is None:
        found += between.scaled(machine.gpus)
    return found


def _apart(job: Job, found: Copies) -> Copies:
    """Place the exchanges in a step: none runs beside an update on the device, which is over before
    the next forward.
    """
    return Copies(rest=found.total) if job.policy.update_on == "device" else found


def _busy_times(
    machine: Machine, job: Job, sizes: ModelBytes, moved: Traffic, copied: Copies, between: Copies
) -> dict[str, BusyTime]:
    updated = 2 * sizes.states + sizes.grads
    on_cpu = job.policy.update_on == "cpu"
    # A GPU adds up the gradients of micro-batches in its own memory.
    added = 0.0 if machine.gpus else (job.micro_batches - 1) * sizes.grads
    early = updated if on_cpu else 0.0
    window, rest = moved.beside_states, moved.rest
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
        # Every GPU updates its share of the states, in its own memory.
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
        # All ranks of a node share its link to the others.
        link = LinkSpeed(machine.link_bytes_per_s, machine.link_bytes_per_s)
        found["link between nodes"] = link.busy_time(_apart(job, exchanged.copies(nodes=True)))
    return found


# -- Needs -----------------------------------------------------------------------------------------


def _ram(placed: Placed, machine: Machine) -> Need:
    """Count a node's RAM."""
    of_rank = {name: size.cpu for name, size in placed.beside.items()}
    parts = {
        name: float(machine.ranks * size)
        for name, size in {**placed.plan.ram_parts, **of_rank}.items()
    }
    parts |= {"activations": placed.waiting, BESIDE_BUDGET: float(placed.outside.peak)}
    found = {name: size for name, size in parts.items() if size}
    return Need(sum(found.values()), machine.ram_bytes, found)


def _nvme(on_nvme: AtRest, placed: Placed, machine: Machine, job: Job) -> Need:
    """Count the room on the drives. Two generations need it twice, a durable run's older commits
    once more for each; a step moves one.
    """
    plan, trained = placed.plan, on_nvme.params + on_nvme.optim
    # Each rank has files of its own on all drives.
    files = machine.ranks * machine.drives
    other = trained + (on_nvme.frozen if job.policy.durable else 0.0)
    parts = {
        "parameters": on_nvme.params + on_nvme.frozen,
        "optimizer states": on_nvme.optim,
        "the other generation": other if job.policy.generations > 1 else 0.0,
        # Less will do: where there is no such room, fewer are kept.
        "older commits": job.policy.older_commits * trained,
        "spilled gradients": on_nvme.grads,
        "activations": placed.spilled,
        "spare ranges": float(files * spare_bytes(placed.needs, plan.nvme_masks, plan.formats)),
    }
    found = {name: size for name, size in parts.items() if size}
    # None would say that the room is not known; without drives there is none.
    return Need(sum(found.values()), machine.nvme_bytes if machine.drives else 0.0, found)


def _why_not(
    shape: ModelShape, gpu: Need, ram: Need, nvme: Need, machine: Machine, job: Job
) -> tuple[str, ...]:
    found = []
    if not gpu.fits:
        what = "GPU memory" if machine.gpus else "device memory (the CPU's)"
        found.append(f"{what}: {_lacks(gpu, ' on each')}; {_what_fits(shape, machine, job)}")
    if not ram.fits:
        less = [] if job.policy.grads == "nvme" else ["spilled gradients (--grads nvme)"]
        # A durable run cannot do without its second generation. With one generation and one pass,
        # gradients of update backward never wait.
        if job.policy.generations > 1:
            less += [] if job.policy.durable else ["one generation"]
        elif job.stores_gradients:
            how = "" if job.passes == 1 else " in one pass (--schedule vertical)"
            less.append(f"update backward{how}")
        less += [] if job.policy.params == job.policy.optim == "nvme" else ["lower tiers"]
        less += ["leaving --resident out"] if job.policy.resident else []
        there = format_size(ram.there_is or 0.0)
        found.append(
            f"RAM: {round_size(ram.bytes)} is the least that works, {there} is there; {_join(less)}"
        )
    if not nvme.fits:
        less = [] if job.policy.state == "compact" else ["compact states"]
        if job.policy.durable:
            less += ["two generations"] if job.policy.older_commits else []
        elif job.policy.generations > 1:
            less.append("one generation")
        found.append(f"NVMe: {_lacks(nvme)}; {_join(less)}")
    # `_join` gives no list where nothing would need less: drop the separator.
    return tuple(text.removesuffix("; ") for text in found)


def _what_fits(shape: ModelShape, machine: Machine, job: Job) -> str:
    """Name the single changes that make the job fit, with the need then; if there is none, the
    least need with all of them.
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
    # Shorter sequences would not help: activations are the smaller part.
    if not least.fits and 2 * of_units > least.bytes:
        enough = f"too much still; {format_size(of_units)} of it are units and gradients"
    return (
        "no single change of the job is enough: all that there are together need "
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


# -- Costs beside the budget -----------------------------------------------------------------------


PIN_S_PER_BYTE = 0.1e-9
"""Seconds in which a GPU's driver pins a byte of RAM: 0.1 s for a GB (assumed, from reports)."""

CHUNK_S = 60e-6
"""Processor seconds that set-up takes for a chunk, I/O apart: 32e-6 for the model and 29e-6 for its
optimizer (tests/slopes.py, states in RAM, 2 cores)."""


DRAW_S = 22e-9
"""Seconds in which one core draws an element's initial value, twice, as `init=` does: 8.03 billion
of them in a set-up of 183 s (docs/performance.md)."""


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Set-up of one rank, in bytes and seconds. read: of the source of parameters; written: on the
    drives. seconds: of all ranks together, which share drives and cores. init_seconds: the same
    where `init=` draws the values, and nothing is read.
    """

    read: float
    written: float
    seconds: float
    init_seconds: float


@dataclasses.dataclass(frozen=True)
class Outside:
    """Costs of one job on one machine. disk: bytes on a node's drives at their most, by case."""

    ram: RamBeside
    disk: dict[str, float]
    set_up: SetUp


def outside(shape: ModelShape, found: Prediction) -> Outside:
    """Count what a predicted job takes besides. Pure."""
    machine, job = found.machine, found.job
    return Outside(
        found.ram_beside,
        _disk_peaks(found.nvme, found.at_rest, job),
        _set_up(shape, machine, found),
    )


def _disk_peaks(nvme: Need, at_rest: AtRest, job: Job) -> dict[str, float]:
    states = at_rest.states + at_rest.frozen
    if job.policy.durable:
        # A linked checkpoint takes nothing, and the next step leaves its places alone. What a
        # killed run has committed stays until the new process has, which keeps two generations;
        # amid a commit either of both may be the one that counts.
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
    # What is found is of a node, but chunks, which are of a rank. The source is taken to be on
    # these drives.
    whole = sum(flat.numel * flat.dtype.itemsize for flat in shape.flats)
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
