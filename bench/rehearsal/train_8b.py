"""A model that does not fit: 8.03B parameters, the shape of Llama-3-8B, from scratch on real text,
on a machine with a fraction of the RAM.

    python bench/rehearsal/train_8b.py --dir out              # 41 GB of swap files, 20 steps
    python bench/rehearsal/train_8b.py --dir out --layers 2 --steps 3

Parameters and states rest on NVMe (`state="compact"`), are updated in backward, and are initialized
by the model's constructors (`init=`), so that RAM never holds the whole model. Blocks are
checkpointed. Weights are bf16, and matrices are multiplied in fp32 (`Fp32Matmul` explains why).
Each step reports loss, time, bytes and peak RSS. The run fails unless the loss falls (the mean of
the last quarter of the steps is below that of the first) and RSS stays below `--rss-max`. The
record compares the measurement with the plan's forecast from rates measured before, and is appended
to bench/results/rehearsal_train_8b.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401 - adds bench/ to sys.path
import forecast
import harness
import llama
import meter
import torch

import infinity as inf
from infinity._src.base.sizes import parse_size
from infinity._src.plan.workload import shape_of

LAYERS = 32
DISK_BYTES_PER_PARAM = 5.2


def shape(args: argparse.Namespace) -> dict[str, int]:
    """Shapes of Llama-3-8B."""
    return {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": args.vocab,
        "max_position_embeddings": 8192,
    }


def train(args: argparse.Namespace, swap: Path) -> dict[str, Any]:
    """Set up and take the steps; returns the record of the run."""
    batches = itertools.cycle(llama.text(args.tokens, args.steps * args.batch).split(args.batch))
    with torch.device("meta"):
        model = llama.build(shape(args))
    parameters = sum(p.numel() for p in model.parameters())
    harness.check_directory(swap, int(DISK_BYTES_PER_PARAM * parameters))
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=swap, ram=args.ram, state="compact", update="backward",
        on_nonfinite="ignore",
    )  # fmt: skip
    planned = shape_of(model)
    sizes = shape(args)
    matrix = llama.Fp32Linear(
        sizes["hidden_size"], sizes["intermediate_size"], bias=False, dtype=torch.bfloat16
    )
    rates = forecast.measure_rates(args.dir, matrix, args.batch * args.tokens)
    del matrix
    harness.note(f"{parameters / 1e9:.2f}B parameters; setting up. Rates: {rates}")
    meter.reset_peak_rss()
    began, before = time.perf_counter(), meter.io_bytes()
    torch.manual_seed(0)
    inf.offload(model, policy, init=lambda: llama.build(shape(args)))
    optimizer = inf.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    store = inf.handle(model).parts.tiers.store
    set_up = {
        "s": time.perf_counter() - began,
        "read_bytes": meter.io_bytes()[0] - before[0],
        "written_bytes": meter.io_bytes()[1] - before[1],
        "peak_rss_bytes": meter.peak_rss_bytes(),
        "file_bytes": store.nvme_bytes + store.spare_bytes,
    }
    harness.note(f"set up in {set_up['s']:.0f} s, peak RSS {set_up['peak_rss_bytes'] / 1e9:.2f} GB")
    warm = [args.lr * min(1.0, number / args.warmup) for number in range(1, args.steps + 1)]
    found = list(llama.steps(model, optimizer, batches, warm))
    ram_bytes = inf.handle(model).stats().ram_bytes
    inf.handle(model).close()
    said = forecast.forecast(
        planned, policy, forecast.machine_of(rates, ram_bytes), args.batch * args.tokens,
        checkpointing=True, init=True,
    )  # fmt: skip
    return {
        "parameters": parameters, "layers": args.layers, "tokens": args.batch * args.tokens,
        "ram_bytes": ram_bytes, "rates": rates, "forecast": said, "set_up": set_up, "steps": found,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory for the swap files")
    parser.add_argument("--layers", type=int, default=LAYERS, help="(%(default)s)")
    parser.add_argument("--vocab", type=int, default=128_256, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of a sequence (%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-5, help="(%(default)s)")
    parser.add_argument("--warmup", type=int, default=4, help="steps (%(default)s)")
    parser.add_argument("--ram", default="min", help="budget of the engine (%(default)s)")
    parser.add_argument("--rss-max", default="6GB", help="fails above (%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS / "rehearsal_train_8b.jsonl"
    )
    args = parser.parse_args()
    if min(args.layers, args.steps, args.batch, args.warmup) < 1 or args.tokens < 2:
        parser.error("--layers, --steps, --batch and --warmup are 1 or more, --tokens 2 or more")
    return args


def main() -> int:
    args = parse()
    rss_max = parse_size(args.rss_max)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    with harness.scratch(args.dir) as swap:
        record = train(args, swap)
    harness.append_line(args.results, {
        "run": harness.now(), "commit": harness.commit(), "machine": harness.machine(), **record,
    })  # fmt: skip
    losses = [step["loss"] for step in record["steps"]]
    quarter = max(1, len(losses) // 4)
    first, last = statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])
    peak = max(record["set_up"]["peak_rss_bytes"], *(s["peak_rss_bytes"] for s in record["steps"]))
    forecast.show(record)
    print(
        f"{record['parameters'] / 1e9:.2f}B parameters: loss {first:.3f} -> {last:.3f} in "
        f"{len(losses)} steps, {statistics.median(s['s'] for s in record['steps']):.1f} s a step, "
        f"peak RSS {peak / 1e9:.2f} GB"
    )
    if len(losses) > 1 and last >= first:
        raise harness.BenchError(f"the loss does not fall: {losses}")
    if peak > rss_max:
        raise harness.BenchError(f"RSS rose to {peak / 1e9:.2f} GB, above {args.rss_max}")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
