#!/usr/bin/env bash
# Triton: `tl.div_rn` and `tl.sqrt_rn` flush denormals before 3.6, and no option keeps them.
#
# `tl.div_rn` is documented as "precise division, rounding to nearest wrt the IEEE standard", so one
# takes its results for those of the CPU. Triton 3.4 and 3.5 compile it to div.rn.ftz.f32, and
# `tl.sqrt_rn` to sqrt.rn.ftz.f32: operands and results below 2^-126 become 0. The launch option
# `enable_reflect_ftz=False` ("ftz in libdevice") changes nothing. 3.6 and later have no .ftz there.
# The same lines in the same script thus give other bits, without a message.
#
# No GPU is needed: Triton compiles for one that is not there.
#
# Seen with Triton 3.4.0, 3.5.1, 3.6.0, 3.9.0 on CPython 3.11, target sm_90:
#     3.4.0 div.rn.ftz.f32 sqrt.rn.ftz.f32   with enable_reflect_ftz=False: the same
#     3.5.1 div.rn.ftz.f32 sqrt.rn.ftz.f32   with enable_reflect_ftz=False: the same
#     3.6.0 div.rn.f32 sqrt.rn.f32   with enable_reflect_ftz=False: the same
#     3.9.0 div.rn.f32 sqrt.rn.f32   with enable_reflect_ftz=False: the same
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat > "$place/compile.py" <<'PYTHON'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def divide(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.div_rn(x, y) + tl.sqrt_rn(x))


def instructions(**options) -> list[str]:
    types = {"a": "*fp32", "b": "*fp32", "out": "*fp32", "N": "constexpr"}
    source = ASTSource(divide, types, {"N": 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return sorted(set(re.findall(r"\b(?:div|sqrt)\.\S*f32", compiled.asm["ptx"])))


found, without = instructions(), instructions(enable_reflect_ftz=False)
same = "the same" if without == found else " ".join(without)
print(triton.__version__, *found, f"  with enable_reflect_ftz=False: {same}")
flushes = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
expected = ["div.rn.ftz.f32", "sqrt.rn.ftz.f32"] if flushes else ["div.rn.f32", "sqrt.rn.f32"]
sys.exit(found != expected or without != expected)
PYTHON
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q setuptools
for version in 3.4.0 3.5.1 3.6.0 3.9.0; do
    "$place/venv/bin/pip" install -q --no-compile --no-deps "triton==$version"
    TRITON_CACHE_DIR="$place/$version" "$place/venv/bin/python" "$place/compile.py"
done
