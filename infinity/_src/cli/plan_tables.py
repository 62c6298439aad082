"""What `infinity plan` shows: tables for people, one record for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity._src.cli.rank_tables import exchange_record, exchange_table, rank_record, rank_table
from infinity._src.perf.plan.changes import Change
from infinity._src.perf.plan.device_memory import Need
from infinity._src.perf.plan.machine import Machine
from infinity._src.perf.plan.predict import EFFICIENCY, Prediction
from infinity._src.perf.plan.ranks import RankBytes
from infinity._src.perf.plan.shape import ModelShape
from infinity._src.perf.roofline import AtRest
from infinity._src.sizes import format_size

SCHEMA = "infinity.plan/1"
SAME_MAX = 0.005  # a gain or loss that is none


def show_plan(
    console: Console,
    shape: ModelShape,
    found: Prediction,
    changes: Sequence[Change],
    sides: Sequence[Prediction] = (),
    ranks: Sequence[RankBytes] = (),
) -> None:
    """Print the answer: does it fit, where things go, how long a step is, what a change would buy, what was assumed.

    sides: the same with updates on the CPU and on the GPUs. ranks: what one of several holds under each stage.
    """
    console.print(_head(shape, found), highlight=False)
    if found.fits:
        console.print("[bold green]It fits.[/bold green]")
    else:
        console.print("[bold red]It does not fit.[/bold red] The times below are those of the least that would work.")
        for reason in found.why_not:
            console.print(f"  {reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(_needs(found))
    console.print(_places(found))
    if ranks:
        console.print(rank_table(ranks, chosen=found.job.zero))
        console.print(exchange_table(found))
    console.print(_step(found))
    if sides:
        console.print(_sides(sides))
        console.print(
            "Updates run on the CPU, beside the next forward, unless you set update_on='device': inside opt.step(), to the same "
            "bits. No plan and no budget decides it.",
            highlight=False,
        )
    _show_changes(console, found, changes)
    assumed = [(name, source) for name, source in found.machine.sources.items() if source != "given"]
    if assumed:
        console.print("Not given, and so taken to be:")
        for name, source in assumed:
            option = {"read": "nvme-read", "write": "nvme-write"}.get(name, name.replace("_", "-"))
            console.print(f"  --{option}: {source}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"s/step is the limit divided by {EFFICIENCY}: the share of it that this project demands of itself. Activations and "
        "operations are estimated from the configuration. It is a forecast: nothing was measured.",
        highlight=False,
    )


def _head(shape: ModelShape, found: Prediction) -> str:
    """What is planned, in a sentence."""
    job, machine = found.job, found.machine
    tiled = f", linears in {job.tiles} tiles" if job.tiles > 1 else ""
    tiled += f", the loss in {job.loss_tiles}" if job.loss_tiles > 1 else ""
    return (
        f"[bold]{escape(shape.name)}[/bold]: {_count(shape.params)} parameters in {len(shape.units)} units, the largest "
        f"{format_size(shape.largest_unit_bytes)}; {job.tokens:,} tokens per step in {_batches(job.micro_batches)} of "
        f"{job.micro_batch_tokens(machine.world):,} tokens on each of {_who(machine)}, sequences of {job.sequence:,}, "
        f"{'checkpointed' if job.checkpointing else 'not checkpointed'}{tiled}; state {job.state}, update {job.update}"
        f"{', durable' if job.durable else ', two generations' if job.generations > 1 else ''}"
        f"{', on the GPU' if job.update_on == 'device' else ''}"
    )


def _who(machine: Machine) -> str:
    """Who computes: "8 GPUs of each of 2 nodes"."""
    if machine.gpus:
        told = f"{machine.gpus} GPU{'s' if machine.ranks > 1 else ''}"
    else:
        told = f"{machine.ranks} ranks on CPUs" if machine.ranks > 1 else "1 CPU"
    return told + (f" of each of {machine.nodes} nodes" if machine.nodes > 1 else "")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _needs(found: Prediction) -> Table:
    table = _table("Does it fit", "memory", "needed", "there is")
    names = {"one GPU" if found.machine.gpus else "device (CPU memory)": found.gpu, "RAM": found.ram, "NVMe": found.nvme}
    for name, need in names.items():
        if not need.parts:
            continue
        there = format_size(need.there_is) if need.there_is is not None else "not given"
        table.add_row(name, format_size(need.bytes), there, style="bold" if need.fits else "bold red")
        for part, size in need.parts.items():
            table.add_row(f"  {part}", format_size(size), "")
    return table


def _places(found: Prediction) -> Table:
    table = _table("Where states rest", "state", "bytes", "in RAM", "on NVMe")
    everything, nvme = found.at_rest, found.on_nvme
    names = {"params": "parameters", "optim": "optimizer states", "frozen": "frozen parameters", "grads": "spilled gradients"}
    for field in dataclasses.fields(AtRest):
        whole, there = getattr(everything, field.name), getattr(nvme, field.name)
        if whole:
            share = f"{format_size(whole - there)} ({1 - there / whole:.0%})"
            table.add_row(names[field.name], format_size(whole), share, f"{format_size(there)} ({there / whole:.0%})")
    return table


def _step(found: Prediction) -> Table:
    table = _table("A step", "", "")
    table.show_header = False
    total, eta = found.moved.total, found.limits.eta(found.step_s)
    if total.read or total.written:
        table.add_row("read from NVMe", f"{format_size(total.read)}, {_per_param(found, total.read)}")
        table.add_row("written to NVMe", f"{format_size(total.written)}, {_per_param(found, total.written)}")
    copied = found.copied
    if copied.total:
        table.add_row("copied to GPUs", f"{format_size(copied.h2d)}, {_per_param(found, copied.h2d)}")
        table.add_row("copied from GPUs", f"{format_size(copied.d2h)}, {_per_param(found, copied.d2h)}")
    for name, seconds in found.terms_s.items():
        if seconds:
            table.add_row(f"{name}, alone", f"{_seconds(seconds)} s")
    table.add_row("limit of any schedule", f"{_seconds(found.limits.floor_s)} s")
    table.add_row(f"limit of update {found.job.update}", f"{_seconds(found.limits.schedule_s)} s")
    reached = f"η {eta[0]:.2f} of any schedule, {eta[1]:.2f} of this"
    table.add_row("s/step expected", f"[bold]{_seconds(found.step_s)}[/bold] ({reached})")
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
        rated = f"{found.machine.tbw_per_drive / 1e12:,.0f} TB written{' each' if drives > 1 else ''}"
        table.add_row("the drives last", f"{_days(found.days)} ({drives} rated for {rated})")
    return table


def _seconds(value: float) -> str:
    """Two decimals; none above a thousand, and three digits where two decimals would say nothing."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.3g}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _batches(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def _per_param(found: Prediction, size: float) -> str:
    whole = found.at_rest.params + found.at_rest.frozen
    return f"{size / whole * 2:.2f} B for every 2 B of parameters" if whole else "-"


