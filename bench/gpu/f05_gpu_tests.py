"""5. All tests that need a GPU (eight minutes): parity, device memory and its bound, exhausted
memory, streams, tiles, attention, torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

WORKERS = 8


def steps(run: stage.Run) -> Iterator[stage.Step]:
    yield run.pytest("all", "tests/gpu", workers=WORKERS, limit_s=475)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 480, steps))
