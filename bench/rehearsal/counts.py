"""Counts: the number of chunks and units of Llama-3-405B, 1.03 million and 506, with 1/192 of its
bytes.

    python bench/rehearsal/counts.py --dir out                       # 0.1, 0.3 and 1.03 million
    python bench/rehearsal/counts.py --dir out --chunks 20000 --units 23

The engine runs with real I/O; chunks have 2,048 elements instead of 393,216. For each count, in
separate processes:

    train     offload, AdamW, two steps clipped by their norm, a save, a third step; killed in the
              fourth (SIGKILL)
    restore   a new process restores the save and takes the third step: its loss must be the same
    offline   the save is verified and resharded to two ranks
    durable   two committed steps; killed in the third
    resume    a new process resumes the run: the loss of the step after its last commit must be that
              of `train`; the run is verified

Each phase reports seconds, CPU seconds and added memory, in total and per chunk: the values per
chunk must not grow with the count. Each count appends a JSON line to
bench/results/rehearsal_counts.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import bench_path  # noqa: F401 - adds bench/ to sys.path
import harness
import meter
import torch
from torch import nn

import infinity as inf
from infinity._src.checkpoint import reshard as resharding
from infinity._src.checkpoint.durable.copies import run_directory
from infinity._src.checkpoint.reader import Checkpoint
from infinity._src.checkpoint.reshard import ReshardJob
from infinity._src.checkpoint.verify import VerifyJob
from infinity._src.engine import build

CHUNK_NUMEL = 2048
UNITS = 506
COUNTS = (100_000, 300_000, 1_030_000)
CHILDREN = (("train", "restore", "offline"), ("durable", "resume"))
DISK_BYTES_PER_PARAM = 28
"""A run and its save take 12 + 14 bytes; two saves 14 each, once the run is gone; a durable run
takes 28."""


class Rows(nn.Module):
    """A matrix for each unit, a row for each of its chunks."""

    def __init__(self, chunks: int, units: int) -> None:
        super().__init__()
        sizes = [chunks // units + (number < chunks % units) for number in range(units)]
        self.layers = nn.ModuleList(
            nn.Linear(CHUNK_NUMEL, size, bias=False, dtype=torch.bfloat16) for size in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each row gets a gradient of its own, and the loss moves with every one of them.
        found = []
        for number, layer in enumerate(self.layers, 1):
            rows = layer(x).float()
            weights = torch.linspace(number, number + 1, rows.shape[1])
            found.append((rows.square() * weights).mean())
        return torch.stack(found).sum()


class Phases:
    """Lines about the phases of one child, printed for the parent."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        gc.collect()
        meter.reset_peak_rss()
        rss = meter.rss_bytes()
        began = time.perf_counter(), time.process_time()
        yield
        seconds, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        tell(
            phase=name,
            s=seconds,
            cpu_s=cpu_s,
            cpu_us_per_chunk=1e6 * cpu_s / self._chunks,
            added_bytes=meter.rss_bytes() - rss,
            peak_bytes_per_chunk=(meter.peak_rss_bytes() - rss) / self._chunks,
        )


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


# -- children --------------------------------------------------------------------------------------


