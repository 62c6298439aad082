"""6. The tests of the kernels (eight minutes): Triton compiles, and gives the bits of the torch
reference, or comes as near as the operation promises. Without a GPU the same tests run in Triton's
interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

WORKERS = 12  # Triton compiles on the CPU


def steps(run: stage.Run) -> Iterator[stage.Step]:
    why_not = stage.no_compiler() if run.on_cuda else ""
    yield run.pytest(
        "kernels", "tests/unit/kernels", on="cuda" if run.on_cuda else "cpu",
        workers=WORKERS, limit_s=475, why_not=why_not,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 480, steps))
