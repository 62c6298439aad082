"""The arguments of `infinity train`, `report`, `plan` and `checkpoint`, apart from the code that
needs torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from infinity._src.base.paths import argument
from infinity._src.config.choices import CHOICES

SCHEDULES = ("horizontal", "vertical")
"""Orders of micro-batches, as `perf.plan.workload` has them."""

TRAIN = (
    "Fine-tune a Hugging Face causal language model with its states in CPU memory or on NVMe. "
    "Writes metrics.jsonl, report.html, trace.json, loss.png and the trained model, which "
    "from_pretrained loads, to --out. The last part of the text (--holdout, 5 %) is never trained "
    "on; the held-out loss is measured on it."
)


def _add_field(group: argparse._ActionsContainer, field: str, text: str, **more: Any) -> None:
    """Add the option of a field of the policy: --update-on for `update_on`, with the choices that
    the policy has. A field that is False or True is a switch. more: as `add_argument` has it.
    """
    choices = [choice for choice in CHOICES[field] if choice is not None]
    if choices[0] is False:
        more["action"] = "store_true"
    else:
        more = {"type": type(choices[0]), "choices": choices, **more}
    group.add_argument(f"--{field.replace('_', '-')}", help=text, **more)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`; defaults suit a small model and a short run."""
    parser.add_argument(
        "model",
        type=argument,
        metavar="MODEL",
        help="a Hugging Face model directory, or a GGUF file",
    )
    parser.add_argument(
        "--out", type=argument, required=True, metavar="DIR", help="where the results go"
    )
    _add_text(parser)
    _add_placement(parser)
    _add_numerics(parser)
    _add_tiles(parser)
    add_ranks(parser)
    _add_training(parser)
    _add_resume(parser)


def _add_resume(parser: argparse.ArgumentParser) -> None:
    kept = parser.add_argument_group("going on after a crash")
    _add_field(
        kept,
        "durable",
        "keep the run in the --nvme directories, to go on from the last committed step; needs "
        "--params nvme and --optim nvme, and twice the room",
    )
    kept.add_argument(
        "--durable-every",
        type=int,
        default=1,
        metavar="STEPS",
        help="commit every so many steps; a crash loses those in between (1)",
    )
    kept.add_argument(
        "--save-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="write a checkpoint every so many steps, and after the last; 0 writes none (0)",
    )
    kept.add_argument(
        "--save-dir",
        type=argument,
        metavar="DIR",
        help="where the checkpoint goes; it replaces the one before (checkpoint in --out)",
    )
    kept.add_argument(
        "--resume",
        action="store_true",
        help="go on from the durable run or the checkpoint in --save-dir, whichever has the later "
        "step, if they are of one run; begin where there is neither",
    )
    kept.add_argument(
        "--damaged",
        choices=("raise", "report", "from-older"),
        default="raise",
        help="where a drive cannot give states back: stop and name them; report: with --resume, go "
        "on without them; from-older: go on with those of an earlier step, also within the run, "
        "with --durable or --generations 2 (raise)",
    )


def _add_text(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text (one of)")
    source = text.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=argument, metavar="FILE", help="plain text, UTF-8")
    source.add_argument(
        "--jsonl", type=argument, metavar="FILE", help="JSON lines; the text is in --column"
    )
    source.add_argument(
        "--sqlite",
        type=argument,
        metavar="FILE",
        help="SQLite database; the text is what --query yields",
    )
    text.add_argument(
        "--column", default="text", metavar="NAME", help="the field of each JSON line (text)"
    )
    text.add_argument(
        "--query",
        metavar="SQL",
        help="a SELECT; the columns of a row are joined by a blank, rows by a line end",
    )
    text.add_argument(
        "--holdout",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the text that is held out, its last part (0.05)",
    )


def _add_placement(parser: argparse.ArgumentParser) -> None:
    place = parser.add_argument_group("placement (never changes the numbers)")
    _add_field(place, "params", "the lowest tier where parameters may rest (cpu)", default="cpu")
    _add_field(
        place, "optim", "the lowest tier where optimizer states may rest (cpu)", default="cpu"
    )
    place.add_argument(
        "--nvme",
        action="append",
        type=argument,
        metavar="DIR",
        help="directory on an NVMe drive; repeat for several drives",
    )
    place.add_argument(
        "--ram",
        metavar="SIZE",
        help='what offloading may hold in memory: "512MiB", or "min" '
        "(a share of what the machine leaves)",
    )
    _add_waiting(place)
    _add_field(place, "io_backend", "the system's interface to the drives (auto)", default="auto")


