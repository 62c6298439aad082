"""The answer of `infinity plan` on one screen: the fastest ways to train that fit, Python and a
command line for the fastest, the gain of a larger machine, and the assumed figures.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from infinity._src.base.console import make_table, say
from infinity._src.base.sizes import GIB, MIB, format_size
from infinity._src.cli.plan_tables import (
    SAME_MAX,
    experts_of,
    format_count,
    format_days,
    format_seconds,
    prediction_record,
    who_computes,
)
from infinity._src.config.choices import field_rows
from infinity._src.config.policy import Policy
from infinity._src.plan.predict import EFFICIENCY, Prediction
from infinity._src.plan.search import departures
from infinity._src.plan.workload import Job, ModelShape


@dataclasses.dataclass(frozen=True)
class Answer:
    """Predictions of one plan.

    best: the fastest way that fits; if no way fits, the job as given, with the reasons. second: the
    fastest way of another kind. exact: the fastest way with the numbers of plain training, if
    `best` rounds. more: for each enlargement of the machine (its name) the fastest way then; None
    if no way is faster than `best`, or if none fits. total_tokens: tokens of the whole training.
    lora: rank of the adapters. dtype: dtype of the parameters. None: not given.
    """

    model: Path
    shape: ModelShape
    best: Prediction
    second: Prediction | None = None
    exact: Prediction | None = None
    more: Mapping[str, Prediction | None] = dataclasses.field(default_factory=dict)
    total_tokens: int | None = None
    lora: int | None = None
    dtype: str | None = None

    @property
    def ways(self) -> dict[str, Prediction]:
        """The ways that fit, by key of the table's column."""
        found = {"1": self.best, "2": self.second, "exact": self.exact}
        return {name: way for name, way in found.items() if way is not None and way.fits}

    def as_record(self) -> dict[str, Any]:
        """Return the fields that the JSON record has in addition to the plan's."""
        best = self.best
        return {
            "policy": policy_text(best) if best.fits else None,
            "calls": calls(best.job),
            "command": command(self) if best.fits else None,
            "total": total(best, self.total_tokens),
            "ways": {name: prediction_record(way) for name, way in self.ways.items()},
            "more": {
                name: None if way is None else prediction_record(way)
                for name, way in self.more.items()
            },
        }


def show_answer(console: Console, answer: Answer) -> None:
    """Print the answer on one screen."""
    best = answer.best
    console.print(_head(answer), highlight=False)
    if best.fits:
        console.print("[bold green]It fits.[/bold green]")
    else:
        console.print(
            "[bold red]It does not fit.[/bold red]"
            + (" No way that the options allow fits. The job as given:" if answer.more else "")
        )
        for reason in best.why_not:
            # Reasons contain brackets of Python calls, which rich would interpret as markup.
            say(console, f"  {reason}", markup=False)
    if answer.ways:
        _show_ways(console, answer)
        line = command(answer)
        train = ["infinity train cannot run this way: see infinity train --help"]
        if line:
            train = [line, _rounded(best), _left_out(best.job.policy)]
        for text in (policy_text(best), *calls(best.job), *filter(None, train)):
            say(console, text, markup=False)
    _show_more(console, answer)
    job = total(best, answer.total_tokens)
    if best.fits and job is not None:
        say(console, _total_text(job, answer.total_tokens or 0), markup=False)


def show_assumed(console: Console, found: Prediction) -> None:
    """Print the figures that the user did not give, and the forecast's assumptions."""
    sources = found.machine.sources
    assumed = {name: source for name, source in sources.items() if source != "given"}
    if assumed:
        console.print("Not given, so assumed:")
        for name, source in assumed.items():
            # Sources are keyed by figures; show the options that set the figures.
            option = {"read": "nvme-read", "write": "nvme-write"}.get(name, name.replace("_", "-"))
            say(console, f"  --{option}: {source}", markup=False)
    console.print(
        f"s/step is the limit divided by {EFFICIENCY}, the efficiency that the engine aims at. "
        "Activations and operations are estimated from the configuration. This is a forecast: "
        "nothing was measured.",
        highlight=False,
    )


def _head(answer: Answer) -> str:
    shape, job, machine = answer.shape, answer.best.job, answer.best.machine
    drives = f"{machine.drives} drive{'s' if machine.drives != 1 else ''}"
    lora = f", LoRA of rank {answer.lora}" if answer.lora else ""
    return (
        f"[bold]{escape(shape.name)}[/bold]: {format_count(shape.params)} parameters"
        f"{experts_of(shape)}{lora}; {job.tokens:,} tokens per step in sequences of "
        f"{job.sequence:,} on {who_computes(machine)}, {format_size(machine.ram_bytes)} of RAM, "
        f"{drives}"
    )


# -- Ways ------------------------------------------------------------------------------------------


