"""Compile Triton kernels for GPUs that are not there, and say what came out: `python -m
tests.unit.kernels.compiled [--all] cuda:90 hip:gfx942`.

The kernels' own Python is called with tensors on the device "meta", which have sizes, strides and
addresses, and no memory. So arguments are specialised as they will be; every launch is turned into
a compilation (to PTX and, by the ptxas that Triton carries, to machine code; for AMD to its
assembly). One JSON line per launch, a `Launch`.

With `--all` every form of every kernel is compiled, in every configuration of a tuned one. Without
it, each target takes one form of each bitwise kernel, and the configurations of the matmuls that
SOME names. Targets take different forms, so that together they compile many.

A process of its own, since the interpreter and the compiler do not live in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = ("cuda:80", "cuda:89", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942")
"""Targets: Ampere, Ada, Hopper, two Blackwells; AMD for bitwise kernels."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, FP16, FP32)
PAST_INT32 = (1 << 31) + 4096


@dataclasses.dataclass(frozen=True)
class Launch:
    """Result of a compilation; sequences name instructions."""

    target: str
    kernel: str
    form: str = ""
    operands: str = ""
    """Key of OPERANDS for a matmul; empty for a kernel that promises torch's bits."""
    sizes: bool = False
    """True for sizes that 16 does not divide, or that pass 2^31: spills are not bounded there."""
    index: int = 0
    """The configuration of a tuned kernel."""
    error: str = ""
    """Message of the compiler, if it failed."""
    shared_bytes: int = 0
    spill_bytes: int | None = None
    inexact: Sequence[str] = ()
    """Instructions that flush denormals or approximate."""
    fused: int = 0
    """Products contracted with sums, AMD's divisions and square roots left out."""
    divisions: Sequence[str] = ()
    """Divisions and square roots."""
    matrix: Sequence[str] = ()
    """Kind of matrix instruction: what orders its sum. The number of columns does not."""
    load_bytes: int = 0
    """Bytes of the widest load."""
    expected_load_bytes: int = 0
    """Bytes of a thread's part of the widest operand, if arguments are aligned; else 0."""
    atomics: int = 0


# -- reading what a compiler wrote -----------------------------------------------------------------


