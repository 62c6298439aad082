"""`infinity plan`: does a model fit a machine, where does each state go, how long is a step, what would one change buy.

Nothing is loaded and nothing is measured: the model is built on the meta device from its configuration (code that comes with
a model is never run), drives are as told or as `python -m infinity.bench swap --json` measured them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

import infinity as inf
from infinity._src.cli import hf_model
from infinity._src.cli.arguments import parse_resident
from infinity._src.cli.plan_tables import as_record, show_plan
from infinity._src.perf.plan.changes import fewest_micro_batches, one_change, where_updates_run
from infinity._src.perf.plan.job import Job
from infinity._src.perf.plan.machine import Machine, describe_machine
from infinity._src.perf.plan.predict import predict
from infinity._src.perf.plan.ranks import stages
from infinity._src.perf.plan.shape import ModelShape, shape_of
from infinity._src.sizes import parse_size
from infinity.aio import IoSettings

SEQUENCE = 4096
DTYPES = ("bfloat16", "float16", "float32")


def run_plan(options: argparse.Namespace, console: Console | None = None) -> int:
    """Plan as `options` say. Exit status: 0 when it fits, 1 when it does not, 2 for a mistake."""
    to_stdout = options.json is not None and str(options.json) == "-"
    console = console or Console(stderr=to_stdout)
    try:
        machine = read_machine(options)
        shape = read_shape(options.model, getattr(torch, options.dtype), nested=machine.world == 1)
        job = read_job(options, shape, machine)
        prediction = predict(shape, machine, job)
        changes = [] if options.no_changes else one_change(
            shape, prediction, choose_micro_batches=options.micro_batches is None
        )
        sides = where_updates_run(shape, prediction)
        ranks = stages(shape, machine, job) if machine.world > 1 else []
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    if options.json is not None:
        text = json.dumps(as_record(shape, prediction, changes, sides, ranks), indent=2) + "\n"
        if to_stdout:
            sys.stdout.write(text)
            return 0 if prediction.fits else 1
        try:
            options.json.write_text(text, encoding="utf-8")
        except OSError as error:
            text = f"--json {escape(str(options.json))}: {error.strerror}"
            console.print(f"[red]error:[/red] {text}", highlight=False, soft_wrap=True)
            return 2
    show_plan(console, shape, prediction, changes, sides, ranks)
    return 0 if prediction.fits else 1


def read_shape(path: Path, dtype: torch.dtype, *, nested: bool = True) -> ModelShape:
    """The shape of the Hugging Face model at `path`: a directory or its config.json. Nothing but that file is read.

    Raises: ValueError naming what is wrong with it.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is neither a directory with a config.json nor such a file; a model is planned from disk only")
    transformers = hf_model.quiet_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - the classes that check a configuration raise what they like
        raise ValueError(f"{file}: {_first_line(error)}") from None
    found = [
        auto
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
        if type(config) in auto._model_mapping
    ]
    if not found:
        raise ValueError(f"{file}: {type(config).__name__} is no language model that transformers can train")
    config.quantization_config = None
    try:
        with torch.device("meta"):
            model = found[0].from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, RuntimeError, AttributeError, TypeError, ImportError) as error:
        raise ValueError(f"{file}: the model cannot be built: {error}") from error
    if file.name == "config.json":
        name = file.absolute().parent.name
    else:
        name = file.stem
    return shape_of(model, name=name, nested=nested)


