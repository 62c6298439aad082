"""A training step with and without another job on the same cores: the ratio of each engine.

    python bench/beside_a_job.py --dir /mnt/nvme0
    python bench/beside_a_job.py --dir /mnt/nvme0 --arms infinity:tier=cpu:ram=8GiB
    infinity:tier=cpu:ram=8GiB:wait=default plain plain:wait=passive deepspeed:offload=cpu

An arm is one of compare_deepspeed.py with its options. `wait` sets how OpenMP threads wait:
passive, active, or default (no variable set). infinity waits passively, as its commands do; other
arms wait by default. The other job (other_job.py) multiplies matrices with torch, on as many
threads as there are cores, at nice 19, in a separate session. Each round runs each arm quiet and
busy, in alternating order. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import compare_deepspeed
import harness
import r1

ARMS = ("infinity:tier=cpu:ram=8GiB", "infinity:ram=600MiB", "plain", "deepspeed")
WAITS = {"passive": "PASSIVE", "active": "ACTIVE", "default": None}
# Other variables that set how threads wait.
COUNTS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
BUSY_MAX = 2.0
"""The target: a busy machine slows infinity down by at most this factor."""


def parse_arm(text: str) -> tuple[str, str]:
    """Split an arm into (arm without `wait`, value of `wait`). Raises: ValueError."""
    kind, *options = text.split(":")
    waits = [option.partition("=")[2] for option in options if option.startswith("wait=")]
    kept = [option for option in options if not option.startswith("wait=")]
    wait = waits[0] if waits else "passive" if kind == "infinity" else "default"
    if len(waits) > 1 or wait not in WAITS:
        raise ValueError(f"--arms {text}: wait is one of {', '.join(WAITS)}, once")
    arm = ":".join([kind, *kept])
    compare_deepspeed.parse_arm(arm, ("infinity", "plain", "deepspeed"))
    return arm, wait


def waiting(env: dict[str, str], wait: str) -> dict[str, str]:
    """Return the environment that makes threads wait as `wait` says, whatever this process has."""
    names = (harness.WAIT_POLICY, *COUNTS)
    kept = {name: value for name, value in env.items() if name not in names}
    policy = WAITS[wait]
    return kept if policy is None else {**kept, harness.WAIT_POLICY: policy}


@contextlib.contextmanager
def other_job(threads: int) -> Iterator[None]:
    """Run the other job during the block, which starts after the job's first multiplication."""
    process = subprocess.Popen(
        [sys.executable, str(harness.BENCH / "other_job.py"), f"--threads={threads}"],
        env=waiting(harness.environment(PYTHONPATH=str(harness.ROOT)), "default"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=harness.die_with_parent,  # noqa: PLW1509 - safe: this process has one thread
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise harness.BenchError("the other job did not begin")
        yield
        if process.poll() is not None:
            raise harness.BenchError("the other job ended before the arm beside it")
    finally:
        harness.kill_group(process)


def run_arm(
    text: str, workload: r1.Workload, directory: Path, *, busy: bool, threads: int
) -> dict[str, Any]:
    """One arm, beside the other job or not; its record. Blocks until it ends."""
    arm, wait = parse_arm(text)
    with other_job(threads) if busy else contextlib.nullcontext():
        record = compare_deepspeed.run_arm(
            arm, workload, directory, with_environment=lambda env: waiting(env, wait)
        )
    return {**record, "arm": text, "wait": wait, "busy": busy}


def summarise(records: Sequence[dict[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Seconds per step of each arm, quiet and busy, and the ratio of each round's pair."""
    found = {}
    for arm in arms:
        quiet, busy = (
            {r["round"]: harness.steady_s(r) for r in records if (r["arm"], r["busy"]) == (arm, on)}
            for on in (False, True)
        )
        pairs = [busy[number] / quiet[number] for number in quiet.keys() & busy.keys()]
        if pairs:
            found[arm] = {
                "quiet_s": harness.Summary.of(list(quiet.values())),
                "busy_s": harness.Summary.of(list(busy.values())),
                "ratio": harness.Summary.of(pairs),
            }
    return found


def show(workload: r1.Workload, threads: int, summary: dict[str, Any]) -> None:
    """Print the summary for people."""
    harness.print_table(
        f"{workload.parameters / 1e6:.0f}M parameters, {workload.tokens} tokens, beside a job on "
        f"{threads} threads at nice 19",
        ("arm", "quiet s/step", "busy s/step", "busy / quiet"),
        [[arm, *(values[name].text() for name in values)] for arm, values in summary.items()],
    )
    for arm, values in summary.items():
        if arm.startswith("infinity") and values["ratio"].median > BUSY_MAX:
            print(f"{arm}: more than {BUSY_MAX:g} times as long beside the job")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive to measure")
    parser.add_argument("--rounds", type=int, default=4, help="alternating rounds (%(default)s)")
    parser.add_argument("--arms", nargs="+", default=ARMS, metavar="ARM")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="threads of the other job (%(default)s)",
    )
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS / "beside_a_job.jsonl", metavar="FILE"
    )
    parser.add_argument(
        "--pip-args", default="", help="more arguments for pip, which installs DeepSpeed"
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    workload, arms = r1.from_arguments(args), tuple(dict.fromkeys(args.arms))
    for arm in arms:
        parse_arm(arm)
    room = compare_deepspeed.SWAP_BYTES_PER_PARAM * workload.parameters
    harness.check_directory(args.dir, room + compare_deepspeed.SPARE_BYTES)
    if any(arm.startswith("deepspeed") for arm in arms):
        compare_deepspeed.check_size(workload)
        compare_deepspeed.prepare_deepspeed(args.pip_args.split())
    about = {
        "run": harness.now(), "commit": harness.commit(), "workload": workload.describe(),
        "machine": harness.machine(), "job_threads": args.threads,
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for arm in arms:
            for busy in (False, True) if number % 2 == 0 else (True, False):
                began = time.perf_counter()
                record = run_arm(arm, workload, args.dir, busy=busy, threads=args.threads)
                record["round"] = number
                records.append(record)
                harness.append_line(args.results, {**about, **record})
                harness.note(
                    f"round {number + 1}/{args.rounds} {arm} {'busy' if busy else 'quiet'}: "
                    f"{compare_deepspeed.told(record)} ({time.perf_counter() - began:.0f} s)"
                )
    show(workload, args.threads, summarise(records, arms))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