def _add_waiting(group: argparse._ArgumentGroup) -> None:
    """Add the tiers of gradients and activations, and states that stay in memory, for `infinity
    train` and `infinity plan`.
    """
    _add_field(group, "grads", "nvme: gradients that RAM does not hold spill (cpu)", default="cpu")
    _add_field(
        group,
        "activations",
        "where inputs of checkpointed blocks wait (device)",
        default="device",
    )
    group.add_argument(
        "--resident",
        action="append",
        metavar="KIND=PART",
        help="how much of a state on NVMe rests in memory all "
        "the same, for each process: params=0.5 or optim=8GiB; repeat for both (what --ram leaves)",
    )


def parse_resident(texts: Sequence[str] | None) -> dict[str, float | str] | None:
    """Parse what --resident was given, for `Policy.resident`. Raises: ValueError."""
    resident: dict[str, float | str] = {}
    for text in texts or ():
        kind, equals, part = text.partition("=")
        if not equals or kind in resident:
            raise ValueError(f"--resident {text}: give each kind once, as params=0.5 or optim=8GiB")
        try:
            # A number is a share. Any other text is a size, which `Policy` parses.
            resident[kind] = float(part)
        except ValueError:
            resident[kind] = part
    return resident or None


def _add_numerics(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("states and updates (part of the numerics)")
    _add_updates(group)
    group.add_argument(
        "--device",
        metavar="DEVICE",
        help="where the model computes: cpu, cuda or cuda:1 (cuda, if there is one)",
    )
    group.add_argument(
        "--delayed-warmup",
        # None by default, so that `infinity train` can refuse it beside other updates.
        type=int,
        metavar="STEPS",
        help="steps that --update delayed takes as deferred first (40)",
    )


def _add_updates(group: argparse._ArgumentGroup) -> None:
    """Add the format of states and the mode of updates, for `infinity train` and `infinity plan`.
    """
    _add_field(
        group,
        "state",
        "encoding of states at rest: 12, 8 or 5.1 bytes per bf16 parameter with AdamW (exact)",
        default="exact",
    )
    _add_field(
        group,
        "update",
        "deferred: beside the next forward; backward: beside backward, clips with "
        "--generations 2 only; delayed: beside the whole next step, which computes with the "
        "parameters before it (deferred)",
        default="deferred",
    )
    _add_field(
        group,
        "generations",
        "2 keeps the step before beside the one that is made: twice the room on the drives, and a "
        "step that fails is undone; more, with --durable, keep further commits (1)",
        default=1,
    )
    _add_field(
        group,
        "update_on",
        "device: states stream through the GPU that computes, with --update deferred; the same "
        "bits (cpu)",
        default="cpu",
    )


def _add_tiles(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the tiles that both `infinity train` and `infinity plan` have. None: whole."""
    tiles = parser.add_argument_group("tiles, for what does not fit whole (part of the numerics)")
    # No default number: a checkpoint from before these options has none.
    tiles.add_argument(
        "--tile-linears",
        type=int,
        metavar="N",
        help="every linear in N tiles: inf.tile_linears (whole)",
    )
    tiles.add_argument(
        "--tile-experts",
        type=int,
        metavar="K",
        help="stacks of experts in tiles of K, which compute as the model's eager "
        "implementation: inf.tile_experts (whole stacks)",
    )
    return tiles


def check_tiles(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers of tiles that cut nothing: whole is what is left out."""
    for name, least in (("tile_linears", 2), ("tile_loss", 2), ("tile_experts", 1)):
        # `infinity train` has no tiles of the loss.
        count = getattr(options, name, None)
        if count is not None and count < least:
            raise ValueError(
                f"--{name.replace('_', '-')} {count} must be at least {least}; leave it out for "
                "what is whole"
            )


def _add_training(parser: argparse.ArgumentParser) -> None:
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    train.add_argument("--batch", type=int, default=2, help="sequences per micro-batch (2)")
    train.add_argument("--seq", type=int, default=128, help="tokens per sequence (128)")
    train.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (1)")
    train.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="vertical",
        help="order of micro-batches: all of them through a block before the next, each block "
        "recomputed in backward (inf.microbatched), or each through the whole model (vertical)",
    )
    train.add_argument("--lr", type=float, default=3e-5, help="peak learning rate (3e-5)")
    train.add_argument(
        "--warmup",
        type=int,
        default=0,
        help="steps of linear warm-up, then linear decay to a tenth (0)",
    )
    train.add_argument("--weight-decay", type=float, default=0.01)
    train.add_argument(
        "--clip", type=float, default=1.0, help="gradient norm; 0 does not clip (1.0)"
    )
    train.add_argument(
        "--seed", type=int, default=0, help="order of the text, and random rounding of states (0)"
    )
    train.add_argument(
        "--eval-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="held-out loss every so many steps; it is always measured before and after (0)",
    )
    train.add_argument(
        "--eval-batches", type=int, default=8, help="micro-batches of a held-out measurement (8)"
    )
    train.add_argument(
        "--prompt", default=None, help="continue this text before and after training"
    )
    train.add_argument(
        "--prompt-tokens", type=int, default=24, help="length of the continuation (24)"
    )
    train.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the parameters that compute; "
        "float32 is faster on CPUs that have no bf16 units, and moves more bytes (bfloat16)",
    )
    train.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in backward"
    )
    train.add_argument("--no-save", action="store_true", help="do not write the trained model")
    train.add_argument("--no-trace", action="store_true", help="record no timeline")


