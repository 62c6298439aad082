"""`compiled` for the matmuls: `python -m tests.unit.kernels.compiled_matmul 90 tile_matmul
first|all`.

Every form of a kernel, in the first of its configurations or in all of them. Sizes say nothing but
what 16 divides. What is multiplied and the form go before what `compiled` says of a launch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from infinity._src.kernels.triton import linear_cross_entropy as loss
from infinity._src.kernels.triton.tile_matmul import tile_matmul
from infinity._src.kernels.triton.tuning import CONFIGS_MAX, using
from tests.unit.kernels.compiled import Absent, compile_instead_of_launching

Forms = Iterator[tuple[str, Callable[[], object]]]


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def tile_forms(dtype: torch.dtype) -> Forms:
    x, w, dy = (
        empty(256, 512, dtype=dtype),
        empty(1024, 512, dtype=dtype),
        empty(256, 1024, dtype=dtype),
    )
    total = empty(256, 1024, dtype=torch.float32)
    yield "forward", lambda: tile_matmul(x, w.t(), dy, accumulator=total, bias=w[:, 0])
    yield "first tile", lambda: tile_matmul(x, w.t(), total)
    yield "input gradient", lambda: tile_matmul(dy, w, x)
    yield "weight gradient", lambda: tile_matmul(dy.t(), x, w)
    yield "odd", lambda: tile_matmul(x[:7, :9], x[:9, :11], dy[:7, :11])


def loss_forms(dtype: torch.dtype) -> Forms:
    x, w, rows = (
        empty(256, 512, dtype=dtype),
        empty(1024, 512, dtype=dtype),
        empty(256, dtype=torch.float32),
    )
    target = torch.zeros(256, dtype=torch.int64)
    rest: dict[str, Any] = {
        "start": 0,
        "lse": rows,
        "scale": rows,
        "label_smoothing": 0.1,
        "vocabulary": 1024,
    }
    yield "partials", lambda: loss.tile_partials(x, w, None, target, start=0)
    yield (
        "partials with bias",
        lambda: loss.tile_partials(x[:, :9], w[:, :9], w[:, 0], target, start=0),
    )
    yield "gradient", lambda: loss.tile_dlogits(x, w, w[:, 0], target, **rest)


OPS: dict[str, Callable[[torch.dtype], Forms]] = {
    "tile_matmul": tile_forms,
    "linear_cross_entropy": loss_forms,
}


def main() -> None:
    """Arguments: the capability (80, 90 ...), a name of `OPS`, and how many configurations."""
    triton.runtime.driver.set_active(Absent(int(sys.argv[1])))
    launches: list[dict[str, Any]] = []
    compile_instead_of_launching(launches.append)
    everything = sys.argv[3] == "all"
    for dtype, allowed in (
        (torch.bfloat16, "highest"),
        (torch.float32, "highest"),
        (torch.float32, "high"),
    ):
        torch.set_float32_matmul_precision(allowed)
        for name, run in OPS[sys.argv[2]](dtype):
            for index in range(CONFIGS_MAX if everything else 1):
                launches.clear()
                with using(index):
                    run()
                (launch,) = launches
                operands = "tf32" if allowed == "high" else str(dtype)
                print(json.dumps({"form": name, "operands": operands, "index": index, **launch}))


if __name__ == "__main__":
    main()
