"""Set-up of `infinity train` from its options: the policy, the optimizer and its learning rate.
Contradictions among options raise. arguments.py declares the options.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

import torch

import infinity as inf
from infinity._src.cli import lora
from infinity._src.cli.arguments import check_tiles
from infinity._src.cli.trackers import check_installed
from infinity._src.config.choices import given_fields


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for values out of range, and for options that contradict each other."""
    for name in ("steps", "batch", "seq", "accumulate", "eval_batches", "prompt_tokens", "lora"):
        value = getattr(options, name)
        # A sequence of one token has no prediction, so its loss is NaN.
        least = 2 if name == "seq" else 1
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    _check_length(options)
    _check_places(options)
    _check_text(options)
    check_tiles(options)
    for name in ("lr", "clip", "weight_decay", "warmup", "eval_every", "seed", "save_every"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name)} must be a number, 0 or more"
            )
    # The run adds numbers of passes and ranks to the seed, and torch limits seeds to 64 bits.
    if options.seed >= 1 << 63:
        raise ValueError(f"--seed {options.seed} must be less than 2**63")
    check_installed(options.report_to or ())
    if options.lora is not None:
        lora.check_installed()
    single = options.generations == 1 and not options.durable
    if options.update == "backward" and options.clip and single:
        raise ValueError(
            f"--clip {options.clip:g} needs the norm of all gradients, and --update backward "
            "applies the first gradient before backward computes the last; give --clip 0, "
            "--generations 2, or another --update"
        )
    if options.delayed_warmup is not None and options.update != "delayed":
        raise ValueError(
            f"--delayed-warmup {options.delayed_warmup} works with --update delayed only; leave it "
            "out"
        )
    if options.activations != "device" and not options.checkpointing and slices_of(options) == 1:
        raise ValueError(
            f"--activations {options.activations} moves the inputs of checkpointed blocks, and no "
            "block is checkpointed; add --checkpointing, or --accumulate with --schedule vertical"
        )


def _check_places(options: argparse.Namespace) -> None:
    """Raise ValueError for directories that are files, have no use, or whose files the run would
    replace.
    """
    out, saves = options.out, options.save_dir
    if not options.no_save and out.is_dir() and options.model.is_dir() and out.samefile(
        options.model
    ):
        raise ValueError(
            f"--out {out} is the directory of the model, which the trained model would replace; "
            "name another directory"
        )
    if saves is None:
        return
    if not (options.save_every or options.resume):
        raise ValueError(
            f"--save-dir {saves} is for checkpoints, and this run writes and reads none; add "
            "--save-every STEPS, or --resume"
        )
    if saves.exists() and not saves.is_dir():
        raise ValueError(f"--save-dir {saves} is a file; name a directory")


def _check_text(options: argparse.Namespace) -> None:
    """Raise ValueError for options of the text that contradict each other."""
    if options.eval is not None and options.holdout is not None:
        raise ValueError(
            f"--eval {options.eval} replaces the held-out part of the text, and --holdout "
            f"{options.holdout:g} sets the size of that part; give one of them"
        )
    if options.query is not None and options.sqlite is None:
        raise ValueError("--query goes with --sqlite FILE: add --sqlite, or leave --query out")
    if options.column is not None and options.jsonl is None and options.chat is None:
        raise ValueError(
            f"--column {options.column} names a field of the lines of --jsonl or --chat; leave it "
            "out"
        )
    if options.packing and options.chat is None:
        raise ValueError(
            "--packing puts several conversations of --chat into a window, and the windows of a "
            "text are always full: leave --packing out"
        )


def _check_length(options: argparse.Namespace) -> None:
    """Raise ValueError if both --steps and --epochs set the length of the run, or for a wrong
    number of epochs.
    """
    if options.epochs is None:
        return
    if options.steps is not None:
        raise ValueError(
            f"--steps {options.steps} and --epochs {options.epochs:g} both set the length of the "
            "run; give one of them"
        )
    if not 0 < options.epochs < math.inf:
        raise ValueError(f"--epochs {options.epochs:g} must be a number above 0")


def slices_of(options: argparse.Namespace) -> int:
    """Return the number of micro-batches that share a pass."""
    return int(options.accumulate) if options.schedule == "vertical" else 1


def policy_of(options: argparse.Namespace, device: str) -> inf.Policy:
    """Make the policy of the options, for a model that computes on `device`. Raises: ValueError."""
    policy = inf.Policy(
        **given_fields(options),
        # `Policy.damaged` acts within the run, and needs two generations.
        damaged=(
            "from-older"
            if options.damaged == "from-older" and (options.durable or options.generations > 1)
            else "raise"
        ),
        device=device,
        seed=options.seed,
    )
    if options.optimizer == "muon":
        inf.Muon.check_policy(policy, "--optimizer muon")
    return policy


def make_optimizer(
    options: argparse.Namespace, params: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    """Make the optimizer of offloaded parameters."""
    rates = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.optimizer == "muon":
        return inf.Muon(params, **rates, adjust_lr_fn="match_rms_adamw")
    return inf.AdamW(params, **rates)


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """Return the share of the peak rate at `step` (from 0): linear warm-up, then linear decay to a
    tenth at the last step. A run that is no longer than its warm-up has no decay.
    """
    if step < warmup:
        # Above 0, so that the first step trains, too.
        return (step + 1) / (warmup + 1)
    # No step remains for the decay, whose formula would divide by 0.
    if steps - 1 <= warmup:
        return 1.0
    return 1.0 - 0.9 * min((step - warmup) / (steps - 1 - warmup), 1.0)