def _days(days: float) -> str:
    if math.isinf(days):
        return "for ever: nothing is written"
    if days > 730:
        return f"{days / 365:,.1f} years"
    return f"{days:,.1f} days" if days < 10 else f"{days:,.0f} days"


def _sides(sides: Sequence[Prediction]) -> Table:
    """What a step takes with updates on the CPU, and on the GPUs."""
    table = _table("Where updates run", "update_on", *(repr(side.job.update_on) for side in sides))
    table.add_row("s/step expected", *(_seconds(side.step_s) for side in sides))
    table.add_row("copied to GPUs", *(format_size(side.copied.h2d) for side in sides))
    table.add_row("copied from GPUs", *(format_size(side.copied.d2h) for side in sides))
    for name in dict.fromkeys(name for side in sides for name in side.terms_s):
        if name not in ("compute", "drives"):  # the same for both
            terms = [side.terms_s.get(name, 0.0) for side in sides]
            table.add_row(f"{name}, alone", *(f"{_seconds(term)} s" if term else "-" for term in terms))
    table.add_row("GPU memory, each", *(format_size(side.gpu.bytes) for side in sides))
    return table


def _show_changes(console: Console, found: Prediction, changes: Sequence[Change]) -> None:
    """A row for each change that changes something; the names of the others."""
    same, rows, never = [], [], []
    for change in changes:
        gain = _gain(found, change.prediction)
        if not change.prediction.fits:
            never.append(change.name)
        elif gain is not None and abs(gain - 1) < SAME_MAX:
            same.append(change.name)
        else:
            rows.append(change)
    if rows:
        console.print(_changes(found, rows))
    for names, told in ((same, "No faster and no slower"), (never, "Would not fit" if found.fits else "Would not fit either")):
        if names:
            console.print(f"{told}: {'; '.join(names)}", highlight=False, markup=False)


