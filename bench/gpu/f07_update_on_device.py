"""7. Updates on the device (eight minutes): Policy(update_on="device") gives the bits of
update_on="cpu", by torch and by Triton; then with a late GPU; then the plain loop's tests with
Triton's update forced everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

WORKERS = 8


def steps(run: stage.Run) -> Iterator[stage.Step]:
    tests = "tests/gpu/test_update_on_device.py"
    fields = {"workers": WORKERS, "why_not": stage.no_compiler() if run.on_cuda else ""}
    yield run.pytest("updates", tests, limit_s=170, **fields)
    yield run.pytest("late", tests, extra=["-p", "pytest_late"], limit_s=170, **fields)
    forced = {"INFINITY_OPS": "update=triton"}
    yield run.pytest("forced", tests, select="environment", env=forced, limit_s=100, **fields)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 450, steps))
