"""Compares infinity with DeepSpeed and plain torch: same model, same drive, alternating runs.

    python bench/compare_deepspeed.py --dir /mnt/nvme0
    python bench/compare_deepspeed.py --dir /mnt/nvme0 --arms infinity:state=compact:ram=1GiB
    deepspeed python bench/compare_deepspeed.py --dir /mnt/nvme0 --arms infinity:tier=cpu
    deepspeed:offload=cpu plain python bench/compare_deepspeed.py --dir /mnt/nvme0 --clip 100 --arms
    infinity infinity:update=backward:generations=2 limit

An arm is infinity, deepspeed, plain (torch alone, all in RAM) or limit (forward, backward and the
drive alone, for η of the infinity arms of the same round), with options of arm_*.py after colons.
Ratios are to the first arm. DeepSpeed runs in a separate environment, which the first run creates.
See bench/README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import drive
import harness
import r1

from infinity._src.memory.roofline import Compute, Drives, Moved, Traffic, limits

DEEPSPEED = "0.19.8"
TORCH = "2.13.0"
VENV = harness.BENCH / ".venv-deepspeed"
ARMS = ("infinity", "deepspeed")
KINDS = ("infinity", "deepspeed", "plain", "limit")
INSTALL_TIMEOUT_S = 3600
ARM_TIMEOUT_S = 7200
# DeepSpeed's files: fp32 parameter and two moments (12), fp32 gradient (4), bf16 parameter (2).
SWAP_BYTES_PER_PARAM = 18
# Two generations of infinity's states.
TWO_GENERATIONS_BYTES_PER_PARAM = 26
# DeepSpeed does not swap parameters below 1 MiB (its I/O block), and a model with such matrices
# fails in its second step ("param 20 already assigned swap buffer id 14").
SWAPPABLE_NUMEL = 1 << 19
SPARE_BYTES = 4_000_000_000


def check_build_tools() -> None:
    """Raise BenchError naming the Debian package for the first missing piece that DeepSpeed
    compiles with."""
    if shutil.which("g++") is None:
        raise harness.BenchError("DeepSpeed compiles its extensions: apt-get install g++")
    source = "#include <libaio.h>\nint main(void) { return io_queue_release(0); }\n"
    with tempfile.TemporaryDirectory() as folder:
        command = ["g++", "-x", "c", "-", "-laio", "-o", f"{folder}/probe"]
        found = (
            subprocess.run(
                command, input=source, text=True, capture_output=True, check=False
            ).returncode
            == 0
        )
    if not found:
        raise harness.BenchError(
            "DeepSpeed's NVMe engine needs libaio's headers: apt-get install libaio-dev"
        )


def check_size(workload: r1.Workload) -> None:
    """Raise ValueError for a model that DeepSpeed cannot train from NVMe."""
    if workload.hidden**2 < SWAPPABLE_NUMEL:
        raise ValueError(
            f"--hidden {workload.hidden}: DeepSpeed fails on matrices below 1 MiB; give 768 or more"
        )


def deepspeed_environment() -> dict[str, str]:
    """Environment variables of the DeepSpeed arm: on the CPU, extensions kept in its own virtual
    environment, waiting threads as its users have them."""
    env = harness.environment(
        DS_ACCELERATOR="cpu",
        TORCH_EXTENSIONS_DIR=str(VENV / "torch_extensions"),
        MAX_JOBS=str(os.cpu_count() or 1),
        PATH=f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    )
    if harness.WAIT_POLICY not in os.environ:
        del env[harness.WAIT_POLICY]
    return env


def prepare_deepspeed(pip_arguments: Sequence[str]) -> None:
    """Make DeepSpeed's environment unless a complete one with these versions is there. Blocks for
    minutes."""
    wanted = {
        "deepspeed": DEEPSPEED,
        "torch": TORCH,
        "transformers": importlib.metadata.version("transformers"),
        "python": sys.version.split()[0],
    }
    stamp = VENV / "ready.json"
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return
    check_build_tools()
    harness.note(
        f"making DeepSpeed's environment in {VENV} (minutes, about 1.5 GB with the CPU build of "
        "torch) ..."
    )
    began = time.perf_counter()
    shutil.rmtree(VENV, ignore_errors=True)
    harness.run_command(
        [sys.executable, "-m", "venv", str(VENV)], harness.environment(), timeout_s=300
    )
    (VENV / ".gitignore").write_text("*\n")
    pip = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--prefer-binary",
        *pip_arguments,
    ]
    env = deepspeed_environment()
    # torch first and without build isolation: DeepSpeed's setup imports the torch it will run with.
    tools = [f"torch=={TORCH}", "numpy", "setuptools", "wheel", "ninja", "psutil", "py-cpuinfo"]
    for packages in (
        tools,
        ["--no-build-isolation", f"deepspeed=={DEEPSPEED}"],
        [f"transformers=={wanted['transformers']}"],
    ):
        harness.run_command([*pip, *packages], env, timeout_s=INSTALL_TIMEOUT_S)
    harness.note("compiling DeepSpeed's extensions ...")
    build = [str(VENV / "bin" / "python"), str(harness.BENCH / "arm_deepspeed.py"), "--build-ops"]
    harness.run_command(build, env, timeout_s=INSTALL_TIMEOUT_S)
    stamp.write_text(json.dumps(wanted))
    harness.note(f"DeepSpeed's environment took {time.perf_counter() - began:.0f} s")


def have_environment(venv: Path | None, pip_arguments: Sequence[str]) -> None:
    """Return DeepSpeed's environment: an existing one, unchanged, or a new one. Creating it blocks
    for minutes."""
    global VENV
    if venv is None:
        prepare_deepspeed(pip_arguments)
        return
    if not (venv / "ready.json").exists():
        raise harness.BenchError(
            f"--deepspeed-venv {venv}: not an environment that compare_deepspeed.py has completed; "
            "leave the option out to make one"
        )
    VENV = venv.absolute()


def parse_arm(text: str, kinds: Collection[str] = KINDS) -> tuple[str, list[str]]:
    """The kind of an arm and the options for its script: "infinity:state=compact" -> infinity,
    --state=compact."""
    kind, *options = text.split(":")
    if kind not in kinds or any("=" not in option for option in options):
        raise ValueError(
            f"--arms {text}: give {', '.join(kinds)}, with options as "
            "infinity:state=compact:ram=1GiB"
        )
    pairs = [option.split("=", 1) for option in options]
    return kind, [f"--{name.replace('_', '-')}={value}" for name, value in pairs]


def interpreter_of(kind: str) -> tuple[str, dict[str, str]]:
    """Return the interpreter of an arm of this kind, and its environment."""
    if kind == "deepspeed":
        return str(VENV / "bin" / "python"), deepspeed_environment()
    return sys.executable, harness.environment(PYTHONPATH=str(harness.ROOT))


def run_arm(
    arm: str,
    workload: r1.Workload,
    directory: Path,
    *,
    with_environment: Callable[[dict[str, str]], dict[str, str]] = dict,
) -> dict[str, Any]:
    """Run one arm in a fresh process and a fresh swap directory; returns its record. Blocks until
    it ends. with_environment: makes its environment of the usual one."""
    kind, chosen = parse_arm(arm)
    python, usual = interpreter_of(kind)
    env = with_environment(usual)
    # Flush the page cache: the previous arm's pages must not be written during this one.
    os.sync()
    with harness.scratch(directory) as swap:
        command = [
            python,
            str(harness.BENCH / f"arm_{kind}.py"),
            f"--dir={swap}",
            *workload.arguments(),
            *chosen,
        ]
        record = harness.last_json_line(harness.run_command(command, env, timeout_s=ARM_TIMEOUT_S))
        return {**record, "arm": arm, "micro_batches": workload.micro_batches}


def told(record: dict[str, Any]) -> str:
    """Return a record's main figures as one line."""
    if "step_s" in record:
        time_s = f"{harness.steady_s(record):.2f} s/step"
    else:
        time_s = f"{record['forward_s'] + record['backward_s']:.2f} s in RAM"
    if "drive" not in record:
        return time_s
    return (
        f"{time_s}, drive {record['drive']['read'] / 1e9:.2f} read, "
        f"{record['drive']['write'] / 1e9:.2f} GB/s written"
    )


