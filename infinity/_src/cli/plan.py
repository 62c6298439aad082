"""`infinity plan`: does a model fit a machine, where does each state go, how long is a step, what
would one change buy.

The command loads no weights and measures nothing. It builds the model on the meta device from its
configuration (code that comes with a model is never run), and takes the drives' figures from its
arguments or from a record of `python -m infinity.bench swap --json`. The answer is tables for
people, or one JSON record. `bench/bytes_per_rank.py` shows the tables of several ranks, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import infinity as inf
from infinity._src.base.console import make_table, say, say_error
from infinity._src.base.sizes import format_size, parse_size
from infinity._src.checkpoint.hub_resolution import read_object
from infinity._src.cli import hf_model
from infinity._src.cli.arguments import check_tiles
from infinity._src.config.choices import given_fields
from infinity._src.config.deepspeed import DeepSpeedRun, read_deepspeed
from infinity._src.config.deepspeed_keys import shown
from infinity._src.measure.report import check_target, write_record
from infinity._src.memory import numa
from infinity._src.memory.device import rocm_lacks
from infinity._src.memory.roofline import AtRest
from infinity._src.plan.changes import (
    Change,
    faster_update,
    fewest_micro_batches,
    one_change,
    where_updates_run,
)
from infinity._src.plan.machine import Machine, describe_machine, read_updates
from infinity._src.plan.memory import Need, TierBytes
from infinity._src.plan.predict import EFFICIENCY, Outside, Prediction, outside, predict
from infinity._src.plan.ranks import Exchanges, RankBytes, stages
from infinity._src.plan.workload import Job, ModelShape, shape_of
from infinity.aio import IoSettings
from infinity.aio._memory_limits import memory_left_bytes
from infinity.aio._probe import DirectoryProbe

# -- The command -----------------------------------------------------------------------------------


SEQUENCE = 4096
"""Default tokens of a sequence; fewer if the model has fewer positions or the step fewer tokens."""
DTYPES = ("bfloat16", "float16", "float32")


def run_plan(options: argparse.Namespace, console: Console | None = None) -> int:
    """Plan as `options` say. Returns the exit status: 0 if the job fits, 1 if it does not, 2 for a
    mistake.
    """
    # With "--json -" standard output has the record alone; all other output goes to stderr.
    to_stdout = options.json is not None and str(options.json) == "-"
    console = console or Console(stderr=to_stdout)
    try:
        check_target(options.json, "--json")
        machine = read_machine(options)
        run = read_ds_config(options, machine)
        # The engine finds nested units on one rank only.
        shape = read_shape(options.model, _dtype(options, run), nested=machine.world == 1)
        job = read_job(options, shape, machine, run)
        prediction = predict(shape, machine, job)
        changes = (
            []
            if options.no_changes
            else one_change(shape, prediction, choose_micro_batches=options.micro_batches is None)
        )
        faster = None if options.no_changes else faster_update(shape, prediction)
        sides = where_updates_run(shape, prediction)
        ranks = stages(shape, machine, job) if machine.world > 1 else []
        if options.json is not None:
            record = as_record(shape, prediction, changes, sides, ranks, faster=faster)
            record |= {"deepspeed": None if run is None else deepspeed_record(run)}
            write_record(record, options.json)
    except (ValueError, OSError) as error:
        say_error(console, error)
        return 2
    if to_stdout:
        return 0 if prediction.fits else 1
    if run is not None:
        console.print(deepspeed_table(run, options.ds_config))
    show_plan(console, shape, prediction, changes, sides, ranks, faster=faster)
    return 0 if prediction.fits else 1


def read_shape(path: Path, dtype: torch.dtype, *, nested: bool = True) -> ModelShape:
    """Read the shape of the Hugging Face model at `path`: a directory or its config.json. Only that
    file is read. nested: as in `plan.workload.shape_of`.

    Raises: ValueError naming what is wrong with the file.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path} is neither a directory with a config.json nor such a file; a model is planned "
            "from disk only"
        )
    transformers = hf_model.quiet_transformers()
    read_object(file)
    with hf_model.read_by_transformers(file):
        config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    found = [
        auto
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
        if type(config) in auto._model_mapping
    ]
    if not found:
        raise ValueError(
            f"{file}: {type(config).__name__} is no language model that transformers can train"
        )
    # Quantized weights cannot be trained, so a plan is of the unquantized model.
    config.quantization_config = None
    with hf_model.read_by_transformers(file), torch.device("meta"):
        model = found[0].from_config(config, dtype=dtype, trust_remote_code=False)
    if file.name == "config.json":
        # Every model's file has this name; its directory is named after the model.
        name = file.absolute().parent.name
    else:
        name = file.stem
    return shape_of(model, name=name, nested=nested)


