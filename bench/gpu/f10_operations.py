"""10. Triton's kernels compared with torch's fastest (eight minutes), cheap ones first, each
operation in a separate process: a compiler that hangs or dies loses only that operation's figures.
table.md ends with the entries for `choice.MEASURED`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import stage

#: bench_ops.CASES, cheap ones first: matmuls compile and tune the longest.
OPERATIONS = (
    "update",
    "ordered_sum",
    "wire_encode",
    "wire_decode",
    "group_quantize",
    "group_dequantize",
    "linear_cross_entropy",
    "tile_matmul",
)
EACH_S = 150.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="(all)")


def steps(run: stage.Run) -> Iterator[stage.Step]:
    device = "cuda" if run.on_cuda else "cpu"
    # Without a GPU the kernels run in Triton's interpreter, on tiny sizes: that shows that it runs.
    smoke = () if run.on_cuda else ("--smoke",)
    env = {} if run.on_cuda else {"TRITON_INTERPRET": "1"}
    why_not = stage.no_compiler() if run.on_cuda else ""
    for name in run.args.ops:
        arguments = ("--ops", name, "--device", device, "--rounds", 10, "--results", run.results)
        command = run.script("bench_ops.py", *arguments, *smoke)
        limit_s = EACH_S if len(run.args.ops) > 1 else run.left_s
        yield stage.Step(name, command, limit_s, env=env, why_not=why_not)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 480, steps, options))