REPORT = (
    "Write one HTML page of a run: loss, the time of each step, drives, memory by tier, one step "
    "unit by unit, and wear. It holds all that it needs, and opens without a network. Where DIR "
    "has several directories with runs, they are shown beside each other."
)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity report`."""
    parser.add_argument(
        "directory",
        type=argument,
        metavar="DIR",
        help="the --out of infinity train, or the directory of an inf.StepLog",
    )
    parser.add_argument(
        "--out", type=argument, metavar="FILE", help="where the page goes (report.html in DIR)"
    )
    parser.add_argument(
        "--tbw",
        type=float,
        metavar="TB",
        help="terabytes written that one drive is rated for (an example)",
    )


PLAN = (
    "Does a model fit this machine, where does each state go, how long is a step, how long do the "
    "drives last, and what would one change buy? Reads the model's config.json only, and measures "
    "nothing. Figures that are not given are assumed, and the answer says which. Exit status 0: it "
    "fits, 1: it does not."
)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity plan`."""
    parser.add_argument(
        "model",
        type=argument,
        metavar="MODEL",
        help="a Hugging Face model directory, or its config.json",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        required=True,
        metavar="N",
        help="tokens of an optimizer step, all GPUs",
    )
    _add_machine(parser)
    _add_job(parser)
    parser.add_argument(
        "--no-changes", action="store_true", help="do not work out what one change would buy"
    )
    parser.add_argument(
        "--json",
        type=argument,
        metavar="FILE",
        help='write everything as JSON, too; "-": to standard output only',
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the machine's arguments of `infinity plan`."""
    machine = parser.add_argument_group("machine (sizes as 80GiB, rates in GB/s)")
    machine.add_argument(
        "--gpus", type=int, default=1, help="GPUs of the node; 0: the CPU computes (1)"
    )
    machine.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes of the node where the CPU computes (1; GPUs have one each)",
    )
    machine.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes, each with all that is told here (1)",
    )
    machine.add_argument(
        "--link-gbps",
        type=float,
        metavar="Gbit/s",
        help="between a node and the others, each way (100)",
    )
    machine.add_argument(
        "--gpu",
        metavar="KIND",
        help="rtx3090, rtx4090, rtx5090, a100, h100 or h200, for what is not given "
        "below (by --gpu-mem, else h100)",
    )
    machine.add_argument("--gpu-mem", metavar="SIZE", help="memory of one GPU")
    machine.add_argument(
        "--ram",
        # The plan may be for another machine, so there is nothing to take a share of.
        required=True,
        metavar="SIZE",
        help="CPU memory of the node: the budgets of all ranks, and what they take beside them",
    )
    _add_drives(machine)
    _add_links(machine)


