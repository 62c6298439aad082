"""Single changes of a job or machine, and a prediction after each change."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from infinity._src.memory.pcie import UPDATES_ON
from infinity._src.plan.machine import Machine
from infinity._src.plan.memory import gpu_need, loss_tiles, ways_to_fit
from infinity._src.plan.predict import Prediction, predict
from infinity._src.plan.workload import Job, ModelShape


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a job or machine, and the prediction for the changed job on that machine."""

    name: str
    prediction: Prediction


def one_change(
    shape: ModelShape, now: Prediction, *, choose_micro_batches: bool = False
) -> list[Change]:
    """Predict the changes that are worth trying. Changes after which the job fits are first; within
    each group the list is sorted by tokens per second, fastest first.

    choose_micro_batches: with each change, use the smallest number of micro-batches whose
    activations fit; False: use the changed job's number.
    """
    machine, job = now.machine, now.job
    tried: list[tuple[str, Machine, Job]] = [
        ("twice the RAM", dataclasses.replace(machine, ram_bytes=2 * machine.ram_bytes), job),
        # Tokens and micro-batches both double, so a micro-batch's device memory stays the same.
        (
            "twice the tokens per step (twice the micro-batches)",
            machine,
            job.replace(tokens=2 * job.tokens, micro_batches=2 * job.micro_batches),
        ),
    ]
    if machine.drives:
        tried.append(("one more drive", machine.with_drives(machine.drives + 1), job))
    if machine.gpus:
        tried.append(("one more GPU", dataclasses.replace(machine, gpus=machine.gpus + 1), job))
    if machine.nodes > 1:
        tried.append(("one more node", dataclasses.replace(machine, nodes=machine.nodes + 1), job))
    tried += [(name, machine, other) for name, other in _other_exchanges(machine, job)]
    # Try only formats with fewer bytes: they save time and capacity, but round more coarsely.
    states = {"exact": ("bf16", "compact"), "bf16": ("compact",)}.get(job.policy.state, ())
    tried += [(f"state {state} (rounds)", machine, job.replace(state=state)) for state in states]
    tried += [(name, machine, other) for name, other in _other_steps(job)]
    tried += [(name, machine, other) for name, other in _other_schedules(machine, job)]
    # Spilled gradients only add traffic, so try them only if the job does not fit the RAM.
    if job.policy.grads == "cpu" and machine.drives and not now.ram.fits:
        tried.append(("gradients spill (--grads nvme)", machine, job.replace(grads="nvme")))
    tried += [
        (name, machine, other) for name, other in _other_memory(shape, machine, job, now.gpu.fits)
    ]
    found = []
    for name, changed, other in tried:
        enough = changed.world * (1 if choose_micro_batches else other.micro_batches)
        # With fewer tokens than this, some devices would compute nothing.
        if other.refusal or other.tokens < enough:
            continue
        chosen = fewest_micro_batches(shape, changed, other) if choose_micro_batches else other
        if chosen.micro_batches != other.micro_batches:
            count = f"{chosen.micro_batches} micro-batch{'es' if chosen.micro_batches > 1 else ''}"
            # Remove "twice the micro-batches" from the name: another number was chosen.
            name = f"{name.partition(' (twice the micro')[0]}, {count}"
        found.append(Change(name, predict(shape, changed, chosen)))
    return sorted(
        found, key=lambda change: (not change.prediction.fits, -change.prediction.tokens_per_s)
    )


def _other_exchanges(machine: Machine, job: Job) -> list[tuple[str, Job]]:
    """List the ZeRO++ switches that are off in the job, and all of these together. The list is
    empty on one node: the switches save bytes between nodes.
    """
    if machine.nodes == 1:
        return []
    switches: dict[str, dict[str, Any]] = {"qgZ (rounds)": {"qgz": True}}
    if not job.whole_params(machine.world):
        switches |= {"qwZ (rounds)": {"qwz": True}, "hpZ, copies in CPU memory": {"hpz": "cpu"}}
    switches = {
        name: fields
        for name, fields in switches.items()
        if not getattr(job.policy, next(iter(fields)))
    }
    if len(switches) > 1:
        every = {name: value for fields in switches.values() for name, value in fields.items()}
        switches["ZeRO++ with all of it (rounds)"] = every
    return [(name, job.replace(**fields)) for name, fields in switches.items()]