def read_machine(options: argparse.Namespace) -> Machine:
    """Describe the machine that the arguments name. Raises: ValueError naming argument, value and
    fix.
    """
    for name in ("flops", "flops_peak", "tbw", "link_gbps"):
        value = getattr(options, name)
        # Checked before units are converted, so that the message shows the number as given.
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
    figures = {
        field: convert(getattr(options, name), f"--{name.replace('_', '-')}")
        for field, (name, convert) in _FIGURES.items()
    }
    return describe_machine(
        gpus=options.gpus,
        gpu=options.gpu,
        ram_bytes=_size(options.ram, "--ram") or 0.0,
        nvme_bytes=_size(options.nvme_size, "--nvme-size"),
        drives=options.drives,
        shared=not options.separable,
        bench=IoSettings.load(options.bench) if options.bench is not None else None,
        bench_name=str(options.bench or ""),
        ranks=options.ranks,
        nodes=options.nodes,
        updates_per_core=read_updates(options.adam) if options.adam is not None else None,
        updates_name=str(options.adam or ""),
        **figures,
    )


def read_ds_config(options: argparse.Namespace, machine: Machine) -> DeepSpeedRun | None:
    """Read the DeepSpeed configuration that the arguments name, for the ranks of `machine`; None
    without one. Raises: ValueError naming key, value and fix.
    """
    if options.ds_config is None:
        return None
    # A trainer replaces "auto" by its arguments. Without --dtype take whichever of bf16 and fp16
    # the configuration enables.
    for dtype in [options.dtype] if options.dtype else ["bfloat16", "float16"]:
        run = read_deepspeed(
            options.ds_config,
            world_size=machine.world,
            ranks_per_node=machine.ranks,
            auto={"bf16.enabled": dtype == "bfloat16", "fp16.enabled": dtype == "float16"},
            keep_auto=True,
        )
        if run.dtype is not None:
            break
    return run


def _dtype(options: argparse.Namespace, run: DeepSpeedRun | None) -> torch.dtype:
    name = options.dtype or (run.dtype if run is not None else None) or DTYPES[0]
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def read_policy(options: argparse.Namespace, run: DeepSpeedRun | None) -> inf.Policy:
    """Make the policy of the arguments. Fields that they leave out come from the DeepSpeed
    configuration, or without one from the plan's defaults: states on NVMe.
    """
    given = given_fields(options)
    # `--ram` is the machine's RAM, not the policy's budget. A tier on NVMe must name a directory; a
    # plan opens none, so any name works.
    given |= {"ram": None, "nvme": ["."]}
    if "grad_dtype" in given:
        given["grad_dtype"] = getattr(torch, given["grad_dtype"])
    if run is not None:
        return inf.Policy.from_deepspeed(run, **given)
    # Stages 1 and 2 keep whole parameters on every device.
    tiers = {"params": "nvme" if given.get("zero", 3) == 3 else "device", "optim": "nvme"}
    return inf.Policy(**{**tiers, **given})


def read_job(
    options: argparse.Namespace, shape: ModelShape, machine: Machine, run: DeepSpeedRun | None
) -> Job:
    """Describe the job of the arguments. Policy and micro-batches that they leave out come from the
    DeepSpeed configuration; without that, take the fewest micro-batches that fit.

    Raises: ValueError naming argument, value and fix.
    """
    if options.tokens_per_step < 1:
        raise ValueError(f"--tokens-per-step {options.tokens_per_step} must be at least 1")
    if options.micro_batches is not None and options.micro_batches < 1:
        raise ValueError(f"--micro-batches {options.micro_batches} must be at least 1")
    sequence = options.seq
    if sequence is None:
        # positions is 0 if the configuration does not say how many there are.
        sequence = min(SEQUENCE, shape.positions or SEQUENCE, options.tokens_per_step)
    if sequence < 1:
        raise ValueError(f"--seq {sequence} must be at least 1")
    if sequence > options.tokens_per_step:
        raise ValueError(
            f"--seq {sequence} is more than --tokens-per-step {options.tokens_per_step}: a step "
            "has whole sequences"
        )
    if shape.positions and sequence > shape.positions:
        raise ValueError(
            f"--seq {sequence}: the model has {shape.positions} positions; give at most that"
        )
    policy = read_policy(options, run)
    _check_passes(options, policy, machine)
    _check_tiles(options, shape)
    micro_batches = options.micro_batches
    if micro_batches is None and run is not None and run.micro_batch_size is not None:
        micro_batches = run.accumulation_steps
    job = Job(
        policy,
        tokens=options.tokens_per_step,
        sequence=sequence,
        micro_batches=micro_batches or 1,
        checkpointing=not options.no_checkpointing,
        # Options are None for whole layers; a job has 1 or 0.
        tiles=options.tile_linears or 1,
        loss_tiles=options.tile_loss or 1,
        expert_tile=options.tile_experts or 0,
        schedule=options.schedule,
    )
    if micro_batches is not None:
        return job
    return fewest_micro_batches(shape, machine, job)


