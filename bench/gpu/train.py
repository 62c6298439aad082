"""Measures tokens per second, MFU, η and peak GPU memory of the engine on Llama-shaped models,
compared with FSDP2 with CPU offload (and DeepSpeed).

    1b, 7b     1.06 and 6.8 billion parameters: `cpu` (states in RAM), `nvme` (states on the drive,
    and in RAM if the drive is too small)
    largest    as many layers of width 6144 as fit RAM and drive, compact states, updated in
    backward

Arms are processes. Arms that fit RAM together run at once and step alternately, others run one
after another. An arm that does not fit is not tried, and the reason is recorded; an arm that takes
too long or fails loses only its own figures.

    model FLOP    6 x parameters x tokens + 6 x layers x width x sequence x tokens (causal
    attention); recomputation is not counted,
                  nor is the table of the input embedding
    MFU           model FLOP / (seconds x FLOP/s of an 8192³ bf16 product in this run)
    η             `stats()`'s, with the drive's bandwidths measured in this run
    η bus         a limit / the measured seconds: the larger of 8/6 model FLOP at that product's
                  rate, and the parameters twice over the bus plus the gradients once back, at the
                  rate of plain pinned copies in this run; drives do not count
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerator
import drive
import harness
import r1
from bench_path import HERE

from infinity._src.memory.ledger import memory_left_bytes

GIB = 1 << 30
SHAPES = {
    "tiny": {"hidden": 64, "layers": 2, "vocab": 256},
    "1b": {"hidden": 2048, "layers": 18, "vocab": 32000},
    "7b": {"hidden": 4096, "layers": 32, "vocab": 32000},
    "largest": {"hidden": 6144, "layers": 1, "vocab": 32000},
}
TOKENS = {"tiny": (32, 64), "1b": (2048, 16384), "7b": (4096, 32768), "largest": (16384,)}
ARMS = ("cpu", "nvme", "fsdp2", "deepspeed")
# bytes per parameter: states at rest (compact: 24-bit masters, scales), gradients
EXACT, COMPACT, GRAD = 12.0, 5.2, 2.0
# fp32 parameters, gradients and two moments, and buffers of units
OTHERS = {"fsdp2": 18.0, "deepspeed": 18.0}
FIXED_BYTES = 4 * GIB  # a process with torch and CUDA, pools
READY_S, STEP_S_MAX = 240.0, 240.0


class ArmFailed(Exception):
    """An arm ended, or did not answer in time; the message is what is known of it."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Budget at the start: bytes of RAM and drive, and when all must be done (monotonic
    seconds)."""

    ram_bytes: float
    disk_bytes: float
    until_s: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.until_s - time.monotonic()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One arm on one shape: its settings, the RAM that it needs, and the reason not to run it, or
    ""."""

    arm: str
    shape: str
    fields: dict[str, int]
    policy: dict[str, Any]
    ram_bytes: float
    why_not: str = ""

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return r1.Workload(**self.fields).parameters

    def flops(self, tokens: int) -> float:
        """Model FLOP of a step (see the module)."""
        workload = r1.Workload(**self.fields)
        computing = workload.parameters - workload.vocab * workload.hidden
        attention = 6.0 * workload.layers * workload.hidden * workload.tokens
        return (6.0 * computing + attention) * tokens


