"""2. The first training (five minutes): the bits of a plain loop on the same GPU, with states in
RAM and on a drive, in every format, under random delays. If this fails, stop here, and look with
CUDA_LAUNCH_BLOCKING=1."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

WORKERS = 8
SELECT = "many_steps or placements_agree or random_delays"


def steps(run: stage.Run) -> Iterator[stage.Step]:
    yield run.pytest(
        "parity", "tests/gpu/test_parity.py", select=SELECT, extra=["-x"], workers=WORKERS,
        limit_s=290,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 300, steps))