def summarise(records: Sequence[dict[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Medians per arm, η where the limits are known, the ratios of each round to the first arm, and
    how far the losses are apart from its own."""
    summary: dict[str, Any] = {"arms": {}, "ratios": {}}
    by_arm = {arm: [record for record in records if record["arm"] == arm] for arm in arms}
    bounds = by_arm.pop("limit", [])
    summary["limit"] = bounds
    for arm, mine in by_arm.items():
        if mine:
            summary["arms"][arm] = {
                "s_per_step": vars(harness.Summary.of([harness.steady_s(r) for r in mine])),
                "s_per_step_flushed": vars(harness.Summary.of([r["s_per_step"] for r in mine])),
                "read_bytes_per_param": harness.Summary.of(
                    [r["read_bytes_per_param"] for r in mine]
                ).median,
                "write_bytes_per_param": harness.Summary.of(
                    [r["write_bytes_per_param"] for r in mine]
                ).median,
                "peak_rss_bytes": max(r["peak_rss_bytes"] for r in mine),
                "peak_rss_steps_bytes": max(r["peak_rss_steps_bytes"] for r in mine),
                "last_loss": mine[-1]["losses"][-1],
                "nvme_share": mine[-1].get("nvme_share"),
                "eta": eta(mine, bounds),
                "per_step": counted(mine),
            }
    first, *others = [arm for arm in by_arm if by_arm[arm]]
    for arm in others:
        pairs = list(zip(by_arm[first], by_arm[arm], strict=False))
        if pairs:
            losses = zip(pairs[0][0]["losses"], pairs[0][1]["losses"], strict=True)
            summary["ratios"][arm] = {
                **vars(
                    harness.Summary.of(
                        [harness.steady_s(b) / harness.steady_s(a) for a, b in pairs]
                    )
                ),
                "loss_difference": max(abs(a - b) for a, b in losses),
            }
    return summary


def counted(mine: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return means per step of an arm's counters, over the steps of `harness.steady_s`; counters
    that are missing are omitted."""
    found = {}
    for name in ("updates_ahead", "updates_withdrawn", "steps_undone", "commit_s"):
        values = [value for record in mine for value in record.get(name, ())[1:]]
        if any(values):
            found[name] = sum(values) / len(values)
    return found


def traffic_of(moved: dict[str, Any]) -> Traffic:
    """Return the traffic that a record has."""
    names = ("states", "grads", "activations", "beside_states")
    return Traffic(moved["params_read"], *(Moved(**moved[name]) for name in names))


def eta(mine: Sequence[dict[str, Any]], bounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return limit / measured of each round's pair, for any schedule and for the arm's update mode;
    empty without limits. The drive's bandwidth was measured just before and after the arm; in
    records before 2026-11-21T17 with the limit of the round.

    If updates may run ahead of their step, the limit counts the bytes that a step must move, not
    those that it moved, and there is a third limit: the same step with deferred updates."""
    found: dict[str, list[float]] = {}
    for record, bound in zip(mine, bounds, strict=False):
        if record.get("moved") is None:
            continue
        compute = Compute.of(bound["forward_s"], bound["backward_s"], record["micro_batches"])
        found_drive = record.get("drive") or {
            "read": bound["read_bytes_per_s"],
            "write": bound["write_bytes_per_s"],
        }
        drives = Drives(found_drive["read"], found_drive["write"])
        measured = harness.steady_s(record)
        ahead = record["update"] == "backward" and record.get("generations", 1) > 1
        moved = record["must_move"]["backward"] if ahead else record["moved"]
        floor, schedule = limits(traffic_of(moved), compute, drives, record["update"]).eta(measured)
        found.setdefault("any schedule", []).append(floor)
        found.setdefault("its schedule", []).append(schedule)
        if ahead:
            deferred = limits(
                traffic_of(record["must_move"]["deferred"]), compute, drives, "deferred"
            ).eta(measured)
            found.setdefault("deferred updates", []).append(deferred[1])
    return {name: vars(harness.Summary.of(values)) for name, values in found.items()}


def show(workload: r1.Workload, summary: dict[str, Any]) -> None:
    """Print the summary for people."""
    columns = [
        "arm",
        "s/step (min–max)",
        "with flush",
        "read B/param",
        "write B/param",
        "peak RSS GB",
        "in steps GB",
        "on NVMe",
        "last loss",
    ]
    rows = [
        [
            arm,
            harness.Summary(**values["s_per_step"]).text(),
            f"{values['s_per_step_flushed']['median']:.2f}",
            f"{values['read_bytes_per_param']:.2f}",
            f"{values['write_bytes_per_param']:.2f}",
            f"{values['peak_rss_bytes'] / 1e9:.2f}",
            f"{values['peak_rss_steps_bytes'] / 1e9:.2f}",
            "" if values["nvme_share"] is None else f"{values['nvme_share']:.0%}",
            f"{values['last_loss']:.4f}",
        ]
        for arm, values in summary["arms"].items()
    ]
    experts = f"{workload.experts} experts in each, " if workload.experts else ""
    title = (
        f"{workload.parameters / 1e6:.0f}M parameters, hidden {workload.hidden}, {workload.layers} "
        f"layers, {experts}{workload.micro_batches} micro-batch(es) of 1 x {workload.tokens}, "
        f"{workload.steps} steps, clipped at {workload.clip:g}"
    )
    harness.print_table(title, columns, rows)
    for bound in summary["limit"]:
        print(
            f"forward {bound['forward_s']:.2f} s, backward {bound['backward_s']:.2f} s in RAM "
            "without the engine"
        )
    for arm, values in summary["arms"].items():
        for name, share in values["eta"].items():
            print(f"{arm}: limit of {name} / measured = {harness.Summary(**share).text()}")
    for arm, values in summary["arms"].items():
        if values["per_step"]:
            told = ", ".join(f"{name} {value:.4g}" for name, value in values["per_step"].items())
            print(f"{arm}: per step {told}")
    first = next(iter(summary["arms"]))
    for arm, values in summary["ratios"].items():
        difference = values.pop("loss_difference")
        ratio = harness.Summary(**values)
        print(
            f"{arm} / {first}, time per step, {ratio.count} pair(s): {ratio.text()}; losses differ "
            f"by {difference:.4f} at most"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="swap directory, on the drive to measure")
    parser.add_argument(
        "--show",
        metavar="RUN",
        help="measure nothing; print a recorded run, named by its time",
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (%(default)s)")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=ARMS,
        metavar="ARM",
        help="what is compared (infinity deepspeed)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "compare_deepspeed.jsonl",
        help="JSON lines file to append to (bench/results/compare_deepspeed.jsonl)",
    )
    parser.add_argument(
        "--pip-args", default="", help="more arguments for pip when DeepSpeed's environment is made"
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    if args.dir is None and not args.show:
        parser.error("--dir: give the swap directory")
    if args.rounds < 1:
        parser.error("--rounds: give at least 1")
    if args.steps < 2:
        parser.error("--steps: give at least 2; the first step follows no update, and is left out")
    for arm in args.arms:
        try:
            parse_arm(arm)
        except ValueError as error:
            parser.error(str(error))
    return args


def show_recorded(run: str, results: Path) -> None:
    """Print the summary of a run of the results file. Raises ValueError when it is not there."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    records = [record for record in lines if record["run"] == run]
    if not records:
        raise ValueError(
            f"--show {run}: {results} has the runs "
            f"{', '.join(sorted({line['run'] for line in lines}))}"
        )
    described = dict(records[0]["workload"])
    described.pop("parameters")
    show(
        r1.Workload(**described),
        summarise(records, tuple(dict.fromkeys(record["arm"] for record in records))),
    )


def main() -> int:
    args = parse()
    if args.show:
        show_recorded(args.show, args.results)
        return 0
    workload = r1.from_arguments(args)
    arms = tuple(dict.fromkeys(args.arms))
    twice = any("generations=2" in arm or "durable=on" in arm for arm in arms)
    room = max(SWAP_BYTES_PER_PARAM, TWO_GENERATIONS_BYTES_PER_PARAM if twice else 0)
    harness.check_directory(args.dir, room * workload.parameters + SPARE_BYTES)
    if any(arm.startswith("deepspeed") for arm in arms):
        check_size(workload)
        prepare_deepspeed(args.pip_args.split())
    run = harness.now()
    records: list[dict[str, Any]] = []
    about = {"run": run, "workload": workload.describe(), "machine": harness.machine()}
    for number in range(args.rounds):
        drives = [drive.measure(args.dir)] if "limit" in arms else []
        for arm in arms:
            began = time.perf_counter()
            record = run_arm(arm, workload, args.dir)
            took = time.perf_counter() - began
            if drives:
                drives.append(drive.measure(args.dir))
                record["drive"] = drive.mean(drives[-2:])
            records.append(record)
            # Written at once: an interrupted run keeps the rounds it completed.
            harness.append_line(args.results, {**about, "round": number, **record})
            harness.note(f"round {number + 1}/{args.rounds} {arm}: {told(record)} ({took:.0f} s)")
    summary = summarise(records, arms)
    if args.json:
        print(json.dumps({**about, **summary}))
    else:
        show(workload, summary)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
