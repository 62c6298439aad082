"""`infinity plan`: predicts whether a model fits a machine, and the fastest way to train it.

The command loads no weights and measures nothing. It builds the model on the meta device from the
model's configuration (code that comes with a model never runs), and takes the drives' figures from
the arguments or from a record of `python -m infinity.bench swap --json`. It searches all ways to
train that the arguments allow (`plan.search`). The output is one screen (`cli.plan_answer`), with
--all every table (`cli.plan_tables`), and with --json a record.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity as inf
from infinity._src.base.console import say_error
from infinity._src.base.sizes import format_size, parse_size
from infinity._src.checkpoint.hub_resolution import read_object
from infinity._src.cli import hf_model
from infinity._src.cli import lora as adapters
from infinity._src.cli.arguments import check_tiles
from infinity._src.cli.plan_answer import (
    Answer,
    policy_text,
    show_answer,
    show_assumed,
)
from infinity._src.cli.plan_tables import (
    as_record,
    deepspeed_record,
    deepspeed_table,
    format_seconds,
    show_tables,
)
from infinity._src.config.choices import OPTIMIZERS, SCHEDULES, given_fields
from infinity._src.config.deepspeed import DeepSpeedRun, read_deepspeed
from infinity._src.measure.report import check_target, write_record
from infinity._src.memory import numa
from infinity._src.memory.device import rocm_lacks
from infinity._src.plan.changes import fewest_micro_batches, one_change, where_updates_run
from infinity._src.plan.machine import Figures, Machine, describe_machine, read_updates
from infinity._src.plan.predict import Prediction, predict
from infinity._src.plan.ranks import stages
from infinity._src.plan.search import axes_of, is_exact, search, states_of, upgrades
from infinity._src.plan.workload import Job, JobShape, ModelShape, shape_in, shape_of
from infinity.aio import IoSettings
from infinity.aio._memory_limits import memory_left_bytes
from infinity.aio._probe import DirectoryProbe

# -- The command -----------------------------------------------------------------------------------


SEQUENCE = 4096
"""Default tokens of a sequence; fewer if the model has fewer positions or the step fewer tokens."""
DTYPES = ("bfloat16", "float16", "float32")


def run_plan(options: argparse.Namespace, console: Console | None = None) -> int:
    """Plan the job of `options`. Returns the exit status: 0 if the job fits, 1 if it does not, 2
    for a user's mistake.
    """
    # With "--json -" standard output has the record alone; all other output goes to stderr.
    to_stdout = options.json is not None and str(options.json) == "-"
    console = console or Console(stderr=to_stdout)
    try:
        check_target(options.json, "--json")
        _check_numbers(options)
        _check_drives(options)
        machine = read_machine(options)
        run = read_ds_config(options, machine)
        # The engine finds nested units on one rank only.
        nested, dtype = machine.world == 1, _dtype(options, run)
        machine = read_machine(options, float32=dtype is torch.float32)
        shape = read_shape(options.model, dtype, nested=nested, lora=options.lora)
        job = read_job(options, shape, machine, run)
        answer = find_answer(options, shape, machine, job)
        best = answer.best
        changes = []
        if options.all:
            choose = options.micro_batches is None
            changes = one_change(shape, best, choose_micro_batches=choose)
        sides = where_updates_run(shape, best)
        ranks = stages(shape, machine, best.job) if machine.world > 1 else []
        if options.json is not None:
            record = as_record(shape, best, changes, sides, ranks) | answer.as_record()
            record |= {"deepspeed": None if run is None else deepspeed_record(run)}
            write_record(record, options.json)
    except (ValueError, OSError) as error:
        say_error(console, error)
        return 2
    if not to_stdout:
        if run is not None:
            console.print(deepspeed_table(run, options.ds_config))
        show_answer(console, answer)
        if options.all:
            show_tables(console, shape, best, changes, sides, ranks)
        show_assumed(console, best)
    return 0 if best.fits else 1


def find_answer(
    options: argparse.Namespace, shape: ModelShape, machine: Machine, job: Job
) -> Answer:
    """Search all ways to train that the options allow. With --as-given or a DeepSpeed
    configuration, predict only the job as given.
    """
    given: dict[str, Any] = {
        name: getattr(options, name) for name in ("total_tokens", "lora", "dtype")
    }
    if options.as_given or options.ds_config is not None:
        return Answer(options.model, shape, predict(shape, machine, job), **given)
    fixed, exact = fixed_fields(options), options.exact
    ways = search(shape, machine, job, fixed, exact=exact, count=2).ways
    best = ways[0] if ways else None
    given["more"] = upgrades(shape, machine, job, fixed, exact=exact, best=best)
    if not ways:
        given["more"] |= _without_one(options, shape, machine, job)
        return Answer(options.model, shape, predict(shape, machine, job), **given)
    plain = None
    if not all(is_exact(way.job) for way in ways):
        found = search(shape, machine, job, fixed, exact=True).ways
        plain = found[0] if found and found[0] not in ways else None
    second = ways[1] if len(ways) > 1 else None
    return Answer(options.model, shape, ways[0], second, plain, **given)


def _without_one(
    options: argparse.Namespace, shape: ModelShape, machine: Machine, job: Job
) -> dict[str, Prediction | None]:
    """For a job that does not fit, search once without each option that restricts the search."""
    fixed, found = fixed_fields(options), {}
    axes = axes_of(shape, machine, job, ()).values()
    searched = {name for values in axes for each in values for name in each}
    for field in sorted(fixed & (searched | set(_JOB_OPTIONS.values()))):
        name = {field: option for option, field in _JOB_OPTIONS.items()}.get(field, field)
        ways = search(shape, machine, job, fixed - {field}, exact=options.exact).ways
        found[f"without --{name.replace('_', '-')}"] = ways[0] if ways else None
    # Options that no search decides.
    others: dict[str, dict[str, Any]] = {
        "exact": {},
        "no_checkpointing": {"checkpointing": True},
        "durable": {"durable": False},
        "resident": {"resident": None},
    }
    for name, fields in others.items():
        if getattr(options, name):
            changed, exact = job.replace(**fields), options.exact and name != "exact"
            ways = search(shape, machine, changed, fixed - fields.keys(), exact=exact).ways
            found[f"without --{name.replace('_', '-')}"] = ways[0] if ways else None
    return found


_JOB_OPTIONS = {
    "schedule": "schedule",
    "micro_batches": "micro_batches",
    "tile_linears": "tiles",
    "tile_loss": "loss_tiles",
    "tile_experts": "expert_tile",
}
"""Fields of a job by the option that sets them."""


def fixed_fields(options: argparse.Namespace) -> set[str]:
    """Return the fields of the job and of its policy that the options set."""
    found = {field for name, field in _JOB_OPTIONS.items() if getattr(options, name) is not None}
    return found | set(given_fields(options))


def read_shape(
    path: Path, dtype: torch.dtype, *, nested: bool = True, lora: int | None = None
) -> ModelShape:
    """Read the shape of the Hugging Face model at `path`: a directory or its config.json, the only
    file that is read. nested: as in `plan.workload.shape_of`. lora: rank of adapters on all
    linears, with which only adapters are trained; None: the whole model is trained.

    Raises: ValueError naming the file and its fault.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path} is neither a directory with a config.json nor a config.json; infinity plan "
            "reads models from disk only"
        )
    transformers = hf_model.quiet_transformers()
    config = _read_config(file, transformers)
    found = [
        auto
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
        if type(config) in auto._model_mapping
    ]
    if not found:
        raise ValueError(
            f"{file}: {type(config).__name__} is not a language model that transformers can train"
        )
    # Quantized weights cannot be trained, so the plan uses the unquantized model.
    config.quantization_config = None
    with hf_model.read_by_transformers(file), torch.device("meta"):
        model = found[0].from_config(config, dtype=dtype, trust_remote_code=False)
    if lora is not None:
        adapters.check_installed()
        with torch.device("meta"):
            model = adapters.add_adapters(model, lora, file.parent)
    if file.name == "config.json":
        # Every model has a file of this name, in a directory named after the model.
        name = file.absolute().parent.name
    else:
        name = file.stem
    shape = shape_of(model, name=name, nested=nested)
    return shape if lora is None else shape.with_adapters()