def _check_passes(options: argparse.Namespace, policy: inf.Policy, machine: Machine) -> None:
    if policy.activations != "device" and options.no_checkpointing:
        raise ValueError(
            f"--activations {policy.activations} moves the inputs of checkpointed blocks; leave "
            "--no-checkpointing out"
        )
    if options.schedule == "vertical" and options.no_checkpointing:
        raise ValueError(
            "--schedule vertical checkpoints each block for each micro-batch; leave "
            "--no-checkpointing out"
        )
    if policy.activations == "cpu" and not machine.gpus:
        raise ValueError(
            "--activations cpu with --gpus 0: they are in CPU memory already; use 'nvme', or "
            "'device' (they stay)"
        )
    if policy.update_on == "device" and not machine.gpus:
        raise ValueError(
            "--update-on device with --gpus 0: there is no other device than the CPU; leave it out"
        )


def _check_tiles(options: argparse.Namespace, shape: ModelShape) -> None:
    check_tiles(options)
    if options.tile_experts is not None and not shape.has_stacks:
        raise ValueError(
            f"--tile-experts {options.tile_experts}: the model has no stack of experts"
        )


def _size(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    try:
        size = float(parse_size(text))
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None
    # parse_size accepts 0, but no figure of a machine may be 0.
    if not size:
        raise ValueError(f"{option} {text}: give a size above 0, such as '64GiB'")
    return size


def _rate(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text) * 1e9
    except ValueError:
        try:
            # A size per second, as people copy it from data sheets: 6.8GB/s.
            value = float(parse_size(text.removesuffix("/s")))
        except ValueError:
            # Refused below, with the text as given.
            value = 0.0
    if not value > 0 or math.isinf(value):
        raise ValueError(
            f"{option} {text}: give GB/s as a number above 0, or a size such as '6.8GB' (per "
            "second)"
        )
    return value


def _times(factor: float) -> Callable[[float | None, str], float | None]:
    return lambda value, _option: None if value is None else value * factor


_FIGURES: dict[str, tuple[str, Callable[[Any, str], float | None]]] = {
    "gpu_mem_bytes": ("gpu_mem", _size),
    "read_bytes_per_s": ("nvme_read", _rate),
    "write_bytes_per_s": ("nvme_write", _rate),
    "flops_per_gpu": ("flops", _times(1e12)),
    "flops_peak_per_gpu": ("flops_peak", _times(1e12)),
    "pcie_per_gpu": ("pcie", _rate),
    "pcie_host": ("pcie_host", _rate),
    "peers_per_gpu": ("peers", _rate),
    "dram_bytes_per_s": ("dram", _rate),
    "tbw_per_drive": ("tbw", _times(1e12)),
    # In bits: networks are rated in Gbit/s.
    "link_bytes_per_s": ("link_gbps", _times(1e9 / 8)),
    "cores": ("cores", _times(1)),
}
"""Fields of `Machine` that options set: (name of the option, conversion of its value)."""


# -- Its tables ------------------------------------------------------------------------------------


SCHEMA = "infinity.plan/1"
JOB_FIELDS = (
    "tokens", "sequence", "micro_batches", "state", "update", "params", "optim", "grads",
    "activations", "resident", "grad_dtype", "checkpointing", "compute_s", "generations", "durable",
    "update_on", "tiles", "loss_tiles", "expert_tile", "zero", "accumulate", "qwz", "hpz", "qgz",
    "error_feedback", "schedule",
)  # fmt: skip
"""Fields of a job and its policy that a record has, in this order."""
SAME_MAX = 0.005
"""Relative gain or loss below which a change counts as none: it would be shown as 1.00x."""


def show_plan(
    console: Console,
    shape: ModelShape,
    found: Prediction,
    changes: Sequence[Change],
    sides: Sequence[Prediction] = (),
    ranks: Sequence[RankBytes] = (),
    *,
    faster: Prediction | None = None,
) -> None:
    """Print the answer: does the job fit, where do states go, how long is a step, what would a
    change buy, what was assumed.

    sides: predictions with updates on the CPU and on the GPUs. ranks: bytes of one rank under each
    stage. faster: the prediction with the recommended update mode.
    """
    console.print(_head(shape, found), highlight=False)
    if found.fits:
        console.print("[bold green]It fits.[/bold green]")
    else:
        console.print(
            "[bold red]It does not fit.[/bold red] The times below are those of the least that "
            "would work."
        )
        for reason in found.why_not:
            # Reasons contain brackets of Python calls, which rich would interpret as markup.
            say(console, f"  {reason}", markup=False)
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
            "Updates run on the CPU, beside the next forward, unless you set update_on='device': "
            "inside opt.step(), to the same bits. No plan and no budget decides it.",
            highlight=False,
        )
    _show_changes(console, found, changes)
    if faster is not None:
        say(console, recommend(found, faster), markup=False)
    if found.job.vertical:
        say(console, _stays(found), markup=False)
    assumed = [
        (name, source) for name, source in found.machine.sources.items() if source != "given"
    ]
    if assumed:
        console.print("Not given, and so taken to be:")
        for name, source in assumed:
            # Sources have names of figures; show the names of the options that set them.
            option = {"read": "nvme-read", "write": "nvme-write"}.get(name, name.replace("_", "-"))
            say(console, f"  --{option}: {source}", markup=False)
    console.print(
        f"s/step is the limit divided by {EFFICIENCY}: the share of it that this project demands "
        "of itself. Activations and operations are estimated from the configuration. It is a "
        "forecast: nothing was measured.",
        highlight=False,
    )


