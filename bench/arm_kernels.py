"""One update kernel, timed round by round; started by bench_kernels.py, which says "go" on its
standard input.

Allocates the states of `--numel` parameters, runs one warm-up update, and prints "ready". For every
line on standard input it updates all of them once and prints one JSON line: wall and CPU seconds.
Input are bf16 gradients, output bf16 parameters; an arm's time includes the casts. Runs in any
interpreter that has the arm's library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Update = Callable[[], object]
LR, DECAY = 1e-4, 0.1

_KEPT: list[object] = []
"""Arrays that must stay alive: the kernels hold only their addresses."""


def _noise(numel: int) -> np.ndarray[Any, Any]:
    return np.resize(
        np.random.default_rng(0).standard_normal(min(numel, 1 << 20)).astype(np.float32), numel
    )


def _in_parts(numel: int, threads: int, part: Callable[[int, int], Update]) -> Update:
    """Runs `part(low, high)` on each thread's share at once, in persistent threads."""
    step = -(-numel // threads // 8192) * 8192
    updates = [part(low, min(low + step, numel)) for low in range(0, numel, step)]
    pool = ThreadPoolExecutor(threads)
    return lambda: [done.result() for done in [pool.submit(update) for update in updates]]


def _encoded(kind: Any, master: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The sections of states with these masters, rounded to nearest."""
    import torch

    from infinity._src.kernels.state_codec import encode_sections

    values = torch.from_numpy(master)
    return [
        section.numpy().copy()
        for section in encode_sections(kind, values, [values * 0.01, values.square() * 1e-4])
    ]


def ours(state: str, numel: int, threads: int) -> Update:
    """inf_update on sections in memory; `verified`: the executor's pass, with checksums before and
    after, on `exact`."""
    from infinity._src.cabi.native import ffi, lib
    from infinity._src.cabi.records import Master, Moments
    from infinity._src.kernels.hyper import hyper_row_adamw
    from infinity.aio import Format, GradDtype

    formats = {
        "exact": Format.SPLIT,
        "bf16": Format(Master.SPLIT, Moments.BF16, 2),
        "compact": Format(Master.SPLIT8, Moments.Q8, 2),
        "fp32": Format.FP32,
    }
    kind = formats[state]
    master = _noise(numel)
    sections = _encoded(kind, master)
    grad = (master[::-1].copy().view(np.uint32) >> 16).astype(np.uint16)
    row = hyper_row_adamw(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY, step=10, key=1)

    def part(low: int, high: int) -> Update:
        places = [
            ffi.cast("uint8_t *", section.ctypes.data + item.size_bytes(low))
            for item, section in zip(kind.sections, sections, strict=True)
        ]
        addresses = ffi.new("uint8_t *[6]", [*places, *[ffi.NULL] * (6 - len(places))])
        source, hyper = (
            ffi.cast("void *", grad[low:].ctypes.data),
            ffi.cast("inf_hyper *", row.ctypes.data),
        )
        return lambda: lib.inf_update(
            int(kind), addresses, source, int(GradDtype.BF16), high - low, low, hyper
        )

    _KEPT.append((sections, grad, row))
    return _in_parts(numel, threads, part)


def verified(numel: int, threads: int) -> Update:
    """Return the executor's pass on `exact` states: verify, update, recompute sums, by pieces."""
    from infinity._src.cabi.native import ffi, lib
    from infinity._src.cabi.records import CHUNK_NUMEL, PIECE_NUMEL, piece_count
    from infinity._src.kernels.hyper import hyper_row_adamw
    from infinity.aio import CHUNK, SEG, Format, GradDtype

    master = _noise(numel)
    sections = _encoded(Format.SPLIT, master)
    grad = (master.view(np.uint32) >> 16).astype(np.uint16)
    hypers = hyper_row_adamw(
        lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY, step=10
    ).reshape(1)

    def chunk(low: int, high: int) -> Update:
        record, seg = np.zeros((), CHUNK), np.zeros(1, SEG)
        sums, scratch = (np.zeros((4, piece_count(high - low)), np.uint32) for _ in range(2))
        record["numel"], record["format"], record["section_count"] = high - low, Format.SPLIT, 4
        record["piece_numel"], record["sums_ptr"] = PIECE_NUMEL, sums.ctypes.data
        record["itemsize"][:4] = [item.itemsize for item in Format.SPLIT.sections]
        record["section_at"][:4], record["run_bytes"] = (
            [(high - low) * at for at in (0, 2, 4, 8)],
            (high - low) * 12,
        )
        seg["numel"], seg["grad"], seg["grad_dtype"] = (
            high - low,
            grad[low:].ctypes.data,
            GradDtype.BF16,
        )
        plan = ffi.cast("inf_chunk *", record.ctypes.data)
        places = [ffi.cast("uint8_t *", section[low:].ctypes.data) for section in sections]
        addresses = ffi.new("uint8_t *[6]", [*places, ffi.NULL, ffi.NULL])
        for index, place in enumerate(places):
            lib.inf_section_store(plan, index, place, place)

        _KEPT.append((record, sums))

        def run() -> None:
            code = lib.inf_chunk_update(
                plan,
                addresses,
                ffi.cast("inf_seg *", seg.ctypes.data),
                1,
                ffi.cast("inf_hyper *", hypers.ctypes.data),
                1,
                ffi.NULL,
                1,
                0,
                ffi.cast("uint32_t *", scratch.ctypes.data),
            )
            assert code == -1, f"the pass refuses its own checksums: {code}"

        return run

    def part(low: int, high: int) -> Update:
        chunks = [chunk(at, min(at + CHUNK_NUMEL, high)) for at in range(low, high, CHUNK_NUMEL)]
        return lambda: [run() for run in chunks]

    _KEPT.append((sections, grad))
    return _in_parts(numel, threads, part)


def others(name: str, numel: int, threads: int) -> Update:
    """torch.optim.AdamW(fused=True) or DeepSpeedCPUAdam on fp32 parameters, with the casts that
    bf16 needs."""
    import torch

    torch.set_num_threads(threads)
    param = torch.from_numpy(_noise(numel)).requires_grad_()
    gradient = param.detach().flip(0).bfloat16()
    param.grad = torch.empty_like(param)
    compute = torch.empty(numel, dtype=torch.bfloat16)
    optimizer: Any
    if name == "deepspeed":
        from deepspeed.ops.adam import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            DeepSpeedCPUAdam,
        )

        optimizer = DeepSpeedCPUAdam([param], lr=LR, weight_decay=DECAY, adamw_mode=True)
    else:
        optimizer = torch.optim.AdamW([param], lr=LR, weight_decay=DECAY, fused=True)

    def update() -> None:
        with torch.no_grad():
            param.grad.copy_(gradient)  # type: ignore[union-attr]
            optimizer.step()
            compute.copy_(param)

    return update


def memory(numel: int, threads: int) -> Update:
    """The limit: four bytes of each of `numel` elements read, changed and written in place."""
    array = np.ones(numel, np.float32)

    def part(low: int, high: int) -> Update:
        mine = array[low:high]
        return lambda: np.add(mine, np.float32(1), out=mine)

    return _in_parts(numel, threads, part)


def make(arm: str, numel: int, threads: int) -> Update:
    """The update of one arm."""
    if arm == "memory":
        return memory(numel, threads)
    if arm == "exact verified":
        return verified(numel, threads)
    if arm in ("torch", "deepspeed"):
        return others(arm, numel, threads)
    return ours(arm, numel, threads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arm", required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    update = make(options.arm, options.numel, options.threads)
    update()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        update()
        record = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
