"""5. All tests that need a GPU (eight minutes): parity, device memory and its bound, exhausted
memory, streams, tiles, attention, torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

WORKERS = 8
#: Tests that run what Triton compiles.
COMPILED = "triton or compile"


def steps(run: stage.Run) -> Iterator[stage.Step]:
    why_not = stage.no_compiler() if run.on_cuda else ""
    select = f"not ({COMPILED})" if why_not else ""
    yield run.pytest("all", "tests/gpu", select=select, workers=WORKERS, limit_s=475)
    if why_not:
        yield run.pytest("compiled", "tests/gpu", select=COMPILED, limit_s=1, why_not=why_not)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 480, steps))
