"""Experts: one mixture-of-experts layer of DeepSeek-V3's width, with its stack of experts in tiles.

    python bench/rehearsal/experts.py --dir out --experts 64

Hidden 7168, experts of intermediate 2048, eight for each token, and a shared expert: 44M parameters
for each expert. bf16, state="compact", everything on NVMe, update="backward", minimal RAM. The
layer is built on the meta device and loaded from tensors with the memory of one expert: all experts
start equal (a dimension of stride 0), the router does not.

The traffic of a step does not depend on the number of tokens, since every expert is updated.
Processors without bf16 instructions multiply so slowly that tokens dominate the time: eight take
minutes.

`--tile 0` keeps the stack whole, as one unit that is gathered and gets its gradient at once. Each
step reports seconds, the drive's bytes, the peak of gathered bytes and the memory of the process.
It appends a JSON line to bench/results/rehearsal_experts.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401 - adds bench/ to sys.path
import forecast
import harness
import meter
import torch
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3RMSNorm

import infinity as inf
from infinity._src.plan.workload import shape_of

HIDDEN, INTERMEDIATE, CHOSEN = 7168, 2048, 8
INIT_STD = 0.006
BYTES_PER_PARAMETER = 5.3
"""Bytes to have free on the drive: state="compact" uses about 5.1."""


class Layer(nn.Module):
    """The mixture-of-experts half of a decoder layer, and its own loss."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        config = DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            n_routed_experts=experts,
            num_experts_per_tok=min(CHOSEN, experts),
            n_group=1,
            topk_group=1,
            num_hidden_layers=1,
            experts_implementation="eager",
        )
        self.config = config  # the plan reads it
        self.norm = DeepseekV3RMSNorm(HIDDEN)
        self.mlp = DeepseekV3MoE(config)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """x, target: [1, tokens, hidden]. Returns the mean square of the way to `target`."""
        found: torch.Tensor = (x + self.mlp(self.norm(x)) - target).float().square().mean()
        return found


