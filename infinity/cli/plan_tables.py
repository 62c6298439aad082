"""What `infinity plan` shows: tables for people, one record for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.limits import AtRest
from infinity.planning.changes import Change
from infinity.planning.predict import EFFICIENCY, Need, Prediction
from infinity.planning.shape import ModelShape
from infinity.sizes import format_size

SCHEMA = "infinity.plan/1"


def show_plan(console: Console, shape: ModelShape, found: Prediction, changes: Sequence[Change]) -> None:
    """Print the answer: does it fit, where things go, how long a step is, what a change would buy, what was assumed."""
    job, machine = found.job, found.machine
    console.print(
        f"[bold]{escape(shape.name)}[/bold]: {_count(shape.params)} parameters in {len(shape.units)} units, the largest "
        f"{format_size(shape.largest_unit_bytes)}; {job.tokens:,} tokens per step in {_batches(job.micro_batches)} of "
        f"{job.micro_batch_tokens(machine.ranks):,} tokens on each of {machine.ranks} "
        f"{'GPU' if machine.gpus else 'CPU'}{'s' if machine.ranks > 1 else ''}, sequences of {job.sequence:,}, "
        f"{'checkpointed' if job.checkpointing else 'not checkpointed'}; state {job.state}, update {job.update}"
        f"{', durable' if job.durable else ', two generations' if job.generations > 1 else ''}",
        highlight=False,
    )
    if found.fits:
        console.print("[bold green]It fits.[/bold green]")
    else:
        console.print("[bold red]It does not fit.[/bold red] The times below are those of the least that would work.")
        for reason in found.why_not:
            console.print(f"  {reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(_needs(found))
    console.print(_places(found))
    console.print(_step(found))
    if changes:
        console.print(_changes(found, changes))
    assumed = [(name, source) for name, source in machine.sources.items() if source != "given"]
    if assumed:
        console.print("Not given: " + "; ".join(f"{name} {source}" for name, source in assumed), highlight=False)
    console.print(
        f"s/step is the limit divided by {EFFICIENCY}: the share of it that this project demands of itself. Activations and "
        "operations are estimated from the configuration. This release computes on the CPU; GPU figures are a forecast.",
        highlight=False,
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _needs(found: Prediction) -> Table:
    table = _table("Does it fit", "memory", "needed", "there is", "")
    table.columns[3].justify = "left"
    names = {"one GPU" if found.machine.gpus else "device (CPU memory)": found.gpu, "RAM": found.ram, "NVMe": found.nvme}
    for name, need in names.items():
        there = format_size(need.there_is) if need.there_is is not None else "not given"
        parts = ", ".join(f"{part} {format_size(size)}" for part, size in need.parts.items())
        style = "" if need.fits else "red"
        table.add_row(name, format_size(need.bytes), there, parts or "-", style=style)
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
    table.add_row("read from NVMe", f"{format_size(total.read)}, {_per_param(found, total.read)}")
    table.add_row("written to NVMe", f"{format_size(total.written)}, {_per_param(found, total.written)}")
    terms = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in found.terms_s.items() if seconds)
    table.add_row("seconds, each alone", terms)
    table.add_row("limit of any schedule", f"{_seconds(found.limits.floor_s)} s")
    table.add_row(f"limit of update {found.job.update}", f"{_seconds(found.limits.schedule_s)} s")
    reached = f"η {eta[0]:.2f} of any schedule, {eta[1]:.2f} of this"
    table.add_row("s/step expected", f"[bold]{_seconds(found.step_s)}[/bold] ({reached})")
    table.add_row("tokens per second", f"{found.tokens_per_s:,.0f}, bound by {found.bottleneck}")
    if found.moved.total.written:
        table.add_row("written per day", f"{found.written_per_day / 1e12:,.1f} TB")
        drives = found.machine.drives
        rated = f"{found.machine.tbw_per_drive / 1e12:,.0f} TB written{' each' if drives > 1 else ''}"
        table.add_row("the drives last", f"{_days(found.days)} ({drives} rated for {rated})")
    return table


def _seconds(value: float) -> str:
    """Two decimals, or three digits where those would say nothing."""
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


def _changes(found: Prediction, changes: Sequence[Change]) -> Table:
    table = _table("What one change would buy", "change", "fits", "s/step", "tokens/s", "gain", "TB/day")
    for change in changes:
        other = change.prediction
        if not other.fits:  # its times would be those of more memory than there is
            table.add_row(change.name, "no", "-", "-", "-", "-")
            continue
        gain = _gain(found, other)
        table.add_row(
            change.name,
            "yes",
            _seconds(other.step_s),
            f"{other.tokens_per_s:,.0f}",
            "-" if gain is None else f"{gain:.2f}x",
            f"{other.written_per_day / 1e12:,.1f}",
        )
    return table


def _gain(found: Prediction, other: Prediction) -> float | None:
    """How many times as many tokens per second; None where one of the two does not fit."""
    return other.tokens_per_s / found.tokens_per_s if found.fits and other.fits else None


def as_record(shape: ModelShape, found: Prediction, changes: Sequence[Change]) -> dict[str, Any]:
    """Everything, ready for JSON. Infinite figures are None."""
    model = {
        name: getattr(shape, name)
        for name in ("name", "params", "trainable", "active_params", "layers", "width", "vocabulary", "largest_unit_bytes")
    }
    return {
        "schema": SCHEMA,
        "model": model | {"units": len(shape.units)},
        "machine": found.machine.as_dict(),
        "plan": _record(found),
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
        "terms_s": found.terms_s,
        "limit_floor_s": found.limits.floor_s,
        "limit_schedule_s": found.limits.schedule_s,
        "efficiency": EFFICIENCY,
        "step_s": found.step_s,
        "eta_floor": eta[0],
        "eta_schedule": eta[1],
        "tokens_per_s": found.tokens_per_s,
        "bound_by": found.bottleneck,
        "written_bytes_per_day": found.written_per_day,
        "drive_days": None if math.isinf(found.days) else found.days,
    }


def _job(found: Prediction) -> dict[str, Any]:
    dtype = found.job.grad_dtype
    return dataclasses.asdict(found.job) | {"grad_dtype": str(dtype).removeprefix("torch.") if dtype else None}


def _need(need: Need) -> dict[str, Any]:
    return {"bytes": need.bytes, "there_is": need.there_is, "fits": need.fits, "parts": need.parts}
