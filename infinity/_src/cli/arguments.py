"""The arguments of `infinity train`, `report`, `plan` and `checkpoint`: tables of rows
(`base/options.py`), and the fields of the policy (`config/choices.py`). This module does not import
torch, so `infinity --help` is fast.
"""

from __future__ import annotations

import argparse

from infinity._src.base.options import Row, add_options
from infinity._src.base.paths import argument
from infinity._src.cli.trackers import TRACKERS
from infinity._src.config.choices import CHOICES, OPTIMIZERS, SCHEDULES, field_rows, left_out

# -- infinity train --------------------------------------------------------------------------------

TRAIN = (
    "Fine-tune a Hugging Face causal language model with its states in CPU memory or on NVMe. "
    "Writes metrics.jsonl, report.html, trace.json, loss.png and the trained model, which "
    "from_pretrained loads, to --out. The last part of the text (--holdout, 5 %) is held out: the "
    "run never trains on it, and measures the held-out loss on it."
)
_SOURCES = (
    Row("text", argument, "plain text, UTF-8", "FILE"),
    Row("jsonl", argument, "JSON lines; the text is in --column", "FILE"),
    Row("sqlite", argument, "SQLite database; --query selects the text", "FILE"),
    Row("chat", argument, "JSON lines of conversations, each a list of messages in --column; the "
        "tokenizer's chat template renders them, and the loss counts only the assistant's tokens",
        "FILE"),
)
_TEXT = (
    Row("column", str, "the field of each JSON line (text; messages with --chat)", "NAME"),
    Row("query", str, "a SELECT; blanks join the columns of a row, line ends join rows", "SQL"),
    Row("holdout", float, "share of the text, at its end, that is held out (0.05)", "SHARE"),
    Row("eval", argument, "measure the held-out loss on this file, of the same kind as the text, "
        "and train on the whole text", "FILE"),
    Row("packing", False, "put several conversations into a window, without attention between "
        "them; needs --chat"),
)  # fmt: skip
# The default is None, not a number: checkpoints record None for whole layers (`resume.RULES`).
_TILES = (
    Row("tile-linears", int, "every linear in N tiles: inf.tile_linears (whole)", "N"),
    Row("tile-loss", int, "the head and its loss in N tiles: inf.tile_loss (whole)", "N"),
    Row("tile-experts", int, "stacks of experts in tiles of K, which compute as the model's eager "
        "implementation: inf.tile_experts (whole stacks)", "K"),
)  # fmt: skip
_OPTIMIZER = Row(
    "optimizer", OPTIMIZERS, "adamw, or muon: inf.Muon for hidden matrices, with "
    "adjust_lr_fn=match_rms_adamw, so that AdamW's rates fit, and AdamW for the rest (adamw)",
    more={"default": OPTIMIZERS[0]},
)  # fmt: skip
_RANKS = ("zero", "accumulate", "qwz", "hpz", "qgz", "error_feedback")
_TRAINING = (
    # The default is None, so that `infinity train` sees whether the option was given.
    Row("steps", int, "optimizer steps (20)"),
    Row("epochs", float, "instead of --steps: passes through the training part of the text", "N"),
    Row("batch", 2, "sequences per micro-batch (2)"),
    Row("seq", 128, "tokens per sequence (128)"),
    Row("accumulate", 1, "micro-batches per step (1)"),
    Row("schedule", SCHEDULES, "order of micro-batches: all of them through a block before the "
        "next, each block recomputed in backward (inf.microbatched), or each through the whole "
        "model (vertical)", more={"default": "vertical"}),
    _OPTIMIZER,
    Row("lr", 3e-5, "peak learning rate (3e-5)"),
    Row("warmup", 0, "steps of linear warm-up, then linear decay to a tenth (0)"),
    Row("weight-decay", 0.01, ""),
    Row("clip", 1.0, "largest gradient norm; 0: no clipping (1.0)"),
    Row("seed", 0, "order of the text, and random rounding of states (0)"),
    Row("eval-every", 0, "measure the held-out loss every STEPS steps, too; always before and "
        "after training (0)", "STEPS"),
    Row("eval-batches", int, "micro-batches of a held-out measurement (8; of --eval, all)"),
    Row("prompt", str, "let the model continue this text before and after training"),
    Row("prompt-tokens", 24, "length of the continuation (24)"),
    Row("dtype", ("auto", "bfloat16", "float32"), "dtype that computes; auto: float32 on a CPU "
        "without bf16 instructions, else bfloat16; a resumed run keeps its dtype (auto)",
        more={"default": "auto"}),
    Row("lora", int, "train LoRA adapters of this rank on all linears of the blocks, by peft; the "
        "model is frozen, and --out gets the adapter (train the model)", "R"),
    Row("checkpointing", False, "recompute activations in backward"),
    Row("report-to", [str], "also report the figures of steps to this tracker; repeat for several; "
        "wandb is offline unless WANDB_MODE is set", more={"choices": TRACKERS}),
    Row("no-save", False, "do not write the trained model"),
    Row("no-trace", False, "record no timeline"),
)  # fmt: skip
_RESUME = (
    Row("save-every", 0, "write a checkpoint every STEPS steps, and after the last; 0: none (0)",
        "STEPS"),
    Row("save-dir", argument, "directory of the checkpoint; each one replaces the one before "
        "(checkpoint in --out)", "DIR"),
    Row("resume", False, "resume from the durable run or the checkpoint in --save-dir, whichever "
        "has the later step, if they are of one run; begin anew if there is neither"),
    # "report" is a value of `inf.restore`, not of `Policy.damaged`.
    Row("damaged", ("raise", "report", "from-older"), "if a drive cannot read states: raise: stop "
        "and name them; report: with --resume, continue without them; from-older: with --resume, "
        "or with --durable or --generations 2, continue with states of an earlier step (raise)",
        more={"default": "raise"}),
)  # fmt: skip


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity train`; their defaults suit a small model and a short run."""
    add_options(parser, (
        Row(" model", argument, "a Hugging Face model directory, or a GGUF file", "MODEL"),
        Row("out", argument, "directory of the results", "DIR", {"required": True}),
    ))  # fmt: skip
    text = parser.add_argument_group("text (one of)")
    add_options(text.add_mutually_exclusive_group(required=True), _SOURCES)
    add_options(text, _TEXT)
    place = parser.add_argument_group("placement (never changes the numbers)")
    add_options(place, field_rows(
        "params", "optim", "nvme", "ram", "grads", "activations", "resident", "io_backend",
    ))  # fmt: skip
    group = parser.add_argument_group("states and updates (part of the numerics)")
    add_options(group, field_rows("state", "update", "generations", "update_on"))
    device = "device that computes: cpu, cuda or cuda:1 (cuda, if there is one)"
    add_options(group, [Row("device", str, device, "DEVICE"), *field_rows("delayed_warmup")])
    _add_shared(parser)
    add_options(parser.add_argument_group("training"), _TRAINING)
    kept = parser.add_argument_group("resuming after a crash")
    add_options(kept, [*field_rows("durable", "durable_every"), *_RESUME])


def _add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the tiles and ranks that `infinity train` and `infinity plan` share."""
    tiles = parser.add_argument_group("tiles, for layers that do not fit (part of the numerics)")
    add_options(tiles, _TILES)
    add_ranks(parser)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the fields of the policy that matter for several ranks only."""
    ranks = parser.add_argument_group("several ranks (part of the numerics)")
    add_options(ranks, field_rows(*_RANKS))


def check_tiles(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers of tiles that do not divide anything (users leave the option out
    to keep layers whole), for tiles of layers with adapters, and for tiles of Muon's matrices.
    """
    for name, least in (("tile_linears", 2), ("tile_loss", 2), ("tile_experts", 1)):
        count = getattr(options, name)
        if count is not None and count < least:
            raise ValueError(
                f"--{name.replace('_', '-')} {count} must be at least {least}; leave it out to "
                "cut nothing"
            )
    if options.optimizer == "muon" and options.tile_linears is not None:
        raise ValueError(
            f"--optimizer muon needs whole matrices, and --tile-linears {options.tile_linears} "
            "cuts them; leave one out"
        )
    for name in ("tile_linears", "tile_experts"):
        count = getattr(options, name)
        if options.lora is not None and count is not None:
            raise ValueError(
                f"--lora {options.lora} puts adapters on whole layers, and --"
                f"{name.replace('_', '-')} {count} cuts them; leave one out"
            )


# -- infinity report -------------------------------------------------------------------------------

REPORT = (
    "Write one HTML page about a run: loss, the time of each step, schedule and speed, drives, "
    "memory by tier, one step unit by unit, and wear. The page needs no network. If DIR has "
    "several directories with runs, the page shows them side by side."
)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity report`."""
    add_options(parser, (
        Row(" directory", argument, "the --out of infinity train, or the directory of an "
            "inf.StepLog", "DIR"),
        Row("out", argument, "file of the page (report.html in DIR)", "FILE"),
        Row("tbw", float, "rated terabytes written of one drive (an example)", "TB"),
        Row("watch", False, "rewrite the page while the run continues; it reloads in a browser"),
        Row("every", float, "seconds between pages of --watch (10)", "SECONDS"),
    ))  # fmt: skip


# -- infinity plan ---------------------------------------------------------------------------------

PLAN = (
    "Predict whether a model fits a machine, the tier of each state, the time of a step, the life "
    "of the drives, and the fastest way to train. Searches schedules, updates, formats, tiers, "
    "tiles and micro-batches; given options stay. Reads the model's config.json only, and measures "
    "nothing. Figures that you do not give are assumed and listed. Exit status 0: the model fits, "
    "1: it does not."
)
_PLAN = (
    Row(" model", argument, "a Hugging Face model directory, or its config.json", "MODEL"),
    Row("tokens-per-step", int, "tokens of an optimizer step, on all GPUs together", "N",
        {"required": True}),
    Row("exact", False, "keep the numbers of plain training: no states and exchanges that round"),
    Row("as-given", False, "do not search: plan the given options, with the engine's defaults for "
        "all others"),
    Row("all", False, "print every table: parts of each memory, places of states, terms of the "
        "step, and the gain of single changes"),
    Row("total-tokens", int, "tokens of the whole training: adds its days, bytes written and wear",
        "N"),
    Row("lora", int, "train LoRA adapters of this rank on all linears, and keep the model frozen",
        "R"),
    Row("json", argument, 'also write everything as JSON; "-": only, to standard output', "FILE"),
)
_MACHINE = (
    Row("gpus", 1, "GPUs of the node; 0: the CPU computes (1)"),
    Row("ranks", int, "processes of the node if the CPU computes (1; GPUs have one each)", "N"),
    Row("nodes", 1, "number of nodes, all alike (1)", "N"),
    Row("link-gbps", float, "network bandwidth of a node, each way (100)", "Gbit/s"),
    Row("gpu", str, "rtx3090, rtx4090, rtx5090, a6000, l40s, a100, h100, h200, b200 or gb200, for "
        "figures that are not given below (by --gpu-mem, else h100)", "KIND"),
    Row("gpu-mem", str, "memory of one GPU", "SIZE"),
    # No default: the plan may be for another machine than this one.
    Row("ram", str, "CPU memory of the node, for the budgets of all ranks and their overhead",
        "SIZE", {"required": True}),
    Row("nvme-read", str, "read bandwidth of all drives together", "GB/s"),
    Row("nvme-write", str, "write bandwidth of all drives together", "GB/s"),
    Row("bench", argument, "instead: a record of python -m infinity.bench swap", "FILE"),
    Row("drives", int, "number of drives (drives of --bench, else 1)"),
    Row("nvme-size", str, "free space of all drives together (not checked)", "SIZE"),
    Row("separable", False, "reads and writes do not slow each other on these drives"),
    Row("tbw", float, "rated terabytes written of one drive", "TB"),
    Row("flops", float, "rate that one GPU sustains in training", "TFLOP/s"),
    Row("flops-peak", float, "peak rate of one GPU, for MFU", "TFLOP/s"),
    Row("pcie", str, "bandwidth of one GPU's link to the CPU, each way", "GB/s"),
    Row("pcie-host", str, "bandwidth of all GPUs' links to the CPU together, each way (more than "
        "two GPUs: half of their sum)", "GB/s"),
    Row("peers", str, "bandwidth of one GPU to other GPUs, each way (NVLink if the kind has it, "
        "else through the CPU's memory)", "GB/s"),
    Row("dram", str, "bandwidth of the CPU's memory", "GB/s"),
    Row("cores", int, "physical cores of a node's CPUs, for updates (32; with more than two GPUs "
        "64)"),
    Row("adam", argument, "rate of the update kernels: a record of `python -m infinity.bench "
        "adam`", "FILE"),
)  # fmt: skip
_JOB = (
    Row("micro-batches", int, "micro-batches of a step (with --as-given the fewest whose "
        "activations fit a GPU)"),
    # None marks an option that was left out: the search chooses its value.
    Row("schedule", SCHEDULES, "order of micro-batches: horizontal: each through the whole model; "
        "vertical: all through a block before the next block, inf.microbatched (with --as-given "
        "horizontal)"),
    # The default is None: the number that fits depends on the model.
    Row("seq", int, "tokens of a sequence (4096, or the model's positions)"),
    Row("dtype", ("bfloat16", "float16", "float32"), "dtype of parameters in compute (bfloat16)"),
    # The default is None, since a DeepSpeed configuration may name an optimizer.
    _OPTIMIZER._replace(more={}),
    Row("ds-config", argument, "a DeepSpeed configuration (JSON): the plan is of what it asks for, "
        "and shows what each key became; options that are given replace it", "FILE"),
    *field_rows(
        "state", "update", "generations", "update_on", "durable", "params", "optim", "grads",
        "activations", "resident", "grad_dtype",
        durable="after a crash the run resumes from the last step: two generations of all states "
        "on the drives, none resident",
        params="the lowest tier that stores parameters (nvme; device with --zero 1 and 2)",
        optim="the lowest tier that stores optimizer states (nvme)",
    ),
    Row("no-checkpointing", False, "keep all activations instead of recomputing them"),
)  # fmt: skip


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity plan`."""
    add_options(parser, _PLAN)
    machine = parser.add_argument_group("machine (sizes as 80GiB, rates in GB/s)")
    add_options(machine, _MACHINE)
    job = [
        # A plan places optimizer states in CPU memory or on drives, never on the device.
        row._replace(kind=CHOICES["optim"][1:]) if row.name == "optim" else row
        for row in _JOB
    ]
    add_options(parser.add_argument_group("training"), job)
    _add_shared(parser)
    # None marks an option that was left out: a DeepSpeed configuration may set it.
    parser.set_defaults(**left_out())