def plan_arm(arm: str, shape: str, sequence: int, swap: Path, budget: Budget) -> Plan:
    """Place the arm's states on this machine, or say that there is no room."""
    fields = {**SHAPES[shape], "tokens": sequence}
    parameters = r1.Workload(**fields).parameters
    ram = budget.ram_bytes - FIXED_BYTES
    if arm in OTHERS:
        needed = OTHERS[arm] * parameters
        why = (
            f"needs about {needed / 1e9:.0f} GB of RAM, {ram / 1e9:.0f} GB are there"
            if needed > ram
            else ""
        )
        if arm == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            why = "is not installed"
        return Plan(arm, shape, fields, {}, needed + FIXED_BYTES, why)
    if shape == "largest":
        return _plan_largest(fields, swap, budget)
    grads, states = GRAD * parameters, EXACT * parameters
    on_drive = min(states, budget.disk_bytes) if arm == "nvme" else 0.0
    needed = grads + states - on_drive
    policy: dict[str, Any] = {"params": arm, "optim": arm}
    if arm == "nvme":
        # All of it on the drive if it has room; else RAM takes the rest, as a budget that is larger
        # than the least.
        policy |= {
            "nvme": [str(swap)],
            "ram": "min" if on_drive == states else int(needed + 2 * GIB),
        }
    why = (
        f"needs about {needed / 1e9:.0f} GB of RAM, {ram / 1e9:.0f} GB are there"
        if needed > ram
        else ""
    )
    return Plan(arm, shape, fields, policy, needed + FIXED_BYTES, why)


