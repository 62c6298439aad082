"""Compares the Triton kernels with torch's fastest alternatives on a GPU.

    python bench/bench_ops.py                           # a table
    python bench/bench_ops.py --ops update tile_matmul
    python bench/bench_ops.py --results FILE            # and a JSON line per case, as it ends
    python bench/bench_ops.py --smoke                   # tiny and fast: only shows that everything
    runs; with --device cpu and TRITON_INTERPRET=1 it does so without a GPU

Every operation of infinity/_src/kernels/choice.py has a function here that yields its cases; to add
one, write the function and name it in `CASES`. Arms of a case alternate in rounds on the same data,
with the L2 cache overwritten before each; times are medians over the rounds, by CUDA events.
"ratio" is the best time of torch's arms divided by Triton's, for choice.MEASURED. On a CPU Triton
runs in its interpreter, so times there mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from infinity._src.cabi.records import HYPER, QUANT_GROUP, SEG, Format, Master, Moments, chunk_numel
from infinity._src.kernels import choice
from infinity._src.kernels import linear_cross_entropy as heads
from infinity._src.kernels import tile_matmul as tiles
from infinity._src.kernels.comm_codec import decode_sum, encode, sum_in_order
from infinity._src.kernels.hyper import hyper_row_adamw
from infinity._src.kernels.quantize import Quantized, dequantize, quantize
from infinity._src.kernels.quantized import wire_bytes
from infinity._src.kernels.update import UpdatePlan

FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 1 << 10}
"""Bytes written before each measurement: more than any GPU's L2 cache."""

NOT_RUN = 3  # exit status


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    arms: functions by name: "triton", torch's alternatives ("torch..."), and bounds ("bound: ..."),
    which do less than the operation and are excluded from the ratio. traffic_bytes: bytes that it
    must read and write at least; flops: multiplications and additions of a matmul, else 0.
    """

    op: str
    what: str
    traffic_bytes: int
    arms: Mapping[str, Callable[[], object]]
    flops: int = 0


def both(op: str, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """Return the arms of an operation that `choice` dispatches: the same call with each
    implementation forced."""

    def forced(which: str) -> Callable[[], object]:
        def arm() -> object:
            with choice.forced(**{op: which}):
                return run()

        return arm

    return {which: forced(which) for which in choice.IMPLEMENTATIONS}


def product_sizes(smoke: bool) -> list[tuple[int, int, int]]:
    """(rows of x, inputs, outputs) of linears: few tokens, a square one, an MLP's at many
    tokens."""
    return (
        [(40, 64, 96)]
        if smoke
        else [(16, 4096, 14336), (512, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 14336)]
    )


def tile_matmul(device: torch.device, smoke: bool) -> Iterator[Case]:
    """The three products of a linear's tile, each added to an fp32 sum. The bound is the product
    alone, rounded to bf16."""
    for rows, inner, outer in product_sizes(smoke):
        x, w, dy = (
            torch.randn(shape, device=device).to(torch.bfloat16)
            for shape in ((rows, inner), (outer, inner), (rows, outer))
        )
        for form, a, b in (
            ("forward", x, w.t()),
            ("input gradient", dy, w),
            ("weight gradient", dy.t(), x),
        ):
            total = torch.zeros((a.shape[0], b.shape[1]), device=device)

            def run(a: torch.Tensor = a, b: torch.Tensor = b, total: torch.Tensor = total) -> None:
                tiles.tile_matmul(a, b, total, accumulator=total)

            def bound(a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
                return a @ b

            traffic = 2 * (a.numel() + b.numel()) + 8 * total.numel()
            arms = {**both("tile_matmul", run), "bound: bf16 product": bound}
            yield Case(
                "tile_matmul",
                f"{form} {rows} x {inner} x {outer}",
                traffic,
                arms,
                2 * rows * inner * outer,
            )


def linear_cross_entropy(device: torch.device, smoke: bool) -> Iterator[Case]:
    """One tile of the vocabulary: its partials, and the gradient of its logits. The bound is the
    logits alone, in bf16."""
    rows, features, columns = (40, 64, 96) if smoke else (4096, 4096, heads.VOCABULARY_TILE)
    hidden, weight = (
        torch.randn((n, features), device=device).to(torch.bfloat16) for n in (rows, columns)
    )
    target = torch.randint(0, columns, (rows,), device=device)
    lse, scale = (
        torch.full((rows,), 70.0, device=device),
        torch.full((rows,), 1 / rows, device=device),
    )
    settings: dict[str, Any] = {
        "start": 0,
        "lse": lse,
        "scale": scale,
        "label_smoothing": 0.0,
        "vocabulary": columns,
    }
    runs: dict[str, Callable[[], object]] = {
        "partials": lambda: heads.tile_partials(hidden, weight, None, target, start=0),
        "gradient of the logits": lambda: heads.tile_dlogits(
            hidden, weight, None, target, **settings
        ),
    }
    for form, run in runs.items():
        traffic = 2 * (hidden.numel() + weight.numel()) + (
            2 * rows * columns if form != "partials" else 16 * rows
        )
        arms = {
            **both("linear_cross_entropy", run),
            "bound: bf16 logits": lambda: hidden @ weight.t(),
        }
        what = f"{form}, {rows} x {features} x {columns}"
        yield Case("linear_cross_entropy", what, traffic, arms, 2 * rows * features * columns)


def _large(device: torch.device) -> bool:
    """Return whether the references' copies of large values fit the device. They do not fit a
    consumer GPU."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > 40e9


