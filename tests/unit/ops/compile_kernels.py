"""Child of test_triton_compiles: compiles what the tuned kernels would run, for GPUs that need not be there. Prints JSON.

    python compile_kernels.py 90 --all        # every configuration of every case, for compute capability 9.0

A call of a kernel is caught just before its launch; its arguments say what to compile, by Triton's own rules: integers that are
1 become constants, those that 16 divides are marked so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infinity.ops import linear_cross_entropy_triton, quant_matmul_triton, tile_matmul_triton
from infinity.ops.quant_matmul import CompactWeight, Int8Weight
from infinity.ops.tuning_triton import Tuned

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int64: "*i64",
}

Call = tuple[Tuned, tuple[Any, ...], dict[str, Any]]


def caught(run: Callable[[], object]) -> Call:
    """The kernel that `run` would launch, and its arguments."""
    calls: list[Call] = []

    def catch(self: Tuned, grid: object, device: object, *args: Any, **kwargs: Any) -> None:
        calls.append((self, args, kwargs))

    original = Tuned.__call__
    Tuned.__call__ = catch  # type: ignore[method-assign]
    try:
        run()
    finally:
        Tuned.__call__ = original  # type: ignore[method-assign]
    (call,) = calls
    return call


def compiled(call: Call, config: Any, capability: int) -> dict[str, Any]:
    """What one configuration compiles to: its shared memory and its matrix instructions."""
    tuned, args, constants = call
    kernel = tuned._kernel
    constants = {**constants, **config.kwargs}
    signature = {name: "constexpr" for name in kernel.arg_names}
    attributes = {}
    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=False)):
        aligned = True
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
            aligned = False
        elif value == 1 and not parameter.do_not_specialize:
            constants[parameter.name] = 1
            continue
        else:
            signature[parameter.name] = "i64" if abs(value) >= 2**31 else "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = re.findall(r"(wgmma\.mma_async|mma\.sync)\.[a-z.]*(?:m\d+n\d+(k\d+))", done.asm["ptx"])
    return {
        "config": str(config),
        "warps": config.num_warps,
        "shared_bytes": done.metadata.shared,
        "instructions": sorted({f"{name} {depth}" for name, depth in found}),
    }


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every kernel in each of its forms. Sizes say nothing but what is divisible by 16."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    x, w, dy, bias = empty(256, 512), empty(1024, 512), empty(256, 1024), empty(1024)
    total = empty(256, 1024, dtype=torch.float32)
    matmul = tile_matmul_triton.tile_matmul
    yield "tile_matmul forward", lambda: matmul(x, w.t(), empty(256, 1024), accumulator=total, bias=bias)
    yield "tile_matmul first tile", lambda: matmul(x, w.t(), total)
    yield "tile_matmul input gradient", lambda: matmul(dy, w, empty(256, 512))
    yield "tile_matmul weight gradient", lambda: matmul(dy.t(), x, empty(1024, 512))
    yield "tile_matmul odd", lambda: matmul(empty(7, 9), empty(9, 11), empty(7, 11))
    targets = torch.zeros(256, dtype=torch.int64)
    loss = linear_cross_entropy_triton
    yield "partials", lambda: loss.tile_partials(x, w, bias, targets, start=0)
    rows = empty(256, dtype=torch.float32)
    settings: dict[str, Any] = {"start": 0, "lse": rows, "scale": rows, "label_smoothing": 0.1, "vocabulary": 1024}
    yield "dlogits", lambda: loss.tile_dlogits(x, w, bias, targets, **settings)
    multiply = quant_matmul_triton.multiply
    codes = torch.empty(1024, 512, dtype=torch.int8)
    for group in (32, 128):
        int8 = Int8Weight(codes, torch.empty(1024, 512 // group, dtype=torch.bfloat16), group)
        yield f"int8 in groups of {group}", lambda int8=int8: multiply(x, int8, bias)
        yield f"int8 in groups of {group}, input gradient", lambda int8=int8: multiply(dy, int8, transposed=True)
    compact = CompactWeight(torch.empty(1024, 512, dtype=torch.int16), codes)
    yield "compact", lambda: multiply(x, compact, bias)
    yield "compact, input gradient", lambda: multiply(dy, compact, transposed=True)


def main() -> None:
    capability, everything = int(sys.argv[1]), "--all" in sys.argv
    records = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if everything else (torch.bfloat16, torch.float32):
        for name, run in cases(dtype):
            call = caught(run)
            for index, config in enumerate(call[0].configurations if everything else call[0].configurations[:1]):
                record = compiled(call, config, capability)
                records.append({"case": name, "dtype": str(dtype), "index": index, **record})
    sys.stdout.write(json.dumps(records))


if __name__ == "__main__":
    main()
