"""The command `infinity`: bench, train, report, plan, checkpoint, doctor. A command imports what it
needs, such as torch, numpy or rich, when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infinity._src.base.openmp import wait_passively
from infinity._src.base.paths import argument
from infinity._src.base.standard_streams import with_safe_streams
from infinity._src.base.version import __version__
from infinity._src.cabi import native
from infinity._src.cli import arguments
from infinity._src.cli.completion import SHELLS, PrintCompletion
from infinity._src.cli.stop_signals import StopSignals, status_of
from infinity.errors import InfinityError

if TYPE_CHECKING:
    from infinity._src.measure import command as bench


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="infinity", description="Train models whose states rest in CPU memory and on NVMe."
    )
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # This entry serves help and completion only: `_run` passes the arguments of bench to another
    # parser.
    benchmarks = commands.add_parser(
        "bench", help="measure drives, update kernels and copies on this machine"
    )
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        describe=lambda: _describe_bench(benchmarks),
        help="print a script that completes commands, options, choices and paths in this shell",
    )
    train = commands.add_parser(
        "train", help="fine-tune a causal language model", description=arguments.TRAIN
    )
    arguments.add_train(train)
    report = commands.add_parser(
        "report",
        help="write one HTML page about a training run, or several",
        description=arguments.REPORT,
    )
    arguments.add_report(report)
    doctor = commands.add_parser(
        "doctor", help="check what this machine can do, and say how to fix what is missing"
    )
    doctor.add_argument(
        "--dir",
        action="append",
        type=argument,
        metavar="DIR",
        help="a directory for swap files; may be repeated",
    )
    doctor.add_argument(
        "--model",
        type=argument,
        metavar="MODEL",
        help="a Hugging Face model directory, or its config.json: predict whether training it fits "
        "this machine, and the fastest way",
    )
    plan = commands.add_parser(
        "plan",
        help="predict whether a model fits, the time of a step, and what would help",
        description=arguments.PLAN,
    )
    arguments.add_plan(plan)
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list, verify, export and reshard checkpoints",
        description=arguments.CHECKPOINT,
    )
    arguments.add_checkpoint(checkpoint)
    return parser


def _describe_bench(parser: argparse.ArgumentParser) -> None:
    from infinity._src.measure import command as bench

    bench.describe_bench(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for a mistake, 1 for a fault, 128 + n after
    the signal n; `run_train`, `run_plan` and `run_checkpoint` define other statuses. Errors of
    files, values, memory and standard output become one line on stderr. argv: arguments without the
    program's name; None: those of `sys.argv`.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    return with_safe_streams(lambda: _run_and_report(given))


def _run_and_report(given: Sequence[str]) -> int:
    """Run a command, and print any foreseen error that it raises in one line."""
    try:
        return _run(given)
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return status_of(error)
    except Exception as error:
        if not _is_foreseen(error):
            raise
        text = str(error).partition("\n")[0] or type(error).__name__
        print(f"error: {text}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _is_foreseen(error: Exception) -> bool:
    if isinstance(error, (OSError, ValueError, MemoryError, InfinityError)):
        return True
    if isinstance(error, ImportError) and not native.available():
        return True
    # Only torch, if a command has imported it, raises the remaining foreseen error.
    if "torch" not in sys.modules:
        return False
    from infinity._src.base.torch_compat import is_out_of_memory

    return is_out_of_memory(error)


def _read_model(path: Path, tbw: float | None) -> bench.Forecast:
    # Imported here: the module imports torch, which other benchmarks do not need.
    from infinity._src.cli.bench_model import read_model

    return read_model(path, tbw)


def _run(given: Sequence[str]) -> int:
    # The parser of bench reads the arguments of bench.
    if given[:1] == ["bench"]:
        from infinity._src.measure import command as bench

        # Without `StopSignals` a signal would end the process and leave fio running.
        with StopSignals():
            return bench.main(given[1:], _read_model)
    parser = build_parser()
    options, unknown = parser.parse_known_args(given)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "doctor":
        from infinity._src.cli.doctor import run_doctor

        return run_doctor(options.dir, model=options.model)
    if options.command == "report":
        from infinity._src.cli.html_report import run_report

        return run_report(options)
    # Progress bars of other libraries would garble this command's. tqdm reads the variable once,
    # when torch imports tqdm.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # After doctor, which reports the environment that a user's training loop would have.
    wait_passively()
    if options.command == "plan":
        from infinity._src.cli.plan import run_plan

        return run_plan(options)
    if options.command == "checkpoint":
        from infinity._src.cli.checkpoint import run_checkpoint

        return run_checkpoint(options)
    from infinity._src.cli.train import run_train

    return run_train(options)


if __name__ == "__main__":
    sys.exit(main())
