"""One of the three calls that run the ten commands, for a machine that is available for minutes:

    python3 bench/gpu/call.py 1     # the driver, the first training and its bits, tokens/s
    python3 bench/gpu/call.py 2     # a late GPU, and all tests that need a GPU
    python3 bench/gpu/call.py 3     # the bus, the kernels' speed, memcheck

A call ends within ten minutes, including the machine's set-up. Each command has a share of that
time: it never uses a later command's share, and passes unused time on. So a command that hangs or
dies loses only its own figures. Results are appended in $OUT or --out as they are known (stage.py).
`table.py` merges the results of several calls.

--dry tries the call on the simulated device, with one or two tests of hundreds.

Exit status: that of the commands together, as stage.py gives it: 1, else 3, else 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence

import bench_path
import harness
import stage
import table

CALL_S = 565.0  # ten minutes less what starting, ending, killing and copying back may take
CLOSING_S = 5.0  # of a command: its table, and what it leaves on the drive
SHOWN = 10_000  # characters of the table at the end of the output


@dataclasses.dataclass(frozen=True)
class Command:
    """A command in a call. share_s: seconds that no other command takes. dry: pytest's -k for a dry
    run; "" leaves the command's."""

    name: str
    share_s: float
    dry: str = ""


ONE_TRAINING = "many_steps and threads"
TRAINS = "f08_train"
CALLS: dict[int, tuple[Command, ...]] = {
    1: (
        Command("f01_smoke", 75),
        Command("f02_first_training", 90, ONE_TRAINING),
        Command(TRAINS, 310),
    ),
    2: (
        Command("f03_late_gpu", 120, ONE_TRAINING),
        Command("f05_gpu_tests", 125, "out_of_memory_leaves and in_forward"),
        Command("f06_kernels", 130, "test_ten_steps"),
        Command("f07_update_on_device", 100, "environment"),
    ),
    3: (
        Command("f09_copies_and_linear", 145),
        Command("f10_operations", 195),
        Command("f04_sanitizer", 135, ONE_TRAINING),
    ),
}


class Call:
    """One call: its time, and how its commands ended."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.until_s = time.monotonic() + args.seconds
        self.run = stage.Run(f"call_{args.number}", args)

    def command(self, command: Command, kept_s: float) -> int:
        """Run a command in the remaining time, less the shares of later commands. Returns its
        status."""
        seconds = max(self.until_s - time.monotonic() - kept_s, CLOSING_S + 1)
        args = self.args
        line = self.run.script(f"{command.name}.py", "--device", args.device, "--out", args.out)
        line += ["--swap", str(args.swap), "--seconds", f"{seconds - CLOSING_S:.0f}"]
        if args.dry and command.dry:
            line += ["--select", command.dry]
        if args.ram and command.name == TRAINS:
            line += ["--ram", args.ram]
        process = subprocess.Popen(
            line,
            cwd=bench_path.ROOT,
            start_new_session=True,
            preexec_fn=harness.die_with_parent,  # noqa: PLW1509 - we have one thread
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.run.say(f"{command.name} did not end in {seconds:.0f} s")
            return stage.TIMED_OUT
        finally:
            if process.poll() is None:
                stage.end(process, stage.GRACE_S)
            self.run.kill(process)

    def commands(self, commands: Sequence[Command]) -> list[int]:
        """Run all commands, each in its share and the time that earlier ones have not used."""
        statuses = []
        scale = min((self.until_s - time.monotonic()) / sum(one.share_s for one in commands), 1.0)
        for number, one in enumerate(commands):
            kept_s = scale * sum(later.share_s for later in commands[number + 1 :])
            statuses.append(self.command(one, kept_s))
        return statuses


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = stage.base_parser(__doc__ or "", CALL_S)
    parser.add_argument("number", type=int, choices=CALLS, help="which call")
    parser.add_argument("--dry", action="store_true", help="on the simulated device, a few tests")
    parser.add_argument("--ram", help="GB of RAM for f08_train, where the system says too little")
    args = parser.parse_args(words)
    if args.dry:
        args.device = "simulated"
    # Commands run in the tree, wherever we were started.
    args.out, args.swap = args.out.resolve(), args.swap.resolve()
    return args


@harness.stopping()
def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    why_not = stage.no_gpu() if args.device == "cuda" else ""
    if why_not:
        sys.stderr.write(f"NOT RUN: call {args.number}: {why_not}. --dry tries it without a GPU\n")
        return stage.NOT_RUN
    call = Call(args)
    name = f"call {args.number}"
    began = {"script": "command", "name": name, "device": args.device, "run": harness.now()}
    call.run.record({**began, "state": "began", "commit": harness.commit()})
    statuses = call.commands(CALLS[args.number]) if call.run.is_ready() else [1]
    call.run.record({**began, "state": "ended", "status": stage.together(statuses)})
    sys.stdout.write(table.make(table.lines_of([args.out]))[:SHOWN])
    return stage.together(statuses)


if __name__ == "__main__":
    sys.exit(main())
