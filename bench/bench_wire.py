"""Compares the codec of collectives on one CPU thread with torch and the memory's bandwidth.

    python bench/bench_wire.py                 # a table
    python bench/bench_wire.py --json          # one JSON line
    python bench/bench_wire.py --append        # and one line to bench/results/wire.jsonl
    python bench/bench_wire.py --smoke         # tiny and fast: only shows that everything runs

Every round runs each case once, in varying order; figures are medians over the rounds, in one
thread's CPU time, so that other work on the machine only competes for caches and memory. The limit
is the case's traffic (every byte that it must read and write) divided by the bandwidth of an
in-place addition in the same round. "torch" is the reference in
infinity/_src/kernels/comm_codec.py, which runs without the extension; it runs once, since it is
slow.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch

from infinity._src.cabi import native
from infinity._src.kernels import comm_codec as wire
from infinity._src.kernels.quantized import wire_bytes

BITS = {8: 256, 4: 128}
"""Elements per group: of weights (qwZ), of gradients (qgZ)."""
RANKS = 4


@dataclass(frozen=True)
class Case:
    """One measured case. traffic: bytes read and written per element."""

    name: str
    traffic: float
    run: Callable[[], object]
    torch: Callable[[], object]


def noise(numel: int, seed: int) -> torch.Tensor:
    """bf16 [numel]."""
    values = torch.randn(
        min(numel, 1 << 20), generator=torch.Generator().manual_seed(seed)
    ).bfloat16()
    return values.repeat(-(-numel // values.numel()))[:numel].clone()


def cases(numel: int) -> list[Case]:
    """Yield the cases of hierarchical reduction and of gathering weights, in bf16."""
    values, out = noise(numel, 0), torch.empty(numel, dtype=torch.bfloat16)
    error = torch.zeros(numel, dtype=torch.bfloat16)
    found = []

    def encoding(
        bits: int, group: int, buffer: torch.Tensor, key: int | None, left: torch.Tensor | None
    ) -> None:
        how = "to nearest" if key is None else "at random"
        how += "" if left is None else ", error feedback"
        found.append(
            Case(
                f"encode int{bits}, {how}",
                2 + buffer.numel() / numel + (0 if left is None else 4),
                lambda: wire.encode(
                    values, buffer, bits=bits, group_numel=group, key=key, error=left
                ),
                lambda: wire.encode_torch(values, buffer, bits, group, key, 0, left),
            )
        )

    def decoding(bits: int, group: int, wires: list[torch.Tensor]) -> None:
        found.append(
            Case(
                f"decode int{bits}" if len(wires) == 1 else f"sum of {len(wires)} wires int{bits}",
                2 + sum(buffer.numel() for buffer in wires) / numel,
                lambda: wire.decode_sum(
                    wires, out, bits=bits, group_numel=group, divisor=len(wires)
                ),
                lambda: wire.decode_sum_torch(wires, out, bits, group, len(wires)),
            )
        )

    def summing(pieces: list[torch.Tensor]) -> None:
        found.append(
            Case(
                f"sum of {len(pieces)} pieces bf16",
                2 + 2 * len(pieces),
                lambda: wire.sum_in_order(pieces, out, divisor=len(pieces)),
                lambda: wire.sum_in_order_torch(pieces, out, len(pieces)),
            )
        )

    for bits, group in BITS.items():
        wires = [
            torch.zeros(wire_bytes(numel, bits, group), dtype=torch.uint8)
            for _ in range(RANKS)
        ]
        for seed, buffer in enumerate(wires):
            wire.encode(noise(numel, seed), buffer, bits=bits, group_numel=group)
        encoding(bits, group, wires[0], None, None)
        encoding(bits, group, wires[0], 7, None)
        encoding(bits, group, wires[0], None, error)
        decoding(bits, group, wires[:1])
        decoding(bits, group, wires)
    pieces = [noise(numel, seed) for seed in range(RANKS)]
    summing(pieces[:2])
    summing(pieces)
    return found


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of this thread that one run takes, the mean of `repeats` runs."""
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def measure(numel: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Run all measurements. Returns one record."""
    torch.set_num_threads(1)
    found = cases(numel)
    addends = torch.zeros(max(numel, 1 << 16))
    chance = random.Random(0)
    times: dict[str, list[float]] = {case.name: [] for case in found}
    bandwidths: list[float] = []
    for case in found:
        case.run()
    addends.add_(1)
    for _ in range(rounds):
        bandwidths.append(8 * addends.numel() / seconds(lambda: addends.add_(1), repeats))
        for case in chance.sample(found, len(found)):
            times[case.name].append(seconds(case.run, repeats))
    rows = []
    for case in found:
        shares = [
            case.traffic * numel / s / limit
            for s, limit in zip(times[case.name], bandwidths, strict=True)
        ]
        rate = harness.Summary.of([numel / s for s in times[case.name]])
        share = harness.Summary.of(shares)
        rows.append(
            {
                "case": case.name,
                "gelem_per_s": rate.median / 1e9,
                "gelem_per_s_range": [rate.least / 1e9, rate.most / 1e9],
                "bf16_gb_per_s": 2 * rate.median / 1e9,
                "traffic_gb_per_s": case.traffic * rate.median / 1e9,
                "of_limit": share.median,
                "of_limit_range": [share.least, share.most],
                "torch_gelem_per_s": numel / seconds(case.torch, 1) / 1e9,
            }
        )
    return {
        "run": harness.now(),
        "commit": harness.commit(),
        "machine": harness.machine(),
        "isa": native.isa(),
        "numel": numel,
        "rounds": rounds,
        "memory_gb_per_s": harness.Summary.of(bandwidths).median / 1e9,
        "cases": rows,
    }


def show(record: dict[str, Any]) -> None:
    """Print the record as a table."""
    harness.print_table(
        f"One thread, {record['isa']}, {record['numel']:,} elements; memory "
        f"{record['memory_gb_per_s']:.1f} GB/s",
        ["case", "Gelem/s", "range", "GB/s of bf16", "traffic GB/s", "of limit", "torch Gelem/s"],
        [
            [
                row["case"],
                f"{row['gelem_per_s']:.2f}",
                "–".join(f"{rate:.2f}" for rate in row["gelem_per_s_range"]),
                f"{row['bf16_gb_per_s']:.1f}",
                f"{row['traffic_gb_per_s']:.1f}",
                f"{row['of_limit']:.2f}",
                f"{row['torch_gelem_per_s']:.3f}",
            ]
            for row in record["cases"]
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--numel", type=int, default=1 << 25, help="elements of each case (33554432)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of a case in a round: more for sizes that fit a cache",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line instead of a table"
    )
    parser.add_argument(
        "--append", action="store_true", help="append the JSON line to bench/results/wire.jsonl"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the figures mean nothing")
    options = parser.parse_args()
    if not native.available():
        raise harness.BenchError(f"there are no native kernels to measure: {native.reason()}")
    if options.smoke:
        options.rounds, options.numel, options.repeats = 1, 8192 + 65, 20
    record = measure(options.numel, options.rounds, options.repeats)
    if options.append:
        harness.append_line(Path(harness.RESULTS) / "wire.jsonl", record)
    if options.json:
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        show(record)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