class Trainer:
    """The model of one child, and its steps."""

    def __init__(self, args: argparse.Namespace, phases: Phases, **policy: Any) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = Rows(args.chunks[0], args.units)
        chosen = inf.Policy(
            params="nvme", optim="nvme", ram=args.ram, units=["Linear"], nvme=args.dir / "run",
            **policy,
        )  # fmt: skip
        self._phases = phases
        torch.manual_seed(1)
        with phases.phase("offload"):
            # A callable: the whole model is never in memory.
            inf.offload(self.model, chosen, load=lambda _, out: out.normal_(std=0.02))
        with phases.phase("optimizer"):
            self.optimizer = inf.AdamW(self.model.parameters(), lr=1e-3)
        self.handle = inf.handle(self.model)
        self._batch = torch.randn(
            2, CHUNK_NUMEL, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)
        )

    def step(self, name: str = "step") -> float:
        """One step, and all its writes; returns the loss before it."""
        with self._phases.phase(name):
            loss = self._backward()
            self._update()
        return loss

    def killed(self) -> None:
        """Begin a step: the parent kills this process in it, or after it."""
        tell(dying=True, losses=[self._backward()])
        self._update()
        while True:
            signal.pause()

    def _backward(self) -> float:
        loss = self.model(self._batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return float(loss.detach())

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.handle.flush()


def train(args: argparse.Namespace, phases: Phases) -> None:
    trainer = Trainer(args, phases)
    tell(losses=[trainer.step("first step"), trainer.step()], ram=trainer.handle.stats().ram_bytes)
    with phases.phase("save"):
        inf.save(trainer.model, trainer.optimizer, args.dir / "saved").wait()
    tell(losses=[trainer.step()])
    trainer.killed()


def restore(args: argparse.Namespace, phases: Phases) -> None:
    trainer = Trainer(args, phases)
    with phases.phase("restore"):
        inf.restore(trainer.model, trainer.optimizer, args.dir / "saved")
    tell(losses=[trainer.step("step after restore")])
    trainer.handle.close()


def offline(args: argparse.Namespace, phases: Phases) -> None:
    with phases.phase("verify"):
        VerifyJob(args.dir / "saved").verify()
    with phases.phase("reshard"), Checkpoint.open(args.dir / "saved") as checkpoint:
        ReshardJob(checkpoint, world=2).write(args.dir / "resharded")


def durable(args: argparse.Namespace, phases: Phases) -> None:
    trainer = Trainer(args, phases, durable="new")
    tell(losses=[trainer.step("first committed step"), trainer.step("committed step")])
    trainer.killed()


def resume(args: argparse.Namespace, phases: Phases) -> None:
    trainer = Trainer(args, phases, durable=True)
    with phases.phase("resume"):
        restored = inf.restore(trainer.model, trainer.optimizer, args.dir / "run")
    tell(step=restored.step, losses=[trainer.step("step after resume")])
    trainer.handle.close()
    with phases.phase("verify run"):
        VerifyJob(run_directory(args.dir / "run")).verify()


def run_child(args: argparse.Namespace) -> int:
    """One child, whose chunks have `CHUNK_NUMEL` elements."""

    def tiny(_state: str, _dtype: torch.dtype) -> int:
        return CHUNK_NUMEL

    (args.dir / "run").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        for module in (build, resharding):
            stack.enter_context(mock.patch.object(module, "chunk_numel_of", tiny))
        globals()[args.child](args, Phases(args.chunks[0]))
    return 0


# -- parent ----------------------------------------------------------------------------------------


def spawn(args: argparse.Namespace, name: str, chunks: int, units: int, place: Path) -> list[Any]:
    """Run one child to its end, or to the middle of the step in which it is killed; returns its
    lines."""
    command = [
        sys.executable, __file__, f"--child={name}", f"--dir={place}", f"--chunks={chunks}",
        f"--units={units}", f"--ram={args.ram}",
    ]  # fmt: skip
    lines: list[Any] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=harness.die_with_parent,  # noqa: PLW1509 - safe: this process has one thread
    ) as child:
        assert child.stdout is not None
        try:
            for text in child.stdout:
                lines.append(line := json.loads(text))
                if "phase" in line:
                    harness.note(
                        f"  {name}: {line['phase']}: {line['s']:.1f} s, "
                        f"{line['cpu_us_per_chunk']:.0f} us of CPU and "
                        f"{line['peak_bytes_per_chunk']:.0f} B at its peak per chunk"
                    )
                if "dying" in line:
                    # In the midst of updates and their writes.
                    time.sleep(args.kill_after)
                    child.send_signal(signal.SIGKILL)
        except BaseException:
            child.kill()
            raise
    killed = any("dying" in line for line in lines)
    if child.returncode != (-signal.SIGKILL if killed else 0):
        raise harness.BenchError(f"{name} ended with status {child.returncode}")
    return lines