def group_quantize(device: torch.device, smoke: bool) -> Iterator[Case]:
    """qwZ's and qgZ's blocks, from bf16."""
    numel = 1 << (14 if smoke else 27 if _large(device) else 24)
    values = torch.randn(numel, device=device).to(torch.bfloat16)
    for bits, group_numel in ((8, 256), (4, 128)):

        def run(bits: int = bits, group_numel: int = group_numel) -> Quantized:
            return quantize(values, bits=bits, group_numel=group_numel)

        traffic = numel * 2 + run().size_bytes
        yield Case(
            "group_quantize",
            f"{numel:,} bf16 to int{bits} in {group_numel}s",
            traffic,
            both("group_quantize", run),
        )


def group_dequantize(device: torch.device, smoke: bool) -> Iterator[Case]:
    """The inverse: blocks dequantized to bf16."""
    numel = 1 << (14 if smoke else 27 if _large(device) else 24)
    values = torch.randn(numel, device=device).to(torch.bfloat16)
    out = torch.empty_like(values)
    for bits, group_numel in ((8, 256), (4, 128)):
        q = quantize(values, bits=bits, group_numel=group_numel)

        def run(q: Quantized = q) -> object:
            return dequantize(q, out=out)

        what = f"{numel:,} bf16 from int{bits} in {group_numel}s"
        yield Case(
            "group_dequantize", what, numel * 2 + q.size_bytes, both("group_dequantize", run)
        )


RANKS = 8
"""Pieces of a sum: one of each rank of a node."""


def pieces_of(device: torch.device, smoke: bool) -> list[torch.Tensor]:
    """The parts of a large unit's gradient that a rank gets from RANKS of them, in bf16."""
    numel = 1 << (11 if smoke else 24 if _large(device) else 21)
    return [torch.randn(numel, device=device).to(torch.bfloat16) for _ in range(RANKS)]


def encoded(values: torch.Tensor, *, bits: int, group_numel: int) -> torch.Tensor:
    size_bytes = wire_bytes(values.numel(), bits, group_numel)
    wire = torch.empty(size_bytes, dtype=torch.uint8, device=values.device)
    encode(values, wire, bits=bits, group_numel=group_numel)
    return wire


def wire_encode(device: torch.device, smoke: bool) -> Iterator[Case]:
    """qwZ's wire of weights, and qgZ's of gradients: rounded at random, with error feedback."""
    numel = 1 << (14 if smoke else 27 if _large(device) else 24)
    values = torch.randn(numel, device=device).to(torch.bfloat16)
    for bits, group_numel, feedback in ((8, 256, False), (4, 128, True)):
        wire = encoded(values, bits=bits, group_numel=group_numel)
        error = torch.zeros_like(values) if feedback else None

        def run(
            wire: torch.Tensor = wire,
            error: torch.Tensor | None = error,
            bits: int = bits,
            group_numel: int = group_numel,
        ) -> None:
            key = None if error is None else 7
            encode(values, wire, bits=bits, group_numel=group_numel, key=key, error=error)

        traffic = 2 * numel + wire.numel() + (4 * numel if feedback else 0)
        what = f"{numel:,} bf16 to int{bits} in {group_numel}s"
        what += " with error feedback" if feedback else ""
        yield Case("wire_encode", what, traffic, both("wire_encode", run))


