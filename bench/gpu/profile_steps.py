"""A profile of two training steps of `train.py`'s model: a trace for people (Perfetto,
chrome://tracing), and what the copies in it say: how busy each direction was, and how long it
stood still between one copy and the next.

Short gaps between many copies mean that copies are too small or too few are under way; long ones,
that the bus waits for kernels, the drive or the updates.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerator
import r1
import torch
import train
import train_arm

WAYS = {"HtoD": "Memcpy HtoD", "DtoH": "Memcpy DtoH"}
TRACE_BYTES_MAX = 15 << 20  # a larger one is left out: it might not be brought back


def gaps(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the copies of a trace, by direction; times of a trace are microseconds."""
    found: dict[str, Any] = {}
    for way, name in WAYS.items():
        mine = sorted(
            (float(one["ts"]), float(one["dur"]), int(one.get("args", {}).get("bytes", 0)))
            for one in events
            if one.get("cat") == "gpu_memcpy" and name in one.get("name", "")
        )
        if not mine:
            continue
        still = [
            max(after[0] - (before[0] + before[1]), 0.0)
            for before, after in itertools.pairwise(mine)
        ]
        busy, span = sum(one[1] for one in mine), mine[-1][0] + mine[-1][1] - mine[0][0]
        size = sum(one[2] for one in mine)
        found[way] = {
            "copies": len(mine),
            "bytes": size,
            "mean_kib": round(size / len(mine) / 1024, 1),
            "busy_share": round(busy / span, 3),
            "gbps_while_busy": round(size / busy / 1e3, 2),
            "gap_us_median": round(statistics.median(still), 1) if still else 0.0,
            "gaps_below_50_us_s": round(sum(gap for gap in still if gap < 50) / 1e6, 4),
            "gaps_above_s": round(sum(gap for gap in still if gap >= 50) / 1e6, 4),
        }
    return found


def profile(device: str, fields: dict[str, int], rows: int, trace: Path) -> dict[str, Any]:
    """Train two steps under torch's profiler. Blocks."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    workload = r1.Workload(**fields)
    arm = train_arm.infinity_arm(workload, device, {"params": "cpu", "optim": "cpu"})
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    try:
        ids = torch.ones((rows, workload.tokens), dtype=torch.int64, device=device)
        for _ in range(2):
            arm.step(ids)
        arm.flush()
        with profiler(activities=[kind]) as found:
            for _ in range(2):
                arm.step(ids)
            arm.flush()
            accelerator.synchronise(device)
        with tempfile.TemporaryDirectory() as place:
            plain = Path(place) / "trace.json"
            found.export_chrome_trace(str(plain))
            text = plain.read_bytes()
    finally:
        arm.close()
    packed = gzip.compress(text, 6)
    if len(packed) <= TRACE_BYTES_MAX:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_bytes(packed)
    events = json.loads(text)["traceEvents"]
    return {"events": len(events), "trace_bytes": len(packed), "ways": gaps(events)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator.add_arguments(parser)
    parser.add_argument("--trace", type=Path, required=True, help="file to write, .json.gz")
    parser.add_argument("--size", choices=list(train.SHAPES), help="(1b; tiny without a GPU)")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a step (%(default)s)")
    args = parser.parse_args()
    size = args.size or ("1b" if args.device == "cuda" else "tiny")
    fields = {**train.SHAPES[size], "tokens": 2048 if args.device == "cuda" else 16}
    with accelerator.computing(args.device) as device:
        found = profile(device, fields, args.rows, args.trace)
    accelerator.record("profile_steps", args.device, {"size": size, **found}, args.results)
    for way, figures in found["ways"].items():
        sys.stdout.write(f"{way}: {json.dumps(figures)}\n")
    if not found["ways"] and args.device != "cuda":
        # The trace was made; the copies in it, which it is for, are a GPU's.
        raise accelerator.NotRun("no copy was seen: torch's profiler sees those of a real GPU only")
    return 0 if found["ways"] else 1


if __name__ == "__main__":
    sys.exit(accelerator.main(main))
