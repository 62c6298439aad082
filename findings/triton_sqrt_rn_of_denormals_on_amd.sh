#!/usr/bin/env bash
# Triton: for AMD's gfx942, `tl.sqrt_rn` of 3.6 does not scale denormal operands; that of 3.9 does.
#
# `tl.sqrt_rn` is documented as "precise square root, rounding to nearest wrt the IEEE standard".
# Triton 3.6 makes it of v_rsq_f32 and a correction by FMAs. Operands below 2^-126 are not scaled
# first, and the one test for special operands (v_cmp_class_f32 with mask 0x260: both zeros and
# +infinity) lets denormals through. The ISA's manual says that v_rsq_f32 flushes denormals, so
# their root is that of 0: infinity times 0 in the correction. Triton 3.9 multiplies operands below
# 2^-96 by 2^32, takes v_sqrt_f32, corrects, and scales back by 2^-16.
#
# No GPU is needed: Triton compiles for one that is not there. What a gfx942 computes was not seen.
#
# Seen with Triton 3.6.0 and 3.9.0 on CPython 3.11:
#     3.6.0 {'v_rsq_f32': 1, 'v_sqrt_f32': 0, 'scaled by 2^32': False}
#     3.9.0 {'v_rsq_f32': 0, 'v_sqrt_f32': 1, 'scaled by 2^32': True}
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat > "$place/compile.py" <<'PYTHON'
import os
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def root(a, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.sqrt_rn(tl.load(a + at)))


source = ASTSource(root, {"a": "*fp32", "out": "*fp32", "N": "constexpr"}, {"N": 256})
compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
text = compiled.asm["amdgcn"]
if "SHOW" in os.environ:
    print(text)
found = {name: len(re.findall(rf"\b{name}", text)) for name in ("v_rsq_f32", "v_sqrt_f32")}
# 0x4f800000 is 2^32; ldexp by 32 is the other way to write it.
found["scaled by 2^32"] = bool(re.search(r"0x4f800000|v_ldexp_f32\S* .*\b32\b", text))
print(triton.__version__, found)
expected = {"3.6.0": (1, 0, False), "3.9.0": (0, 1, True)}
sys.exit(tuple(found.values()) != expected[triton.__version__])
PYTHON
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q setuptools
for version in 3.6.0 3.9.0; do
    "$place/venv/bin/pip" install -q --no-compile --no-deps "triton==$version"
    TRITON_CACHE_DIR="$place/$version" "$place/venv/bin/python" "$place/compile.py"
done