def wire_decode(device: torch.device, smoke: bool) -> Iterator[Case]:
    """A gathered wire of weights, and the mean of the ranks' wires of gradients."""
    parts = pieces_of(device, smoke)
    out = torch.empty_like(parts[0])
    for bits, group_numel, count in ((8, 256, 1), (4, 128, RANKS)):
        wires = [encoded(part, bits=bits, group_numel=group_numel) for part in parts[:count]]

        def run(
            wires: list[torch.Tensor] = wires, bits: int = bits, group_numel: int = group_numel
        ) -> None:
            decode_sum(wires, out, bits=bits, group_numel=group_numel, divisor=len(wires))

        traffic = sum(wire.numel() for wire in wires) + 2 * out.numel()
        what = f"{out.numel():,} bf16 from {count} x int{bits} in {group_numel}s"
        yield Case("wire_decode", what, traffic, both("wire_decode", run))


def ordered_sum(device: torch.device, smoke: bool) -> Iterator[Case]:
    """The mean of the ranks' gradients, in the order of ranks."""
    parts = pieces_of(device, smoke)
    out = torch.empty_like(parts[0])

    def run() -> None:
        sum_in_order(parts, out, divisor=RANKS)

    what = f"{RANKS} x {out.numel():,} bf16"
    yield Case("ordered_sum", what, 2 * (RANKS + 1) * out.numel(), both("ordered_sum", run))


def update(device: torch.device, smoke: bool) -> Iterator[Case]:
    """AdamW on one chunk, two parameters in it, from a bf16 gradient. torch's arm has the same
    bits, in many passes."""
    formats = {
        "exact": Format.SPLIT,
        "bf16": Format(Master.SPLIT, Moments.BF16, 2),
        "compact": Format(Master.SPLIT8, Moments.Q8, 2),
    }
    rows = [
        hyper_row_adamw(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=5, key=key)
        for key in (1, 2)
    ]
    hypers = np.array(rows, HYPER)
    for name, state_format in formats.items():
        numel = 4096 if smoke else chunk_numel(state_format)
        half = numel // 2 // QUANT_GROUP * QUANT_GROUP
        segs = np.zeros(2, SEG)
        segs["start"], segs["numel"], segs["hyper"] = (0, half), (half, numel - half), (0, 1)
        # States of zeros, and a gradient that moves them: what a first step finds.
        sections = [
            torch.zeros(kind.size_bytes(numel), dtype=torch.uint8, device=device)
            for kind in state_format.sections
        ]
        grad = torch.randn(numel, device=device).to(torch.bfloat16)

        arms: dict[str, Callable[[], object]] = {}
        for which in choice.IMPLEMENTATIONS:
            # a plan is made once a step with the implementation chosen then
            with choice.forced(update=which):
                plan = UpdatePlan(
                    state_format, [segs], hypers, device=device, grad_dtype=grad.dtype
                )
            arms[which] = functools.partial(plan.run, 0, sections, grad)
        traffic = 2 * numel + 2 * sum(section.numel() for section in sections)
        yield Case("update", f"AdamW, {name}, a chunk of {numel:,}", traffic, arms)


CASES: dict[str, Callable[[torch.device, bool], Iterator[Case]]] = {
    "tile_matmul": tile_matmul,
    "linear_cross_entropy": linear_cross_entropy,
    "group_quantize": group_quantize,
    "group_dequantize": group_dequantize,
    "wire_encode": wire_encode,
    "wire_decode": wire_decode,
    "ordered_sum": ordered_sum,
    "update": update,
}
"""Operation -> its cases on a device; the second argument asks for tiny ones."""