def _plan_largest(fields: dict[str, int], swap: Path, budget: Budget) -> Plan:
    one = r1.Workload(**fields).parameters
    layer = r1.Workload(**{**fields, "layers": 2}).parameters - one
    ram = 0.9 * (budget.ram_bytes - FIXED_BYTES)
    layers = int(((ram + budget.disk_bytes) / COMPACT - (one - layer)) // layer)
    fields = {**fields, "layers": max(layers, 1)}
    policy = {
        "params": "nvme",
        "optim": "nvme",
        "nvme": [str(swap)],
        "ram": int(max(ram, 0)),
        "state": "compact",
        "update": "backward",
    }
    why = "" if layers >= 1 and ram >= GIB else "not one layer of width 6144 fits RAM and drive"
    return Plan("nvme", "largest", fields, policy, ram + FIXED_BYTES, why)


class Process:
    """An arm in a separate process, which takes steps on request, and answers. It exits when its
    standard input is closed, so also when this process ends."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan = plan
        self._ready = False
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        command = [
            sys.executable,
            str(HERE / "train_arm.py"),
            "--arm",
            plan.arm if plan.arm in OTHERS else "infinity",
            "--device",
            device,
            "--shape",
            json.dumps(plan.fields),
            "--policy",
            json.dumps(plan.policy),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=harness.ROOT,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ARM "):
                self._answers.put(line[4:])
        self._answers.put(None)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises ArmFailed when none comes."""
        try:
            text = self._answers.get(timeout=max(timeout_s, 1.0))
        except queue.Empty:
            raise ArmFailed(f"did not answer in {timeout_s:.0f} s") from None
        if text is None:
            self._log.seek(0)
            raise ArmFailed(f"ended with {self._process.wait()}: {self._log.read()[-1500:]}")
        self._ready = True
        found: dict[str, Any] = json.loads(text)
        return found

    def ask(self, question: dict[str, int], timeout_s: float) -> dict[str, Any]:
        """Request steps. Raises ArmFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ArmFailed("ended") from None
        return self.answer(timeout_s)

    def let_go(self) -> None:
        """Request the end, without waiting: several arms may close at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Close the arm, and kill it if it does not exit within half a minute; at once if it has
        never answered, and so reads no requests."""
        self.let_go()
        try:
            self._process.wait(30 if self._ready else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@dataclasses.dataclass
class Bench:
    """A run: its device, its rates, and the rows so far."""

    args: argparse.Namespace
    peak_flops: float
    bus: dict[str, float]
    budget: Budget
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    drive: dict[str, float] = dataclasses.field(default_factory=dict)

    def record(self, plan: Plan, found: dict[str, Any]) -> None:
        """Keep a row, at once."""
        about = {
            "size": plan.shape,
            "arm": plan.arm,
            "parameters": plan.parameters,
            "layers": plan.fields["layers"],
        }
        row = {**about, "sequence": plan.fields["tokens"], **found}
        rates = {"peak_flops": self.peak_flops, "bus": self.bus, "drive": self.drive}
        accelerator.record("train", self.args.device, {**row, **rates}, self.args.results)
        self.rows.append(row)

    def measured(self, plan: Plan, found: dict[str, Any], number: int) -> None:
        """Derive the figures of one measurement and keep it."""
        step_s, flops = harness.steady_s(found), plan.flops(found["tokens"])
        gathered = 2.0 * plan.parameters
        bus_s = max(
            2 * gathered / self.bus["to"],
            gathered / self.bus["from"],
            3 * gathered / self.bus["both"],
        )
        floor_s = max(flops * 8 / 6 / self.peak_flops, bus_s)
        self.record(
            plan,
            {
                **found,
                "round": number,
                "steady_s": step_s,
                "tokens_per_s": found["tokens"] / step_s,
                "model_flops": flops,
                "mfu": flops / step_s / self.peak_flops,
                "eta_bus": floor_s / step_s,
            },
        )

    def with_drive(self, plan: Plan, swap: Path) -> Plan:
        """Return the plan with the drive's bandwidths in its policy. They are measured on first
        use; on the CPU the policy needs none."""
        if "nvme" not in plan.policy or self.args.device != "cuda":
            return plan
        if not self.drive:
            self.drive = drive.measure(swap)
        rates = {str(swap): [self.drive["read"], self.drive["write"]]}
        return dataclasses.replace(plan, policy={**plan.policy, "io": {"bandwidths": rates}})

    def group(self, plans: Sequence[Plan], tokens: Sequence[int]) -> None:
        """Arms that live side by side: they step in turns, the order turned round after each
        round."""
        with contextlib.ExitStack() as undo:
            alive = [process for plan in plans for process in self._started(plan, undo)]
            for process in alive:  # all begin to close before one is waited for
                undo.callback(process.let_go)
            for size in tokens:
                for number in range(self.args.rounds):
                    for process in list(alive if number % 2 == 0 else reversed(alive)):
                        if not self._measure(process, size, number):
                            alive.remove(process)

    def _started(self, plan: Plan, undo: contextlib.ExitStack) -> Iterator[Process]:
        accelerator.note(
            f"{plan.shape} {plan.arm}: {plan.parameters / 1e9:.2f} billion parameters, "
            f"{self.budget.left_s:.0f} s left"
        )
        if self.budget.left_s < 5:
            self.record(plan, {"failed": "no time was left"})
            return
        process = Process(plan, self.args.device)
        undo.callback(process.end)
        try:
            self.record(plan, process.answer(min(READY_S, self.budget.left_s)))
        except ArmFailed as failed:
            self.record(plan, {"failed": str(failed)})
            return
        yield process

    def _measure(self, process: Process, tokens: int, number: int) -> bool:
        """Measure steps of `tokens` tokens and record them. Returns False when the arm failed and
        cannot go on."""
        if self.budget.left_s < 5:
            self.record(process.plan, {"tokens": tokens, "failed": "no time was left"})
            return True
        sequence = process.plan.fields["tokens"]
        asked = {
            "rows": max(tokens // sequence, 1),
            "warmup": 1 if number == 0 else 0,
            "steps": self.args.steps,
        }
        try:
            found = process.ask(asked, min(STEP_S_MAX, self.budget.left_s))
        except ArmFailed as failed:
            self.record(process.plan, {"tokens": tokens, "failed": str(failed)})
            return False
        self.measured(process.plan, found, number)
        return True


def run(bench: Bench, swap: Path) -> None:
    """Every size, arms in turns where RAM has room for all of them at once."""
    args = bench.args
    for shape in args.sizes:
        names = [arm for arm in args.arms if arm == "nvme" or shape != "largest"]
        plans = [plan_arm(name, shape, args.sequence, swap, bench.budget) for name in names]
        for plan in plans:
            if plan.why_not:
                bench.record(plan, {"failed": plan.why_not})
        able = [bench.with_drive(plan, swap) for plan in plans if not plan.why_not]
        together = sum(plan.ram_bytes for plan in able) <= 0.8 * bench.budget.ram_bytes
        tokens = args.tokens or TOKENS[shape]
        for group in [able] if together else [[plan] for plan in able]:
            if bench.budget.left_s > 10:
                bench.group(group, tokens)
            else:
                for plan in group:
                    bench.record(plan, {"failed": "no time was left"})


def show(rows: Sequence[dict[str, Any]]) -> None:
    """For people."""
    lines = []
    for row in rows:
        what = (
            row["size"],
            row["arm"],
            f"{row['parameters'] / 1e9:.2f}",
            str(row.get("tokens", "")),
        )
        if "failed" in row:
            lines.append((*what, row["failed"].splitlines()[0][:60], "", "", "", ""))
        elif "tokens_per_s" in row:
            eta = row.get("eta_schedule")
            peak = f"{row['peak_bytes'] / GIB:.2f}" + (
                f" / {row['planned_bytes'] / GIB:.2f}" if "planned_bytes" in row else ""
            )
            lines.append(
                (
                    *what,
                    f"{row['tokens_per_s']:.0f}",
                    f"{100 * row['mfu']:.1f} %",
                    f"{row['eta_bus']:.2f}",
                    f"{eta:.2f}" if eta is not None else "",
                    peak,
                )
            )
    columns = ("size", "arm", "1e9", "tokens", "tokens/s", "MFU", "η bus", "η", "peak GiB / plan")
    harness.print_table("Training: the engine beside FSDP2 with CPU offload", columns, lines)


def numbers(text: str) -> list[int]:
    """An argument's type: whole numbers with commas between."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator.add_arguments(parser)
    parser.add_argument("--sizes", type=harness.some_of(SHAPES), help="(1b,7b,largest on a GPU)")
    parser.add_argument(
        "--arms",
        type=harness.some_of(ARMS),
        default=["cpu", "nvme", "fsdp2", "deepspeed"],
        help="(all)",
    )
    parser.add_argument("--tokens", type=numbers, help="per step, with commas between")
    parser.add_argument("--sequence", type=int, help="tokens of a row (2048; 16 on the CPU)")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="measured steps of a round; the first follows no update (%(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="time limit of the whole command (%(default)s)"
    )
    parser.add_argument("--dir", type=Path, required=True, help="swap directory, on a drive")
    parser.add_argument(
        "--ram", type=float, help="GB of RAM that may be used (0.92 of what is left)"
    )
    parser.add_argument(
        "--disk", type=float, help="GB of it that may be used (0.8 of what is free)"
    )
    args = parser.parse_args()
    if args.steps < 2:
        raise harness.BenchError("--steps must be at least 2: the first of a round bears no update")
    args.dir = args.dir.resolve()
    args.sizes = args.sizes or (["1b", "7b", "largest"] if args.device == "cuda" else ["tiny"])
    args.sequence = args.sequence or (2048 if args.device == "cuda" else 16)
    disk = args.disk * 1e9 if args.disk is not None else 0.8 * shutil.disk_usage(args.dir).free
    ram = args.ram * 1e9 if args.ram is not None else 0.92 * memory_left_bytes()
    budget = Budget(ram, disk, time.monotonic() + args.seconds)
    with accelerator.computing(args.device) as device:
        copies = accelerator.PlainCopies(device)
        bench = Bench(args, accelerator.matmul_flops(device), copies.rates(), budget)
        del copies
        accelerator.clear(device)
    with harness.scratch(args.dir) as swap:
        run(bench, swap)
    show(bench.rows)
    return 0 if any("tokens_per_s" in row for row in bench.rows) else 1


if __name__ == "__main__":
    sys.exit(accelerator.main(main))
