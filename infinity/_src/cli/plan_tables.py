"""The tables of `infinity plan --all`, and its JSON record. `bench/bytes_per_rank.py` shows the
tables of several ranks, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity._src.base.console import make_table, say
from infinity._src.base.sizes import format_size
from infinity._src.config.deepspeed import DeepSpeedRun
from infinity._src.config.deepspeed_keys import shown
from infinity._src.plan.changes import Change
from infinity._src.plan.machine import Machine
from infinity._src.plan.memory import Need, TierBytes
from infinity._src.plan.predict import EFFICIENCY, Outside, Prediction, outside
from infinity._src.plan.ranks import Exchanges, RankBytes
from infinity._src.plan.workload import ModelShape

# -- Tables ----------------------------------------------------------------------------------------


SCHEMA = "infinity.plan/1"
JOB_FIELDS = (
    "tokens", "sequence", "micro_batches", "state", "update", "params", "optim", "grads",
    "activations", "resident", "grad_dtype", "checkpointing", "compute_s", "generations", "durable",
    "update_on", "tiles", "loss_tiles", "expert_tile", "zero", "accumulate", "qwz", "hpz", "qgz",
    "error_feedback", "schedule", "optimizer",
)  # fmt: skip
"""Fields of a job and its policy that a record has, in this order."""
SAME_MAX = 0.005
"""Relative gain or loss below which a change counts as no change: it would print as 1.00x."""


def show_tables(
    console: Console,
    shape: ModelShape,
    found: Prediction,
    changes: Sequence[Change],
    sides: Sequence[Prediction] = (),
    ranks: Sequence[RankBytes] = (),
) -> None:
    """Print every table: the job's needs, the place of each state, the time of a step, the gain of
    each change.

    sides: predictions with updates on the CPU and on the GPUs. ranks: bytes of one rank under each
    ZeRO stage.
    """
    console.print(_head(shape, found), highlight=False)
    if not found.fits:
        say(console, "The times below are for a machine with the least memory that this job needs.")
    console.print(_needs(found))
    console.print(_places(found))
    if ranks:
        console.print(rank_table(ranks, chosen=found.job.policy.zero))
        console.print(exchange_table(found))
    console.print(_step(found))
    console.print(_outside(shape, found))
    if sides:
        console.print(_sides(sides))
        console.print(
            "Updates run on the CPU, concurrently with the next forward. With update_on='device' "
            "they run on the GPU inside opt.step(), to the same bits; the engine never chooses it.",
            highlight=False,
        )
    _show_changes(console, found, changes)
    if found.job.vertical:
        say(console, _stays(found), markup=False)


def deepspeed_table(run: DeepSpeedRun, path: Path) -> Table:
    """Format the status and the meaning of each key of a DeepSpeed configuration."""
    title = f"{path}, as the engine reads it (options of the command replace its values)"
    columns = ("key", "value", "fate", "became")
    table = make_table(title, *columns, left=columns)
    section = ""
    for found in run.keys:
        above, _, last = found.key.rpartition(".")
        if above and above != section:
            table.add_row(f"[bold]{above}[/bold]")
        section = above
        cells = ("  " * bool(above) + last, shown(found.value), found.fate, found.became)
        table.add_row(*(escape(cell) for cell in cells))
    return table


def deepspeed_record(run: DeepSpeedRun) -> dict[str, Any]:
    """Return the JSON record of the keys of a DeepSpeed configuration; their values are text."""
    keys = [{**dataclasses.asdict(found), "value": shown(found.value)} for found in run.keys]
    return {"keys": keys, "notes": list(run.notes), "policy": dict(run.policy)}


def _head(shape: ModelShape, found: Prediction) -> str:
    job, policy, machine = found.job, found.job.policy, found.machine
    kept = ", two generations" if policy.generations > 1 else ""
    # A durable run always has two generations, so the text only shows further ones.
    kept = ", durable" if policy.durable else kept
    kept += f" with {policy.older_commits + 1} commits kept" if policy.older_commits else ""
    tiled = f", linears in {job.tiles} tiles" if job.tiles > 1 else ""
    tiled += f", the loss in {job.loss_tiles}" if job.loss_tiles > 1 else ""
    tiled += f", experts in tiles of {job.expert_tile}" if job.expert_tile else ""
    return (
        f"[bold]{escape(shape.name)}[/bold]: {format_count(shape.params)} parameters"
        f"{experts_of(shape)} in {len(shape.units)} units, the largest "
        f"{format_size(shape.largest_unit_bytes)}; {job.tokens:,} tokens per step in "
        f"{_batches(job.micro_batches)} of "
        f"{job.micro_batch_tokens(machine.world):,} tokens on each of "
        f"{who_computes(machine)}, sequences of {job.sequence:,}, "
        f"{'checkpointed' if job.checkpointing else 'not checkpointed'}{tiled}"
        f"{', schedule vertical' if job.vertical else ''}; state "
        f"{job.policy.state}, update "
        f"{job.policy.update}{kept}{', on the GPU' if job.policy.update_on == 'device' else ''}"
        f"{f', optimizer {job.optimizer}' if job.optimizer != 'adamw' else ''}"
    )


def experts_of(shape: ModelShape) -> str:
    """Describe the experts of a model; "" for a model without experts."""
    if not shape.experts:
        return ""
    shared = f" and {shape.shared} shared" if shape.shared else ""
    return (
        f" ({format_count(shape.active_params)} compute for a token, with {shape.chosen} of "
        f"{shape.experts} experts{shared})"
    )


def who_computes(machine: Machine) -> str:
    """Describe the devices that compute."""
    if machine.gpus:
        text = f"{machine.gpus} GPU{'s' if machine.ranks > 1 else ''}"
    else:
        text = f"{machine.ranks} ranks on CPUs" if machine.ranks > 1 else "1 CPU"
    return text + (f" of each of {machine.nodes} nodes" if machine.nodes > 1 else "")


def _needs(found: Prediction) -> Table:
    table = make_table("Does it fit", "memory", "needed", "available")
    names = {
        "one GPU" if found.machine.gpus else "device (CPU memory)": found.gpu,
        "RAM": found.ram,
        "NVMe": found.nvme,
    }
    for name, need in names.items():
        # Without parts nothing rests on drives.
        if not need.parts:
            continue
        there = format_size(need.there_is) if need.there_is is not None else "not given"
        table.add_row(
            name, format_size(need.bytes), there, style="bold" if need.fits else "bold red"
        )
        for part, size in need.parts.items():
            table.add_row(f"  {part}", format_size(size), "")
    return table


def _places(found: Prediction) -> Table:
    table = make_table("Where states rest", "state", "bytes", "in RAM", "on NVMe")
    everything, nvme = found.at_rest, found.on_nvme
    names = {
        "params": "parameters",
        "optim": "optimizer states",
        "grads": "spilled gradients",
        "frozen": "frozen parameters",
    }
    for field, name in names.items():
        whole, there = getattr(everything, field), getattr(nvme, field)
        if whole:
            share = f"{format_size(whole - there)} ({1 - there / whole:.0%})"
            table.add_row(
                name,
                format_size(whole),
                share,
                f"{format_size(there)} ({there / whole:.0%})",
            )
    return table


def _step(found: Prediction) -> Table:
    table = make_table("A step", "", "")
    table.show_header = False
    total, eta = found.moved.total, found.limits.eta(found.step_s)
    if total.read or total.written:
        table.add_row(
            "read from NVMe", f"{format_size(total.read)}, {_per_param(found, total.read)}"
        )
        table.add_row(
            "written to NVMe", f"{format_size(total.written)}, {_per_param(found, total.written)}"
        )
    work = found.matrices
    if work.numel:
        first, idle = format_size(found.on_nvme.first), format_size(found.on_nvme.idle)
        table.add_row(
            "whole matrices",
            f"{format_count(work.numel)} parameters, {work.flops:.3g} FLOP of Newton-Schulz",
        )
        table.add_row("  first update", f"reads and writes {first}; the second leaves out {idle}")
    copied = found.copied
    if copied.total:
        table.add_row(
            "copied to GPUs", f"{format_size(copied.h2d)}, {_per_param(found, copied.h2d)}"
        )
        table.add_row(
            "copied from GPUs", f"{format_size(copied.d2h)}, {_per_param(found, copied.d2h)}"
        )
    for name, seconds in found.terms_s.items():
        # A term is 0 if it does not apply to the machine or job.
        if seconds:
            table.add_row(f"{name}, alone", f"{format_seconds(seconds)} s")
    table.add_row("limit of any schedule", f"{format_seconds(found.limits.floor_s)} s")
    table.add_row(
        f"limit of update {found.job.policy.update}", f"{format_seconds(found.limits.schedule_s)} s"
    )
    reached = f"η {eta[0]:.2f} of any schedule, {eta[1]:.2f} of this"
    table.add_row("s/step expected", f"[bold]{format_seconds(found.step_s)}[/bold] ({reached})")
    table.add_row("tokens per second", f"{found.tokens_per_s:,.0f}, bound by {found.bottleneck}")
    if found.mfu is not None:
        peak = found.machine.flops_peak_per_gpu / 1e12
        rate = f"{found.flops_per_gpu / 1e12:,.1f} TFLOP/s of the model"
        if found.machine.gpus > 1:
            table.add_row("of each GPU", f"{found.tokens_per_s / found.machine.world:,.0f}")
        table.add_row("MFU", f"{found.mfu:.1%}: {rate} on each GPU, of {peak:,.0f}")
    if found.moved.total.written:
        table.add_row("written per day", f"{found.written_per_day / 1e12:,.1f} TB")
        drives = found.machine.drives
        rated = (
            f"{found.machine.tbw_per_drive / 1e12:,.0f} TB written{' each' if drives > 1 else ''}"
        )
        table.add_row("the drives last", f"{format_days(found.days)} ({drives} rated for {rated})")
    return table


def _outside(shape: ModelShape, found: Prediction) -> Table:
    costs, ranks = outside(shape, found), found.machine.ranks
    table = make_table("Overhead and set-up", "", "")
    table.show_header = False
    on_each = " on each rank" if ranks > 1 else ""
    each = f", {costs.ram.chunks:,} chunks{on_each}"
    table.add_row("Policy(ram=...)", f"at most {format_size(found.policy_ram)}{on_each}")
    table.add_row("RAM overhead", f"{format_size(costs.ram.held)} of records{each}")
    for phase, size in costs.ram.passing.items():
        if size:
            table.add_row(f"  more in a {phase}", format_size(size))
    table.add_row("  at most", format_size(costs.ram.peak))
    for case, most in costs.disk.items():
        if most:
            table.add_row(f"drives, {case}", format_size(most))
    first = costs.set_up
    rank = "each rank reads" if ranks > 1 else "reads"
    table.add_row(
        "set-up",
        f"{rank} {format_size(first.read)} and writes {format_size(first.written)}; "
        f"{format_seconds(first.seconds)} s",
    )
    drawn_s = format_seconds(first.init_seconds)
    filling = format_size(costs.ram.fill_without_files)
    table.add_row(
        "  from scratch (init=)",
        f"draws the values, reads none; {drawn_s} s, and {filling} of RAM while it fills",
    )
    return table


def format_seconds(value: float) -> str:
    """Format seconds: no decimals from 1000 on, two from 1 on, three significant digits below."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.3g}"