def _add_drives(machine: argparse._ArgumentGroup) -> None:
    """Add the drives' arguments of `infinity plan`."""
    machine.add_argument("--nvme-read", metavar="GB/s", help="all drives together, reading")
    machine.add_argument("--nvme-write", metavar="GB/s", help="all drives together, writing")
    machine.add_argument(
        "--bench",
        type=argument,
        metavar="FILE",
        help="instead: a record of python -m infinity.bench swap",
    )
    machine.add_argument(
        "--drives", type=int, help="how many drives there are (those of --bench, else 1)"
    )
    machine.add_argument(
        "--nvme-size", metavar="SIZE", help="room on all drives together (not checked)"
    )
    machine.add_argument(
        "--separable",
        action="store_true",
        help="reads and writes do not slow each other on these drives",
    )
    machine.add_argument(
        "--tbw", type=float, metavar="TB", help="terabytes written that one drive is rated for"
    )


def _add_links(machine: argparse._ArgumentGroup) -> None:
    """Add the rates of GPUs, links and memory of `infinity plan`."""
    machine.add_argument(
        "--flops", type=float, metavar="TFLOP/s", help="what one GPU sustains in training"
    )
    machine.add_argument(
        "--flops-peak", type=float, metavar="TFLOP/s", help="what one GPU can do at most, for MFU"
    )
    machine.add_argument("--pcie", metavar="GB/s", help="link of one GPU to the CPU, each way")
    machine.add_argument(
        "--pcie-host",
        metavar="GB/s",
        help="all GPUs' links to the CPU together, each way (more than two GPUs: "
        "half of their sum)",
    )
    machine.add_argument(
        "--peers",
        metavar="GB/s",
        help="between GPUs, of one, each way (NVLink where the kind has it, else "
        "through the CPU's memory)",
    )
    machine.add_argument("--dram", metavar="GB/s", help="bandwidth of the CPU's memory")
    machine.add_argument(
        "--cores",
        type=int,
        help="physical cores of a node's CPUs, which update (32; 64 beside more than two GPUs)",
    )
    machine.add_argument(
        "--adam",
        type=argument,
        metavar="FILE",
        help="rate of the update kernels: a record of `python -m infinity.bench adam`",
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add the training's arguments of `infinity plan`."""
    job = parser.add_argument_group("training")
    job.add_argument(
        "--micro-batches", type=int, help="per step (the fewest whose activations fit a GPU)"
    )
    job.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="horizontal",
        help="order of micro-batches: each through the whole model, or all of them through a block "
        "before the next: inf.microbatched (horizontal)",
    )
    # None by default, since the number that fits depends on the model.
    job.add_argument("--seq", type=int, help="tokens of a sequence (4096, or what the model has)")
    job.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the parameters that compute (bfloat16)",
    )
    job.add_argument(
        "--ds-config",
        type=argument,
        metavar="FILE",
        help="a DeepSpeed configuration (JSON): the plan is of what it asks for, and shows what "
        "each key became; options that are given replace it",
    )
    _add_updates(job)
    _add_field(
        job,
        "durable",
        "after a crash the run goes on from the last step: two generations of everything on the "
        "drives, nothing resident",
    )
    _add_tiers(job)
    job.add_argument(
        "--grad-dtype",
        choices=("bfloat16", "float32"),
        help="in which gradients wait (that of the parameters)",
    )
    job.add_argument(
        "--no-checkpointing",
        action="store_true",
        help="keep all activations instead of recomputing them",
    )
    _add_tiles(parser).add_argument(
        "--tile-loss",
        type=int,
        metavar="N",
        help="the head and its loss in N tiles: inf.tile_loss (whole)",
    )
    add_ranks(parser)
    # None is "left out", where a DeepSpeed configuration may say it; `infinity train` shares these.
    parser.set_defaults(
        grads=None, activations=None, state=None, update=None, generations=None, update_on=None,
        durable=None, zero=None, qwz=None, qgz=None, error_feedback=None,
    )  # fmt: skip


