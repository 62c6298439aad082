"""One run of R1 under infinity, by default with everything on NVMe and the smallest RAM budget;
prints one JSON line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import meter
import r1
import torch

import infinity as inf
from infinity._src.memory.roofline import AtRest, traffic


class Always:
    """A history by which every step is worth speculating, so that
    `infinity._src.optim.speculative_update` always runs ahead."""

    speculates = True

    def add(self, right: bool) -> None:
        """Ignore the step's outcome."""


@dataclasses.dataclass
class Training:
    """R1 under infinity, ready to train. step: one optimizer step, returns its loss."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    handle: Any
    step: Callable[[], float]


def build(
    workload: r1.Workload,
    policy: inf.Policy,
    *,
    always: bool = False,
    schedule: str = "horizontal",
    checkpoint: bool = True,
    ns_steps: int | None = None,
) -> Training:
    """R1 and an ordinary loop. It does not clip with update="backward" and one generation, which
    does not support that.

    always: speculate in every step, whatever the last steps showed.
    schedule: horizontal runs one micro-batch after the other; vertical runs all of them through a
    layer before the next (`inf.microbatched`). checkpoint: with vertical, checkpoint slices.
    ns_steps: train with Muon, and so many steps of Newton-Schulz; None: with AdamW.
    """
    vertical = schedule == "vertical"
    bare = r1.build_on_meta(workload)
    if vertical:
        inf.microbatched(bare, workload.micro_batches, checkpoint=checkpoint)
    model = inf.offload(bare, policy, load=partial(r1.fill, seed=workload.seed))
    rates: dict[str, Any] = {"lr": workload.lr, "weight_decay": workload.weight_decay}
    optimizer: torch.optim.Optimizer = (
        inf.AdamW(model.parameters(), **rates)
        if ns_steps is None
        else inf.Muon(
            model.parameters(), **rates, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw"
        )
    )
    handle = inf.handle(model)
    if always:
        if not policy.speculates:
            raise ValueError("--speculate=always is for update=backward with generations=2")
        handle.parts.mode.history = Always()
    batches = r1.micro_batches(workload)
    if vertical:
        batches = [torch.cat(batches)]
    clips = policy.update != "backward" or policy.speculates

    def step() -> float:
        total = 0.0
        for number, tokens in enumerate(batches, 1):
            with handle.no_sync() if number < len(batches) else nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / len(batches)).backward()
            total += float(loss.detach())
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total / len(batches)

    return Training(model, optimizer, handle, step)


def counters(handle: Any) -> dict[str, float]:
    """Return the totals of `handle.stats()` that are recorded for each step, cheaply."""
    pipeline = handle.pipeline
    return {
        "updates_ahead": pipeline.updates_ahead,
        "updates_withdrawn": pipeline.updates_withdrawn,
        "steps_undone": pipeline.steps_undone,
        "commit_s": pipeline.transaction.commit_s if pipeline.transaction is not None else 0.0,
    }


def must_move(handle: Any, workload: r1.Workload) -> dict[str, Any]:
    """Return the bytes that a step must move, by update mode, for the states on NVMe, without the
    bytes of undone updates."""
    plan, params, optim, grads = handle.parts.tiers.planner.plan, 0, 0, 0
    for flat, state_format, masks in zip(
        handle.parts.split.flats, plan.formats, plan.nvme_masks, strict=True
    ):
        for numel, mask in zip(handle.parts.tiers.store[flat].records["numel"], masks, strict=True):
            for index, section in enumerate(state_format.sections):
                size = section.size_bytes(int(numel)) if mask >> index & 1 else 0
                if section.name == "grad":
                    grads += size
                elif index:
                    optim += size
                else:
                    params += size
    rests = AtRest(params, optim, grads)
    return {
        mode: dataclasses.asdict(traffic(rests, mode, workload.micro_batches))
        for mode in ("deferred", "backward")
    }


def run(workload: r1.Workload, policy: inf.Policy, **options: Any) -> dict[str, Any]:
    """Train and measure. Blocks until done. options: of `build`."""
    began = time.perf_counter()
    training = build(workload, policy, **options)
    handle = training.handle
    record = meter.measure(
        training.step,
        flush=handle.flush,
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=time.perf_counter() - began,
        counters=partial(counters, handle),
    )
    stats = handle.stats()
    terms = stats.terms
    needed = must_move(handle, workload)
    handle.close()
    return {
        "arm": "infinity",
        "verify": policy.verify,
        "torch": torch.__version__,
        **record,
        "nvme_share": stats.nvme_bytes / max(stats.nvme_bytes + stats.resident_bytes, 1),
        "ram_bytes": stats.ram_bytes,
        "gathered_bytes_peak": stats.gathered_bytes_peak,
        "update": policy.update,
        "schedule": options["schedule"],
        "checkpoint": options["checkpoint"],
        "optimizer": type(training.optimizer).__name__,
        "ns_steps": options["ns_steps"],
        "generations": policy.generations,
        "durable": bool(policy.durable),
        "moved": dataclasses.asdict(terms.moved) if terms is not None else None,
        "must_move": needed,
        "terms": str(terms),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the policy; `policy_of` reads them back."""
    parser.add_argument(
        "--verify",
        default="full",
        choices=("full", "sample", "off"),
        help="checksums (%(default)s)",
    )
    parser.add_argument(
        "--tier",
        default="nvme",
        choices=("nvme", "cpu", "device"),
        help="where everything may rest; device: parameters, with states in RAM (%(default)s)",
    )
    parser.add_argument("--ram", default="min", help="Policy(ram=) (%(default)s)")
    parser.add_argument(
        "--state", default="exact", choices=("exact", "bf16", "compact"), help="(%(default)s)"
    )
    parser.add_argument(
        "--update",
        default="deferred",
        choices=("deferred", "backward", "delayed"),
        help="(%(default)s)",
    )
    parser.add_argument(
        "--nonfinite", default="raise", choices=("raise", "ignore"), help="(%(default)s)"
    )
    parser.add_argument(
        "--generations", type=int, default=1, choices=(1, 2), help="of the states (%(default)s)"
    )
    parser.add_argument(
        "--durable", default="off", choices=("off", "on"), help="Policy(durable=) (%(default)s)"
    )
    parser.add_argument(
        "--durable-every", type=int, default=1, help="steps from commit to commit (%(default)s)"
    )