def describe_way(job: Job) -> dict[str, str]:
    """Return the values of a way by name; values of plain training are left out."""
    policy = job.policy
    batches = f"{job.micro_batches}{', vertical' if job.vertical else ''}"
    update = f"{policy.update}{' on the GPU' if policy.update_on == 'device' else ''}"
    if policy.durable or policy.generations > 1:
        update += ", durable" if policy.durable else f", {policy.generations} generations"
    tiles = {
        "linears": str(job.tiles) if job.tiles > 1 else "",
        "loss": str(job.loss_tiles) if job.loss_tiles > 1 else "",
        "experts": f"of {job.expert_tile}" if job.expert_tile else "",
    }
    exchanges = [name for name in ("qwz", "qgz") if getattr(policy, name)]
    exchanges += [f"hpz {policy.hpz}"] if policy.hpz else []
    found = {
        "optimizer": job.optimizer if job.optimizer != "adamw" else "",
        "micro-batches": batches,
        "update": update,
        "state": policy.state,
        "parameters": "stay on the device" if policy.params == "device" else "",
        "activations": policy.activations if policy.activations != "device" else "",
        "gradients": policy.grads if policy.grads != "cpu" else "",
        "tiles": ", ".join(f"{name} {count}" for name, count in tiles.items() if count),
        "exchanges": ", ".join(exchanges),
        "beside plain training": "; ".join(departures(job)),
    }
    return {name: value for name, value in found.items() if value}


def _show_ways(console: Console, answer: Answer) -> None:
    # Only a search fills `more`.
    names = {"1": "fastest" if answer.more else "as given", "2": "second", "exact": "fastest exact"}
    table = make_table("", "", *(names[name] for name in answer.ways))
    ways = [describe_way(way.job) for way in answer.ways.values()]
    for name in dict.fromkeys(name for way in ways for name in way):
        table.add_row(name, *(way.get(name, "-") for way in ways))
    figures: dict[str, Callable[[Prediction], str]] = {
        "s/step": lambda way: f"[bold]{format_seconds(way.step_s)}[/bold]",
        "tokens/s": lambda way: f"{way.tokens_per_s:,.0f}",
        "bound by": lambda way: way.bottleneck,
        "device memory": lambda way: format_size(way.gpu.bytes),
        "RAM": lambda way: format_size(way.ram.bytes),
        "drives": lambda way: format_size(way.nvme.bytes),
        "TB written a day": lambda way: f"{way.written_per_day / 1e12:,.1f}",
        "the drives last": lambda way: format_days(way.days),
    }
    if not answer.best.machine.drives:
        figures = dict(list(figures.items())[:5])
    for name, text in figures.items():
        table.add_row(name, *(text(way) for way in answer.ways.values()))
    console.print(table)


def _show_more(console: Console, answer: Answer) -> None:
    best, found = answer.best, []
    for name, way in answer.more.items():
        gain = way.tokens_per_s / best.tokens_per_s if way is not None else 1.0
        if way is not None and not best.fits:
            found.append(f"{name}: it fits, {format_seconds(way.step_s)} s/step")
        elif way is None or gain < 1 + SAME_MAX:
            found.append(f"{name}: {'no faster' if best.fits else 'does not fit either'}")
        else:
            found.append(f"{name}: {format_seconds(way.step_s)} s/step, {gain:.2f}x")
    if found:
        say(console, "; ".join(found), markup=False)


def policy_text(found: Prediction) -> str:
    """Return the policy as Python: the fields that differ from their defaults."""
    policy = found.job.policy
    left_out = {"nvme", "ram", "generations"} if policy.durable else {"nvme", "ram"}
    default, parts = Policy(), []
    for field in dataclasses.fields(Policy):
        value = getattr(policy, field.name)
        if field.name not in left_out and value != getattr(default, field.name):
            text = str(value) if isinstance(value, torch.dtype) else repr(value)
            parts.append(f"{field.name}={text}")
    if _has_drives(policy):
        parts.append('nvme=["DIR"]')
    parts.append(f'ram="{_ram_text(found)}"')
    return f"inf.Policy({', '.join(parts)})"


def _has_drives(policy: Policy) -> bool:
    return "nvme" in (policy.params, policy.optim, policy.grads, policy.activations)


def _ram_text(found: Prediction) -> str:
    # Rounded down, since the remaining RAM is for overhead.
    if found.policy_ram >= 100 * GIB:
        return f"{found.policy_ram // GIB}GiB"
    return f"{found.policy_ram // MIB}MiB"


def calls(job: Job) -> list[str]:
    """Return the calls that a training loop needs for this way, in addition to `inf.offload`."""
    found = []
    if job.loss_tiles > 1:
        found.append(f"inf.tile_loss(model, tiles={job.loss_tiles})")
    if job.tiles > 1:
        found.append(f"inf.tile_linears(model, tiles={job.tiles})")
    if job.expert_tile:
        found.append(f"inf.tile_experts(model, experts={job.expert_tile})")
    if job.vertical:
        found.append(f"model = inf.microbatched(model, {job.micro_batches})")
    if job.optimizer == "muon":
        found.append("inf.Muon(model.parameters())")
    return found