def _other_memory(
    shape: ModelShape, machine: Machine, job: Job, fits: bool
) -> list[tuple[str, Job]]:
    """List changes of device memory: if the job does not fit the GPUs, the changes that make it
    fit, else the changes that free memory for more tokens.
    """
    if not fits:
        return [(way.name, way.job) for way in ways_to_fit(shape, machine, job)]
    found = []
    if machine.gpus and job.policy.activations == "device" and job.checkpointing:
        found.append(("activations on the CPU", job.replace(activations="cpu")))
    tiles = loss_tiles(shape)
    # Logits and a block's activations exist at different times, so smaller logits help only if
    # logits are larger than the activations.
    if (
        machine.gpus
        and tiles > job.loss_tiles
        and shape.logits_bytes_per_token(job.loss_tiles) > shape.block_bytes_per_token
    ):
        found.append((f"the loss in {tiles} tiles (rounds)", job.replace(loss_tiles=tiles)))
    return found


def where_updates_run(shape: ModelShape, now: Prediction) -> list[Prediction]:
    """Predict the job with updates on the CPU and with updates on the GPUs. The list is empty if
    the CPU computes, if the optimizer refuses one of the two, or if the update mode is not
    "deferred": a GPU updates in no other mode.

    The prediction does not decide where a run updates: `Policy.update_on` is "cpu" on every machine
    unless the user sets it. The default needs no GPU memory, and combines with every other setting.
    """
    if not now.machine.gpus or now.job.policy.update != "deferred":
        return []
    jobs = [now.job.replace(update_on=where) for where in UPDATES_ON]
    if any(job.refusal for job in jobs):
        return []
    return [now if job == now.job else predict(shape, now.machine, job) for job in jobs]


def _other_steps(job: Job) -> list[tuple[str, Job]]:
    found: list[tuple[str, Job]] = []
    # `Policy` refuses updates on the device in modes other than "deferred": try these modes with
    # updates on the CPU.
    on = ", on the CPU" if job.policy.update_on == "device" else ""
    here = job.replace(update_on="cpu")
    tried: dict[str, dict[str, Any]] = {}
    if job.policy.update == "deferred" and job.policy.generations == 1:
        tried = {
            "update backward (no clipping by norm)": {"update": "backward"},
            "update backward, two generations": {"update": "backward", "generations": 2},
            "update delayed (one step late)": {"update": "delayed"},
        }
    elif job.policy.update == "deferred":
        tried = {"update backward": {"update": "backward"}}
    for name, fields in tried.items():
        # `Policy` may refuse a mode because of other fields, as on_nonfinite="skip" of a DeepSpeed
        # configuration.
        with contextlib.suppress(ValueError):
            found.append((f"{name}{on}", here.replace(**fields)))
    if job.policy.durable:
        once = job.replace(durable=False, generations=job.policy.places, resident=None)
        found.append(("not durable", once))
    elif job.policy.generations == 2:
        # The engine needs a second generation to undo an update in backward, so this change also
        # defers the update.
        update = "update deferred, " if job.policy.speculates else ""
        found.append((f"{update}one generation", job.replace(update="deferred", generations=1)))
    if (
        not job.policy.durable
        and job.policy.update != "delayed"
        and job.policy.params == job.policy.optim == "nvme"
        and (job.policy.update == "deferred" or job.policy.generations == 2)
    ):
        # `Policy` refuses resident shares in durable runs.
        found.append(("durable (resumes after a crash)", job.replace(durable=True, resident=None)))
    return found


def _other_schedules(machine: Machine, job: Job) -> list[tuple[str, Job]]:
    """List the job in the vertical schedule, with the inputs of blocks on the job's tier and on
    each lower tier. The schedule retains these inputs for all micro-batches at the same time, so
    the inputs may need a larger tier.
    """
    if job.vertical or job.micro_batches == 1 or not job.checkpointing:
        return []
    found = [("vertical schedule", job.replace(schedule="vertical"))]
    # Lower tiers have more capacity.
    below = {"device": ["cpu", "nvme"], "cpu": ["nvme"], "nvme": []}[job.policy.activations]
    there = {"cpu": ("the CPU", machine.gpus), "nvme": ("the drives", machine.drives)}
    for tier in below:
        place, count = there[tier]
        if count:
            other = job.replace(schedule="vertical", activations=tier)
            found.append((f"vertical schedule, activations on {place}", other))
    return found


def fewest_micro_batches(shape: ModelShape, machine: Machine, job: Job) -> Job:
    """Return the job with the smallest number of micro-batches, a power of two, that fits a device.
    If the CPU computes, a device is a part of the RAM: prefer the smallest number that also leaves
    enough RAM for the states. If no number fits, return the job with the largest number tried.
    """
    best, least = job, None
    for count in job.micro_batch_counts(machine.world):
        best = job.replace(micro_batches=count)
        if gpu_need(shape, machine, best).fits:
            least = least or best
            if machine.gpus or predict(shape, machine, best).ram.fits:
                return best
    return least or best