def _read_config(file: Path, transformers: Any) -> Any:
    """Read a configuration. If the code of the configuration's class comes with the model, use the
    class of transformers that `architectures` names: Kimi-K2 names DeepseekV3ForCausalLM.
    """
    fields: dict[str, Any] = read_object(file) or {}
    kind = fields.get("model_type")
    if "auto_map" not in fields or kind in transformers.CONFIG_MAPPING:
        with hf_model.read_by_transformers(file):
            return transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else ():
        config = getattr(getattr(transformers, str(name), None), "config_class", None)
        if config is not None:
            with hf_model.read_by_transformers(file):
                return config.from_dict({**fields, "model_type": config.model_type})
    raise ValueError(
        f"{file}: the code of model_type {kind!r} comes with the model, and infinity does not run "
        f"such code; architectures={names!r} names no class of transformers. If transformers has a "
        "model of the same structure, plan a copy of config.json that names its class, such as "
        '"architectures": ["DeepseekV3ForCausalLM"]'
    )


def read_machine(options: argparse.Namespace, *, float32: bool = False) -> Machine:
    """Describe the machine of the arguments. float32: the machine computes in fp32.

    Raises: ValueError naming argument, value and fix.
    """
    figures = {
        field: convert(getattr(options, name), f"--{name.replace('_', '-')}")
        for field, (name, convert) in _FIGURES.items()
    }
    machine = describe_machine(
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
        float32=float32,
        **figures,
    )
    if machine.gpus and machine.flops_per_gpu > machine.flops_peak_per_gpu:
        rate, peak = machine.flops_per_gpu / 1e12, machine.flops_peak_per_gpu / 1e12
        raise ValueError(
            f"--flops {rate:g} is more than the GPU's peak of {peak:g} TFLOP/s; give less, or the "
            "--flops-peak of your GPU"
        )
    return machine


