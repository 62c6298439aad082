"""How fast the update kernels and the checksums are, beside torch's fused AdamW and what the memory allows.

    python bench/bench_kernels.py                 # a table
    python bench/bench_kernels.py --json          # one JSON line
    python bench/bench_kernels.py --append        # and one line to bench/results/kernels.jsonl
    python bench/bench_kernels.py --smoke         # tiny and fast: only shows that everything runs

One thread, as the executor's worker has, and its CPU time, since others may use the machine. Every round runs each arm
once, in turn, so that a machine that slows down slows them all; figures are medians over the rounds. "cache": two pieces,
updated again and again. "memory": states far larger than any cache. The limit is the arm's traffic (every byte it reads
and writes) over the bandwidth of an in-place addition in the same round: a copy would be no limit, since it also reads
the lines it overwrites. In cache, `torch.optim` is mostly the overhead of `step()`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from infinity import native
from infinity.aio.plan import CHUNK, HYPER, PIECE_NUMEL, SEG, Format, GradDtype, piece_count
from infinity.native import ffi, lib
from infinity.ops.adamw import Hyper, adamw_split_

HYPER_ROW = Hyper(lr=1e-4, step=10, weight_decay=0.1).row()

SPLIT_BYTES = 14 + 12
"""Read and written per parameter: 12 of states and 2 of gradient, 12 of states."""
FP32_BYTES = 16 + 12


@dataclass(frozen=True)
class Arm:
    """Something that is timed: `run` handles `numel` parameters, or bytes for copies and checksums."""

    name: str
    run: Callable[[], object]
    bytes_per_item: int
    keep: object = None
    """Arrays that `run` knows only by address."""


def _address(array: np.ndarray[Any, Any], kind: str) -> Any:
    return ffi.cast(kind, array.ctypes.data)


def _states(state_format: Format, numel: int) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(min(numel, 1 << 20)).astype(np.float32)
    master = np.resize(noise, numel)
    moments = [master * np.float32(0.01), np.square(master) * np.float32(1e-4)]
    grad = np.resize(noise[::-1], numel).astype(np.float32)
    if state_format is Format.FP32:
        return [master, *moments], grad
    hi, lo = np.empty(numel, np.uint16), np.empty(numel, np.int16)
    lib.inf_split_master(
        _address(master, "float *"), _address(hi, "uint16_t *"), _address(lo, "int16_t *"), numel
    )
    return [hi, lo, *moments], (grad.view(np.uint32) >> 16).astype(np.uint16)


def _kernel_arm(name: str, state_format: Format, numel: int) -> Arm:
    sections, grad = _states(state_format, numel)
    addresses = ffi.new("uint8_t *[6]", [_address(array, "uint8_t *") for array in sections])
    place = _address(grad, "void *")
    kind = GradDtype.BF16 if grad.itemsize == 2 else GradDtype.FP32
    row = _address(HYPER_ROW, "inf_hyper *")

    def run() -> None:
        lib.inf_update(int(state_format), addresses, place, int(kind), numel, 0, row)

    traffic = SPLIT_BYTES if state_format is Format.SPLIT else FP32_BYTES
    return Arm(name, run, traffic, keep=(sections, grad))


def _chunk_arm(numel: int) -> Arm:
    """The fused pass on one chunk of `numel`: verify, update, checksum."""
    sections, grad = _states(Format.SPLIT, numel)
    pieces = piece_count(numel)
    sums, scratch = np.zeros((4, pieces), np.uint32), np.zeros((4, pieces), np.uint32)
    record, seg, hypers = np.zeros((), CHUNK), np.zeros(1, SEG), np.array([HYPER_ROW], HYPER)
    record["numel"], record["format"], record["section_count"] = numel, int(Format.SPLIT), 4
    record["piece_numel"], record["itemsize"][:4] = PIECE_NUMEL, (2, 2, 4, 4)
    record["section_at"][:4], record["run_bytes"] = [0, 2 * numel, 4 * numel, 8 * numel], 12 * numel
    record["sums_ptr"] = sums.ctypes.data
    seg["numel"], seg["grad"] = numel, grad.ctypes.data
    chunk = _address(record, "inf_chunk *")
    addresses = ffi.new("uint8_t *[6]", [_address(section, "uint8_t *") for section in sections])
    for index in range(4):
        lib.inf_section_store(chunk, index, addresses[index], addresses[index])

    def run() -> None:
        code = lib.inf_chunk_update(
            chunk,
            addresses,
            _address(seg, "inf_seg *"),
            1,
            _address(hypers, "inf_hyper *"),
            1,
            ffi.NULL,
            1,
            0,
            _address(scratch, "uint32_t *"),
        )
        assert code == -1, code

    return Arm("fused pass: verify, exact, checksum", run, SPLIT_BYTES, keep=(sections, grad, sums))


def _torch_arms(numel: int) -> list[Arm]:
    param = torch.randn(numel, requires_grad=True)
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=1e-4, weight_decay=0.1, fused=True)
    sections, grad = _states(Format.SPLIT, numel)
    tensors = [torch.from_numpy(section.view(f"i{section.itemsize}")) for section in sections[:2]]
    tensors += [torch.from_numpy(section) for section in sections[2:]]
    gradient = torch.from_numpy(grad.view(np.int16)).view(torch.bfloat16)
    return [
        Arm("torch.optim.AdamW(fused=True), fp32", optimizer.step, FP32_BYTES),
        Arm("torch fall-back, exact", lambda: adamw_split_(*tensors, gradient, HYPER_ROW), SPLIT_BYTES),
    ]


def _in_place_arm(size_bytes: int) -> Arm:
    array = np.ones(size_bytes // 4, np.float32)
    return Arm("in-place addition", lambda: np.add(array, np.float32(1), out=array), 2)


def _seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def measure_updates(numel: int, *, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Every arm at one problem size; a row per arm with medians."""
    arms = [
        _kernel_arm("exact", Format.SPLIT, numel),
        _chunk_arm(numel),
        _kernel_arm("fp32", Format.FP32, numel),
        *_torch_arms(numel),
    ]
    touched_bytes = 12 * numel
    plain = _in_place_arm(touched_bytes)
    for arm in arms:
        arm.run()
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    limits: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        bytes_per_s = 2 * touched_bytes / _seconds(plain.run, repeats)
        for arm in arms:
            rates[arm.name].append(numel / _seconds(arm.run, repeats))
            limits[arm.name].append(bytes_per_s / arm.bytes_per_item)
    rows = []
    for arm in arms:
        rate = harness.Summary.of(rates[arm.name]).median
        limit = harness.Summary.of(limits[arm.name]).median
        rows.append(
            {
                "arm": arm.name,
                "numel": numel,
                "gparam_per_s": rate / 1e9,
                "gb_per_s": rate * arm.bytes_per_item / 1e9,
                "limit_gparam_per_s": limit / 1e9,
                "of_limit": rate / limit,
            }
        )
    return rows


