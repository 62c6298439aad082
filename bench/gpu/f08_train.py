"""8. Training of a billion parameters (seven minutes): tokens/s, MFU, η and peak memory, with
states in RAM compared with FSDP2 with CPU offload, then with states on a drive, which may be slow
and so is last. First check η bus, and the peak against the plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import stage

CLOSING_S = 35.0  # arms close, and what they left on the drive goes


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", help="1b, 7b, largest (1b; tiny without a GPU)")
    parser.add_argument("--arms", default="cpu,fsdp2,nvme", help="(%(default)s)")
    parser.add_argument(
        "--ram", help="GB of RAM that may be used, where the system says too little"
    )


def steps(run: stage.Run) -> Iterator[stage.Step]:
    sizes = run.args.sizes or ("1b" if run.on_cuda else "tiny")
    ram = ("--ram", run.args.ram) if run.args.ram else ()
    arms = run.args.arms.split(",")
    in_ram = [arm for arm in arms if arm != "nvme"] if sizes != "largest" else []
    for name, group in (("ram", in_ram), ("drive", ["nvme"] if "nvme" in arms else [])):
        arguments = (
            *("--device", run.device, "--sizes", sizes, "--arms", ",".join(group)),
            *("--dir", run.swap, "--results", run.results, *ram),
        )
        if group:
            yield stage.Step(name, run.script("train.py", *arguments), 220, closing_s=CLOSING_S)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 440, steps, options))
