"""9. The bus (eight minutes): bandwidth of the engine's copies as a share of plain pinned copies, a
profile of two steps (gaps between copies show whether copies are too small), and the largest linear
that trains within 1 GiB of GPU memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage


def steps(run: stage.Run) -> Iterator[stage.Step]:
    common = ("--device", run.device, "--results", run.results)
    yield stage.Step("copies", run.script("copies.py", *common), 200)
    trace = ("--trace", run.out / "trace.json.gz")
    yield stage.Step("profile", run.script("profile_steps.py", *common, *trace), 100)
    linear = run.script("largest_linear.py", *common)
    yield stage.Step("linear", linear, 160, closing_s=30)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 470, steps))
