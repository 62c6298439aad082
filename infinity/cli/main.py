"""The command `infinity` and its subcommands: bench, train, doctor. Torch is imported only where it is needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from infinity import __version__
from infinity.bench import command as bench
from infinity.cli import arguments


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="infinity", description="Train models whose states rest in CPU memory and on NVMe."
    )
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("bench", help="what drives, update kernels and copies give on this machine", add_help=False)
    train = commands.add_parser("train", help="fine-tune a causal language model", description=arguments.TRAIN)
    arguments.add_train(train)
    doctor = commands.add_parser("doctor", help="what this machine offers, and what is missing")
    doctor.add_argument("--dir", action="append", metavar="DIR", help="a directory that shall hold swap; may be repeated")
    plan = commands.add_parser("plan", help="(not built in this release)", add_help=False)
    plan.add_argument("rest", nargs="*")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:
        return bench.main(given[1:])
    parser = build_parser()
    options, unknown = parser.parse_known_args(given)
    if options.command == "plan":
        parser.error("`infinity plan` is not built in this release; `infinity bench` measures your drive")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "doctor":
        from infinity.cli.doctor import run_doctor

        return run_doctor(options.dir)
    # Before torch, which imports tqdm, which reads this once: other libraries' bars would run through ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from infinity.cli.train import run_train

    return run_train(options)


if __name__ == "__main__":
    sys.exit(main())
