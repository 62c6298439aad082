"""Measures Python's CPU time per unit in the main thread, for small units in RAM.

One arm of compare_versions.py. It uses only the public interface, so that it runs with any version
of the project (PYTHONPATH). Prints a JSON line: microseconds of the main thread per unit, the
median over passes, for a forward without gradients and for a training step, with `--units` units
and with 8 times as many (the cost per unit must not grow).

    python bench/arm_unit_time.py --units 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import infinity as inf

WIDTH = 64


class Stack(nn.Module):
    """`count` units of one small linear each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def us_per_unit(run: Callable[[], object], units: int, passes: int) -> float:
    """Median microseconds of this thread's CPU time for a unit, after three passes to warm up."""
    taken = []
    for number in range(passes + 3):
        begin = time.thread_time()
        run()
        if number >= 3:
            taken.append(time.thread_time() - begin)
    return statistics.median(taken) / units * 1e6


def measure(units: int, passes: int) -> dict[str, float]:
    """Measure both figures for a model of `count` units."""
    torch.manual_seed(0)
    model: Any = Stack(units)
    plain = Stack(units)
    inf.offload(model, inf.Policy(units=[nn.Linear]))
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    ones = torch.ones(1, WIDTH, dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            model(ones)

    def step() -> None:
        model(ones).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        inf.handle(model).flush()  # the same point in every version: updates are over

    def compute() -> None:
        plain(ones).sum().backward()

    found = {
        "forward": us_per_unit(forward, units, passes),
        "step": us_per_unit(step, units, passes),
        "plain_step": us_per_unit(compute, units, passes),
    }
    inf.handle(model).close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=64, help="units (%(default)s)")
    parser.add_argument("--passes", type=int, default=30, help="measured passes (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        json.dumps(
            {str(units): measure(units, args.passes) for units in (args.units, 8 * args.units)}
        )
    )


if __name__ == "__main__":
    main()