_LEAST = {
    "gpus": 0, "ranks": 1, "nodes": 1, "drives": 0, "cores": 1, "tokens_per_step": 1, "seq": 1,
    "micro_batches": 1, "lora": 1,
}  # fmt: skip
"""Least values of the options that are whole numbers."""


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (*_LEAST.items(), ("total_tokens", options.tokens_per_step)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    for name in ("flops", "flops_peak", "tbw", "link_gbps"):
        value = getattr(options, name)
        # Checked before the conversion of units, so that the message shows the user's number.
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")


def _check_drives(options: argparse.Namespace) -> None:
    """Raise ValueError for options of drives with --drives 0, and for --durable with one
    generation.
    """
    of_drives = ("nvme_read", "nvme_write", "nvme_size", "bench", "tbw", "separable", "durable")
    found = [f"--{name.replace('_', '-')}" for name in of_drives if getattr(options, name)]
    tiers = ("params", "optim", "grads", "activations")
    found += [f"--{name} nvme" for name in tiers if getattr(options, name) == "nvme"]
    if options.drives == 0 and found:
        raise ValueError(
            f"--drives 0 with {', '.join(found)}, which need{'s' * (len(found) == 1)} a drive: "
            "leave one or the other out"
        )
    if options.durable and options.generations == 1:
        raise ValueError(
            "--generations 1 with --durable: a durable run has two or more; leave --generations out"
        )


def read_ds_config(options: argparse.Namespace, machine: Machine) -> DeepSpeedRun | None:
    """Read the DeepSpeed configuration of the arguments for the ranks of `machine`; None if the
    arguments have none. Raises: ValueError naming key, value and fix.
    """
    if options.ds_config is None:
        return None
    # A trainer replaces "auto" by its arguments. Without --dtype, use bf16 or fp16, whichever the
    # configuration enables.
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


def read_policy(
    options: argparse.Namespace, machine: Machine, run: DeepSpeedRun | None
) -> inf.Policy:
    """Make the policy of the arguments. Fields that the arguments leave out come from the DeepSpeed
    configuration; without a configuration, from the plan's defaults: states on NVMe, or in RAM if
    the machine has no drives.
    """
    given = given_fields(options)
    # `--ram` is the machine's RAM, not the policy's budget. A tier on NVMe must have a directory; a
    # plan does not open it, so any name works.
    given |= {"ram": None, "nvme": ["."]}
    if "grad_dtype" in given:
        given["grad_dtype"] = getattr(torch, given["grad_dtype"])
    if run is not None:
        return inf.Policy.from_deepspeed(run, **given)
    below = "nvme" if machine.drives else "cpu"
    # Stages 1 and 2 keep whole parameters on every device.
    tiers = {"params": below if given.get("zero", 3) == 3 else "device", "optim": below}
    return inf.Policy(**{**tiers, **given})


def read_job(
    options: argparse.Namespace, shape: ModelShape, machine: Machine, run: DeepSpeedRun | None
) -> Job:
    """Describe the job of the arguments. Policy and micro-batches that the arguments leave out come
    from the DeepSpeed configuration; without one, the job has the fewest micro-batches that fit.

    Raises: ValueError naming argument, value and fix.
    """
    policy = read_policy(options, machine, run)
    if options.exact and (policy.state != "exact" or policy.qwz or policy.qgz):
        raise ValueError(
            "--exact with --state, --qwz or --qgz, which round: leave one or the other out"
        )
    _check_passes(options, policy, machine)
    _check_tiles(options, shape)
    micro_batches = options.micro_batches
    if micro_batches is None and run is not None and run.micro_batch_size is not None:
        micro_batches = run.accumulation_steps
    sequence = _sequence(options, shape, machine.world * (micro_batches or 1))
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
        schedule=options.schedule or SCHEDULES[0],
        optimizer=options.optimizer or _optimizer_of(run),
    )
    _check_resident(options, shape_in(job, shape), machine, policy)
    if micro_batches is not None:
        return job
    return fewest_micro_batches(shape, machine, job)


