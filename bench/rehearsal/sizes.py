"""Sizes: Llama-3-405B on null drives, with its true shapes, layout and schedule.

    python bench/rehearsal/sizes.py --dir out               # all 126 layers: 4.8 TB of sparse files
    python bench/rehearsal/sizes.py --dir out --layers 2    # two of them: 0.09 TB

The engine runs unchanged: units, chunks of 393,216 elements, places in the swap files, pools,
prefetch, updates in backward. Drives complete requests at once without moving bytes
(`aio.Seam(null=...)`), so that only the engine's own time remains. No module computes: each returns
zeros of its output's shape, and backward gives every weight a view of one zero gradient. Kernels
and copies run for one chunk in `--computes`: by default for one layer's number of chunks, spread
over all 126 layers.

Each step reports seconds, CPU time of the training thread (Python and its calls) per unit and per
chunk, CPU time of all threads, and requested bytes per parameter. The record also has the place of
the last chunk, the memory outside `ram`, and the planner's forecast. It is appended as a JSON line
to bench/results/rehearsal_sizes.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401 - adds bench/ to sys.path
import forecast
import harness
import meter
import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import infinity as inf
from infinity._src.engine.build import EngineParts
from infinity._src.plan.workload import shape_of
from infinity.aio import IoSettings, Seam

LAYERS = 126
VOCABULARY = 32_768
"""Rows of the embedding, of 128,256: set-up has two units in RAM, and a layer's are larger so."""
TOKENS = 4
_BANDWIDTH = 10e9
"""Bytes per second of each null drive, for the shares of several; any number does."""


def config(layers: int, vocabulary: int) -> LlamaConfig:
    """Shapes of Llama-3-405B."""
    return LlamaConfig(
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        use_cache=False,
    )


class Untouched(torch.autograd.Function):
    """A module that does not compute: zeros of its output's shape, and for its weight a gradient
    that is a view of zeros shared by all."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, width: int, zeros: torch.Tensor
    ) -> torch.Tensor:
        ctx.like, ctx.shape, ctx.zeros = x, weight.shape, zeros
        shape = (*x.shape, width) if x.dtype == torch.int64 else (*x.shape[:-1], width)
        return torch.zeros(shape, dtype=weight.dtype)

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_input = torch.zeros_like(ctx.like) if ctx.like.is_floating_point() else None
        return to_input, ctx.zeros[: ctx.shape.numel()].view(ctx.shape), None, None


def without_compute(model: nn.Module, zeros: torch.Tensor) -> None:
    """Give every module that holds a weight a forward that only passes shapes on."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            width = module.out_features
        elif isinstance(module, nn.Embedding):
            width = module.embedding_dim
        elif isinstance(module, LlamaRMSNorm):
            width = module.weight.shape[0]
        else:
            continue
        module.forward = _forward(module, width, zeros)  # type: ignore[method-assign]