def measure_checksums(size_bytes: int, *, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """GB/s of every implementation that this machine has, on one buffer."""
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
            {"implementation": name, "size_bytes": size_bytes, "gb_per_s": size_bytes / seconds / 1e9}
        )
    return rows


def measure(*, smoke: bool) -> dict[str, Any]:
    """Everything, as one record."""
    rounds = 1 if smoke else 7
    small, large = (4096, 8192) if smoke else (16_384, 24 * 1024 * 1024)
    updates = {
        "cache": measure_updates(small, rounds=rounds, repeats=1 if smoke else 200),
        "memory": measure_updates(large, rounds=rounds, repeats=1),
    }
    checksums = measure_checksums(1 << 15, rounds=rounds, repeats=1 if smoke else 500)
    if not smoke:
        checksums += measure_checksums(1 << 28, rounds=3, repeats=1)
    return {
        "run": harness.now(),
        "machine": harness.machine(),
        "isa": native.isa(),
        "crc32c": native.crc32c_name(),
        "torch": torch.__version__,
        "updates": updates,
        "checksums": checksums,
    }


def show(record: dict[str, Any]) -> None:
    """Print the record as tables."""
    for where, rows in record["updates"].items():
        harness.print_table(
            f"AdamW, one thread, {record['isa']}, {where} ({rows[0]['numel']:,} parameters)",
            ["arm", "Gparam/s", "traffic GB/s", "memory limit Gparam/s", "of limit"],
            [
                [
                    row["arm"],
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
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of tables")
    parser.add_argument(
        "--append", action="store_true", help="append the JSON line to bench/results/kernels.jsonl"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the figures mean nothing")
    options = parser.parse_args()
    if not native.available():
        raise harness.BenchError(f"there are no native kernels to measure: {native.reason()}")
    torch.set_num_threads(1)
    record = measure(smoke=options.smoke)
    if options.append:
        harness.append_line(Path(harness.RESULTS) / "kernels.jsonl", record)
    if options.json:
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        show(record)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