def command(answer: Answer) -> str | None:
    """Return the command line of `infinity train` for the best way; None if `infinity train` cannot
    run it: in float16, with another dtype of gradients, or for a model with an encoder.
    """
    found = answer.best
    job, policy, machine = found.job, found.job.policy, found.machine
    if answer.dtype == "float16" or policy.grad_dtype is not None or answer.shape.encoder:
        return None
    words: list[object] = ["infinity", "train"]
    if machine.world > 1:
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        nodes = ["--nnodes", machine.nodes, *meet] if machine.nodes > 1 else []
        words = ["torchrun", *nodes, "--nproc-per-node", machine.ranks, "-m", *words]
    folder = answer.model if answer.model.is_dir() else answer.model.parent
    batch, sequence = _batch(found)
    words += [folder, "--text", "FILE", "--out", "DIR", "--batch", batch, "--seq", sequence]
    if job.micro_batches > 1:
        words += ["--accumulate", job.micro_batches, "--schedule", job.schedule]
    words += ["--dtype", answer.dtype] if answer.dtype else []
    words += ["--checkpointing"] if job.checkpointing and not job.vertical else []
    words += ["--optimizer", job.optimizer] if job.optimizer != "adamw" else []
    words += _policy_words(policy)
    tiles = {
        "--tile-linears": job.tiles if job.tiles > 1 else 0,
        "--tile-loss": job.loss_tiles if job.loss_tiles > 1 else 0,
        "--tile-experts": job.expert_tile,
        "--lora": answer.lora or 0,
    }
    for option, value in tiles.items():
        words += [option, value] if value else []
    words += ["--nvme", "DIR"] if _has_drives(policy) else []
    words += ["--ram", _ram_text(found)]
    words += ["--clip", 0] if "no clipping by norm" in departures(job) else []
    return shlex.join(map(str, words))


_FIELDS = (
    "params", "optim", "grads", "activations", "state", "update", "update_on", "zero",
    "accumulate", "hpz", "qwz", "qgz", "error_feedback", "durable", "generations",
)  # fmt: skip
"""Fields of a policy that are options of `infinity train`, apart from `nvme`, `ram` and `resident`.
"""


def _left_out(policy: Policy) -> str:
    """Return a line with the policy's fields for which `infinity train` has no option, as a
    DeepSpeed configuration may set; "" without such fields.
    """
    default = Policy()
    known = {*_FIELDS, "nvme", "ram", "resident"}
    names = {each.name for each in dataclasses.fields(Policy)} - known
    values = ((name, getattr(policy, name)) for name in sorted(names))
    found = [f"{name}={value!r}" for name, value in values if value != getattr(default, name)]
    return f"infinity train has no option for {', '.join(found)}." if found else ""


def _policy_words(policy: Policy) -> list[object]:
    """Return the options of `infinity train` for the fields that differ from their defaults."""
    default = Policy()
    words: list[object] = []
    for field, row in zip(_FIELDS, field_rows(*_FIELDS), strict=True):
        value = getattr(policy, field)
        # --durable implies two generations.
        implied = field == "generations" and policy.durable and value == 2
        if value != getattr(default, field) and not implied:
            words += [f"--{row.name}"] if value is True else [f"--{row.name}", value]
    # --durable implies that nothing is resident.
    for kind, part in ({} if policy.durable else policy.resident_parts).items():
        words += ["--resident", f"{kind}={part}"]
    return words


def _batch(found: Prediction) -> tuple[int, int]:
    """Return (sequences of a micro-batch on each rank, tokens of a sequence). Sequences are whole,
    so a step may have more tokens than planned.
    """
    tokens = found.job.micro_batch_tokens(found.machine.world)
    sequence = min(found.job.sequence, tokens)
    return -(-tokens // sequence), sequence


def _rounded(found: Prediction) -> str:
    """Return a line if a step of the command has more tokens than the plan's; else ""."""
    batch, sequence = _batch(found)
    tokens = batch * sequence * found.job.micro_batches * found.machine.world
    if tokens == found.job.tokens:
        return ""
    return f"Its steps have {tokens:,} tokens, not {found.job.tokens:,}: batches are whole."


# -- The whole job ---------------------------------------------------------------------------------


def total(found: Prediction, tokens: int | None) -> dict[str, Any] | None:
    """Return steps, days, bytes written and the used share of the drives' rated writes for training
    on `tokens` tokens; None without a number of tokens, or if the job does not fit.
    """
    if tokens is None or not found.fits:
        return None
    steps = -(-tokens // found.job.tokens)
    written = steps * found.moved.total.written
    rated = found.machine.tbw_per_drive * found.machine.worn_drives
    return {
        "steps": steps,
        "days": steps * found.step_s / 86_400,
        "written_bytes": written,
        "rated_share": written / rated if found.machine.drives else 0.0,
    }


def _total_text(job: Mapping[str, Any], tokens: int) -> str:
    text = f"{tokens:,} tokens are {job['steps']:,} steps, {format_days(job['days'])}"
    if job["written_bytes"]:
        share = job["rated_share"]
        part = f"{share:,.0f} times" if share >= 10 else f"{share:.2g} of"
        part = f"{share:.0%} of" if 0.01 <= share < 10 else part
        # Drives are rated in decimal terabytes.
        written = f"{job['written_bytes'] / 1e12:,.1f} TB"
        text += f", and {written} written: {part} what the drives are rated for"
    return text
