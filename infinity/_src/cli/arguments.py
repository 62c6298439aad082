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
    "from_pretrained loads, to --out. The last part of the text (--holdout, 5 %) is never trained "
    "on; the held-out loss is measured on it."
)
_SOURCES = (
    Row("text", argument, "plain text, UTF-8", "FILE"),
    Row("jsonl", argument, "JSON lines; the text is in --column", "FILE"),
    Row("sqlite", argument, "SQLite database; the text is what --query yields", "FILE"),
    Row("chat", argument, "JSON lines of conversations, each a list of messages in --column; the "
        "tokenizer's chat template renders them, and only the assistant's words are learnt",
        "FILE"),
)
_TEXT = (
    Row("column", str, "the field of each JSON line (text; messages with --chat)", "NAME"),
    Row("query", str, "a SELECT; the columns of a row are joined by a blank, rows by a line end",
        "SQL"),
    Row("holdout", float, "share of the text that is held out, its last part (0.05)", "SHARE"),
    Row("eval", argument, "measure the held-out loss on this file, of the same kind as the text, "
        "and train on all of the text", "FILE"),
    Row("packing", False, "several conversations in a window, which do not attend to each other; "
        "needs --chat"),
)  # fmt: skip
# The default is None, not a number: checkpoints record None for whole layers (`resume.RULES`).
_TILES = (
    Row("tile-linears", int, "every linear in N tiles: inf.tile_linears (whole)", "N"),
    Row("tile-loss", int, "the head and its loss in N tiles: inf.tile_loss (whole)", "N"),
    Row("tile-experts", int, "stacks of experts in tiles of K, which compute as the model's eager "
        "implementation: inf.tile_experts (whole stacks)", "K"),
)  # fmt: skip
_OPTIMIZER = Row(
    "optimizer", OPTIMIZERS, "adamw, or muon: inf.Muon for hidden matrices, with the factor of "
    "match_rms_adamw, with which rates of AdamW fit, and AdamW for the rest (adamw)",
    more={"default": OPTIMIZERS[0]},
)  # fmt: skip
_RANKS = ("zero", "accumulate", "qwz", "hpz", "qgz", "error_feedback")
_TRAINING = (
    # None by default, so that `infinity train` can tell them apart from those that were given.
    Row("steps", int, "optimizer steps (20)"),
    Row("epochs", float, "instead: so many passes through the training part of the text", "N"),
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
    Row("clip", 1.0, "gradient norm; 0 does not clip (1.0)"),
    Row("seed", 0, "order of the text, and random rounding of states (0)"),
    Row("eval-every", 0, "held-out loss every so many steps; it is always measured before and "
        "after (0)", "STEPS"),
    Row("eval-batches", int, "micro-batches of a held-out measurement (8; of --eval, all)"),
    Row("prompt", str, "continue this text before and after training"),
    Row("prompt-tokens", 24, "length of the continuation (24)"),
    Row("dtype", ("auto", "bfloat16", "float32"), "dtype that computes; auto: float32 on a CPU "
        "without bf16 instructions, else bfloat16; a resumed run keeps its dtype (auto)",
        more={"default": "auto"}),
    Row("lora", int, "train LoRA adapters of this rank on all linears of the blocks, by peft; the "
        "model is frozen, and --out gets the adapter (train the model)", "R"),
    Row("checkpointing", False, "recompute activations in backward"),
    Row("report-to", [str], "report the figures of steps there, too; repeat for several; wandb is "
        "offline unless WANDB_MODE says otherwise", more={"choices": TRACKERS}),
    Row("no-save", False, "do not write the trained model"),
    Row("no-trace", False, "record no timeline"),
)  # fmt: skip
_RESUME = (
    Row("save-every", 0, "write a checkpoint every so many steps, and after the last; 0 writes "
        "none (0)", "STEPS"),
    Row("save-dir", argument, "where the checkpoint goes; it replaces the one before (checkpoint "
        "in --out)", "DIR"),
    Row("resume", False, "resume from the durable run or the checkpoint in --save-dir, whichever "
        "has the later step, if they are of one run; begin where there is neither"),
    # "report" is for `inf.restore` alone: no policy has it.
    Row("damaged", ("raise", "report", "from-older"), "if a drive cannot read states: stop and "
        "name them; report: with --resume, continue without them; from-older: with those of "
        "an earlier step, also within the run, with --durable or --generations 2 (raise)",
        more={"default": "raise"}),
)  # fmt: skip


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity train`; their defaults suit a small model and a short run."""
    add_options(parser, (
        Row(" model", argument, "a Hugging Face model directory, or a GGUF file", "MODEL"),
        Row("out", argument, "where the results go", "DIR", {"required": True}),
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
    device = "where the model computes: cpu, cuda or cuda:1 (cuda, if there is one)"
    add_options(group, [Row("device", str, device, "DEVICE"), *field_rows("delayed_warmup")])
    _add_shared(parser)
    add_options(parser.add_argument_group("training"), _TRAINING)
    kept = parser.add_argument_group("resuming after a crash")
    add_options(kept, [*field_rows("durable", "durable_every"), *_RESUME])


def _add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the tiles and ranks that `infinity train` and `infinity plan` share."""
    tiles = parser.add_argument_group("tiles, for what does not fit whole (part of the numerics)")
    add_options(tiles, _TILES)
    add_ranks(parser)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the fields of the policy that matter for several ranks only."""
    ranks = parser.add_argument_group("several ranks (part of the numerics)")
    add_options(ranks, field_rows(*_RANKS))


def check_tiles(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers of tiles that cut nothing (to keep layers whole, a user leaves
    the option out), and for tiles of layers that have adapters, or of matrices that Muon needs.
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
    "Write one HTML page of a run: loss, the time of each step, schedule and speed, drives, memory "
    "by tier, one step unit by unit, and wear. It holds all that it needs, and opens "
    "without a network. Where DIR "
    "has several directories with runs, they are shown beside each other."
)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity report`."""
    add_options(parser, (
        Row(" directory", argument, "the --out of infinity train, or the directory of an "
            "inf.StepLog", "DIR"),
        Row("out", argument, "where the page goes (report.html in DIR)", "FILE"),
        Row("tbw", float, "terabytes written that one drive is rated for (an example)", "TB"),
        Row("watch", False, "write the page again and again while the run goes on; it loads itself "
            "again in a browser"),
        Row("every", float, "how often --watch does so (10)", "SECONDS"),
    ))  # fmt: skip


# -- infinity plan ---------------------------------------------------------------------------------

PLAN = (
    "Does a model fit this machine, where does each state go, how long is a step, how long do the "
    "drives last, and which way to train is the fastest? Searches schedules, updates, formats, "
    "tiers, tiles and micro-batches; options that are given stay. Reads the model's config.json "
    "only, and measures nothing. Figures that are not given are assumed, and the answer says "
    "which. Exit status 0: it fits, 1: it does not."
)
_PLAN = (
    Row(" model", argument, "a Hugging Face model directory, or its config.json", "MODEL"),
    Row("tokens-per-step", int, "tokens of an optimizer step, all GPUs", "N", {"required": True}),
    Row("exact", False, "keep the numbers of plain training: no state and no exchange that rounds"),
    Row("as-given", False, "search nothing: the plan is of what the options say, and of the "
        "engine's defaults for what they leave out"),
    Row("all", False, "every table: parts of each memory, places of states, terms of the step, and "
        "what single changes would buy"),
    Row("total-tokens", int, "of the whole training: days, bytes written, wear", "N"),
    Row("lora", int, "train LoRA adapters of this rank on all linears, and keep the model frozen",
        "R"),
    Row("json", argument, 'write everything as JSON, too; "-": to standard output only', "FILE"),
)
_MACHINE = (
    Row("gpus", 1, "GPUs of the node; 0: the CPU computes (1)"),
    Row("ranks", int, "processes of the node where the CPU computes (1; GPUs have one each)", "N"),
    Row("nodes", 1, "nodes, each as these options describe it (1)", "N"),
    Row("link-gbps", float, "between a node and the others, each way (100)", "Gbit/s"),
    Row("gpu", str, "rtx3090, rtx4090, rtx5090, a6000, l40s, a100, h100, h200, b200 or gb200, for "
        "what is not given below (by --gpu-mem, else h100)", "KIND"),
    Row("gpu-mem", str, "memory of one GPU", "SIZE"),
    # No default: the plan may be for another machine, so this machine's RAM says nothing.
    Row("ram", str, "CPU memory of the node, for the budgets of all ranks and their overhead",
        "SIZE", {"required": True}),
    Row("nvme-read", str, "all drives together, reading", "GB/s"),
    Row("nvme-write", str, "all drives together, writing", "GB/s"),
    Row("bench", argument, "instead: a record of python -m infinity.bench swap", "FILE"),
    Row("drives", int, "how many drives there are (those of --bench, else 1)"),
    Row("nvme-size", str, "free space of all drives together (not checked)", "SIZE"),
    Row("separable", False, "reads and writes do not slow each other on these drives"),
    Row("tbw", float, "terabytes written that one drive is rated for", "TB"),
    Row("flops", float, "what one GPU sustains in training", "TFLOP/s"),
    Row("flops-peak", float, "what one GPU can do at most, for MFU", "TFLOP/s"),
    Row("pcie", str, "link of one GPU to the CPU, each way", "GB/s"),
    Row("pcie-host", str, "all GPUs' links to the CPU together, each way (more than two GPUs: "
        "half of their sum)", "GB/s"),
    Row("peers", str, "between GPUs, of one, each way (NVLink where the kind has it, else through "
        "the CPU's memory)", "GB/s"),
    Row("dram", str, "bandwidth of the CPU's memory", "GB/s"),
    Row("cores", int, "physical cores of a node's CPUs, which update (32; 64 beside more than two "
        "GPUs)"),
    Row("adam", argument, "rate of the update kernels: a record of `python -m infinity.bench "
        "adam`", "FILE"),
)  # fmt: skip
_JOB = (
    Row("micro-batches", int, "per step (with --as-given the fewest whose activations fit a GPU)"),
    # None marks an option that was left out, which the search decides.
    Row("schedule", SCHEDULES, "order of micro-batches: each through the whole model, or all of "
        "them through a block before the next: inf.microbatched (with --as-given horizontal)"),
    # The default is None: the number that fits depends on the model.
    Row("seq", int, "tokens of a sequence (4096, or what the model has)"),
    Row("dtype", ("bfloat16", "float16", "float32"), "of the parameters that compute (bfloat16)"),
    # None, too: a DeepSpeed configuration may name one.
    _OPTIMIZER._replace(more={}),
    Row("ds-config", argument, "a DeepSpeed configuration (JSON): the plan is of what it asks for, "
        "and shows what each key became; options that are given replace it", "FILE"),
    *field_rows(
        "state", "update", "generations", "update_on", "durable", "params", "optim", "grads",
        "activations", "resident", "grad_dtype",
        durable="after a crash the run resumes from the last step: two generations of everything "
        "on the drives, nothing resident",
        params="the lowest tier of parameters (nvme; device with --zero 1 and 2)",
        optim="the lowest tier of optimizer states (nvme)",
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
    "What lies in checkpoints and durable runs, and what can be done with them without the model: "
    "list, verify, export, rewrite for another number of ranks. Exit status 0: "
    "well, 1: damage was found, 2: a mistake, or an error."
)
_WHERE = "a checkpoint, or the (first) directory of a durable run"
_DIRECTORY = Row(" directory", argument, _WHERE, "DIR")
_JSON = Row("json", False, "as JSON instead, to standard output")
# Not for `ls`, which lists all generations.
_GENERATION = Row("generation", int, "this generation, instead of the newest (whole) one", "N")
_ACTIONS: dict[str, tuple[str, str, tuple[Row, ...]]] = {
    "ls": (
        "list generations, whole or not",
        "Every generation, from its manifests; states are not read.",
        (Row(" directories", argument, f"{_WHERE}, or a directory of such", "DIR", {"nargs": "+"}),
         _JSON),
    ),
    "verify": (
        "read every byte against its checksums",
        ("Reads every byte of a generation against its checksums, and names all that is damaged. "
         "For a durable run in progress it may report damage that does not exist, since the run "
         "writes new steps meanwhile: verify it when the run has ended, or verify a checkpoint."),
        (_DIRECTORY, _JSON, _GENERATION),
    ),
    "export": (
        "safetensors, or for DeepSpeed, without the model",
        ("Writes parameters and persistent buffers as safetensors in the layout of Hugging Face, "
         "as inf.export_safetensors does, in constant memory. Configuration and tokenizer are not "
         "in a checkpoint: copy them. --to deepspeed-universal writes masters, moments and "
         "hyper-parameters as a universal checkpoint, from which DeepSpeed continues "
         "(load_universal), a parameter in memory at a time."),
        (_DIRECTORY,
         Row(" out", argument, "where the files go; those of an earlier export are replaced",
             "OUT"),
         Row("to", ("safetensors", "deepspeed-universal"), "the format (safetensors)",
             more={"default": "safetensors"}),
         Row("masters", False, "fp32 masters, where they exist, instead of parameters"),
         Row("shard-bytes-max", str, "largest size of a file; units are not split (2GiB)", "SIZE"),
         Row("dtype", ("bfloat16", "float16", "float32"), "of floating parameters (their own)"),
         _GENERATION),
    ),
    "reshard": (
        "rewrite for another number of ranks",
        ("Rewrites a checkpoint for another number of ranks, and in another state format if one is "
        "given, in constant memory. inf.restore does the same as it reads."),
        (_DIRECTORY,
         Row(" out", argument, "a directory without a checkpoint", "OUT"),
         Row("world", int, "ranks", "N", {"required": True}),
         Row("state", CHOICES["state"], "encoding of the states (as it is)"),
         _GENERATION),
    ),
}  # fmt: skip


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `infinity checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (text, about, rows) in _ACTIONS.items():
        add_options(actions.add_parser(name, help=text, description=about), rows)