def _forward(module: Any, width: int, zeros: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Untouched.apply(x, module.weight, width, zeros)
        return found

    return forward


class Phases:
    """Seconds, CPU and memory of each phase of the run."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure the block; the record is complete after it."""
        gc.collect()
        meter.reset_peak_rss()
        record: dict[str, Any] = {"phase": name}
        began = time.perf_counter(), time.thread_time(), time.process_time()
        yield record
        ended = time.perf_counter(), time.thread_time(), time.process_time()
        record["s"], record["trainer_cpu_s"], record["cpu_s"] = (
            after - before for before, after in zip(began, ended, strict=True)
        )
        record["peak_rss_bytes"] = meter.peak_rss_bytes()
        self.found.append(record)
        harness.note(
            f"{name}: {record['s']:.2f} s, CPU of the trainer {record['trainer_cpu_s']:.2f} s, of "
            f"all {record['cpu_s']:.2f} s, peak RSS {record['peak_rss_bytes'] / 1e9:.2f} GB"
        )


def policy(args: argparse.Namespace, directories: list[Path]) -> inf.Policy:
    bandwidths = {str(path.resolve()): (_BANDWIDTH, _BANDWIDTH) for path in directories}
    return inf.Policy(
        params="nvme", optim="nvme", nvme=directories, ram="min", verify="off", state=args.state,
        update="backward", on_nonfinite="ignore", io=IoSettings(bandwidths=bandwidths),
    )  # fmt: skip


def moved(handle: Any) -> tuple[int, int]:
    """Bytes that the drives were asked to read and to write so far."""
    drives = handle.stats().drives
    return sum(one.bytes_read for one in drives), sum(one.bytes_written for one in drives)


def places(parts: EngineParts) -> dict[str, int]:
    """Chunks, and the ends of the farthest one and of the files."""
    store, space = parts.tiers.storage.store, parts.tiers.storage.space
    assert space is not None
    shards = [store[flat] for flat in parts.split.flats]
    return {
        "chunks": sum(len(shard.records) for shard in shards),
        "last_chunk_end": max(
            int((shard.records["file_offset"] + shard.records["run_bytes"]).max())
            for shard in shards
        ),
        "file_bytes": space.size_bytes,
    }


def train(args: argparse.Namespace, directories: list[Path]) -> dict[str, Any]:
    """Set up, take the steps, close; returns the record of the run."""
    phases = Phases()
    with torch.device("meta"):
        model = LlamaForCausalLM(config(args.layers, args.vocab)).to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    # By numpy: torch would write the zeros, and these take no memory.
    zeros = torch.from_numpy(np.zeros(largest, dtype=np.int16)).view(torch.bfloat16)
    without_compute(model, zeros)
    values = {
        name: torch.zeros((), dtype=torch.bfloat16).expand(p.shape)
        for name, p in model.named_parameters()
    }
    shape, plan = shape_of(model), policy(args, directories)
    seam = Seam(null=args.batch, null_computes=args.computes)
    before = meter.rss_bytes()
    with phases.phase("offload"):
        inf.offload(model, plan, load=values, _seam=seam)
    handle = inf.handle(model)
    with phases.phase("optimizer"):
        optimizer = inf.AdamW(model.parameters(), lr=1e-5)
    at = places(handle.parts)
    gc.collect()
    set_up = meter.rss_bytes() - before - handle.stats().ram_bytes
    units = len(handle.units)
    batch = torch.zeros((1, TOKENS), dtype=torch.int64)
    for number in range(args.steps):
        read, written = moved(handle)
        with phases.phase(f"step {number + 1}") as record:
            model(input_ids=batch).logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.flush()
        read, written = (
            now - then for now, then in zip(moved(handle), (read, written), strict=True)
        )
        record["read_bytes_per_param"] = read / parameters
        record["written_bytes_per_param"] = written / parameters
        record["trainer_us_per_unit"] = record["trainer_cpu_s"] / units * 1e6
        record["trainer_us_per_chunk"] = record["trainer_cpu_s"] / at["chunks"] * 1e6
    stats = handle.stats()
    gc.collect()
    outside = meter.rss_bytes() - before - stats.ram_bytes
    rates = {"read_bytes_per_s": _BANDWIDTH, "write_bytes_per_s": _BANDWIDTH}
    machine = forecast.machine_of(rates, stats.ram_bytes, len(directories))
    said = forecast.forecast(shape, plan, machine, TOKENS, checkpointing=False)
    record = {
        "layers": args.layers, "vocab": args.vocab, "parameters": parameters, "units": units,
        "drives": len(directories), "computes": args.computes, "state": args.state, **at,
        "ram_bytes": stats.ram_bytes, "set_up_rss_outside_ram_bytes": set_up,
        "rss_outside_ram_bytes": outside, "forecast": said,
        "bytes_read": moved(handle)[0], "bytes_written": moved(handle)[1],
        "updates": handle.parts.tiers.executor.stats().updates, "phases": phases.found,
    }  # fmt: skip
    with phases.phase("close"):
        handle.close()
    return record


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory for the sparse files")
    parser.add_argument("--layers", type=int, default=LAYERS, help="(%(default)s)")
    parser.add_argument("--vocab", type=int, default=VOCABULARY, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--drives", type=int, default=1, help="null drives (%(default)s)")
    parser.add_argument("--state", default="exact", help="state format (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="requests that end together")
    parser.add_argument(
        "--computes",
        type=int,
        default=LAYERS,
        help="of so many chunks one has kernels (%(default)s)",
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "rehearsal_sizes.jsonl")
    args = parser.parse_args()
    if min(args.layers, args.steps, args.drives) < 1:
        parser.error("--layers, --steps and --drives are 1 or more")
    return args


def main() -> int:
    args = parse()
    harness.check_directory(args.dir, 1 << 20)
    with harness.scratch(args.dir) as swap:
        directories = [swap / str(number) for number in range(args.drives)]
        for directory in directories:
            directory.mkdir()
        record = {
            "run": harness.now(), "commit": harness.commit(), "machine": harness.machine(),
            **train(args, directories),
        }  # fmt: skip
    harness.append_line(args.results, record)
    plan, last = record["forecast"], record["phases"][-2]
    harness.print_table(
        "the last step, and the plan",
        ["", "measured", "forecast"],
        [
            [
                "bytes read per parameter",
                f"{last['read_bytes_per_param']:.2f}",
                f"{plan['read_bytes'] / record['parameters']:.2f}",
            ],
            [
                "bytes written per parameter",
                f"{last['written_bytes_per_param']:.2f}",
                f"{plan['written_bytes'] / record['parameters']:.2f}",
            ],
            ["bytes of swap files", f"{record['file_bytes']}", f"{plan['file_bytes']:.0f}"],
            ["bytes of `ram`", f"{record['ram_bytes']}", f"{plan['ram_bytes']:.0f}"],
        ],
    )
    print(
        f"{record['parameters'] / 1e9:.1f}B parameters, {record['units']} units, "
        f"{record['chunks']} chunks; the last one ends at {record['last_chunk_end']} "
        f"(2^42 = {1 << 42}); RSS outside of `ram`: "
        f"{record['set_up_rss_outside_ram_bytes'] / record['chunks']:.0f} B per chunk after "
        f"set-up, {record['rss_outside_ram_bytes'] / 1e9:.2f} GB after the steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