def policy_of(args: argparse.Namespace) -> inf.Policy:
    """Return the policy of parsed arguments."""
    nvme = [args.dir] if args.tier == "nvme" else ()
    return inf.Policy(
        params=args.tier,
        optim="cpu" if args.tier == "device" else args.tier,
        nvme=nvme,
        ram=args.ram,
        verify=args.verify,
        state=args.state,
        update=args.update,
        delayed_warmup=0,
        on_nonfinite=args.nonfinite,
        generations=args.generations,
        durable=args.durable == "on",
        durable_every=args.durable_every,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="swap directory")
    add_arguments(parser)
    parser.add_argument(
        "--speculate",
        default="adaptive",
        choices=("adaptive", "always"),
        help="with update=backward and generations=2: give up when it is in vain, or never "
        "(%(default)s)",
    )
    parser.add_argument(
        "--schedule",
        default="horizontal",
        choices=("horizontal", "vertical"),
        help="order of several micro-batches (%(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        default="on",
        choices=("on", "off"),
        help="with --schedule=vertical: slices of blocks are computed again in backward "
        "(%(default)s)",
    )
    parser.add_argument(
        "--optimizer", default="adamw", choices=("adamw", "muon"), help="(%(default)s)"
    )
    parser.add_argument(
        "--ns-steps",
        type=int,
        default=5,
        help="steps of Newton-Schulz with --optimizer=muon; 0 leaves its products out, for the "
        "time of the rest (%(default)s)",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    meter.report(
        run(
            r1.from_arguments(args),
            policy_of(args),
            always=args.speculate == "always",
            schedule=args.schedule,
            checkpoint=args.checkpoint == "on",
            ns_steps=args.ns_steps if args.optimizer == "muon" else None,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