def deepspeed_table(run: DeepSpeedRun, path: Path) -> Table:
    """Format the status of each key of a DeepSpeed configuration, and what it became."""
    title = f"{path}, as the engine takes it (options of the command replace it)"
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
    # A durable run always has at least two generations, so only their number is worth a word.
    kept = ", durable" if policy.durable else kept
    kept += f" with {policy.older_commits + 1} commits kept" if policy.older_commits else ""
    tiled = f", linears in {job.tiles} tiles" if job.tiles > 1 else ""
    tiled += f", the loss in {job.loss_tiles}" if job.loss_tiles > 1 else ""
    tiled += f", experts in tiles of {job.expert_tile}" if job.expert_tile else ""
    return (
        f"[bold]{escape(shape.name)}[/bold]: {_count(shape.params)} parameters{_experts(shape)} in "
        f"{len(shape.units)} units, the largest {format_size(shape.largest_unit_bytes)}; "
        f"{job.tokens:,} tokens per step in {_batches(job.micro_batches)} of "
        f"{job.micro_batch_tokens(machine.world):,} tokens on each of {_who(machine)}, sequences "
        f"of {job.sequence:,}, "
        f"{'checkpointed' if job.checkpointing else 'not checkpointed'}{tiled}"
        f"{', schedule vertical' if job.vertical else ''}; state "
        f"{job.policy.state}, update "
        f"{job.policy.update}{kept}{', on the GPU' if job.policy.update_on == 'device' else ''}"
    )


def _experts(shape: ModelShape) -> str:
    if not shape.experts:
        return ""
    shared = f" and {shape.shared} shared" if shape.shared else ""
    return (
        f" ({_count(shape.active_params)} compute for a token, with {shape.chosen} of "
        f"{shape.experts} experts{shared})"
    )


def _who(machine: Machine) -> str:
    if machine.gpus:
        text = f"{machine.gpus} GPU{'s' if machine.ranks > 1 else ''}"
    else:
        text = f"{machine.ranks} ranks on CPUs" if machine.ranks > 1 else "1 CPU"
    return text + (f" of each of {machine.nodes} nodes" if machine.nodes > 1 else "")


