"""8. Training of a billion parameters (seven minutes): tokens/s, MFU, η and peak memory, states in
RAM and on a drive, beside FSDP2 with CPU offload. Look at η bus first, and at peak beside plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import stage

CLOSING_S = 45.0  # arms close, and what they left on the drive goes


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", help="1b, 7b, largest (1b; tiny without a GPU)")
    parser.add_argument("--arms", default="cpu,nvme,fsdp2", help="(%(default)s)")


def steps(run: stage.Run) -> Iterator[stage.Step]:
    sizes = run.args.sizes or ("1b" if run.on_cuda else "tiny")
    seconds = max(run.left_s - CLOSING_S, 10.0)
    arguments = (
        *("--device", run.device, "--sizes", sizes, "--arms", run.args.arms),
        *("--dir", run.swap, "--seconds", f"{seconds:.0f}", "--results", run.results),
    )
    yield stage.Step("train", run.script("train.py", *arguments), seconds + CLOSING_S)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 440, steps, options))
