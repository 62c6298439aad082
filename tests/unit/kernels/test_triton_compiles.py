"""The kernels compile for GPUs that are not there: to arithmetic that rounds as the references do,
and the matmuls to one kind of matrix instruction in all configurations.

In the quick run every kernel is compiled in one form for the target of QUICK, and the matmuls in
the configurations of `compiled.SOME`. The slow tests (`make compile-kernels`,
with the oldest and the newest Triton, too) do so for every target, and compile every configuration,
fp16, and the other forms: constants, strides, addresses, sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.marks import mostly_slow
from tests.unit.kernels.compiled import BITWISE, MATMULS, TARGETS, Launch, of_gcn, of_ptx

ROOT = Path(__file__).resolve().parents[3]
KIB = 1 << 10
QUICK = ("cuda:100",)
SHARED_MAX = {"cuda:80": 163, "cuda:89": 99, "cuda:90": 227, "cuda:100": 227, "cuda:120": 99}
"""KiB of shared memory that a block may ask for, by target (CUDA's programming guide)."""


# -- the judge -------------------------------------------------------------------------------------


def complaints(launches: Sequence[Launch]) -> list[str]:
    """Return the faults of launches, in a line each."""
    found = [f"{text}: {launch}" for launch in launches for text in _of_one(launch)]
    # A measurement chooses between configurations, and must not choose between orders of a sum.
    kinds: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for launch in launches:
        if launch.operands and not launch.error:
            kinds.setdefault((launch.target, launch.operands), set()).add(tuple(launch.matrix))
    found += [
        f"several matrix instructions for {' '.join(key)}: {sorted(several)}"
        for key, several in kinds.items()
        if len(several) > 1
    ]
    return found


def _of_one(launch: Launch) -> Iterator[str]:
    if launch.error:
        yield "does not compile"
        return
    if launch.atomics:
        yield "atomics: the order of a sum is left to chance"
    # 48 KiB are what every device gives a block.
    if not (launch.operands and launch.index) and launch.shared_bytes > 48 * KIB:
        yield "shared memory beyond 48 KiB"
    elif launch.shared_bytes > SHARED_MAX.get(launch.target, 48) * KIB:
        yield "shared memory beyond the device's"
    if launch.spill_bytes is None:
        yield "spills are not known"
    elif launch.spill_bytes > (128 if launch.operands else 16) and not launch.sizes:
        yield "spills"
    if launch.operands:
        if bool(launch.matrix) != (launch.operands != "float32"):
            yield "matrix units are for all but exact fp32"
        return
    if launch.fused:
        yield "a product and a sum in one FMA"
    if launch.inexact or set(launch.divisions) - {"div.rn.f32", "sqrt.rn.f32"}:
        yield "approximates, or flushes denormals"
    if launch.target.startswith("cuda") and launch.load_bytes < launch.expected_load_bytes:
        yield "narrow loads"


# -- the kernels -----------------------------------------------------------------------------------


def compiled(cache: Path, *arguments: str) -> list[Launch]:
    """Run tests/unit/kernels/compiled.py and return the records that it prints."""
    environment = {
        **os.environ,
        # What stands there already may be another Triton: `make compile-kernels`.
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
        "TRITON_CACHE_DIR": str(cache),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.kernels.compiled", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Launch(**json.loads(line)) for line in done.stdout.splitlines()]


def launched_kernels() -> set[str]:
    """Names of the kernels that the package launches, from its text."""
    sources = (ROOT / "infinity/_src/kernels/triton").glob("*.py")
    found = [re.findall(r"\s(_\w+)\[\(|\bTuned\((_\w+),", path.read_text()) for path in sources]
    return {name for pair in itertools.chain.from_iterable(found) for name in pair if name}


@pytest.mark.parametrize("targets", mostly_slow([QUICK, TARGETS], QUICK))
def test_every_kernel_keeps_its_promises(tmp_path: Path, targets: tuple[str, ...]) -> None:
    launches = compiled(tmp_path, *targets)
    assert not complaints(launches)
    assert {launch.kernel for launch in launches} == launched_kernels() == {*BITWISE, *MATMULS}
    there = {(launch.target, launch.kernel) for launch in launches}
    assert there == {
        (target, kernel)
        for target in targets
        for kernel in (*BITWISE, *(MATMULS if target.startswith("cuda") else ()))
    }
    for target in (each for each in targets if each.startswith("cuda")):
        products = {
            (launch.operands, launch.index > 0)
            for launch in launches
            if (launch.target, launch.kernel) == (target, "_product")
        }
        # The smallest blocks, the largest ones, and each kind of product.
        assert products >= {("bfloat16", False), ("bfloat16", True), ("float32", False)}, target
        assert ("tf32", True) in products, target


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_form_and_configuration_keeps_its_promises(tmp_path: Path, target: str) -> None:
    launches = compiled(tmp_path, "--all", target)
    assert not complaints(launches)
    assert {launch.kernel for launch in launches} >= set(BITWISE)


# -- the judge is judged ---------------------------------------------------------------------------

PTX = """
 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
 mul.rn.f32 %r5, %r1, %r2;
 add.rn.f32 %r6, %r5, %r3;
 div.rn.f32 %r7, %r6, %r4;
 sqrt.rn.f32 %r8, %r7;
"""
GCN = """
 v_fma_f32 v0, v1, v2, v3
 v_fma_f32 v0, v1, v2, v3
 v_fmac_f32_e32 v0, v1, v2
 v_fma_f32 v0, v1, v2, v3
 v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
 v_fma_f32 v0, v1, v2, v3
 v_div_fixup_f32 v0, v1, v2, v3
 v_sqrt_f32_e32 v0, v1
 .amdhsa_float_denorm_mode_32 3
 .sgpr_spill_count: 0
 .vgpr_spill_count: 0
"""
HOPPER = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;"
BLACKWELL = """
 mov.b32 %r159, 136314896;
 @%p20 tcgen05.mma.cta_group::1.kind::f16 [ %r295 + 0 ], %rd79, %rd80, %r159, %p19;
"""


def bitwise(ptx: str = PTX, **changes: Any) -> Launch:
    return Launch(
        **{"target": "cuda:90", "kernel": "_update", "spill_bytes": 0, "expected_load_bytes": 16}
        | of_ptx(ptx)
        | changes
    )


def on_amd(gcn: str = GCN) -> Launch:
    return Launch("hip:gfx942", "_update", **of_gcn(gcn))


def product(ptx: str = HOPPER, **changes: Any) -> Launch:
    return Launch(
        **{"target": "cuda:90", "kernel": "_product", "operands": "bfloat16", "spill_bytes": 128}
        | of_ptx(ptx)
        | changes
    )


@pytest.mark.parametrize(
    ("launch", "complaint"),
    [
        (bitwise(error="PTXASError: no such instruction"), "does not compile"),
        (bitwise(PTX + "fma.rn.f32 %r1, %r2, %r3, %r4;"), "FMA"),
        (bitwise(PTX.replace("div.rn", "div.full")), "approximates"),
        (bitwise(PTX.replace("div.rn.f32", "div.rn.ftz.f32")), "flushes"),
        (bitwise(PTX.replace("add.rn.f32", "add.rn.ftz.f32")), "flushes"),
        (bitwise(PTX.replace("sqrt.rn", "sqrt.approx")), "approximates"),
        (bitwise(PTX.replace("sqrt.rn", "sqrt.rz")), "approximates"),
        (bitwise(PTX.replace("mul.rn.f32", "mul.f32")), "approximates"),
        (bitwise(PTX + "mad.rn.f32 %r1, %r2, %r3, %r4;"), "FMA"),
        (bitwise(PTX.replace("v4", "v2")), "narrow loads"),
        (bitwise(PTX + "atom.global.add.f32 %r1, [%rd1], %r2;"), "atomics"),
        (bitwise(PTX + "red.global.gpu.add.f32 [%rd1], %r2;"), "atomics"),
        (bitwise(spill_bytes=20), "spills"),
        (bitwise(spill_bytes=None), "spills are not known"),
        (bitwise(shared_bytes=49 * KIB), "shared memory"),
        (on_amd(GCN + "v_fma_f32 v0, v1, v2, v3"), "FMA"),
        (on_amd(GCN.replace("mode_32 3", "mode_32 0")), "flushes"),
        (on_amd(GCN.replace("vgpr_spill_count: 0", "vgpr_spill_count: 5")), "spills"),
        (on_amd(GCN + "global_atomic_add_f32 v0, v1, s[0:1]"), "atomics"),
        (product(spill_bytes=132, index=3), "spills"),
        (product(shared_bytes=49 * KIB), "shared memory"),
        (product(target="cuda:120", index=1, shared_bytes=100 * KIB), "shared memory"),
        (product("add.rn.f32 %r1, %r2, %r3;"), "matrix units"),
        (product(operands="float32"), "matrix units"),
        (product(HOPPER + "red.global.add.f32 [%rd1], %r2;"), "atomics"),
    ],
)  # fmt: skip
def test_the_judge_sees_each_fault(launch: Launch, complaint: str) -> None:
    (found,) = complaints([launch])
    assert complaint in found.partition(": Launch(")[0]


def test_the_judge_passes_what_is_right() -> None:
    assert not complaints([
        bitwise(), bitwise(PTX.replace("v4", "v2"), expected_load_bytes=8), on_amd(), product(),
        product(HOPPER.replace("n128", "n64"), index=1, shared_bytes=200 * KIB),
        product(BLACKWELL, target="cuda:100"),
        product(sizes=True, spill_bytes=6104),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (HOPPER, HOPPER.replace("k16", "k8")),
        # Triton's for 64 rows and 64 columns: the descriptor alone tells the modes apart.
        (BLACKWELL, BLACKWELL.replace("136314896", "68158608")),
        (HOPPER, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};"),
        (BLACKWELL, BLACKWELL.replace("mov.b32 %r159", "add.s32 %r159, %r1")),
    ],
)
def test_the_judge_sees_that_configurations_multiply_by_other_instructions(
    first: str, second: str
) -> None:
    target = "cuda:100" if first == BLACKWELL else "cuda:90"
    launches = [product(ptx, target=target) for ptx in (first, second)]
    (found,) = complaints([*launches, dataclasses.replace(launches[0], target="cuda:89")])
    assert found.startswith(f"several matrix instructions for {target} bfloat16")