def _needs(found: Prediction) -> Table:
    table = make_table("Does it fit", "memory", "needed", "there is")
    names = {
        "one GPU" if found.machine.gpus else "device (CPU memory)": found.gpu,
        "RAM": found.ram,
        "NVMe": found.nvme,
    }
    for name, need in names.items():
        # No parts: nothing rests on drives.
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
        "frozen": "frozen parameters",
        "grads": "spilled gradients",
    }
    for field in dataclasses.fields(AtRest):
        whole, there = getattr(everything, field.name), getattr(nvme, field.name)
        if whole:
            share = f"{format_size(whole - there)} ({1 - there / whole:.0%})"
            table.add_row(
                names[field.name],
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
            table.add_row(f"{name}, alone", f"{_seconds(seconds)} s")
    table.add_row("limit of any schedule", f"{_seconds(found.limits.floor_s)} s")
    table.add_row(
        f"limit of update {found.job.policy.update}", f"{_seconds(found.limits.schedule_s)} s"
    )
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
        rated = (
            f"{found.machine.tbw_per_drive / 1e12:,.0f} TB written{' each' if drives > 1 else ''}"
        )
        table.add_row("the drives last", f"{_days(found.days)} ({drives} rated for {rated})")
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
        f"{_seconds(first.seconds)} s",
    )
    drawn_s = _seconds(first.init_seconds)
    filling = format_size(costs.ram.fill_without_files)
    table.add_row(
        "  from scratch (init=)",
        f"draws the values, reads none; {drawn_s} s, and {filling} of RAM while it fills",
    )
    return table