def _optimizer_of(run: DeepSpeedRun | None) -> str:
    named = run.optimizer[0].lower() if run is not None and run.optimizer is not None else ""
    return named if named in OPTIMIZERS else OPTIMIZERS[0]


def _sequence(options: argparse.Namespace, shape: ModelShape, batches: int) -> int:
    """Return the tokens of a sequence. batches: micro-batches of a step, over all devices; each
    must have a whole sequence. Raises: ValueError if the sequence is too long for that or for the
    model.
    """
    tokens: int = options.tokens_per_step // batches
    if options.seq is None:
        # positions is 0 if the configuration does not state their number.
        return max(min(SEQUENCE, shape.positions or SEQUENCE, tokens), 1)
    sequence: int = options.seq
    if sequence > tokens:
        each = f" has for each of {batches} micro-batches" if batches > 1 else ""
        raise ValueError(
            f"--seq {sequence} is more than --tokens-per-step {options.tokens_per_step}{each}: "
            f"give shorter sequences, or --tokens-per-step {sequence * batches}"
        )
    if shape.positions and sequence > shape.positions:
        raise ValueError(
            f"--seq {sequence}: the model has {shape.positions} positions; give at most as many"
        )
    return sequence


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
            "--activations cpu with --gpus 0: activations are in CPU memory already; use "
            "'nvme', or 'device' (they stay)"
        )
    if policy.update_on == "device" and not machine.gpus:
        raise ValueError(
            "--update-on device with --gpus 0: the CPU is the only device; leave --update-on out"
        )


def _check_tiles(options: argparse.Namespace, shape: ModelShape) -> None:
    check_tiles(options)
    if options.tile_experts is not None and not shape.has_stacks:
        raise ValueError(
            f"--tile-experts {options.tile_experts}: the model has no stack of experts; leave it "
            "out"
        )
    outputs = max((linear.out_features for linear in shape.kinds_of_linears), default=0)
    for name, most, what in (
        ("tile_linears", outputs, "outputs of the largest linear"),
        ("tile_loss", shape.vocabulary, "words of the vocabulary"),
        ("tile_experts", shape.experts, "experts of a layer"),
    ):
        value = getattr(options, name)
        if value is not None and value > most:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is more than the {most} {what}; give at most "
                f"{most}"
            )


