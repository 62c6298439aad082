"""4. One training under compute-sanitizer's memcheck (eight minutes): detects kernels and copies
out of bounds. Allocations are CUDA's own, since torch's pools hide overruns."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import stage

SELECT = "many_steps and threads"
PLACES = ("local/cuda*/bin", "local/cuda*/compute-sanitizer")  # under /usr
FOUND_ERRORS = 9
FOUND = "ERROR SUMMARY|Invalid __|Program hit|not supported|Internal Sanitizer Error"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sanitizer", help="the program (looked for on the PATH and under CUDA's)")


def find(given: str | None) -> str | None:
    """The path of compute-sanitizer."""
    if given is not None:
        return given
    name = "compute-sanitizer"
    beside = [str(one) for place in PLACES for one in Path("/usr").glob(f"{place}/{name}")]
    return shutil.which(name) or next(iter(beside), None)


def steps(run: stage.Run) -> Iterator[stage.Step]:
    sanitizer = find(run.args.sanitizer)
    tests = run.pytest("memcheck", "tests/gpu/test_parity.py", select=SELECT, limit_s=0)
    checked = [
        *(sanitizer or "compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"),
        *("--error-exitcode", str(FOUND_ERRORS), *tests.command, "-x"),
    ]
    yield stage.Step(
        "memcheck", checked, 470, pytest=True, find=FOUND,
        env={**tests.env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        why_not="" if sanitizer else "there is no compute-sanitizer here; --sanitizer names it",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 480, steps, options))
