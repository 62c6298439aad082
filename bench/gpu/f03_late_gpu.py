"""3. A late GPU (six minutes): every kernel of a unit runs milliseconds after its launch, so a copy
that does not wait for it reads old bytes. The bits must equal those of the plain loop. This is the
most valuable run. Its control breaks the engine on purpose (copies wait for an empty stream): its
tests must fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

SELECT = "many_steps or other_update_modes or accumulation"
CONTROL = "many_steps and threads"
WORKERS = 8
LATE = ["-p", "pytest_late"]


def steps(run: stage.Run) -> Iterator[stage.Step]:
    parity = "tests/gpu/test_parity.py"
    yield run.pytest(
        "control", parity, select=CONTROL, limit_s=90,
        extra=[*LATE, "--unordered", "--must-fail"],
        why_not="" if run.device != "cpu" else "the CPU has no copies that could be unordered",
    )  # fmt: skip
    yield run.pytest("late", parity, select=SELECT, extra=LATE, workers=WORKERS, limit_s=270)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 370, steps))
