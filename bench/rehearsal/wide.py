"""A true width: two layers of Llama-3-405B, hidden size 16,384 and 128 heads, from a directory of
safetensors.

    python bench/rehearsal/wide.py --dir out       # 6.7B parameters: 13 GB of files, 34 GB of swap

The model is initialized (`init=`), computes a loss, and is exported; then it is closed, loaded from
the files, and trained for a few steps. The loaded model must have the exported model's loss. Units
have 1.7 GB, and the largest tensor 872 million elements. The vocabulary is reduced, so that a layer
is the largest unit. The record is appended to bench/results/rehearsal_wide.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import os
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
from infinity._src.plan.workload import shape_of

DISK_BYTES_PER_PARAM = 7.3


def shape(args: argparse.Namespace) -> dict[str, int]:
    """Shapes of Llama-3-405B."""
    return {
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 13 // 4,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 128,
        "num_key_value_heads": 8,
        "vocab_size": args.vocab,
        "max_position_embeddings": 8192,
    }


def policy_of(args: argparse.Namespace, swap: Path) -> inf.Policy:
    return inf.Policy(
        params="nvme", optim="nvme", nvme=swap, ram=args.ram, state="compact", update="backward",
        on_nonfinite="ignore", unit_bytes_max="2GiB",
    )  # fmt: skip


def offloaded(
    args: argparse.Namespace, swap: Path, *, learns: bool, **source: Any
) -> tuple[Any, dict[str, Any]]:
    """Build the model with values of this source, and measure that. learns: reserve states."""
    with torch.device("meta"):
        model = llama.build(shape(args)).requires_grad_(learns)
    meter.reset_peak_rss()
    began, before = time.perf_counter(), meter.io_bytes()
    inf.offload(model, policy_of(args, swap), **source)
    store = inf.handle(model).parts.tiers.store
    took = {
        "s": time.perf_counter() - began,
        "read_bytes": meter.io_bytes()[0] - before[0],
        "written_bytes": meter.io_bytes()[1] - before[1],
        "peak_rss_bytes": meter.peak_rss_bytes(),
        "file_bytes": store.nvme_bytes + store.spare_bytes,
    }
    harness.note(f"{took['s']:.0f} s, peak RSS {took['peak_rss_bytes'] / 1e9:.2f} GB")
    return model, took


def train(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Begin, export, load, train; returns the record of the run."""
    # Ids beyond the cut vocabulary are folded into it.
    batches = (llama.text(args.tokens, args.steps) % args.vocab).split(1)
    swap, files = place / "swap", place / "files"
    swap.mkdir()
    with torch.device("meta"):
        planned = shape_of(llama.build(shape(args)))
    matrix = llama.Fp32Linear(args.hidden, args.hidden * 13 // 4, bias=False, dtype=torch.bfloat16)
    rates = forecast.measure_rates(place, matrix, args.tokens)
    del matrix
    torch.manual_seed(0)
    harness.note(f"rates: {rates}; from scratch")
    model, began = offloaded(args, swap, learns=False, init=lambda: llama.build(shape(args)))
    parameters = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        exported = float(model(input_ids=batches[0], labels=batches[0]).loss)
    harness.note(f"{parameters / 1e9:.2f}B parameters, loss {exported:.4f}; exporting")
    mark = time.perf_counter()
    inf.export_safetensors(model, files)
    export_s = time.perf_counter() - mark
    inf.handle(model).close()
    harness.note(f"exported in {export_s:.0f} s; loading")
    model, loaded = offloaded(args, swap, learns=True, load=files)
    optimizer = inf.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    handle = inf.handle(model)
    schedule = [args.lr] * args.steps
    steps = list(llama.steps(model, optimizer, itertools.cycle(batches), schedule))
    machine = forecast.machine_of(rates, handle.stats().ram_bytes)
    record = {
        "parameters": parameters, "layers": args.layers, "hidden": args.hidden,
        "largest_unit_bytes": max(unit.size_bytes for unit in handle.units),
        "largest_tensor": max(p.numel() for p in model.parameters()),
        "ram_bytes": handle.stats().ram_bytes, "exported_loss": exported, "from_scratch": began,
        "export_s": export_s, "files_bytes": meter.tree_bytes(files), "set_up": loaded,
        "steps": steps, "rates": rates, "forecast": forecast.forecast(
            planned, policy_of(args, swap), machine, args.tokens, checkpointing=True
        ),
    }  # fmt: skip
    handle.close()
    return record


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory for all files")
    parser.add_argument("--hidden", type=int, default=16_384, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--vocab", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="(%(default)s)")
    parser.add_argument("--ram", default="min", help="budget of the engine (%(default)s)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "rehearsal_wide.jsonl")
    args = parser.parse_args()
    if min(args.layers, args.steps) < 1 or args.hidden % 1024 or args.tokens < 2:
        parser.error("--hidden is a multiple of 1024, --layers and --steps are 1 or more")
    return args


def main() -> int:
    args = parse()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    width = args.hidden
    harness.check_directory(
        args.dir,
        int(DISK_BYTES_PER_PARAM * (args.layers * 12 * width * width + 2 * args.vocab * width)),
    )
    with harness.scratch(args.dir) as place:
        record = train(args, place)
    harness.append_line(args.results, {
        "run": harness.now(), "commit": harness.commit(), "machine": harness.machine(), **record,
    })  # fmt: skip
    forecast.show(record)
    first = record["steps"][0]["loss"]
    peak = max(step["peak_rss_bytes"] for step in record["steps"])
    print(
        f"{record['parameters'] / 1e9:.2f}B parameters: exported at loss "
        f"{record['exported_loss']}, loaded at {first}; peak RSS {peak / 1e9:.2f} GB"
    )
    if first != record["exported_loss"]:
        raise harness.BenchError("the loaded model is not the one that was exported")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