# -- infinity checkpoint ---------------------------------------------------------------------------

CHECKPOINT = (
    "List, verify, export, or rewrite for another number of ranks: checkpoints and durable runs, "
    "without building the model. Exit status 0: success, 1: damage was found, 2: a mistake or an "
    "error."
)
_WHERE = "a checkpoint, or the (first) directory of a durable run"
_DIRECTORY = Row(" directory", argument, _WHERE, "DIR")
_JSON = Row("json", False, "as JSON instead, to standard output")
# Not an option of `ls`, which lists all generations.
_GENERATION = Row("generation", int, "this generation, instead of the newest (whole) one", "N")
_ACTIONS: dict[str, tuple[str, str, tuple[Row, ...]]] = {
    "ls": (
        "list generations, whole or not",
        "Lists every generation, from the manifests; does not read states.",
        (Row(" directories", argument, f"{_WHERE}, or a directory of several", "DIR",
             {"nargs": "+"}),
         _JSON),
    ),
    "verify": (
        "read every byte against its checksums",
        ("Reads every byte of a generation, compares checksums, and names all damage. For a "
         "durable run in progress it may report damage that does not exist, since the run writes "
         "new steps meanwhile: verify the run when it has ended, or verify a checkpoint."),
        (_DIRECTORY, _JSON, _GENERATION),
    ),
    "export": (
        "write safetensors, or a universal checkpoint of DeepSpeed",
        ("Writes parameters and persistent buffers as safetensors in the layout of Hugging Face, "
         "as inf.export_safetensors does, in constant memory. A checkpoint lacks configuration and "
         "tokenizer: copy them. --to deepspeed-universal writes masters, moments and "
         "hyper-parameters as a universal checkpoint, from which DeepSpeed continues "
         "(load_universal), with one parameter in memory at a time."),
        (_DIRECTORY,
         Row(" out", argument, "directory of the files; files of an earlier export are replaced",
             "OUT"),
         Row("to", ("safetensors", "deepspeed-universal"), "the format (safetensors)",
             more={"default": "safetensors"}),
         Row("masters", False, "write fp32 masters instead of parameters, if they exist"),
         Row("shard-bytes-max", str, "largest size of a file; units are not split (2GiB)", "SIZE"),
         Row("dtype", ("bfloat16", "float16", "float32"), "dtype of floating parameters "
             "(unchanged)"),
         _GENERATION),
    ),
    "reshard": (
        "rewrite for another number of ranks",
        ("Rewrites a checkpoint for another number of ranks, and with --state in another format, "
         "in constant memory. inf.restore does the same while it reads."),
        (_DIRECTORY,
         Row(" out", argument, "a directory without a checkpoint", "OUT"),
         Row("world", int, "number of ranks", "N", {"required": True}),
         Row("state", CHOICES["state"], "encoding of the states (unchanged)"),
         _GENERATION),
    ),
}  # fmt: skip


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `infinity checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (text, about, rows) in _ACTIONS.items():
        add_options(actions.add_parser(name, help=text, description=about), rows)