def values_of(layer: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Values for a layer on the meta device. All experts of a stack share those of one."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, value in layer.state_dict().items():
        one = value.shape[1:] if value.dim() == 3 else value.shape
        if name.endswith("norm.weight"):
            made = torch.ones(one)
        elif name.endswith("bias"):
            made = torch.zeros(one)
        else:
            made = torch.randn(one, generator=generator) * INIT_STD
        found[name] = made.to(value.dtype).expand(value.shape)
    return found


def policy_of(args: argparse.Namespace, swap: Path) -> inf.Policy:
    return inf.Policy(
        params="nvme", optim="nvme", nvme=swap, ram="min", state=args.state, update="backward"
    )


def empty(args: argparse.Namespace) -> Layer:
    """The layer on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            layer = Layer(args.experts)
    finally:
        torch.set_default_dtype(before)
    return layer


def offloaded(args: argparse.Namespace, layer: nn.Module, swap: Path) -> Any:
    """Fill the layer; returns its optimizer."""
    values = values_of(layer, args.seed)
    if args.tile:
        inf.tile_experts(layer, experts=args.tile)
    inf.offload(layer, policy_of(args, swap), load=values)
    return inf.AdamW(layer.parameters(), lr=1e-5, weight_decay=0.01)


def train(args: argparse.Namespace, swap: Path) -> dict[str, Any]:
    """Train, and return the record."""
    layer = empty(args)
    planned = shape_of(layer)
    matrix = nn.Linear(HIDDEN, INTERMEDIATE, bias=False, dtype=torch.bfloat16)
    # One token in each batch: hardly any expert is shared.
    rates = forecast.measure_rates(args.dir, matrix, 1)
    harness.note(f"rates: {rates}; setting up")
    meter.reset_peak_rss()
    start, io = time.perf_counter(), meter.io_bytes()
    optimizer = offloaded(args, layer, swap)
    handle: Any = inf.handle(layer)
    gc.collect()
    store = handle.parts.tiers.store
    set_up = {
        "s": time.perf_counter() - start,
        "read_bytes": meter.io_bytes()[0] - io[0],
        "written_bytes": meter.io_bytes()[1] - io[1],
        "peak_rss_bytes": meter.peak_rss_bytes(),
        "file_bytes": store.nvme_bytes + store.spare_bytes,
    }
    parameters = handle.stats().params
    generator = torch.Generator().manual_seed(args.seed)
    shape = (1, args.tokens, HIDDEN)
    x, target = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    steps = []
    for _ in range(args.steps):
        meter.reset_peak_rss()
        handle.unsharder.gathered_bytes_peak = 0
        before = handle.stats()
        begun = time.perf_counter()
        loss = layer(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.flush()
        after = handle.stats()
        steps.append(
            {
                "loss": loss.item(),
                "s": time.perf_counter() - begun,
                "read_bytes_per_param": (after.bytes_read - before.bytes_read) / parameters,
                "written_bytes_per_param": (after.bytes_written - before.bytes_written)
                / parameters,
                "gathered_bytes_peak": handle.unsharder.gathered_bytes_peak,
                "demands": after.demands - before.demands,
                "peak_rss_bytes": meter.peak_rss_bytes(),
            }
        )
        print(report(steps[-1]), flush=True)
    stats = handle.stats()
    said = forecast.forecast(
        planned, policy_of(args, swap), forecast.machine_of(rates, stats.ram_bytes), args.tokens,
        checkpointing=False, expert_tile=args.tile,
    )  # fmt: skip
    record = {
        "experts": args.experts, "tile": args.tile, "tokens": args.tokens, "state": args.state,
        "parameters": parameters, "ram_bytes": stats.ram_bytes, "set_up": set_up,
        "fresh_grad_bytes_peak": stats.fresh_grad_bytes_peak, "steps": steps, "rates": rates,
        "forecast": said,
    }  # fmt: skip
    handle.close()
    return record


def report(step: dict[str, Any]) -> str:
    """One step, for people."""
    return (
        f"loss {step['loss']:.4f}, {step['s']:.1f} s, {step['read_bytes_per_param']:.2f} B/param "
        f"read, {step['written_bytes_per_param']:.2f} written, "
        f"{step['gathered_bytes_peak'] / 1e9:.2f} GB gathered at once, "
        f"peak RSS {step['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory on a drive")
    parser.add_argument("--experts", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--tile", type=int, default=1, help="experts of a tile; 0: not cut (1)")
    parser.add_argument("--tokens", type=int, default=8, help="of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--state", default="compact", help="state format (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS / "rehearsal_experts.jsonl"
    )
    args = parser.parse_args()
    if min(args.experts, args.tokens, args.steps) < 1 or args.tile < 0:
        parser.error("--experts, --tokens and --steps are 1 or more, --tile 0 or more")
    return args


def main() -> int:
    args = parse()
    parameters = (args.experts + 1) * 3 * HIDDEN * INTERMEDIATE
    scale = {"compact": BYTES_PER_PARAMETER, "bf16": 8.2, "exact": 12.2}.get(args.state, 12.2)
    harness.check_directory(args.dir, int(parameters * scale))
    with harness.scratch(args.dir) as swap:
        record = {
            "run": harness.now(), "commit": harness.commit(), "machine": harness.machine(),
            **train(args, swap),
        }  # fmt: skip
    harness.append_line(args.results, record)
    forecast.show(record)
    set_up = record["set_up"]
    print(
        f"{record['parameters'] / 1e9:.2f}B parameters, {args.experts} experts in tiles of "
        f"{args.tile or args.experts}; set-up {set_up['s']:.1f} s, its peak RSS "
        f"{set_up['peak_rss_bytes'] / 1e9:.2f} GB; fresh gradients at most "
        f"{record['fresh_grad_bytes_peak'] / 1e9:.2f} GB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