def of_ptx(text: str) -> dict[str, Any]:
    """The fields of a `Launch` that PTX has."""
    widths = re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.[bufs](\d+)\b", text)
    return {
        # ptxas may contract products and sums that do not say how they round.
        "fused": len(re.findall(r"\bfma\.|\bmad\.\S*f(?:16|32|64)\b", text)),
        "inexact": sorted({
            *re.findall(r"\S*\.(?:ftz|approx|full)\S*", text),
            *re.findall(r"(?<![.\w])(?:mul|add|sub)\.f32\b", text),
        }),
        "divisions": sorted(set(re.findall(r"\b(?:div|sqrt)\.\S*f(?:16|32|64)\b", text))),
        "matrix": sorted(set(_matrix(text))),
        "load_bytes": max((int(v or 1) * int(bits) // 8 for v, bits in widths), default=0),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", text)),
    }


def _matrix(text: str) -> Iterator[str]:
    for kind, rows, depth, dtypes in re.findall(
        r"\b(wgmma|mma)\.\S*?(m\d+)n\d+(k\d+)\.(?:row\.col\.)?(\S+)", text
    ):
        yield f"{kind} {rows}{depth} {dtypes}"
    # Blackwell's has its rows in a descriptor: bits 24 to 28 are a sixteenth of them.
    for dtypes, register in re.findall(
        r"\btcgen05\.mma\.\S*kind::(\w+) \[[^]]*\], \S+, \S+, (%r\d+),", text
    ):
        for value in re.findall(rf"\bmov\.b32\s+{register}, (\d+);", text) or ["0"]:
            yield f"tcgen05 m{(int(value) >> 24 & 31) * 16} {dtypes}"


def of_gcn(text: str) -> dict[str, Any]:
    """The fields of a `Launch` that AMD's assembly has."""

    def count(*names: str) -> int:
        return sum(len(re.findall(rf"\b{name}(?:_e32|_e64)?\b", text)) for name in names)

    # LLVM's IEEE division has five FMAs and one fixup, its square root five (from v_rsq) or two.
    known = 5 * count("v_div_fixup_f32", "v_rsq_f32") + 2 * count("v_sqrt_f32")
    fused = count("v_fma_f32", "v_fmac_f32", "v_mad_f32") + 2 * count("v_pk_fma_f32")
    modes = re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", text)
    spills = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text)
    return {
        "fused": fused - known,
        # 3: denormals are neither flushed as operands nor as results.
        "inexact": [f"denormal mode {mode}" for mode in modes if mode != "3"],
        "spill_bytes": 4 * sum(map(int, spills)) if spills else None,
        "atomics": len(re.findall(r"\w+_atomic_\w+", text)),
    }


# -- compiling instead of launching ----------------------------------------------------------------


class Absent:
    """The driver of a GPU that is not there; all that a compilation asks of one."""

    def __init__(self, target: str) -> None:
        backend, _, arch = target.partition(":")
        self.name = target
        self.target = (
            GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Each target another one: Triton keeps what it compiled by the number of a device.
        return TARGETS.index(self.name)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_instead_of_launching(report: Callable[[Launch], None]) -> None:
    """From now on a launch compiles, and reports."""
    run = JITFunction.run
    triton.knobs.nvidia.dump_ptxas_log = True
    # ptxas reports spills once: a kernel that was compiled is not compiled again.
    spilled: dict[str, int] = {}

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = triton.runtime.driver.active.name
        try:
            with contextlib.redirect_stdout(io.StringIO()) as log:
                kernel = run(self, *args, **{**kwargs, "warmup": True})
        except Exception as error:
            report(Launch(target, self.fn.__name__, error=f"{type(error).__name__}: {error}"))
            return None
        stores = re.findall(r"(\d+) bytes spill stores", log.getvalue())
        if stores:
            spilled[kernel.hash] = max(map(int, stores))
        found = (
            {**of_ptx(kernel.asm["ptx"]), "spill_bytes": spilled.get(kernel.hash)}
            if "ptx" in kernel.asm
            else of_gcn(kernel.asm["amdgcn"])
        )
        shared = kernel.metadata.shared
        report(Launch(target, self.fn.__name__, shared_bytes=shared, **found))
        return kernel

    JITFunction.run = compiled


# -- forms of the kernels that promise torch's bits ------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Form:
    """A call that launches one kernel."""

    name: str
    run: Callable[[], object]
    load_bytes: int = 0
    """`Launch.expected_load_bytes`."""
    sizes: bool = False
    """`Launch.sizes`; such a form is compiled in the first configuration."""


def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous; of rows that are one, where torch could not count the bytes of all."""
    small = rows * columns < 1 << 60
    return empty(rows if small else 1, columns, dtype=dtype).expand(rows, columns)


def odd(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """One-dimensional, at an address that nothing but the element's size divides."""
    return empty(numel + 1, dtype=dtype)[1:]


def turning(values: Sequence[Any], *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """All combinations of the axes, each with the next of the values."""
    for at, rest in enumerate(itertools.product(*axes)):
        yield (values[at % len(values)], *rest)


GROUPS = (64, 128, 256, 512, 1024)
NUMELS = (1, PAST_INT32, 8192)


def sized(cases: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Cases with a number of elements: the first with all of NUMELS, the others with the last."""
    first = next(cases)
    yield from ((numel, *first) for numel in NUMELS)
    yield from ((NUMELS[-1], *case) for case in cases)


def quantize_forms() -> Iterator[Form]:
    from infinity._src.kernels.triton.quantize import quantize_triton

    for numel, *case in sized(turning(GROUPS, FLOATS, (8, 4), (True, False), (None, 7))):
        group, dtype, bits, symmetric, key = case
        arguments = (empty(numel, dtype=dtype), bits, group, symmetric, key, 0)
        run = functools.partial(quantize_triton, *arguments)
        yield Form(f"{numel} {case}", run, 16 if numel > 1 else 0)
    for rows in (empty(64, 128, dtype=FP16).t(), empty(1, dtype=BF16).expand(PAST_INT32, 2)):
        run = functools.partial(quantize_triton, rows, 4, 64, False, None, 0)
        yield Form(f"strided {tuple(rows.shape)}", run)


def dequantize_forms() -> Iterator[Form]:
    from infinity._src.kernels.quantized import Quantized
    from infinity._src.kernels.triton.quantize import dequantize_triton

    def run(out: torch.Tensor, group: int, bits: int, symmetric: bool) -> None:
        numel, groups = out.numel(), -(-out.numel() // group)
        codes = empty(-(-numel * bits // 8),
                      dtype=torch.int8 if bits == 8 and symmetric else torch.uint8)  # fmt: skip
        scales, zeros = empty(groups, dtype=BF16), empty(groups, dtype=torch.uint8)
        dequantize_triton(
            Quantized(
                codes, scales, None if symmetric else zeros, out.shape, out.dtype, bits, group
            ),
            out,
        )

    for numel, *case in sized(turning(GROUPS, FLOATS, (8, 4), (True, False))):
        group, dtype, bits, symmetric = case
        call = functools.partial(run, empty(numel, dtype=dtype), group, bits, symmetric)
        # 16 elements a thread: 16 bytes of codes, or 8.
        yield Form(f"{numel} {case}", call, 2 * bits if numel > 1 else 0)
    yield Form("strided", lambda: run(empty(64, 128, dtype=FP16).t(), 64, 4, False))


def encode_forms() -> Iterator[Form]:
    from infinity._src.kernels.quantized import wire_bytes
    from infinity._src.kernels.triton.comm_codec import encode_triton

    for numel, *case in sized(turning(GROUPS, FLOATS, (8, 4), (None, 7), (None, BF16, FP32))):
        group, dtype, bits, key, error = case
        wire = empty(wire_bytes(numel, bits, group), dtype=torch.uint8)
        left = None if error is None else empty(numel, dtype=error)
        arguments = (empty(numel, dtype=dtype), wire, bits, group, key, 0, left)
        run = functools.partial(encode_triton, *arguments)
        yield Form(f"{numel} {case}", run, 16 if numel > 1 else 0)


def decode_forms() -> Iterator[Form]:
    from infinity._src.kernels.quantized import wire_bytes
    from infinity._src.kernels.triton.comm_codec import decode_sum_triton

    for numel, *case in sized(turning(GROUPS, FLOATS, (8, 4), (1, 3), (empty, odd))):
        group, dtype, bits, divisor, make = case
        wires = [make(wire_bytes(numel, bits, group), dtype=torch.uint8)] * 3
        arguments = (wires, empty(numel, dtype=dtype), bits, group, divisor)
        aligned = make is empty and numel > 1
        name = f"{numel} {case[:4]} {make.__name__}"
        yield Form(name, functools.partial(decode_sum_triton, *arguments), 2 * bits * aligned)


def sum_forms() -> Iterator[Form]:
    from infinity._src.kernels.triton.comm_codec import sum_in_order_triton

    for numel, *case in sized(turning((1, 4), FLOATS, FLOATS, (empty, odd))):
        divisor, source, dtype, make = case
        arguments = ([make(numel, dtype=source)] * 4, empty(numel, dtype=dtype), divisor)
        aligned = make is empty and numel > 1
        name = f"{numel} {case[:3]} {make.__name__}"
        yield Form(name, functools.partial(sum_in_order_triton, *arguments), 16 * aligned)


def update_forms() -> Iterator[Form]:
    from infinity._src.cabi.records import HYPER, Algorithm, Format, GradDtype, Master, Moments
    from infinity._src.kernels.triton.update import Launches
    from infinity._src.kernels.update import _MOMENT_COUNTS, RESOLVED

    def run(state_format: Format, algorithm: Algorithm, grad: GradDtype, address: int) -> None:
        sections = [empty(k.size_bytes(4096), dtype=torch.uint8) for k in state_format.sections]
        segs, hypers = np.zeros(1, RESOLVED), np.zeros(1, HYPER)
        segs["numel"], segs["grad"], segs["grad_dtype"] = 4096, address, grad
        hypers["algorithm"] = algorithm
        launches = Launches(state_format, [segs], hypers, torch.device("meta"))
        launches.run(0, sections, 1 << 40)

    exact = (Format.SPLIT, Algorithm.ADAMW, GradDtype.BF16)
    yield Form("exact at an odd address", functools.partial(run, *exact, 68))
    masters = (Master.SPLIT, Master.SPLIT8, Master.FP32, Master.FP16)
    grads = (GradDtype.BF16, GradDtype.FP16, GradDtype.FP32, GradDtype.BF16, GradDtype.FP32)
    for grad, moments, master, algorithm in turning(grads, Moments, masters, _MOMENT_COUNTS):
        for count in _MOMENT_COUNTS[algorithm]:
            # Without moments their encoding is none.
            if count or moments == Moments.FP32:
                state = Format(master, moments, count)
                name = f"{algorithm.name} {master.name} {moments.name} {count} {grad.name}"
                yield Form(name, functools.partial(run, state, algorithm, grad, 64), 16)


# -- forms of the matmuls --------------------------------------------------------------------------


SHAPES = (
    (1, 1, 1),
    (PAST_INT32, 1024, PAST_INT32),
    (256, PAST_INT32, PAST_INT32),
    (1, 1024, 512),
    (256, 1, 512),
    (256, 1024, 1),
    (256, 1024, 512),
)


def product_forms(dtype: torch.dtype) -> Iterator[Form]:
    from infinity._src.kernels.triton.tile_matmul import tile_matmul

    for m, n, k in SHAPES:
        product = (matrix(m, k, dtype), matrix(n, k, dtype).t(), empty(m, n, dtype=dtype))
        rest = {"accumulator": empty(m, n), "bias": empty(n, dtype=dtype)}
        run = functools.partial(tile_matmul, *product, **rest)
        yield Form(f"{m} {n} {k}", run, sizes=(m, n, k) != SHAPES[-1])
    x, w = empty(256, 512, dtype=dtype), empty(1024, 512, dtype=dtype)
    dy, sums = empty(256, 1024, dtype=dtype), empty(1024, 1024)
    yield Form("first tile", lambda: tile_matmul(x, w.t(), sums[:256]))
    middle = {"out": sums[:256], "accumulator": sums[:256]}
    yield Form("middle tile", lambda: tile_matmul(x, w.t(), **middle))
    yield Form("input gradient", lambda: tile_matmul(dy, w, x))
    yield Form("weight gradient", lambda: tile_matmul(dy.t(), x, w, accumulator=sums[:, :512]))
    yield Form("odd", lambda: tile_matmul(x[:7, :9], x[:9, :11], dy[:7, :11]), sizes=True)


def partials_forms(dtype: torch.dtype) -> Iterator[Form]:
    from infinity._src.kernels.triton.linear_cross_entropy import tile_partials

    for name, arguments, _, sizes in _losses(dtype):
        yield Form(name, functools.partial(tile_partials, *arguments, start=0), sizes=sizes)


def dlogits_forms(dtype: torch.dtype) -> Iterator[Form]:
    from infinity._src.kernels.triton.linear_cross_entropy import tile_dlogits

    for name, arguments, rows, sizes in _losses(dtype):
        rest = {"lse": rows, "scale": rows, "label_smoothing": 0.1, "vocabulary": 1 << 40}
        run = functools.partial(tile_dlogits, *arguments, start=0, **rest)
        yield Form(name, run, sizes=sizes)


def _losses(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor, bool]]:
    """Forms' names; hidden, weight, bias and target; a number per row; `Form.sizes`."""
    for rows, columns, features in SHAPES:
        x, w = matrix(rows, features, dtype), matrix(columns, features, dtype)
        arguments = (x, w, None, empty(rows, dtype=torch.int64))
        sizes = (rows, columns, features) != SHAPES[-1]
        yield f"{rows} {columns} {features}", arguments, empty(rows), sizes
    x, w = empty(256, 9, dtype=dtype), empty(1024, 9, dtype=dtype)
    yield "odd, with bias", (x, w, w[:, 0], empty(256, dtype=torch.int64)), empty(256), True


BITWISE: dict[str, Callable[[], Iterator[Form]]] = {
    "_quantize": quantize_forms,
    "_dequantize": dequantize_forms,
    "_encode": encode_forms,
    "_decode_sum": decode_forms,
    "_sum_in_order": sum_forms,
    "_update": update_forms,
}
MATMULS: dict[str, Callable[[torch.dtype], Iterator[Form]]] = {
    "_product": product_forms,
    "_partials": partials_forms,
    "_dlogits": dlogits_forms,
}
OPERANDS = {"bfloat16": BF16, "float16": FP16, "float32": FP32, "tf32": FP32}


# -- which of them ---------------------------------------------------------------------------------

SOME = {
    ("_product", "bfloat16"): (0, -1),
    ("_product", "tf32"): (-1,),
    ("_product", "float32"): (0,),
    ("_partials", "bfloat16"): (-1,),
    ("_dlogits", "tf32"): (0,),
}
"""Configurations that are compiled without `--all`."""


def chosen(forms: Sequence[Form], target: str) -> Form:
    """The form that a target takes of a table without `--all`. The first three are about sizes and
    alignment; the other targets take later ones, far from each other."""
    place, last = TARGETS.index(target), len(TARGETS) - 1
    return forms[place if place < 3 else place * (len(forms) - 1) // last]


def bitwise_launches(target: str, everything: bool) -> Iterator[tuple[dict[str, Any], Form]]:
    for forms_of in BITWISE.values():
        forms = list(forms_of())
        for form in forms if everything else [chosen(forms, target)]:
            yield {"form": form.name, "expected_load_bytes": form.load_bytes}, form


def matmul_launches(target: str, everything: bool) -> Iterator[tuple[dict[str, Any], Form]]:
    from infinity._src.kernels.triton import linear_cross_entropy as loss
    from infinity._src.kernels.triton import tile_matmul as tiles

    tuned = {
        "_product": (tiles._narrow, tiles._wide),
        "_partials": (loss._partials_narrow, loss._partials_wide),
        "_dlogits": (loss._dlogits_narrow, loss._dlogits_wide),
    }
    for (kernel, forms_of), (operands, dtype) in itertools.product(
        MATMULS.items(), OPERANDS.items()
    ):
        forms = list(forms_of(dtype))
        count = len(tuned[kernel][dtype is FP32].configurations)
        if everything:
            # fp16 takes the way of bf16: one form of it.
            of_dtype = [forms[len(SHAPES) - 1]] if dtype is FP16 else forms
            # Sizes of 1 take one long basic block, which compiles slowly.
            pairs = [(form, at) for form in of_dtype for at in range(1 if form.sizes else count)]
        else:
            some = SOME.get((kernel, operands), ())
            pairs = [(chosen(forms, target), at % count) for at in some]
        for form, index in pairs:
            yield {
                "form": form.name, "operands": operands, "index": index, "sizes": form.sizes
            }, form  # fmt: skip


def main() -> None:
    """Arguments: --all, or not, and targets."""
    from infinity._src.kernels.triton.tuning import using

    everything = sys.argv[1] == "--all"
    label: dict[str, Any] = {}

    def report(launch: Launch) -> None:
        found = dataclasses.asdict(dataclasses.replace(launch, **label))
        print(json.dumps(found), flush=True)

    compile_instead_of_launching(report)
    for target in sys.argv[1 + everything :]:
        triton.runtime.driver.set_active(Absent(target))
        launches = bitwise_launches(target, everything)
        if target.startswith("cuda"):
            launches = itertools.chain(launches, matmul_launches(target, everything))
        for label, form in launches:
            allowed = "high" if label.get("operands") == "tf32" else "highest"
            torch.set_float32_matmul_precision(allowed)
            with using(label.get("index", 0)):
                form.run()


if __name__ == "__main__":
    main()
