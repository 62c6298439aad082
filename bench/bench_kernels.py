"""Compares the update kernels and checksums with torch, DeepSpeed and the memory's bandwidth.

    python bench/bench_kernels.py                 # a table
    python bench/bench_kernels.py --json          # one JSON line
    python bench/bench_kernels.py --append        # and one line to bench/results/kernels.jsonl
    python bench/bench_kernels.py --smoke         # tiny and fast: only shows that everything runs

Every arm is a separate process (arm_kernels.py; DeepSpeed's in its own environment, which
compare_deepspeed.py prepares) that holds its states and updates them on request. Every round runs
each arm once, alone, in varying order; figures are medians of wall times over the rounds. All arms
start from bf16 gradients and end with bf16 parameters; their times include the casts. The limit is
the arm's traffic (every byte it must read and write) divided by the bandwidth of an in-place
addition by the same number of threads in the same round. (A copy is no limit: it also reads the
cache lines that it overwrites.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from compare_deepspeed import VENV, deepspeed_environment

from infinity._src.cabi import native
from infinity._src.cabi.native import ffi, lib

ARMS = {
    "exact": 2 + 12 + 12,
    "exact verified": 2 + 12 + 12,
    "bf16": 2 + 8 + 8,
    "compact": 2 + 5.0625 * 2,
    "torch": (2 + 4) + (16 + 12) + (4 + 2),
    "deepspeed": (2 + 4) + (16 + 12) + (4 + 2),
}
"""Bytes per parameter that each arm reads (gradient and states) and writes (states). For torch and
DeepSpeed: cast of the gradient, update, cast of the parameter."""


class Arm:
    """One arm's process."""

    def __init__(self, name: str, numel: int, threads: int) -> None:
        self.name = name
        script = [str(harness.BENCH / "arm_kernels.py"), "--arm", name]
        script += ["--numel", str(numel), "--threads", str(threads)]
        if name == "deepspeed":
            python, env = str(VENV / "bin" / "python"), deepspeed_environment()
        else:
            python, env = sys.executable, harness.environment(PYTHONPATH=str(harness.ROOT))
        env["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [python, *script],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("ready", "{")):  # others are its libraries' chatter
                return line
        raise harness.BenchError(
            f"the arm {self.name} ended with {self._process.wait()}: run arm_kernels.py by hand to "
            "see why"
        )

    def wait_ready(self) -> None:
        """Block until its states are allocated and a first update is done."""
        self._line()

    def round(self) -> float:
        """Seconds of one update of all its parameters."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(json.loads(self._line())["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def started(names: list[str], numel: int, threads: int) -> Iterator[dict[str, Arm]]:
    """Start the arms one after the other, so that none is set up while another warms up."""
    arms: dict[str, Arm] = {}
    try:
        for name in names:
            arms[name] = Arm(name, numel, threads)
            arms[name].wait_ready()
        yield arms
    finally:
        for arm in arms.values():
            arm.close()


def measure_updates(
    names: list[str], numel: int, threads: int, rounds: int
) -> list[dict[str, Any]]:
    """A row per arm with medians over the rounds."""
    chance = random.Random(0)
    memory_numel = max(numel, 1 << 16)
    rates: dict[str, list[float]] = {name: [] for name in names}
    limits: dict[str, list[float]] = {name: [] for name in names}
    with (
        started(names, numel, threads) as arms,
        started(["memory"], memory_numel, threads) as limit,
    ):
        for _ in range(rounds):
            bytes_per_s = 8 * memory_numel / limit["memory"].round()
            for name in chance.sample(names, len(names)):
                rates[name].append(numel / arms[name].round())
                limits[name].append(bytes_per_s / ARMS[name])
    rows = []
    for name in names:
        shares = [rate / limit for rate, limit in zip(rates[name], limits[name], strict=True)]
        rate, share = harness.Summary.of(rates[name]), harness.Summary.of(shares)
        rows.append(
            {
                "arm": name,
                "numel": numel,
                "threads": threads,
                "gparam_per_s": rate.median / 1e9,
                "gparam_per_s_range": [rate.least / 1e9, rate.most / 1e9],
                "gb_per_s": rate.median * ARMS[name] / 1e9,
                "limit_gparam_per_s": harness.Summary.of(limits[name]).median / 1e9,
                "of_limit": share.median,
                "of_limit_range": [share.least, share.most],
                "rounds": rounds,
            }
        )
    return rows


def _seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def measure_checksums(size_bytes: int, *, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Measure GB/s of every implementation that this machine supports, on one buffer, by one
    thread's CPU time."""
    data = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)
    view, ok = ffi.from_buffer(data), ffi.new("int32_t *")
    rows = []
    for variant in range(4):
        lib.inf_crc32c_with(variant, 0, view, size_bytes, ok)
        if not ok[0]:
            continue

        def run(variant: int = variant) -> None:
            lib.inf_crc32c_with(variant, 0, view, size_bytes, ok)

        seconds = harness.Summary.of([_seconds(run, repeats) for _ in range(rounds)]).median
        name = ffi.string(lib.inf_crc32c_name(variant)).decode()
        rows.append(
            {
                "implementation": name,
                "size_bytes": size_bytes,
                "gb_per_s": size_bytes / seconds / 1e9,
            }
        )
    return rows


def measure(
    names: list[str], threads: list[int], numel: int, *, rounds: int, smoke: bool
) -> dict[str, Any]:
    """Run all measurements. Returns one record."""
    checksums = measure_checksums(1 << 15, rounds=rounds, repeats=1 if smoke else 500)
    if not smoke:
        checksums += measure_checksums(1 << 28, rounds=3, repeats=1)
    return {
        "run": harness.now(),
        "commit": harness.commit(),
        "machine": harness.machine(),
        "isa": native.isa(),
        "crc32c": native.crc32c_name(),
        "updates": [
            row for count in threads for row in measure_updates(names, numel, count, rounds)
        ],
        "checksums": checksums,
    }


def show(record: dict[str, Any]) -> None:
    """Print the record as tables."""
    rows = record["updates"]
    harness.print_table(
        f"AdamW from bf16 gradients to bf16 parameters, {record['isa']}, {rows[0]['numel']:,} "
        "parameters",
        ["arm", "threads", "Gparam/s", "traffic GB/s", "memory limit Gparam/s", "of limit"],
        [
            [
                row["arm"],
                str(row["threads"]),
                f"{row['gparam_per_s']:.2f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['limit_gparam_per_s']:.2f}",
                f"{row['of_limit']:.2f}",
            ]
            for row in rows
        ],
    )
    harness.print_table(
        f"crc32c, one thread (in use: {record['crc32c']})",
        ["implementation", "bytes", "GB/s"],
        [
            [row["implementation"], f"{row['size_bytes']:,}", f"{row['gb_per_s']:.1f}"]
            for row in record["checksums"]
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), help="default: all that can run here"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--numel", type=int, default=24 * 1024 * 1024, help="parameters of each arm (25165824)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of tables")
    parser.add_argument(
        "--append", action="store_true", help="append the JSON line to bench/results/kernels.jsonl"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the figures mean nothing")
    options = parser.parse_args()
    if not native.available():
        raise harness.BenchError(f"there are no native kernels to measure: {native.reason()}")
    names = options.arms or list(ARMS)
    if "deepspeed" in names and not (VENV / "bin" / "python").exists():
        if options.arms:
            raise harness.BenchError(
                "DeepSpeed's environment is not there: compare_deepspeed.py makes it"
            )
        harness.note("the arm deepspeed is left out: compare_deepspeed.py makes its environment")
        names.remove("deepspeed")
    if options.smoke:
        options.rounds, options.numel = 1, 8192 + 64
        names = options.arms or [name for name in names if name != "deepspeed"]
    record = measure(
        names, options.threads, options.numel, rounds=options.rounds, smoke=options.smoke
    )
    if options.append:
        harness.append_line(Path(harness.RESULTS) / "kernels.jsonl", record)
    if options.json:
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        show(record)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
