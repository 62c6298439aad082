"""The page of `infinity report` for R1 with several micro-batches: horizontal beside vertical.

    python bench/schedules_page.py --dir /mnt/nvme0 --out out/schedules --micro-batches 4

Measures the drive, then trains in one process after another: a loop over micro-batches, and
`inf.microbatched`, which takes all through a block before the next. Each leaves an `inf.StepLog` in
OUT/horizontal and OUT/vertical, of which the page OUT/report.html is made. Its figures are of one
run each, without alternation: it shows where a step's time goes, and compares no engines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import harness
import r1
import torch

ORDERS = ("horizontal", "vertical")


def train(
    workload: r1.Workload, order: str, swap: Path, out: Path, options: dict[str, str]
) -> None:
    """Train in this process; leave the log in `out`."""
    import infinity as inf

    model = r1.build_on_meta(workload)
    count = workload.micro_batches
    if order == "vertical":
        inf.microbatched(model, count)
    io = json.loads(options["io"])
    policy = inf.Policy(params="nvme", optim="nvme", nvme=swap, ram=options["ram"], io=io)
    inf.offload(model, policy, load=partial(r1.fill, seed=workload.seed))
    optimizer = inf.AdamW(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    parts = r1.micro_batches(workload)
    batches = [torch.cat(parts)] if order == "vertical" else parts
    with inf.StepLog(model, out) as log:
        for _ in range(workload.steps):
            losses = []
            for ids in batches:
                loss = model(input_ids=ids, labels=ids).loss / len(batches)
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
            optimizer.step()
            optimizer.zero_grad()
            log.step(sum(losses), tokens=count * workload.tokens)
            print(f"{order}: loss {sum(losses):.4f}", flush=True)
    inf.handle(model).close()


def measured(swap: Path) -> dict[str, list[float]]:
    """Bytes per second that the drive reads and writes."""
    from infinity._src.measure.swap import SwapTask, measure_swap

    phases = measure_swap(SwapTask(directories=(swap,), size_bytes=1 << 29)).phases
    return {str(swap): [phases[kind].spread.gbps * 1e9 for kind in ("read", "write")]}


def main() -> int:
    """Measure the drive, run both orders, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--out", type=Path, required=True, help="where the page goes")
    parser.add_argument("--ram", default="min", help="the budget (%(default)s)")
    parser.add_argument("--order", choices=ORDERS, help=argparse.SUPPRESS)
    parser.add_argument("--io", default="{}", help=argparse.SUPPRESS)
    r1.add_arguments(parser)
    parser.set_defaults(micro_batches=4, steps=20)
    given = parser.parse_args()
    workload = r1.from_arguments(given)
    if given.order is not None:
        train(workload, given.order, given.dir, given.out, {"ram": given.ram, "io": given.io})
        return 0
    from infinity._src.cli.html_report import write_report

    with tempfile.TemporaryDirectory(dir=given.dir) as swap:
        io = json.dumps({"bandwidths": measured(Path(swap))})
        for order in ORDERS:
            arguments = [f"--dir={swap}", f"--out={given.out / order}", f"--ram={given.ram}"]
            command = [sys.executable, __file__, *arguments, f"--order={order}", f"--io={io}"]
            environment = harness.environment(PYTHONPATH=str(harness.ROOT))
            subprocess.run([*command, *workload.arguments()], check=True, env=environment)
    page = given.out / "report.html"
    write_report([given.out / order for order in ORDERS], page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