def _changes(found: Prediction, changes: Sequence[Change]) -> Table:
    title = "What one change would buy" if found.fits else "One change with which it fits"
    table = _table(title, "change", "s/step", "tokens/s", "gain", "TB/day")
    for change in changes:
        other, gain = change.prediction, _gain(found, change.prediction)
        table.add_row(
            change.name,
            _seconds(other.step_s),
            f"{other.tokens_per_s:,.0f}",
            "-" if gain is None else f"{gain:.2f}x",
            f"{other.written_per_day / 1e12:,.1f}",
        )
    return table


def _gain(found: Prediction, other: Prediction) -> float | None:
    """How many times as many tokens per second; None where one of the two does not fit."""
    return other.tokens_per_s / found.tokens_per_s if found.fits and other.fits else None


def as_record(
    shape: ModelShape,
    found: Prediction,
    changes: Sequence[Change],
    sides: Sequence[Prediction] = (),
    ranks: Sequence[RankBytes] = (),
) -> dict[str, Any]:
    """Everything, ready for JSON. Infinite figures are None. sides, ranks: as in `show_plan`."""
    model = {
        name: getattr(shape, name)
        for name in ("name", "params", "trainable", "active_params", "layers", "width", "vocabulary", "largest_unit_bytes")
    }
    return {
        "schema": SCHEMA,
        "model": model | {"units": len(shape.units)},
        "machine": found.machine.as_dict(),
        "plan": _record(found),
        "rank_bytes": rank_record(ranks),
        "update_on": {side.job.update_on: _record(side) for side in sides},
        "changes": [
            {"change": change.name, "gain": _gain(found, change.prediction), **_record(change.prediction)} for change in changes
        ],
    }


def _record(found: Prediction) -> dict[str, Any]:
    eta = found.limits.eta(found.step_s)
    return {
        "fits": found.fits,
        "why_not": list(found.why_not),
        "job": _job(found),
        "gpu": _need(found.gpu),
        "ram": _need(found.ram),
        "nvme": _need(found.nvme),
        "at_rest": dataclasses.asdict(found.at_rest),
        "on_nvme": dataclasses.asdict(found.on_nvme),
        "read_bytes": found.moved.total.read,
        "written_bytes": found.moved.total.written,
        "h2d_bytes": found.copied.h2d,
        "d2h_bytes": found.copied.d2h,
        "exchanged": exchange_record(found.exchanged),
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
        "drive_days": None if math.isinf(found.days) else found.days,
    }


def _job(found: Prediction) -> dict[str, Any]:
    dtype = found.job.grad_dtype
    return dataclasses.asdict(found.job) | {"grad_dtype": str(dtype).removeprefix("torch.") if dtype else None}


def _need(need: Need) -> dict[str, Any]:
    return {"bytes": need.bytes, "there_is": need.there_is, "fits": need.fits, "parts": need.parts}