def format_count(number: int) -> str:
    """Format a number of parameters."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _batches(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def _per_param(found: Prediction, size: float) -> str:
    # Per 2 B of parameters, so that users can compare models of different dtypes.
    whole = found.at_rest.params + found.at_rest.frozen
    return f"{size / whole * 2:.2f} B for every 2 B of parameters" if whole else "-"


def format_days(days: float) -> str:
    """Format how long drives last; infinite days: nothing is written."""
    if math.isinf(days):
        return "for ever: nothing is written"
    if days > 730:
        return f"{days / 365:,.1f} years"
    return f"{days:,.1f} days" if days < 10 else f"{days:,.0f} days"


def _sides(sides: Sequence[Prediction]) -> Table:
    table = make_table(
        "Where updates run", "update_on", *(repr(side.job.policy.update_on) for side in sides)
    )
    table.add_row("s/step expected", *(format_seconds(side.step_s) for side in sides))
    table.add_row("copied to GPUs", *(format_size(side.copied.h2d) for side in sides))
    table.add_row("copied from GPUs", *(format_size(side.copied.d2h) for side in sides))
    # The union of both sides' terms, in order: each side may have terms that the other lacks.
    for name in dict.fromkeys(name for side in sides for name in side.terms_s):
        if name not in ("compute", "drives"):  # equal on both sides
            terms = [side.terms_s.get(name, 0.0) for side in sides]
            table.add_row(
                f"{name}, alone", *(f"{format_seconds(term)} s" if term else "-" for term in terms)
            )
    table.add_row("GPU memory, each", *(format_size(side.gpu.bytes) for side in sides))
    return table


def _show_changes(console: Console, found: Prediction, changes: Sequence[Change]) -> None:
    """Print a row for each change that fits and changes the speed, and only the names of all other
    changes.
    """
    same, rows, never = [], [], []
    for change in changes:
        gain = _gain(found, change.prediction)
        if not change.prediction.fits:
            never.append(change.name)
        # If the plan does not fit, every change that fits gets a row: its gain is None.
        elif gain is not None and abs(gain - 1) < SAME_MAX:
            same.append(change.name)
        else:
            rows.append(change)
    if rows:
        console.print(_changes(found, rows))
    for names, text in (
        (same, "No faster and no slower"),
        (never, "Would not fit" if found.fits else "Would not fit either"),
    ):
        if names:
            console.print(f"{text}: {'; '.join(names)}", highlight=False, markup=False)


def _changes(found: Prediction, changes: Sequence[Change]) -> Table:
    title = "What one change would buy" if found.fits else "One change with which it fits"
    table = make_table(title, "change", "s/step", "tokens/s", "gain", "TB/day")
    for change in changes:
        other, gain = change.prediction, _gain(found, change.prediction)
        table.add_row(
            change.name,
            format_seconds(other.step_s),
            f"{other.tokens_per_s:,.0f}",
            "-" if gain is None else f"{gain:.2f}x",
            f"{other.written_per_day / 1e12:,.1f}",
        )
    return table


def _stays(found: Prediction) -> str:
    if not found.again:
        return (
            "Units stay gathered until all micro-batches have passed their block: each unit is "
            "gathered once in forward and once in backward."
        )
    device = "GPU" if found.machine.gpus else "device"
    return (
        f"The {device} cannot hold whole blocks with their gradients and activations: "
        f"{found.again:.0%} of the parameters are gathered for each micro-batch, and once more "
        "where backward recomputes it; all other parameters stay until all micro-batches have "
        "passed their block. Smaller blocks (inf.microbatched(blocks=...)) fit."
    )


def _gain(found: Prediction, other: Prediction) -> float | None:
    """Return the ratio of tokens per second of `other` to `found`; None if either does not fit."""
    return other.tokens_per_s / found.tokens_per_s if found.fits and other.fits else None


def as_record(
    shape: ModelShape,
    found: Prediction,
    changes: Sequence[Change],
    sides: Sequence[Prediction] = (),
    ranks: Sequence[RankBytes] = (),
) -> dict[str, Any]:
    """Return the JSON record of a plan. Infinite figures are None. sides, ranks: as in
    `show_tables`.
    """
    model = {
        name: getattr(shape, name)
        for name in (
            "name",
            "params",
            "trainable",
            "active_params",
            "experts",
            "chosen",
            "shared",
            "layers",
            "width",
            "vocabulary",
            "largest_unit_bytes",
        )
    }
    return {
        "schema": SCHEMA,
        "model": model | {"units": len(shape.units)},
        "machine": found.machine.as_dict(),
        "plan": prediction_record(found),
        "outside": _outside_record(outside(shape, found)),
        "rank_bytes": rank_record(ranks),
        "update_on": {side.job.policy.update_on: prediction_record(side) for side in sides},
        "changes": [
            {
                "change": change.name,
                "gain": _gain(found, change.prediction),
                **prediction_record(change.prediction),
            }
            for change in changes
        ],
    }


def prediction_record(found: Prediction) -> dict[str, Any]:
    """Return the JSON record of one prediction."""
    eta = found.limits.eta(found.step_s)
    return {
        "fits": found.fits,
        "why_not": list(found.why_not),
        "job": _job(found),
        "gpu": _need(found.gpu),
        "ram": _need(found.ram),
        "policy_ram_bytes": found.policy_ram,
        "nvme": _need(found.nvme),
        "at_rest": dataclasses.asdict(found.at_rest),
        "on_nvme": dataclasses.asdict(found.on_nvme),
        "read_bytes": found.moved.total.read,
        "written_bytes": found.moved.total.written,
        "h2d_bytes": found.copied.h2d,
        "d2h_bytes": found.copied.d2h,
        "exchanged": exchange_record(found.exchanged),
        "matrices": found.matrices._asdict(),
        "touched": found.touched,
        "gathered_again": found.again,
        "terms_s": found.terms_s,
        "limit_floor_s": found.limits.floor_s,
        "limit_schedule_s": found.limits.schedule_s,
        "efficiency": EFFICIENCY,
        "step_s": found.step_s,
        "eta_floor": eta[0],
        "eta_schedule": eta[1],
        "tokens_per_s": found.tokens_per_s,
        "model_flops": found.model_flops,
        "model_flops_per_s_per_gpu": found.flops_per_gpu if found.machine.gpus else None,
        "mfu": found.mfu,
        "bound_by": found.bottleneck,
        "written_bytes_per_day": found.written_per_day,
        # JSON has no infinity: write null.
        "drive_days": None if math.isinf(found.days) else found.days,
    }


def _outside_record(costs: Outside) -> dict[str, Any]:
    return {
        "chunks": costs.ram.chunks,
        "ram_held_bytes": costs.ram.held,
        "ram_passing_bytes": costs.ram.passing,
        "ram_peak_bytes": costs.ram.peak,
        "ram_fill_without_files_bytes": costs.ram.fill_without_files,
        "disk_bytes": costs.disk,
        "set_up": dataclasses.asdict(costs.set_up),
    }


def _job(found: Prediction) -> dict[str, Any]:
    job, policy = found.job, found.job.policy
    dtype = policy.grad_dtype
    # A record has fields of the job and of its policy at one level.
    record = {name: getattr(job if hasattr(job, name) else policy, name) for name in JOB_FIELDS}
    return record | {
        "resident": policy.resident_parts or None,
        # JSON has no dtypes: write the name.
        "grad_dtype": str(dtype).removeprefix("torch.") if dtype else None,
    }


def _need(need: Need) -> dict[str, Any]:
    return {"bytes": need.bytes, "there_is": need.there_is, "fits": need.fits, "parts": need.parts}


# -- Tables of several ranks -----------------------------------------------------------------------


TIERS = ("device", "cpu", "nvme")


def rank_table(ranks: Sequence[RankBytes], *, chosen: int) -> Table:
    """Format the bytes of one rank: a row for each state, a column for each stage. chosen: the
    stage of the plan.
    """
    stages = (f"stage {each.stage}{' (planned)' if each.stage == chosen else ''}" for each in ranks)
    table = make_table("What each rank holds: device + CPU memory + NVMe", "state", *stages)
    # Stages have different states: rows are the union, in the order of first occurrence.
    for name in dict.fromkeys(name for each in ranks for name in each.states):
        table.add_row(name, *(describe_tiers(each.states.get(name, TierBytes())) for each in ranks))
    table.add_row("together", *(describe_tiers(each.total) for each in ranks), style="bold")
    return table


def describe_tiers(size: TierBytes) -> str:
    """Format the bytes of each tier with any, as "1.5 GiB cpu + 8 GiB nvme"; "-" without bytes."""
    text = [f"{format_size(getattr(size, tier))} {tier}" for tier in TIERS if getattr(size, tier)]
    return " + ".join(text) or "-"


def exchange_table(found: Prediction) -> Table:
    """Format the bytes that each rank receives in a step. The last column is the communication
    volume by the definition of ZeRO++ (`Exchanges.volume`).
    """
    exchanged, machine = found.exchanged, found.machine
    several = machine.nodes > 1
    across = ["from other nodes", "whole node from other nodes"] if several else []
    plain = format_size(exchanged.plain_bytes)
    volume = f"volume{' between nodes' if several else ''}, M = {plain}"
    columns = ("", "times", "inside its node", *across, volume)
    table = make_table("What each rank receives in a step", *columns)
    parts = [(each.name, str(each.count), (each,)) for each in exchanged.each]
    for name, times, found_ in [*parts, ("together", "", exchanged.each)]:
        # `Exchanges` with one kind of collective computes sums and volume of that kind.
        part = dataclasses.replace(exchanged, each=found_)
        sizes = [part.inside, *([part.across, machine.ranks * part.across] if several else [])]
        cells = [format_size(size) if size else "-" for size in sizes]
        table.add_row(name, times, *cells, f"{part.volume:.3g} M", style="" if times else "bold")
    return table


def rank_record(ranks: Sequence[RankBytes]) -> dict[str, Any]:
    """Return the JSON record of bytes by stage, state and tier."""
    return {
        str(each.stage): {name: dataclasses.asdict(size) for name, size in each.states.items()}
        | {"together": dataclasses.asdict(each.total)}
        for each in ranks
    }


def exchange_record(found: Exchanges) -> dict[str, Any]:
    """Return the JSON record of the bytes that one rank receives in a step."""
    return {
        "plain_bytes": found.plain_bytes,
        "inside_bytes": found.inside,
        "across_bytes": found.across,
        "volume": found.volume,
        "each": [dataclasses.asdict(each) for each in found.each],
    }