def read_machine(options: argparse.Namespace) -> Machine:
    """The machine that the arguments describe. Raises: ValueError naming argument, value and fix."""
    for name in ("flops", "flops_peak", "tbw", "link_gbps"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
    bench = IoSettings.load(options.bench) if options.bench is not None else None
    return describe_machine(
        gpus=options.gpus,
        gpu=options.gpu,
        gpu_mem_bytes=_size(options.gpu_mem, "--gpu-mem"),
        ram_bytes=_size(options.ram, "--ram") or 0.0,
        drives=options.drives,
        read_bytes_per_s=_rate(options.nvme_read, "--nvme-read"),
        write_bytes_per_s=_rate(options.nvme_write, "--nvme-write"),
        flops_per_gpu=options.flops * 1e12 if options.flops is not None else None,
        flops_peak_per_gpu=options.flops_peak * 1e12 if options.flops_peak is not None else None,
        pcie_per_gpu=_rate(options.pcie, "--pcie"),
        pcie_host=_rate(options.pcie_host, "--pcie-host"),
        peers_per_gpu=_rate(options.peers, "--peers"),
        dram_bytes_per_s=_rate(options.dram, "--dram"),
        tbw_per_drive=options.tbw * 1e12 if options.tbw is not None else None,
        nvme_bytes=_size(options.nvme_size, "--nvme-size"),
        shared=not options.separable,
        bench=bench,
        bench_name=str(options.bench or ""),
        ranks=options.ranks,
        nodes=options.nodes,
        link_bytes_per_s=options.link_gbps * 1e9 / 8 if options.link_gbps is not None else None,
    )


def read_job(options: argparse.Namespace, shape: ModelShape, machine: Machine) -> Job:
    """The job that the arguments describe; without --micro-batches the fewest that fit a device."""
    if options.tokens_per_step < 1:
        raise ValueError(f"--tokens-per-step {options.tokens_per_step} must be at least 1")
    if options.micro_batches is not None and options.micro_batches < 1:
        raise ValueError(f"--micro-batches {options.micro_batches} must be at least 1")
    sequence = options.seq
    if sequence is None:
        sequence = min(SEQUENCE, shape.positions or SEQUENCE, options.tokens_per_step)
    if sequence < 1:
        raise ValueError(f"--seq {sequence} must be at least 1")
    if sequence > options.tokens_per_step:
        raise ValueError(f"--seq {sequence} is more than --tokens-per-step {options.tokens_per_step}: a step has whole sequences")
    if shape.positions and sequence > shape.positions:
        raise ValueError(f"--seq {sequence}: the model has {shape.positions} positions; give at most that")
    if options.activations != "device" and options.no_checkpointing:
        raise ValueError(
            f"--activations {options.activations} moves the inputs of checkpointed blocks; leave --no-checkpointing out"
        )
    if options.activations == "cpu" and not machine.gpus:
        raise ValueError("--activations cpu with --gpus 0: they are in CPU memory already; use 'nvme', or 'device' (they stay)")
    if options.update_on == "device" and not machine.gpus:
        raise ValueError("--update-on device with --gpus 0: there is no other device than the CPU; leave it out")
    for name in ("tile_linears", "tile_loss"):
        value = getattr(options, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    tiers = {"params": options.params or ("nvme" if options.zero == 3 else "device"), "optim": options.optim}
    ranks = {name: getattr(options, name) for name in ("zero", "qwz", "hpz", "qgz", "error_feedback")}
    ranks["accumulate"] = options.accumulate_in
    policy = inf.Policy(  # checks and parses
        **tiers, **ranks, nvme=["."], resident=parse_resident(options.resident), update=options.update,
        generations=options.generations, durable=options.durable,
    )  # fmt: skip
    job = Job(
        tokens=options.tokens_per_step,
        sequence=sequence,
        micro_batches=1 if options.micro_batches is None else options.micro_batches,
        state=options.state,
        update=options.update,
        **tiers,
        **ranks,
        grads=options.grads,
        activations=options.activations,
        resident={kind: part for kind, part in (policy.resident or {}).items() if not isinstance(part, str)} or None,
        grad_dtype=getattr(torch, options.grad_dtype) if options.grad_dtype else None,
        checkpointing=not options.no_checkpointing,
        generations=policy.generations,
        durable=options.durable,
        update_on=options.update_on,
        tiles=options.tile_linears,
        loss_tiles=options.tile_loss,
    )
    if options.micro_batches is not None:
        return job
    return fewest_micro_batches(shape, machine, job)


def _size(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    try:
        size = float(parse_size(text))
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None
    if not size:
        raise ValueError(f"{option} {text}: give a size above 0, such as '64GiB'")
    return size


def _first_line(error: Exception) -> str:
    """What a fault says, in one line; the type too where the text alone does not tell."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _rate(text: str | None, option: str) -> float | None:
    """GB/s as a plain number, or a size per second."""
    if text is None:
        return None
    try:
        value = float(text) * 1e9
    except ValueError:
        try:
            value = float(parse_size(text.removesuffix("/s")))
        except ValueError:
            value = 0.0
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{option} {text}: give GB/s as a number above 0, or a size such as '6.8GB' (per second)")
    return value