def _milliseconds(run: Callable[[], object], flush: torch.Tensor) -> float:
    flush.zero_()
    if flush.device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure_case(case: Case, flush: torch.Tensor, *, rounds: int) -> dict[str, Any]:
    """The case as a record: milliseconds per arm, GB/s, TFLOP/s, and torch's best time over
    Triton's."""
    for run in case.arms.values():  # compiled, tuned and allocated before anything is measured
        run()
        run()
    if flush.device.type == "cuda":
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in case.arms}
    for index in range(rounds):
        names = list(case.arms)
        for name in names if index % 2 == 0 else reversed(names):
            times[name].append(_milliseconds(case.arms[name], flush))
    medians = {name: statistics.median(values) for name, values in times.items()}
    of_torch = min(value for name, value in medians.items() if name.startswith("torch"))
    return {
        "op": case.op,
        "what": case.what,
        "ms": medians,
        "ms_range": {name: [min(values), max(values)] for name, values in times.items()},
        "gb_per_s": {name: case.traffic_bytes / value / 1e6 for name, value in medians.items()},
        "tflop_per_s": {name: case.flops / value / 1e9 for name, value in medians.items()}
        if case.flops
        else None,
        "ratio": of_torch / medians["triton"],
        "rounds": rounds,
    }


def measure(
    names: Sequence[str], device: torch.device, *, rounds: int, smoke: bool
) -> Iterator[dict[str, Any]]:
    """Yield a record for each measured case, and one at the end of each operation. A case that
    fails is recorded, and the next cases run; a case that cannot be built ends its operation."""
    flush = torch.empty(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)
    for name in names:
        cases, what = CASES[name](device, smoke), "making the first case"
        while True:
            try:
                case = next(cases, None)
                if case is None:
                    break
                what = case.what
                harness.note(f"{name}: {what}")
                yield measure_case(case, flush, rounds=rounds)
                what = f"making the case after {case.what}"
            except Exception as error:  # noqa: BLE001 - compilers raise what they like; it is recorded and shown
                why = f"{type(error).__name__}: {error}"
                harness.note(f"{name}, {what}: {why}")
                yield {"op": name, "what": what, "failed": why[:2000]}
        yield {"op": name, "state": "ended"}


def about(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of the measurement."""
    found: dict[str, Any] = {"script": "bench_ops", "run": harness.now()}
    found |= {"commit": harness.commit(), "machine": harness.machine()}
    on: dict[str, Any] = {"device": device.type, "torch": str(torch.__version__)}
    if device.type == "cuda":
        on["name"] = torch.cuda.get_device_name(device)
        on["capability"] = list(torch.cuda.get_device_capability(device))
    return {**found, "on": on}


def show(record: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    rows = []
    for row in found:
        if "failed" in row:
            rows.append([row["op"], row["what"], "failed", row["failed"], "", ""])
            continue
        for arm, value in row["ms"].items():
            speed = f"{row['gb_per_s'][arm]:.0f} GB/s"
            if row["tflop_per_s"]:
                speed = f"{row['tflop_per_s'][arm]:.0f} TFLOP/s"
            ratio = f"{row['ratio']:.2f}" if arm == "triton" else ""
            rows.append([row["op"], row["what"], arm, f"{value:.3f}", speed, ratio])
    harness.print_table(
        f"operations on {record['on'].get('name', 'the CPU')}, torch {record['on']['torch']}",
        ["operation", "case", "arm", "ms", "speed", "ratio"],
        rows,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", nargs="+", choices=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", type=Path, help="file to append a JSON line per case to")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the figures mean nothing")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        harness.note(
            "NOT RUN: bench_ops: torch finds no CUDA device; --device cpu --smoke tries it"
        )
        return NOT_RUN
    if choice.interpreted() != (options.device == "cpu"):
        raise harness.BenchError(
            "on a GPU unset TRITON_INTERPRET, or the interpreter is what would be measured; "
            "with --device cpu set TRITON_INTERPRET=1: there the interpreter is all that runs"
        )
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    smoke = options.smoke or options.device == "cpu"
    rounds = 2 if smoke else options.rounds
    record, rows = about(device), []
    for row in measure(options.ops or list(CASES), device, rounds=rounds, smoke=smoke):
        if options.results is not None:
            harness.append_line(options.results, {**record, **row})
        if "what" in row:
            rows.append(row)
    show(record, rows)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