def of(lines: list[Any], name: str) -> list[Any]:
    """All values that a child process has reported under a name."""
    return [line[name] for line in lines if name in line]


def measure(args: argparse.Namespace, chunks: int) -> dict[str, Any]:
    """All children for one count."""
    units = min(args.units, chunks)
    harness.note(f"{chunks} chunks in {units} units, {chunks * CHUNK_NUMEL / 1e9:.2f}B parameters")
    harness.check_directory(args.dir, chunks * CHUNK_NUMEL * DISK_BYTES_PER_PARAM)
    told: dict[str, list[Any]] = {}
    for children in CHILDREN:
        with harness.scratch(args.dir) as place:
            for name in children:
                if name == "offline":
                    # Remove the run: the resharded save needs its space.
                    shutil.rmtree(place / "run")
                told[name] = spawn(args, name, chunks, units, place)
    losses = {name: list(itertools.chain(*of(lines, "losses"))) for name, lines in told.items()}
    steps = of(told["resume"], "step")[0]
    checks = {
        "restored": losses["restore"] == losses["train"][2:3],
        "durable": losses["durable"] == losses["train"][:3],
        # Killed in the third step: two were committed, and the third perhaps.
        "resumed": steps in (2, 3) and losses["resume"] == losses["train"][steps : steps + 1],
    }
    return {
        "chunks": chunks, "units": units, "losses": losses, "checks": checks,
        "committed_steps": steps, "ram_bytes": of(told["train"], "ram")[0],
        "phases": {name: [line for line in lines if "phase" in line]
                   for name, lines in told.items()},
    }  # fmt: skip


def show(records: list[dict[str, Any]]) -> None:
    """The table of what each phase takes per chunk at each count."""
    rows = []
    for child, phases in records[0]["phases"].items():
        for index, first in enumerate(phases):
            cells = [record["phases"][child][index] for record in records]
            rows.append([child, first["phase"], *(
                f"{cell['s']:.1f}; {cell['cpu_us_per_chunk']:.0f}, "
                f"{cell['peak_bytes_per_chunk']:.0f}" for cell in cells
            )])  # fmt: skip
    columns = ["child", "phase", *(f"{record['chunks']:,}" for record in records)]
    harness.print_table("seconds; CPU us and peak bytes per chunk", columns, rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory for the swap files")
    parser.add_argument("--chunks", type=harness.counts, default=list(COUNTS), help="counts")
    parser.add_argument("--units", type=int, default=UNITS, help="(%(default)s)")
    parser.add_argument("--ram", default="min", help="budget of the engine (%(default)s)")
    parser.add_argument("--kill-after", type=float, default=1.0,
                        help="seconds into the optimizer's step (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--child", choices=list(itertools.chain(*CHILDREN)), help=argparse.SUPPRESS
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "rehearsal_counts.jsonl")
    args = parser.parse_args()
    if min(*args.chunks, args.units) < 1:
        parser.error("--chunks and --units are 1 or more")
    return args


def main() -> int:
    args = parse()
    if args.child:
        return run_child(args)
    records = []
    for chunks in args.chunks:
        record = measure(args, chunks)
        records.append(record)
        harness.append_line(args.results, {
            "run": harness.now(), "commit": harness.commit(), "machine": harness.machine(),
            "load": os.getloadavg()[0], **record,
        })  # fmt: skip
    show(records)
    wrong = [
        f"{record['chunks']} chunks: {name}"
        for record in records
        for name, right in record["checks"].items()
        if not right
    ]
    if wrong:
        raise harness.BenchError(f"losses differ: {', '.join(wrong)}")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