def _seconds(value: float) -> str:
    """Format seconds: no decimals from 1000 on, two from 1 on, three significant digits below."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.3g}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _batches(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def _per_param(found: Prediction, size: float) -> str:
    # For 2 B of parameters, so that models of different dtypes can be compared.
    whole = found.at_rest.params + found.at_rest.frozen
    return f"{size / whole * 2:.2f} B for every 2 B of parameters" if whole else "-"


def _days(days: float) -> str:
    if math.isinf(days):
        return "for ever: nothing is written"
    if days > 730:
        return f"{days / 365:,.1f} years"
    return f"{days:,.1f} days" if days < 10 else f"{days:,.0f} days"


def _sides(sides: Sequence[Prediction]) -> Table:
    table = make_table(
        "Where updates run", "update_on", *(repr(side.job.policy.update_on) for side in sides)
    )
    table.add_row("s/step expected", *(_seconds(side.step_s) for side in sides))
    table.add_row("copied to GPUs", *(format_size(side.copied.h2d) for side in sides))
    table.add_row("copied from GPUs", *(format_size(side.copied.d2h) for side in sides))
    # The union of both sides' terms, in order: each side may have terms that the other lacks.
    for name in dict.fromkeys(name for side in sides for name in side.terms_s):
        if name not in ("compute", "drives"):  # equal on both sides
            terms = [side.terms_s.get(name, 0.0) for side in sides]
            table.add_row(
                f"{name}, alone", *(f"{_seconds(term)} s" if term else "-" for term in terms)
            )
    table.add_row("GPU memory, each", *(format_size(side.gpu.bytes) for side in sides))
    return table


def _show_changes(console: Console, found: Prediction, changes: Sequence[Change]) -> None:
    """Print a row for each change that fits and changes the speed, and the names of the others."""
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
            _seconds(other.step_s),
            f"{other.tokens_per_s:,.0f}",
            "-" if gain is None else f"{gain:.2f}x",
            f"{other.written_per_day / 1e12:,.1f}",
        )
    return table


def _stays(found: Prediction) -> str:
    if not found.again:
        return (
            "Units stay gathered until all micro-batches have passed their block: each is gathered "
            "once in forward and once in backward."
        )
    device = "GPU" if found.machine.gpus else "device"
    return (
        f"The {device} has no room for whole blocks beside their gradients and activations: "
        f"{found.again:.0%} of the parameters are gathered for each micro-batch, and again where "
        "backward computes it again; the others stay until all micro-batches have passed their "
        "block. Smaller blocks (inf.microbatched(blocks=...)) have room."
    )


def recommend(found: Prediction, faster: Prediction) -> str:
    """Return the sentence that recommends the update mode of `faster`, with its gain and the
    capacity that it needs on the drives.
    """
    there, more = faster.nvme.there_is, faster.nvme.bytes - found.nvme.bytes
    room = f"; it needs {format_size(faster.nvme.bytes)} on the drives"
    if more > 0:
        room += f", {format_size(more)} more: "
        # Without --nvme-size the capacity is not known.
        room += f"{format_size(there)} are there" if there is not None else "see that they have it"
    return (
        "Recommended: Policy(update='backward', generations=2), exact and with clipping: "
        f"{found.step_s / faster.step_s:.2f} times as fast ({_seconds(faster.step_s)} s/step, not "
        f"{_seconds(found.step_s)}){room if faster.nvme.bytes else ''}."
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
    *,
    faster: Prediction | None = None,
) -> dict[str, Any]:
    """Return the JSON record of a plan. Infinite figures are None. sides, ranks, faster: as in
    `show_plan`.
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
        "plan": _record(found),
        "outside": _outside_record(outside(shape, found)),
        "rank_bytes": rank_record(ranks),
        "update_on": {side.job.policy.update_on: _record(side) for side in sides},
        "recommended": None if faster is None else _record(faster),
        "changes": [
            {
                "change": change.name,
                "gain": _gain(found, change.prediction),
                **_record(change.prediction),
            }
            for change in changes
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
        "policy_ram_bytes": found.policy_ram,
        "nvme": _need(found.nvme),
        "at_rest": dataclasses.asdict(found.at_rest),
        "on_nvme": dataclasses.asdict(found.on_nvme),
        "read_bytes": found.moved.total.read,
        "written_bytes": found.moved.total.written,
        "h2d_bytes": found.copied.h2d,
        "d2h_bytes": found.copied.d2h,
        "exchanged": exchange_record(found.exchanged),
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
    """Format the bytes of the tiers that have any, as "1.5 GiB cpu + 8 GiB nvme"; "-" if none."""
    text = [f"{format_size(getattr(size, tier))} {tier}" for tier in TIERS if getattr(size, tier)]
    return " + ".join(text) or "-"


def exchange_table(found: Prediction) -> Table:
    """Format the bytes that each rank receives in a step. The last column is the volume as ZeRO++
    counts it (`Exchanges.volume`).
    """
    exchanged, machine = found.exchanged, found.machine
    several = machine.nodes > 1
    across = ["from other nodes", "its whole node from others"] if several else []
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


# -- A model on this machine -----------------------------------------------------------------------


def describe_model(model: Path, drives: Sequence[DirectoryProbe]) -> tuple[str, str]:
    """Return (forecast of training `model` on this machine, warning); the warning is "" if the
    model fits. model: a directory or its config.json. drives: usable directories for swap.

    Raises: ValueError for a path that is no model, or without directories.
    """
    if not drives:
        raise ValueError("there is no directory for swap to train it with; give one with --dir")
    shape = read_shape(model, torch.bfloat16)
    sequence = min(SEQUENCE, shape.positions or SEQUENCE)
    # A tier on NVMe must name a directory; the forecast does not open it.
    policy = inf.Policy(params="nvme", optim="nvme", nvme=[drives[0].path])
    now = predict(shape, _machine_here(drives), Job(policy, tokens=sequence, sequence=sequence))
    value = (
        f"{shape.name}: {shape.params / 1e9:.2f} B parameters; {format_size(now.nvme.bytes)} on "
        f"the drives, {format_size(now.nvme.there_is or 0.0)} are free; {now.step_s:.3g} s/step of "
        f"{sequence:,} tokens (forecast with assumed rates: `infinity plan` takes yours)"
    )
    if not now.fits:
        return value, "; ".join(now.why_not)
    faster = faster_update(shape, now)
    return value if faster is None else f"{value}. {recommend(now, faster)}", ""


def _machine_here(drives: Sequence[DirectoryProbe]) -> Machine:
    # Directories of one file system share its capacity, and count as one drive.
    free = {Path(probe.path).stat().st_dev: float(probe.free_bytes) for probe in drives}
    left = float(memory_left_bytes())
    # Models cannot be offloaded from AMD GPUs, so there the CPU computes.
    there = torch.cuda.is_available() and not rocm_lacks()
    gpu = torch.cuda.get_device_properties(0) if there else None
    return describe_machine(
        gpus=0 if gpu is None else 1,
        # Where the CPU computes, device memory is the machine's RAM.
        gpu_mem_bytes=left if gpu is None else float(gpu.total_memory),
        ram_bytes=left,
        drives=len(free),
        nvme_bytes=sum(free.values()),
        cores=numa.core_count(os.sched_getaffinity(0)),
    )
