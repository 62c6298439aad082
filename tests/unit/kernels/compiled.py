"""Compile Triton kernels for a GPU that is not there, and say what came out: `python -m
tests.unit.kernels.compiled groups`.

The kernels' own Python is called with CPU tensors, so that arguments are specialised as they will
be; every launch is turned into a compilation (to PTX and, by the ptxas that Triton carries, to
machine code). One JSON line per launch. A process of its own, since the interpreter and the
compiler do not live in one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Absent:
    """The driver of a GPU that is not there; all that a compilation asks of one."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_instead_of_launching(report: Callable[[dict[str, Any]], None]) -> None:
    """From now on a launch compiles, and reports."""
    run = JITFunction.run

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        ptx = kernel.asm["ptx"]
        report(
            {
                "kernel": self.fn.__name__,
                "constants": {name: value for name, value in kwargs.items() if name.isupper()},
                "shared_bytes": kernel.metadata.shared,
                "fused": len(re.findall(r"\bfma\.", ptx)),
                "inexact": re.findall(r"\S*\.(?:ftz|approx|full)\S*", ptx),
                "loads": len(re.findall(r"ld\.global", ptx)),
                "vector_loads": len(re.findall(r"ld\.global[^;]*\.v[248]", ptx)),
                "matrix": sorted(
                    set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.[a-z.]*m\d+n\d+(k\d+)", ptx))
                ),
                "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
            }
        )
        return kernel

    JITFunction.run = compiled


def groups() -> None:
    from infinity._src.kernels.quantize import quantize
    from infinity._src.kernels.triton.quantize import dequantize_triton, quantize_triton

    plain, strided = (
        torch.zeros(4096, dtype=torch.bfloat16),
        torch.zeros(64, 64, dtype=torch.float16).t(),
    )
    for bits, group_numel, symmetric, key, values in [
        (8, 256, True, None, plain),
        (8, 1024, False, 7, plain.float()),
        (4, 128, True, 7, plain),
        (4, 64, False, None, strided),
    ]:
        quantize_triton(values, bits, group_numel, symmetric, key, 0)
        q = quantize(values, bits=bits, group_numel=group_numel, symmetric=symmetric, key=key)
        dequantize_triton(q, values)


def update() -> None:
    from infinity._src.kernels.triton.update import Launches
    from infinity._src.kernels.update import RESOLVED
    from infinity.aio._records import HYPER, Algorithm, Format, GradDtype, Master, Moments

    cases = [
        (Format.SPLIT, Algorithm.ADAMW, GradDtype.BF16),
        (Format(Master.SPLIT, Moments.BF16, 2), Algorithm.ADAMW, GradDtype.BF16),
        (Format(Master.SPLIT8, Moments.Q8, 2), Algorithm.ADAMW, GradDtype.BF16),
        (Format.FP32, Algorithm.ADAMW, GradDtype.FP32),
        (Format(Master.FP16, Moments.FP32, 2), Algorithm.ADAMW, GradDtype.FP16),
        (Format(Master.SPLIT8, Moments.Q8, 1), Algorithm.LION, GradDtype.BF16),
        (Format(Master.SPLIT, Moments.BF16, 1), Algorithm.SGD, GradDtype.BF16),
        (Format(Master.SPLIT, Moments.FP32, 0), Algorithm.SGD, GradDtype.FP32),
    ]
    for state_format, algorithm, grad_dtype in cases:
        sections = [
            torch.zeros(kind.size_bytes(4096), dtype=torch.uint8) for kind in state_format.sections
        ]
        grad, segs, hypers = torch.zeros(4096), np.zeros(1, RESOLVED), np.zeros(1, HYPER)
        segs["numel"], segs["grad"], segs["grad_dtype"], hypers["algorithm"] = (
            4096,
            grad.data_ptr(),
            grad_dtype,
            algorithm,
        )
        Launches(state_format, [segs], hypers, torch.device("cpu")).run(0, sections, 1 << 40)


def wire() -> None:
    from infinity._src.kernels.comm_codec import wire_bytes
    from infinity._src.kernels.triton.comm_codec import (
        decode_sum_triton,
        encode_triton,
        sum_in_order_triton,
    )

    for bits, group_numel, dtype, key, error in [
        (8, 256, torch.bfloat16, None, None),
        (8, 64, torch.float16, 7, torch.float32),
        (4, 128, torch.bfloat16, 7, torch.bfloat16),
        (4, 1024, torch.float32, None, torch.bfloat16),
    ]:
        values, encoded = (
            torch.zeros(4096, dtype=dtype),
            torch.zeros(wire_bytes(4096, bits, group_numel), dtype=torch.uint8),
        )
        encode_triton(
            values,
            encoded,
            bits,
            group_numel,
            key,
            0,
            None if error is None else torch.zeros(4096, dtype=error),
        )
        decode_sum_triton([encoded] * 3, values, bits, group_numel, 3)
        sum_in_order_triton([values] * 4, values, 4)


OPS: dict[str, Callable[[], None]] = {"groups": groups, "update": update, "wire": wire}


def main() -> None:
    """Arguments: the capability (80, 90 ...), then names of `OPS`."""
    triton.runtime.driver.set_active(Absent(int(sys.argv[1])))
    compile_instead_of_launching(lambda record: print(json.dumps(record)))
    for name in sys.argv[2:]:
        OPS[name]()


if __name__ == "__main__":
    main()