def _check_resident(
    options: argparse.Namespace, shape: JobShape, machine: Machine, policy: inf.Policy
) -> None:
    """Raise ValueError for more bytes of resident states than a process of the machine has RAM, or
    than the model has states.
    """
    if not options.resident:
        return
    states = states_of(shape, policy.state)
    sizes = {"params": states.params + states.frozen, "optim": states.optim}
    for kind, part in policy.resident_parts.items():
        if isinstance(part, float):
            continue
        each, room = sizes[kind] / machine.world, machine.ram_bytes / machine.ranks
        what = "the machine has RAM" if room < each else "the model has"
        if part > min(each, room):
            raise ValueError(
                f"--resident {kind}={format_size(part)} is more than {what} for each process, "
                f"{format_size(min(each, room))}; give less, or a share such as {kind}=0.5"
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
            # A size per second, as in data sheets: 6.8GB/s.
            value = float(parse_size(text.removesuffix("/s")))
        except ValueError:
            # The check below raises, with the user's text.
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
    # Networks are rated in Gbit/s.
    "link_bytes_per_s": ("link_gbps", _times(1e9 / 8)),
    "cores": ("cores", _times(1)),
}
"""Fields of `Machine` that options set: (name of the option, conversion of its value)."""


# -- A model on this machine -----------------------------------------------------------------------


def describe_model(model: Path, drives: Sequence[DirectoryProbe]) -> tuple[str, str]:
    """Return (forecast of training `model` on this machine, warning); the warning is "" if the
    model fits. model: a directory or its config.json. drives: usable directories for swap.

    Raises: ValueError for a path that is not a model, or without directories.
    """
    if not drives:
        raise ValueError("training needs a directory for swap, and none is usable; give one: --dir")
    shape = read_shape(model, torch.bfloat16)
    sequence = min(SEQUENCE, shape.positions or SEQUENCE)
    # A tier on NVMe must name a directory; the forecast does not open it.
    policy = inf.Policy(params="nvme", optim="nvme", nvme=[drives[0].path])
    machine, job = machine_here(drives), Job(policy, tokens=sequence, sequence=sequence)
    ways = search(shape, machine, job, exact=True).ways
    now = ways[0] if ways else predict(shape, machine, job)
    value = (
        f"{shape.name}: {shape.params / 1e9:.2f} B parameters; {format_size(now.nvme.bytes)} on "
        f"the drives, {format_size(now.nvme.there_is or 0.0)} are free; "
        f"{format_seconds(now.step_s)} s/step of {sequence:,} tokens (forecast with assumed rates: "
        "`infinity plan` takes yours)"
    )
    if not now.fits:
        return value, "; ".join(now.why_not)
    return f"{value}. The fastest exact way: {policy_text(now)}", ""


def machine_here(
    drives: Sequence[DirectoryProbe],
    measured: IoSettings | None = None,
    tbw: float | None = None,
) -> Machine:
    """Describe this machine. measured: rates of the directories; None: assumed rates. tbw: rated
    terabytes written of one drive; None: an assumed rating.
    """
    # Directories of one file system share its capacity, and count as one drive.
    free = {Path(probe.path).stat().st_dev: float(probe.free_bytes) for probe in drives}
    left = float(memory_left_bytes())
    # Models cannot be offloaded from AMD GPUs, so the CPU computes on such machines.
    there = torch.cuda.is_available() and not rocm_lacks()
    gpu = torch.cuda.get_device_properties(0) if there else None
    rates: Figures = {
        "gpu_mem_bytes": None if gpu is None else float(gpu.total_memory),
        "cores": numa.core_count(os.sched_getaffinity(0)),
        "tbw_per_drive": None if tbw is None else tbw * 1e12,
    }
    pairs = list(measured.bandwidths.values()) if measured is not None else []
    if len(pairs) > len(free):
        # All directories were measured at once, so directories of one drive share its rate.
        rates["read_bytes_per_s"] = sum(read for read, _ in pairs)
        rates["write_bytes_per_s"] = sum(write for _, write in pairs)
        measured = None
    return describe_machine(
        gpus=0 if gpu is None else 1,
        ram_bytes=left,
        drives=len(free),
        nvme_bytes=sum(free.values()),
        bench=measured,
        **rates,
    )