def _add_tiers(job: argparse._ArgumentGroup) -> None:
    """Add the tiers of states of `infinity plan`. None by default: the stage decides."""
    _add_field(job, "params", "the lowest tier of parameters (nvme; device with --zero 1 and 2)")
    _add_field(
        job, "optim", "the lowest tier of optimizer states (nvme)", choices=CHOICES["optim"][1:]
    )
    _add_waiting(job)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of several ranks, for `infinity train` and `infinity plan`."""
    ranks = parser.add_argument_group("several ranks (part of the numerics)")
    _add_field(
        ranks,
        "zero",
        "what they split: optimizer states (1), gradients too (2), parameters too (3)",
        default=3,
    )
    ranks.add_argument(
        "--accumulate-in",
        choices=CHOICES["accumulate"][1:],
        help="micro-batches but the last: each reduced into the "
        "shard, or added up whole on each rank and reduced once (local with --zero 1, else shard)",
    )
    _add_field(ranks, "qwz", "ZeRO++: gather weights as int8 groups")
    _add_field(ranks, "hpz", "ZeRO++: where each node keeps a copy of gathered weights")
    _add_field(ranks, "qgz", "ZeRO++: reduce gradients as int4 groups, first inside the node")
    _add_field(
        ranks, "error_feedback", "with --qgz: what rounding took goes into the next gradient"
    )


CHECKPOINT = (
    "What lies in checkpoints and durable runs, and what can be done with them without the model: "
    "list, verify, export, rewrite for another number of ranks. Exit status 0: "
    "well, 1: damage was found, 2: a mistake, or an error."
)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `infinity checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    where = "a checkpoint, or the (first) directory of a durable run"
    listing = actions.add_parser(
        "ls",
        help="what there is, whole or not",
        description="Every generation, from its manifests; states are not read.",
    )
    listing.add_argument(
        "directories",
        nargs="+",
        type=argument,
        metavar="DIR",
        help=f"{where}, or a directory of such",
    )
    listing.add_argument("--json", action="store_true", help="as JSON instead, to standard output")
    verify = actions.add_parser(
        "verify",
        help="read every byte against its checksums",
        description="Reads every byte of a generation against its checksums, and names all that is "
        "damaged. Of a durable run that is going on it may tell of damage that there is not: the "
        "run writes new steps meanwhile. Verify it when the run has ended, or a checkpoint of it.",
    )
    verify.add_argument("directory", type=argument, metavar="DIR", help=where)
    verify.add_argument("--json", action="store_true", help="as JSON instead, to standard output")
    export = _add_export(actions, where)
    reshard = actions.add_parser(
        "reshard",
        help="rewrite for another number of ranks",
        description="Rewrites a checkpoint for another number of ranks, and in another state "
        "format if one is given, in constant memory. inf.restore does the same as it reads.",
    )
    reshard.add_argument("directory", type=argument, metavar="DIR", help=where)
    reshard.add_argument(
        "out", type=argument, metavar="OUT", help="a directory without a checkpoint"
    )
    reshard.add_argument("--world", type=int, required=True, metavar="N", help="ranks")
    reshard.add_argument(
        "--state", choices=CHOICES["state"], help="encoding of the states (as it is)"
    )
    # ls lists all generations, so there is none to choose.
    for action in (verify, export, reshard):
        action.add_argument(
            "--generation", type=int, metavar="N", help="not the newest (whole) one, but this"
        )


def _add_export(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], where: str
) -> argparse.ArgumentParser:
    """Add `infinity checkpoint export`."""
    export = actions.add_parser(
        "export",
        help="safetensors, or for DeepSpeed, without the model",
        description="Writes parameters and persistent "
        "buffers as safetensors in the layout of Hugging Face, as inf.export_safetensors does, in "
        "constant memory. Configuration and tokenizer are not in a checkpoint: copy them. --to "
        "deepspeed-universal writes masters, moments and hyper-parameters as a universal "
        "checkpoint, from which DeepSpeed goes on (load_universal), a parameter in memory at a "
        "time.",
    )
    export.add_argument("directory", type=argument, metavar="DIR", help=where)
    export.add_argument(
        "out",
        type=argument,
        metavar="OUT",
        help="where the files go; those of an earlier export are replaced",
    )
    export.add_argument(
        "--to",
        choices=("safetensors", "deepspeed-universal"),
        default="safetensors",
        help="the format (safetensors)",
    )
    export.add_argument(
        "--masters",
        action="store_true",
        help="fp32 masters, where there are such, instead of what computes",
    )
    export.add_argument(
        "--shard-bytes-max",
        metavar="SIZE",
        help="of one file; a unit stays whole (2GiB)",
    )
    export.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of floating parameters (their own)",
    )
    return export
